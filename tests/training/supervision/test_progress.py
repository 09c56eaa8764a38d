"""When a run that does no step is said to hang."""

import json
from dataclasses import replace

import pytest

from meshdsl.training.observing.events import add_event
from meshdsl.training.supervision.progress import Patience, Progress

PATIENCE = Patience(start=900.0, save_every=50, evaluate_every=20)


def steps(last, seconds=0.1):
    return [{"step": n, "loss": 1.0, "seconds": seconds} for n in range(last - 4, last + 1)]


@pytest.mark.parametrize(("patience", "lines", "allowed"), [
    (PATIENCE, steps(33), 60.0),
    (PATIENCE, [*steps(33, 7.0)[:-1], {"step": 33, "loss": 1.0, "seconds": 800.0}], 140.0),  # the median's multiple
    (replace(PATIENCE, sink=10), steps(33, 1.0), 200.0),
    (PATIENCE, steps(40), 900.0),  # an evaluation follows
    (PATIENCE, [*steps(40), {"step": 40, "evaluation": {}}], 60.0),
    (PATIENCE, [*steps(100), {"step": 100, "evaluation": {}}], 900.0),  # a checkpoint follows
    (Patience(step=5.0), steps(100), 5.0),
    (PATIENCE, [], 900.0),
])  # fmt: skip
def test_how_long_the_next_line_may_take(patience, lines, allowed):
    assert patience.allowed(lines) == allowed


def test_silence_of_a_run(tmp_path):
    now = [0.0]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in steps(4990)) + '{"step": 4, "lo\n')
    add_event(tmp_path, "first step", step=1)  # of an earlier launch
    progress = Progress(tmp_path, PATIENCE, lambda: now[0])
    now[0] = 100.0
    assert not progress.has_stepped and progress.silence() == (100.0, 900.0)
    add_event(tmp_path, "first step", step=5001)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in steps(5001)) + '{"step": 50')
    assert progress.has_stepped and progress.silence() == (0.0, 60.0)
    now[0] = 300.0
    assert progress.silence() == (200.0, 60.0)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in steps(5050)))
    now[0] = 400.0
    assert progress.silence() == (0.0, 60.0)
    now[0] = 500.0
    assert progress.silence() == (100.0, 900.0)  # a checkpoint is due
    add_event(tmp_path, "last step", step=5001)
    assert progress.silence() == (0.0, 900.0)
