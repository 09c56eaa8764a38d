"""Checkpoints, the loop, its record, the picture."""

import logging
import math
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from meshdsl.errors import ArgumentError
from meshdsl.training.batches import ReadAhead, at_least, host_feed
from meshdsl.training.datasets.text import text_batches
from meshdsl.training.loop import Run, TrainingBar, _Loop, restore_newest, train
from meshdsl.training.observing.metrics import History, MetricsFile, RecentLosses, draw_curves, read_metrics
from meshdsl.training.observing.step_times import SlowestProcess
from meshdsl.training.saving.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent.parent
TOKENS = (np.arange(1000) % 256).astype(np.uint16)


def test_checkpoints_keep_every_bit_and_the_newest_two(tmp_path):
    state = ({"layers": {0: jnp.arange(3.0), 1: jnp.float32(0.1)}}, (jnp.int32(7),), jax.random.key(3))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest is None
    for step in (1, 2, 3):
        checkpoints.save(step, jax.tree.map(lambda x, s=step: x * s, state[:2]) + state[2:])
    checkpoints.close()
    done, restored = Checkpoints(tmp_path).restore_newest(jax.eval_shape(lambda: state))
    assert done == 3
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b * 3), restored[:2], state[:2])
    assert restored[2] == state[2]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_a_checkpoint_of_another_state(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, ({"w": jnp.ones(3), "old": jnp.ones(2)},))
    with pytest.raises(ArgumentError) as error:
        Checkpoints(tmp_path).restore_newest(({"w": jnp.ones(5), "new": jnp.ones(2)},))
    assert str(error.value) == (
        f"the checkpoint in {tmp_path} after step 4 is of another state:\n"
        "  0.new: float32[2], not in the checkpoint\n"
        "  0.old: not in this program\n"
        "  0.w: float32[5], in the checkpoint float32[3]\n"
        "train into another folder, or resume that program"
    )


