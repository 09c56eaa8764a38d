"""Both predictions of a pipeline, from what its parts cost."""

from itertools import pairwise

import pytest

import meshdsl as md
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import PipelineCosts, TaskCost, part_of, part_scope


def priced(p, m, schedule="1f1b", chunks=1, forward=1.0, backward=2.0, head=0.0, handing=0.0, others=0.0):
    """A pipeline whose units cost this much each; ``head`` per microbatch, ``handing`` per permute."""
    asked = md.Pipeline(m, schedule, chunks)
    ticks = m * chunks + p - 1
    totals = forward * ticks, backward * ticks, 0.0, head * m, handing * 2 * ticks, others
    costs = PipelineCosts(*totals, kept=10, memory=1000, exchanges=2 * ticks, sent=20 * ticks)
    return Pipelined(asked, "pipe", p, costs=costs)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_both_are_the_closed_forms(p, m, schedule, chunks):
    found = priced(p, m, schedule, chunks, head=0.5, others=7.0)
    rest = 0.5 * m + 7.0
    assert found.forecast.lockstep == pytest.approx(3 * (m * chunks + p - 1) + rest)
    assert found.forecast.asynchronous == pytest.approx(3 * (m * chunks + p - 1) + rest)


def test_handing_on_takes_nobodys_time_but_that_of_who_waits():
    plain, slow = (priced(4, 8, handing=h).forecast for h in (0.0, 0.25))
    assert slow.lockstep - plain.lockstep == pytest.approx(0.25 * 2 * 11)
    assert plain.asynchronous + 0.25 * 6 <= slow.asynchronous < slow.lockstep


def test_ticks_add_up_to_what_was_spent():
    found = priced(4, 8, "interleaved", 2, head=0.5, handing=0.25, others=3.0)
    costs = found.costs
    spent = costs.forward + costs.backward + costs.head + costs.handing + costs.others
    assert found.forecast.lockstep == pytest.approx(spent)
    for timing in (found.forecast.lockstep_timing, found.forecast.asynchronous_timing):
        for tasks in timing.schedule.ranks:
            assert all(timing.end[a] <= timing.begin[b] + 1e-9 for a, b in pairwise(tasks))
            assert all(timing.end[n] <= timing.begin[t] + 1e-9 for t in tasks for n in timing.schedule.needs(t))


def test_what_ranks_keep_in_bytes():
    found = priced(4, 16)
    assert found.stash_bytes == (70, 50, 30, 10) and found.memory == (1000, 980, 960, 940)
    assert found.facts["stash_bytes"] == (70, 50, 30, 10) and found.facts["lockstep"] == found.forecast.lockstep
    assert "stash_bytes" not in Pipelined(md.Pipeline(4), "pipe", 2).facts


def test_stages_that_are_not_alike():
    """Two microbatches through three stages; in a tick, the largest of those that work in it is waited for."""
    loads = (TaskCost(1, 2, 100), TaskCost(3, 4, 400), TaskCost(0, 2, 200))
    forward, backward = 1 + 3 + 3 + 0, 2 + 4 + 4 + 2  # tick by tick
    costs = PipelineCosts(forward, backward, 0.0, 0.0, 0.0, 5.0, kept=10, memory=1000, exchanges=8, sent=8, room=200)
    found = Pipelined(md.Pipeline(2, axis="pipe"), "pipe", 3, layers=(1, 1, 1), loads=loads, costs=costs)
    assert found.forecast.lockstep == pytest.approx(forward + backward + 5)
    assert [sum(s for _, s in tick.groups) for tick in found.forecast.ticks] == pytest.approx([1, 3, 5, 4, 4, 2])
    assert found.forecast.balance == pytest.approx((3, 7, 2))
    assert found.forecast.asynchronous == pytest.approx(1 + 3 + 3 + 4 + 4 + 2 + 5)
    assert found.memory == (1000 - 200 + 50, 1000, 1000 - 10 - 200 + 100)


def test_timelines_are_to_scale():
    found = priced(2, 2, backward=3.0, head=1.0)
    assert found.timeline().splitlines() == [
        "rank 0   F0 F1 ...............B0       ...B1       ",
        "rank 1   ...F0 B0       ...F1 B1       ............",
    ]
    assert found.timeline(asynchronous=True).splitlines() == [
        "rank 0   F0 F1 .........B0       ...B1       ",
        "rank 1   ...F0 B0       F1 B1       .........",
    ]


def test_the_innermost_part_counts():
    assert part_of("") == part_of("jit/layers") == ""
    assert part_of(f"a/{part_scope('backward')}/b/vmap({part_scope('head')})/c") == "head"
