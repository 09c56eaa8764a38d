"""``Lazy``: a value is computed once, on first read, and compares, hashes, prints and pickles as that value."""

import pickle
from copy import deepcopy

import pytest

import meshdsl as md
from meshdsl.util.lazy import Lazy
from tests.planner.graphs import shape


def test_what_comes_later_is_made_once_and_is_what_it_is():
    made = []
    later = Lazy(lambda: made.append(1) or (1, 2))
    assert made == []
    assert later.value == later.value == (1, 2) and made == [1]
    assert later == Lazy.known((1, 2)) == pickle.loads(pickle.dumps(later)) == deepcopy(later)
    assert later != Lazy.known((1, 3)) and later != (1, 2)
    assert hash(later) == hash((1, 2)) and repr(later) == "(1, 2)"


def test_an_error_comes_again_when_it_is_asked_for_again():
    later = Lazy(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _ = later.value


def test_what_reports_show_is_worked_out_when_it_is_read():
    made = []
    plan = md.parallelize(lambda a, b: a @ b, md.Mesh(x=2), layouts={"a": "x=S(0)"}).plan(shape(8, 8), shape(8, 8))
    assert plan.identity._make is not None
    make = plan.timing._make
    plan.timing._make = lambda: made.append(1) or make()
    assert "peak" in repr(plan.solution) and plan.gap < 1e-6 and made == []
    assert len(plan.fingerprint) == 64 and plan.identity._make is None
    assert plan.simulated_seconds > 0 and plan.spans and "with overlap" in str(plan) and made == [1]
