"""The values of the page are the plan's: whatever they are added up by, the sums are its totals."""

import json
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from meshdsl.plan.report import perfetto_trace, report_data
from meshdsl.plan.types import Timing
from meshdsl.util.lazy import Lazy


@pytest.fixture(scope="module")
def data(plan):
    return report_data(plan)


def sent(plan):
    return sum(c.seconds * c.trips for c in plan.collectives)


def test_totals(plan, data):
    assert [data[name] for name in ("seconds", "lower_bound", "gap", "bytes", "memory")] == [
        plan.seconds,
        plan.lower_bound,
        plan.gap,
        plan.bytes,
        plan.memory,
    ]
    assert data["mesh"] == [["data", 4], ["model", 2]] and data["limit"] == plan.topology.memory
    assert data["compute"] + sent(plan) == pytest.approx(plan.seconds, rel=1e-6)


def test_collectives_add_up_to_the_plan(plan, data):
    rows = data["collectives"]
    assert sum(row["bytes"] for row in rows) == plan.bytes > 0
    assert sum(row["seconds"] for row in rows) == pytest.approx(sent(plan))
    assert sum(row["runs"] for row in rows) == sum(c.trips for c in plan.collectives)
    assert all(row["bytes"] == row["runs"] * row["each"] for row in rows)


def test_axes_kinds_and_phases_add_up_to_the_plan(plan, data):
    for by, of in ((0, lambda c: ",".join(c.axes)), (1, lambda c: c.kind), (2, lambda c: c.phase)):
        for key in {of(c) for c in plan.collectives}:
            cells = [cell for cell in data["cells"] if cell[by] == key]
            own = [c for c in plan.collectives if of(c) == key]
            assert sum(cell[3] for cell in cells) == sum(c.trips for c in own)
            assert sum(cell[4] for cell in cells) == sum(c.trips * c.bytes for c in own)
            assert sum(cell[5] for cell in cells) == pytest.approx(sum(c.trips * c.seconds for c in own))
    assert sum(cell[4] for cell in data["cells"]) == plan.bytes


def test_lines_add_up_to_the_plan(plan, data):
    compute, wait, size, runs = zip(*(line[3:7] for line in data["lines"]), strict=True)
    assert sum(size) == plan.bytes and sum(runs) == sum(c.trips for c in plan.collectives)
    assert sum(compute) + sum(wait) == pytest.approx(plan.seconds, rel=1e-6)
    for source, *_, own_bytes, _, _ in data["lines"]:
        assert own_bytes == sum(c.bytes * c.trips for c in plan.collectives if c.source == source)


def test_events_lie_one_after_the_other(plan, data):
    rows = sorted(data["events"], key=lambda row: row[4])
    assert rows[0][4] == 0 and {row[0] for row in rows} == set(data["lanes"])
    ends = [row[4] + row[5] for row in rows]
    assert max(ends) == pytest.approx(plan.seconds, rel=1e-6)
    assert sum(row[5] for row in rows if row[0] != "compute") <= sent(plan) * (1 + 1e-9)
    for lane in data["lanes"]:
        own = [row for row in data["events"] if row[0] == lane]
        assert all(a[4] + a[5] <= b[4] * (1 + 1e-9) for a, b in pairwise(own))


def test_memory_reaches_the_peak(plan, data):
    assert max(point[0] for point in data["points"]) == plan.memory
    assert sum(row[2] for row in data["held"]) == sum(size for _, size in plan.held) == plan.memory


def test_arrays_are_the_inputs(plan, data):
    sizes = plan.mesh.sizes_by_name
    local = {a.path: prod(a.layout.local_shape(a.shape, sizes)) * 4 for a in plan.inputs}
    assert sum(row["bytes"] for row in data["arrays"]) == sum(local.values())
    assert sum(row["number"] for row in data["arrays"]) == len(plan.inputs)
    batch = next(row for row in data["arrays"] if row["name"] == "batch")
    assert batch["splits"][0] == ["data", 0] and "data" in batch["pinned"]


def test_a_large_plan_has_no_more_than_a_screen_shows(plan):
    times = 1 + 50_000 // len(plan.spans)
    long = replace(plan, timing=Lazy.known(Timing(plan.spans * times)), collectives=plan.collectives * times)
    data = report_data(long)
    assert len(long.spans) >= 50_000 and len(data["points"]) <= 3000 and len(data["events"]) < 10_000
    assert max(point[0] for point in data["points"]) == plan.memory
    assert sum(row["bytes"] for row in data["collectives"]) == long.bytes


def test_ranks_of_a_pipeline(plan, pipelined):
    assert report_data(plan)["pipeline"] is None
    found = report_data(pipelined)["pipeline"]
    assert found["text"] == str(pipelined.pipeline)
    lockstep, asynchronous = found["drawn"]
    assert lockstep["seconds"] == pytest.approx(100e-6) and asynchronous["seconds"] < lockstep["seconds"]
    for ranks in (lockstep["ranks"], asynchronous["ranks"]):
        assert max(end for tasks in ranks for *_, end in tasks) <= 100_000
        for tasks in ranks:
            assert all(a[3] <= b[2] for a, b in pairwise(tasks))
            for kind in "FB":
                assert [task[1] for task in tasks if task[0] == kind] == list(range(8))
    assert found["kept"] == [[3, 3072, 50_000], [1, 1024, 47_952]]


def test_the_trace_has_the_ranks_of_a_pipeline(pipelined):
    trace = json.loads(json.dumps(perfetto_trace(pipelined)))["traceEvents"]
    named = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert named[1:] == ["model, in lockstep", "model, asynchronous"]
    for pid in (1, 2):
        tasks = [event for event in trace if event["ph"] == "X" and event["pid"] == pid]
        assert len(tasks) == 2 * 2 * 8 and {event["tid"] for event in tasks} == {0, 1}
        assert sum(event["dur"] for event in tasks) == pytest.approx(2 * 8 * (2 + 4))
        assert {event["args"]["microbatch"] for event in tasks} == set(range(8))


def test_the_trace_is_the_timeline(plan):
    trace = json.loads(json.dumps(perfetto_trace(plan)))["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert sum(event["dur"] for event in spans) == pytest.approx(1e6 * plan.seconds, rel=1e-6)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * plan.seconds, rel=1e-6)
    assert max(event["args"]["bytes"] for event in trace if event["ph"] == "C") == plan.memory
    named = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {named[event["tid"]] for event in spans} == {"compute", *(",".join(c.axes) for c in plan.collectives)}
