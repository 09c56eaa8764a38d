"""Thread pools that shorten the switch interval, and stages that run with the garbage collector off."""

import gc
import sys
from threading import Barrier, Event, Thread, current_thread

import pytest

from meshdsl.util.runtime import gc_paused, run_parallel, worker_pool


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


@gc_paused
def stage(fails=False):
    if fails:
        raise ValueError("fails")
    return gc.isenabled()


def test_the_collector_is_off_inside_and_on_again_afterwards():
    assert gc.isenabled() and not stage() and gc.isenabled()
    with pytest.raises(ValueError, match="fails"):
        stage(fails=True)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        assert not stage() and not gc.isenabled()
    finally:
        gc.enable()