def test_a_killed_run_resumes_exactly(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(whole, 0.0).wait()
    process = _run(killed, 0.05)
    _wait_for(lambda: any((killed / "checkpoints").glob("1[05]")), process)
    process.kill()
    assert process.wait() == -9 and not (killed / "final.npy").exists()
    assert "resumed after step 1" in _run(killed, 0.0).communicate()[0]
    for file in ("final.npy", "losses.npy"):
        np.testing.assert_array_equal(np.load(killed / file), np.load(whole / file))


def test_the_loop_evaluates_and_finishes_where_it_should(tmp_path):
    run = Run(steps=7, folder=tmp_path, save_every=3, evaluate_every=4)
    feed = host_feed(text_batches(TOKENS, 4, 8))
    state, outcome = train(count, (jnp.float32(0),), feed, run, evaluate=lambda n: {"twice": [n, 3 * n]})
    assert outcome.history == History([0, 1, 2, 3, 4, 5, 6], [(4, {"twice": 8.0}), (7, {"twice": 14.0})])
    assert (float(state[0]), outcome.done, outcome.stopped) == (7, 7, False)
    done, again = restore_newest(run, state)
    assert (done, float(again[0])) == (7, 7)
    assert train(None, again, feed, run, done)[1].history == outcome.history


def test_the_bar_shows_no_nan_and_stays_whole_under_other_lines():
    handler = logging.StreamHandler(sys.stderr)  # which holds the stream, as those of libraries do
    logging.getLogger("another").addHandler(handler)
    screen = Console(file=StringIO(), force_terminal=True, width=120)
    try:
        with TrainingBar(steps=3, done=0, unit="rows", console=screen) as bar:
            logging.getLogger("another").warning("a line of another library")
            print("a print of the step")
            before = screen.file.getvalue()
            bar.advance(1.5, 32)
            bar.stopping()
    finally:
        logging.getLogger("another").removeHandler(handler)
    assert handler.stream is sys.stderr
    assert "compiling" in before and "nan" not in before
    for line in ("a line of another library\n", "a print of the step\n"):
        assert line in before  # on a line of its own, above the bar
    assert "loss 1.500" in screen.file.getvalue() and "stopping after this step" in screen.file.getvalue()


def test_the_bar_of_a_run_that_ends_early_counts_every_step():
    screen = Console(file=StringIO(), force_terminal=True, width=120)
    with pytest.raises(OSError), TrainingBar(steps=9, done=2, unit="rows", console=screen) as bar:
        for loss in (3.0, 2.0, 1.0):
            bar.advance(loss, 32)
        raise OSError("disk gone")
    last = screen.file.getvalue().rpartition("training")[2]
    assert "5/9" in last and "loss 1.000" in last


def test_batches_that_end_before_the_steps(tmp_path):
    run = Run(steps=7, folder=tmp_path)
    state, outcome = train(count, (jnp.float32(0),), host_feed([0, 0, 0]), run)
    assert (float(state[0]), outcome.done) == (3, 3)
    assert restore_newest(run, state)[0] == 3


def test_the_record_grows_and_what_is_done_again_counts_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsFile(file, 0) as record:
        assert not file.exists()  # its time is that of a step
        for step in (1, 2, 3):
            record.step(step, step / 2, seconds=0.5)
        record.evaluation(2, {"accuracy": 0.9})
    before = file.read_text() + '{"step": 4, "lo'  # killed while writing
    file.write_text(before)
    os.utime(file, (1, 1))
    with MetricsFile(file, 2) as record:
        assert record.history == History([0.5, 1.0], [(2, {"accuracy": 0.9})]) and file.stat().st_mtime == 1
        record.step(3, 7.0)
    assert file.read_text().startswith(before + "\n") and record.history.losses == [0.5, 1.0, 7.0]
    lines = read_metrics(file)
    assert lines[0] == {"time": pytest.approx(time.time(), abs=60), "step": 1, "loss": 0.5, "seconds": 0.5}
    assert [line["step"] for line in lines] == [1, 2, 2, 3] and lines[-1]["loss"] == 7.0
    assert MetricsFile(file, 2).history.losses == [0.5, 1.0]


@pytest.mark.parametrize(("others", "rest", "note"), [
    ((0, 1, 0), 0, "the batches of process 1 end after step 7 of 20"),  # it has resumed, and has none
    ((0, 1, 1), 1, "the batches of process 1 end after step 8 of 20"),
    ((0, 1, 2), 2, "the batches end after step 9 of 20"),
    ((0, 0, 0), 2, "the batches of process 0 end after step 9 of 20"),
    ((1, 0, 2), None, ""),  # an error of process 1
])  # fmt: skip
def test_processes_end_together_when_the_batches_of_one_end(tmp_path, monkeypatch, others, rest, note):
    monkeypatch.setattr("meshdsl.training.loop.multihost_utils.process_allgather", lambda own: np.array([own, others]))
    notes, run = [], Run(20, tmp_path)
    loop = _Loop(None, run, SimpleNamespace(note=notes.append), MetricsFile(None, 7), None, None, None, (), 7)
    with ReadAhead(at_least(iter(range(2)), 13), margin=2) as batches:
        batches.wait()
        assert loop._rest(batches) == rest and "".join(notes) == note
        assert (batches.margin == 0) is (rest is not None)


def test_a_function_of_metrics_that_fails_is_dropped(tmp_path, caplog):
    seen = []

    def failing(step, values):
        raise OSError("no network\nat all")

    run = Run(steps=4, folder=tmp_path, evaluate_every=2, unit="rows", compute_bound=1e-9)
    hooks = [failing, lambda *line: seen.append(line)]
    train(count, (jnp.float32(0),), host_feed([0] * 4), run, evaluate=lambda n: {"n": n}, on_metrics=hooks)
    assert [step for step, _ in seen] == [1, 2, 2, 3, 4, 4] and seen[2] == (2, {"n": 2.0})
    (warning,) = (each.getMessage() for each in caplog.records)
    assert warning == "failing is not called again: OSError: no network"
    for step, values in seen[3:5]:
        own = values["input seconds"] + values["compute seconds"]
        assert values["loss"] == step - 1 and values["rows/s"] == pytest.approx(1 / own, rel=0.1)
        assert values["seconds"] == pytest.approx(own + values.get("evaluation seconds", 0), abs=1e-5)
    assert "compile seconds" in seen[0][1] and "save seconds" not in seen[0][1] and "MFU" in seen[0][1]


def spikes(losses):
    recent = RecentLosses()
    return [i for i, loss in enumerate(losses) if recent.spike_above(loss) is not None]


def test_spikes_of_the_loss():
    draw = np.random.default_rng(0)
    falling = 2 + 8 * np.exp(-np.arange(20_000) / 300) + 0.2 * draw.normal(size=20_000)
    assert len(spikes(falling)) <= 1
    assert len(spikes(2 + np.cos(np.arange(20_000) / 500) + 0.05 * draw.normal(size=20_000))) <= 2
    assert spikes([2.0, *[1.0] * 60, 1.09, 1.2, math.nan, 1.0]) == [62]  # by a tenth at least
    falling[[700, 9000]] += 4
    assert {700, 9000} <= {*spikes(falling)} and len(spikes(falling)) <= 3
    assert 0 < len(spikes([*[1.0] * 100, *[3.0] * 100])) <= 26  # a new level is soon the usual one


def test_a_spike_is_a_line_and_a_value(tmp_path, capsys):
    losses = [1.0] * 30 + [5.0] + [1.0] * 4
    run = Run(steps=35, folder=tmp_path)
    train(lambda n, batch: (n, batch), (jnp.float32(0),), host_feed(losses), run)
    assert [x["step"] for x in read_metrics(tmp_path / "metrics.jsonl") if x.get("spike above") == 1.0] == [31]
    assert "step    31   training loss 5.000: a spike, the recent median is 1.000" in capsys.readouterr().out


def test_the_slowest_process():
    assert SlowestProcess.of([0.2, 0.5, 0.1, 0.3]) == (1, 0.5, 0.2)
    assert SlowestProcess.of([0.2, 0.3]).delays(0.5) and not SlowestProcess.of([0.2, 0.3]).delays(2.0)


def test_the_curves_are_a_picture(tmp_path):
    history = History([3.0, 2.0, 1.0], [(3, {"held-out loss": 1.5, "accuracy": 0.5})])
    file = draw_curves(history, tmp_path / "a" / "curves.png", {"unigram": 2.5})
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


def count(n, batch):
    return n + 1, n


def _run(folder: Path, pause: float) -> subprocess.Popen:
    script = [sys.executable, str(ROOT / "tests" / "training" / "resumable_run.py"), str(folder), "40", str(pause)]
    return subprocess.Popen(script, cwd=ROOT, text=True, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})


def _wait_for(condition, process: subprocess.Popen, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.01)
