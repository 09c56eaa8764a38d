"""Strategies that people invented by hand: what they send is what was published, and they run as planned."""

import sys

from bench.strategies import FILES, PAGE, Strategy, sent_by_collective
from meshdsl.api import parallelize
from tests.models.values import filled
from tests.sweeps import swept

NAMES = [file.stem for file in FILES]


@swept("file", FILES, ids=NAMES, every=3)
def test_a_strategy_sends_what_was_published_and_runs_as_planned(file):
    strategy = Strategy(file)
    sharded, args = strategy.sharded(), filled(strategy.program.args)
    total, _ = sent_by_collective(sharded.plan(*args))
    assert dict(total) == {what: value for what, (_, value) in strategy.published().items()}
    sharded.verify(*args)
    sharded.check(*args)


def test_factors_are_gathered_below_the_break_even_batch_only():
    strategy = Strategy(next(file for file in FILES if file.stem == "sufficient_factors"))
    sizes = strategy.module["sizes"]
    even = 2 * sizes["m"] * sizes["n"] // (sizes["m"] + sizes["n"])

    def kinds(examples):
        program = strategy.module["build"](examples)
        plan = parallelize(program.step, strategy.mesh, program.layouts).plan(*program.args)
        return plan.bytes, {c.kind for c in plan.collectives}

    ring = 2 * 4 * sizes["m"] * sizes["n"] * 7 // 8
    below, above = kinds(even - 8), kinds(even + 8)
    assert below == (ring * (even - 8) // even, {"all-gather"})
    assert above == (ring, {"reduce-scatter", "all-gather"})


def test_a_strategy_that_is_run_by_itself_hides_no_module():
    """Python looks beside the script first; jax asks for ``compression``, which came with Python 3.14."""
    assert {"compression", *sys.stdlib_module_names}.isdisjoint(NAMES)


def test_the_page_names_every_strategy():
    page = PAGE.read_text()
    assert [name for name in NAMES if f"## {name}\n" not in page] == []
    assert "| no |" not in page
