"""What runs beside other work, and what is worked out when it is first read."""

import pickle
import sys
from copy import deepcopy
from threading import Barrier, Event, Thread, current_thread

import pytest

import meshdsl as md
from meshdsl.util.lazy import Lazy
from meshdsl.util.runtime import run_parallel, worker_pool
from tests.planner.graphs import shape


def test_the_block_ends_when_what_it_has_started_has_ended():
    before, done = sys.getswitchinterval(), []
    with worker_pool() as start:
        assert sys.getswitchinterval() < before
        sums = [start(lambda i=i: done.append(i) or sum(range(i))) for i in (10, 100_000)]
    assert sorted(done) == [10, 100_000] and [s.result() for s in sums] == [45, 4999950000]
    assert sys.getswitchinterval() == before


def test_blocks_of_several_threads_leave_the_interval_as_it_was():
    before, inside, out = sys.getswitchinterval(), Event(), Event()

    def longer():
        with worker_pool():
            inside.set()
            out.wait()

    with worker_pool():
        other = Thread(target=longer)
        other.start()
        inside.wait()
    assert sys.getswitchinterval() < before, "the other is not over"
    out.set()
    other.join()
    assert sys.getswitchinterval() == before


def test_errors_come_out_of_both():
    before = sys.getswitchinterval()
    with pytest.raises(ZeroDivisionError), worker_pool() as start:
        start(lambda: 1 / 0).result()
    with pytest.raises(KeyError), worker_pool():
        raise KeyError
    assert sys.getswitchinterval() == before


def test_several_functions_run_beside_each_other_and_one_where_it_is():
    before, met = sys.getswitchinterval(), Barrier(2, timeout=60)
    assert run_parallel([lambda: met.wait() * 0 + 1, lambda: met.wait() * 0 + 2]) == [1, 2]
    assert run_parallel([current_thread]) == [current_thread()]
    with pytest.raises(ZeroDivisionError):
        run_parallel([lambda: 1, lambda: 1 / 0])
    assert sys.getswitchinterval() == before


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
