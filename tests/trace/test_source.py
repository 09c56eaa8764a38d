"""The source of an operation is the user's line, whichever public function the user calls there."""

from importlib.util import find_spec

import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from meshdsl.trace.source import file_kind
from tests.nd import test_same_program

X = jnp.ones((4, 6))
NAMED = md.named(X, "batch embed")


@md.rule("b k -> b k")
def doubled(x):
    return x * 2


CALLS = {
    "constrain": lambda: md.constrain(X, "data=S(0)"),
    "constrain a named tensor": lambda: md.constrain(NAMED, "data=S(batch)"),
    "stage": lambda: md.stage(jnp.sin(X)),
    "rule": lambda: doubled(X),
    "remat": lambda: md.remat(lambda x: jnp.sin(x))(X),
    "scan": lambda: md.scan(lambda c, x: (c + x, c * x), md.sum(NAMED, over="batch"), NAMED, over="batch")[1],
    "vmap": lambda: md.vmap(lambda x: x * 2, over="batch")(NAMED),
    "named arithmetic": lambda: NAMED + 2 * NAMED,
}


def lines(function):
    return {line for *_, line in function.__code__.co_lines() if line}


def sources(function, *args):
    graph = trace(function, args, cuts=True).graph
    return {(op.source.file, op.source.line) for _, op in walk(graph) if op.name not in ("return", "constant")}


@pytest.mark.parametrize("name", CALLS)
def test_of_a_public_function(name):
    found = sources(lambda _: CALLS[name](), X)
    assert found and found <= {(__file__, line) for line in lines(CALLS[name])}


@pytest.mark.parametrize("name", test_same_program.CASES)
def test_of_an_operation_on_named_dims(name):
    operands, by_name, *_ = test_same_program.CASES[name]
    found = sources(lambda *xs: by_name(*xs), *operands)  # some cases are the library's function itself
    assert {file for file, _ in found} <= {__file__, test_same_program.__file__}


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("meshdsl.models", "user"),
        ("meshdsl.training", "user"),
        ("meshdsl.nd", "internal"),
        ("meshdsl.primitives.stage", "internal"),
        ("meshdsl.custom_rules.api", "internal"),
        ("meshdsl.lowering.interpreter", "internal"),
        ("meshdsl.layouts", "internal"),
        ("meshdsl.trace.passes.rolls", "trace"),
    ],
)
def test_which_files_of_the_package_are_programs(module, kind):
    assert file_kind(find_spec(module).origin) == kind
