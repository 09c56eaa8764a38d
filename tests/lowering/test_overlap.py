"""Seconds that a plan hides against those that a program has beside products, and what becomes of the difference."""

from fractions import Fraction

import pytest

from meshdsl.errors import ArgumentError
from meshdsl.lowering.hlo.collectives import CompiledCollective
from meshdsl.lowering.hlo.schedule import ScheduledCollective
from meshdsl.lowering.overlap import check_judgement, compare_overlap, planned_overlap

KEYS = [("all-gather", "data"), ("reduce-scatter", "data"), ("all-gather", "data")]
SCOPE = "jit(step)/while/body/{}(data) bfloat16/op"


def compiled(kind, scope, seconds, covered, trips=1, known=True):
    sent = CompiledCollective(kind, ("data",), 4, Fraction(64), trips, known, False, scope, f"{kind}.1")
    return ScheduledCollective(sent, seconds, covered, ("fusion.7",) if covered else ())


def report(exposed, *scheduled):
    planned = planned_overlap(KEYS, [2.0, 4.0, 2.0], exposed)
    return compare_overlap(planned, scheduled, ["data"] * len(scheduled))


GATHER = compiled("all-gather", SCOPE.format("all-gather"), 0.5, 0.5, trips=8)
REDUCE = compiled("all-reduce", "", 8.0, 5.0)  # what a TPU's compiler makes of the reduce-scatter


def test_seconds_are_compared_by_what_was_planned():
    found = report([1.0, 0.0, 0.0], GATHER, REDUCE)
    lines = [(line.kind, line.sent, line.hidden, line.compiled, line.covered, line.kept) for line in found.lines]
    assert lines == [("all-gather", 4.0, 3.0, 4.0, 4.0, 4.0), ("reduce-scatter", 4.0, 4.0, 8.0, 5.0, 1.0)]
    assert (found.hidden, found.covered, found.kept) == (7.0, 9.0, False)  # 3 seconds of twice the bytes are exposed
    assert report([1.0, 0.0, 0.0], GATHER, compiled("reduce-scatter", "", 0.1, 0.0)).kept  # combined


def test_a_program_that_hides_less_names_both_sides():
    found = report([1.0, 0.0, 0.0], GATHER, compiled("all-reduce", "", 8.0, 0.0))
    assert not found.kept
    assert str(found.error("tpu-v5e:4x4")).splitlines() == [
        "the program compiled for tpu-v5e:4x4 exposes 8 s of communication per step, and the plan 1 s:",
        "  collective      axes  sent  plan hides  compiled  covered",
        "  reduce-scatter  data  4 s   4 s         8 s       0 s      1 of 1 synchronous",
        "plan.seconds counts nothing as hidden: choose by it (overlap=False), or accept the difference with "
        "exposed='warn' or 'ignore' (--exposed)",
    ]


def test_a_reduce_scatter_that_the_scope_names_is_that():
    named = compiled("all-reduce", SCOPE.format("reduce-scatter"), 8.0, 3.0)
    assert [line.kind for line in report([0.0] * 3, GATHER, named).lines] == ["all-gather", "reduce-scatter"]
    assert report([0.0] * 3, GATHER, named).rows()[2][0] == "all-reduce of reduce-scatter"


def test_what_cannot_be_compared_is_kept():
    assert report([], compiled("all-gather", "", 1.0, 0.0)).kept  # a plan from an old file
    assert report([0.0] * 3, compiled("all-gather", "", 9.0, 0.0, known=False)).kept
    assert not report([0.0] * 3, compiled("all-gather", "", 9.0, 0.0)).kept


def test_ways_to_judge():
    with pytest.raises(
        ArgumentError, match="exposed: no way 'warning' to judge a program that hides less; did you mean 'warn'"
    ):
        check_judgement("warning")
