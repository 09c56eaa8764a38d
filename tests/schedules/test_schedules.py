"""Schedules: the numbers of the papers, what cannot run, the text, the uniform one."""

from itertools import accumulate

import msgspec
import pytest

from meshdsl.errors import ScheduleError
from meshdsl.pipelining.tick_loops import TickTable, make_loops
from meshdsl.plan.file import as_json
from meshdsl.schedules.lockstep import UniformSchedule, lockstep, make_buffer_slots
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.schedule import Schedule, Task, make_schedule
from meshdsl.schedules.simulate import Durations, time_schedule
from meshdsl.schedules.spec import Pipeline

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 7, 8, 32)]


def seconds(schedule, chunks=1, **durations):
    return time_schedule(schedule, Durations(**durations)).seconds / chunks


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_have_their_bubble_and_stash(p, m):
    for name in ("gpipe", "1f1b"):
        timing = time_schedule(make_schedule(name, p, m), Durations())
        assert timing.seconds == 3 * (m + p - 1)
        assert timing.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert [make_schedule("gpipe", p, m).stash(r) for r in range(p)] == [m] * p
    assert [make_schedule("1f1b", p, m).stash(r) for r in range(p)] == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 32), (8, 3, 32)])
def test_interleaving_divides_the_bubble_by_the_chunks(p, v, m):
    schedule = make_schedule("interleaved", p, m, v)
    assert seconds(schedule, v) == pytest.approx(3 * m + 3 * (p - 1) / v)
    assert [schedule.stash(r) for r in range(p)] == [
        min(m * v, (v - 1) * p + 2 * (p - 1 - r) + (r < p - 1 or v > 1)) for r in range(p)
    ]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_split_backwards_never_cost_more_and_hold_no_more(p, m):
    split, whole = make_schedule("zb-h1", p, m), make_schedule("1f1b", p, m)
    assert seconds(split) <= seconds(whole)
    assert max(split.stash(r) for r in range(p)) <= p
    if m >= 2 * p > 2:
        assert seconds(split) - 3 * m < 0.7 * (seconds(whole) - 3 * m)


def test_slow_links_delay_what_has_to_arrive():
    schedule = make_schedule("1f1b", 4, 1)
    assert seconds(schedule, transfer=0.5) == 12 + 6 * 0.5
    assert seconds(make_schedule("1f1b", 1, 4), transfer=0.5) == 12


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_the_text_reads_back(name):
    schedule = make_schedule(name, 3, 4)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(str(schedule).replace(",", ", ,")) == schedule


def test_text_that_says_more_than_is_needed():
    said = "0UNSHARD,0F0,0SEND_F0,0F1,0RECV_B0,0B0,,0B1,0REDUCE_GRAD\n1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1B1,1RESHARD"
    assert str(Schedule.parse(said)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"


def test_files(tmp_path):
    schedule = make_schedule("zb-v", 2, 3)
    schedule.save(tmp_path / "v.csv")
    assert Schedule.load(tmp_path / "v.csv") == schedule
    for use in (Schedule.load, schedule.save):
        with pytest.raises(ScheduleError, match=r"cannot (read|write) the schedule '.*none/v.csv': .*No such file"):
            use(tmp_path / "none" / "v.csv")


def test_plans_keep_tables():
    made = Pipelined(Pipeline(3, make_schedule("zb-v", 2, 3)), "pipe", 2)
    assert msgspec.json.decode(as_json(made), type=Pipelined) == made
    assert made.facts["schedule"].startswith("0F0,0F1,") and made.facts["chunks"] == 2


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_where_the_last_stage_lives_on_the_first_rank_there_is_next_to_no_bubble(p, m):
    schedule = make_schedule("zb-v", p, m)
    assert [schedule.home[s] for s in range(2 * p)] == [*range(p), *range(p)[::-1]]
    assert seconds(schedule, 2) <= min(3 * m + p, seconds(make_schedule("zb-h1", p, m)))
    assert max(map(schedule.stash, range(p))) <= 2 * p


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (4, 8), (4, 4)])
def test_tables_in_lockstep(name, p, m):
    schedule = make_schedule(name, p, m, 2 if name == "interleaved" else 1)
    table = lockstep(schedule)
    assert table.schedule == schedule  # every rank in its order
    for task, tick in table.tick_of.items():
        for need in schedule.needs(task):
            assert table.tick_of[need] < tick or (need.stage == task.stage and table.tick_of[need] == tick)
    slots = make_buffer_slots(table)
    for kept in (slots.inputs, slots.gradients, slots.residuals):
        assert set(kept.at.values()) == set(range(kept.count))
    assert max(map(schedule.stash, range(p))) <= slots.inputs.count <= max(map(schedule.stash, range(p))) + 1


