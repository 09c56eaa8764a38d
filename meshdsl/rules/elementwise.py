"""Elementwise primitives."""
from meshdsl.rules.registry import rule
from meshdsl.layouts.rule import Rule, Row
@rule("sin")
def sin(op): return Rule.parse("a b -> a b")
@rule("add")
def add(op): return Rule.parse("a b, a b -> a b", linear=((0,1),),increasing=(0,1))
