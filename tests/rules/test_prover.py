"""The prover finds wrong and missing rows."""

from jax import lax

from meshdsl.layouts.sharding_rule import Rule
from meshdsl.rules import RULES
from tests.rules.data import floats
from tests.rules.prover import Sample, prove

ADD = Sample("add", lax.add, (floats(12, 24), floats(12, 24)))


def faults(monkeypatch, case: Sample, rule: Rule) -> list[str]:
    monkeypatch.setitem(RULES, case.name, lambda op: rule)
    return prove(case)


def test_a_property_that_does_not_hold(monkeypatch):
    found = faults(monkeypatch, ADD, Rule.parse("a b, a b -> a b", linear=((0, 1), (0,)), increasing=(0, 1)))
    assert found[:2] == ["wrong on 2 devices: P, B -> P", "wrong on 3 devices: P, B -> P"]


def test_a_property_that_is_not_stated(monkeypatch):
    found = faults(monkeypatch, ADD, Rule.parse("a b, a _ -> a b", linear=((0, 1),), increasing=(0,)))
    assert [fault for fault in found if fault.startswith("missing")] == [
        "missing: B, P(max) -> P(max)",
        "missing: B, P(min) -> P(min)",
        "missing: S(1), S(1) -> S(1)",
    ]


def test_an_excuse_that_is_not_needed():
    assert prove(Sample("neg", lax.neg, (floats(12),), excused={"P -> P": ""})) == [
        "excused, but not missing: P -> P",
    ]
