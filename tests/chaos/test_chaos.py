"""A sample of the faults of ``make chaos``."""

import random

import pytest
from typer.testing import CliRunner

from meshdsl.cli import app
from tests.chaos.run import PROGRAM, Disturbed, disturb, losses


@pytest.mark.sweep
def test_a_run_that_is_stuck_and_whose_checkpoint_is_damaged_ends_as_if_undisturbed(tmp_path, monkeypatch):
    run = Disturbed(tmp_path / "disturbed", 2, 40, random.Random(0))
    try:
        disturb(run, "stuck in input")
        disturb(run, "checkpoint damaged")
        assert run.end() == 0, run.said()
    finally:
        run.clear()
    said = (run.folder / "output.txt").read_text() + (run.folder / "process-1.log").read_text()
    assert "no step was done for 5 s; the processes wrote their stacks" in said
    assert "Current thread" in said and "program.py" in said
    (tmp_path / "devices").write_text("1")
    monkeypatch.setenv("CHAOS_FOLDER", str(tmp_path))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as there are in this process
    whole = tmp_path / "undisturbed"
    options = ["--mesh", "data=2", "--steps", "40", "--folder", str(whole)]
    CliRunner().invoke(app, ["train", str(PROGRAM), *options], catch_exceptions=False)
    assert run.judge({2: losses(whole)}) == 0