def test_the_timeline_is_drawn_to_scale():
    drawn = time_schedule(make_schedule("1f1b", 2, 2), Durations()).timeline()
    assert drawn == "rank 0   F0 F1 ......B0    ...B1    \nrank 1   ...F0 B0    F1 B1    ......"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0F0,0B0\n1B0,1F0", ["rank 0 waits at 0B0 for 1B0, which rank 1 does not reach: a deadlock"]),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", ["stage 0, microbatch 1: F; each needs F and B, or F, I and W"]),
        ("0F0,0F0,0B0", ["0F0 is done 2 times"]),
        ("0F0,0B0,1F0\n1B0", ["stage 1 is on ranks 0 and 1: a stage lives on one"]),
        ("0F0,0I0,0B0,0W0", ["stage 0, microbatch 0: FBIW; each needs F and B, or F, I and W"]),
        ("0F0,0W0,0I0", ["rank 0 waits at 0W0 for 0I0, which rank 0 does not reach: a deadlock"]),
        ("0F0,0B0\n2F0,2B0", ["stage 1, microbatch 0: nothing; each needs F and B, or F, I and W"]),
        (",", ["it has no tasks"]),
        ("0F0,0B0,2F0,2B0\n1F0,1B0", ["all ranks need the same number of stages, but rank 0 has 2, rank 1 has 1"]),
    ],
)
def test_schedules_that_cannot_run(text, rows):
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    assert str(error.value).startswith("this schedule cannot run:\n  ")
    assert set(rows) <= {row.strip() for row in str(error.value).splitlines()}


def test_other_bad_input():
    with pytest.raises(ScheduleError, match="'0G1' is not a task: stage, F B I or W, microbatch, as in 2F0"):
        Schedule.parse("0F0,0G1")
    with pytest.raises(ScheduleError, match="no schedule '1f1'; did you mean '1f1b'"):
        make_schedule("1f1", 2, 2)
    with pytest.raises(ScheduleError, match="'gpipe' has one chunk per rank, not 2; 'interleaved' takes several"):
        make_schedule("gpipe", 2, 2, 2)
    with pytest.raises(ScheduleError, match="6 do not divide\nuse 4 or 8 microbatches"):
        make_schedule("interleaved", 4, 6, 2)
    with pytest.raises(ScheduleError, match="3 do not divide\nuse 4 microbatches, or 1 chunk"):
        UniformSchedule(4, 3, chunks=2)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("p", "v", "m"), [(1, 1, 3), (2, 1, 1), (4, 1, 2), (4, 1, 32), (2, 3, 4), (4, 2, 8), (8, 3, 16)]
)
def test_the_uniform_schedule(p, v, m, split):
    uniform = UniformSchedule(p, m, v, split)
    schedule = uniform.schedule  # which checks itself
    assert uniform.ticks == m * v + v * p - 1 + p - 1
    made = {
        task: (tick, rank)
        for tick in range(uniform.ticks)
        for rank in range(p)
        for task in (uniform.forward(tick, rank), uniform.backward(tick, rank), uniform.weights(tick, rank))
        if task is not None
    }
    for task, (tick, rank) in made.items():
        for need in schedule.needs(task):
            before, where = made[need]
            if where != rank or need.stage != task.stage:  # from the neighbour on the ring, one tick earlier
                assert before == tick - 1 and (where - rank) % p in (1 % p, p - 1)
    slots = make_buffer_slots(uniform.table)
    assert not slots.gradients.outlives_tick and max(slots.gradients.used) <= 1  # read in the tick in which they come
    if v == 1 or m >= 2 * p:
        kept = [(v - 1) * p + 2 * (p - 1 - r) + 1 for r in range(p)]
        assert slots.inputs.used == tuple(min(m * v, count) for count in kept)
    if split:
        assert slots.residuals.used == tuple(min(m * v, r + 1) for r in range(p))


def test_tasks_sort_and_print():
    assert str(Task(2, "F", 0)) == "2F0" and Task.parse(" 2F0 ") == Task(2, "F", 0)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_programs_have_the_ticks_of_the_closed_form_and_few_bodies(p):
    for v, m, split in [(1, m, s) for m in (1, 2, p, 33, 64) for s in (False, True)] + [
        (2, 2 * p, False),
        (3, 64, True),
    ]:
        if v == 1 or m % p == 0:
            table = UniformSchedule(p, m, v, split).table
            loops = TickTable(table, make_buffer_slots(table)).loops
            assert sum(loop.times * loop.period for loop in loops) == m * v + v * p - 1 + p - 1
            assert sum(len(loop.parts) for loop in loops) <= 8


def test_bodies_are_few_whatever_the_order_of_a_table():
    kinds = ["FB"[: 1 + i % 2] + "H" * (i % 3 == 0) for i in range(60)] + ["F", "B", "W"] * 5 + list("FWFBBWFFFW")
    for bodies in (3, 8, 20):
        loops = make_loops(kinds, bodies)
        assert sum(len(loop.parts) for loop in loops) <= bodies
        done = [part.kinds for loop in loops for part in loop.parts * loop.times for _ in range(part.count)]
        assert len(done) == len(kinds) and all(set(want) <= set(found) for want, found in zip(kinds, done, strict=True))
        assert [loop.start for loop in loops] == [0, *accumulate(loop.times * loop.period for loop in loops)][:-1]


def test_a_tick_alone_does_no_more_than_it_is_asked():
    """A compiler unrolls it, and drops what is masked and was planned."""
    kinds = ["F", "F", "B", "F", "F"] + ["BH", "B"] * 10
    loops = make_loops(kinds, bodies=4)
    assert [part.kinds for loop in loops for part in loop.parts] == ["F", "B", "F", "BH"]
