"""Checkpoints, the loop, its record, the picture."""

import json
import logging
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from meshdsl.errors import ArgumentError
from meshdsl.training.batches import host_feed
from meshdsl.training.checkpoint import Checkpoints
from meshdsl.training.datasets.text import text_batches
from meshdsl.training.loop import Run, TrainingBar, restore_newest, train
from meshdsl.training.metrics import History, MetricsFile, draw_curves

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


def test_batches_that_end_before_the_steps(tmp_path):
    run = Run(steps=7, folder=tmp_path)
    state, outcome = train(count, (jnp.float32(0),), host_feed([0, 0, 0]), run)
    assert (float(state[0]), outcome.done) == (3, 3)
    assert restore_newest(run, state)[0] == 3


def test_the_record_drops_what_will_be_done_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsFile(file, 0) as record:
        for step in (1, 2, 3):
            record.step(step, step / 2, seconds=0.5)
        record.evaluation(2, {"accuracy": 0.9})
    file.write_text(file.read_text() + '{"step": 4, "lo')  # killed while writing
    with MetricsFile(file, 2) as record:
        record.step(3, 7.0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0] == {"step": 1, "loss": 0.5, "seconds": 0.5}
    assert [line["step"] for line in lines] == [1, 2, 2, 3] and lines[-1]["loss"] == 7.0
    assert record.history == History([0.5, 1.0, 7.0], [(2, {"accuracy": 0.9})])


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
