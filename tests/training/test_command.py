"""``meshdsl train``: on one process and several, stopped, killed, resumed, on other meshes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from meshdsl.cli import app, main
from meshdsl.errors import ArgumentError
from meshdsl.training.loop import Run
from meshdsl.training.observing.metrics import read_metrics
from meshdsl.training.observing.profile import parse_profile
from meshdsl.training.run import Session
from tests.cli.test_json import documented
from tests.sweeps import swept

ROOT = Path(__file__).parent.parent.parent
TINY = str(ROOT / "tests" / "training" / "tiny.py")
TWO = (TINY, "--processes", "2")
LONG = ("--steps", "4000", "--save-every", "10", "--evaluate-every", "1000")


def run(*options):
    """The command in this process, on the devices of the tests."""
    result = CliRunner().invoke(app, ["train", TINY, *map(str, options)], catch_exceptions=False)
    return result.exit_code, result.stdout


def started(*options, folder, **variables):
    """The command in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TINY_FOLDER": str(folder), "COLUMNS": "200", **variables}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    command = [sys.executable, "-m", "meshdsl", "train", TINY, "--folder", str(folder), *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def saved(folder):
    return max((int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def wait_for_a_checkpoint(process, folder, after=0):
    end = time.monotonic() + 120
    while saved(folder) <= after:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_outcome_as_json(tmp_path):
    status, printed = run("--folder", tmp_path / "a", "--steps", 4, "--evaluate-every", 2, "--json")
    facts = json.loads(printed)
    assert set(facts) == {"format", "version", *documented("train")}
    assert status == 0 and facts["folder"] == str(tmp_path / "a")
    assert (facts["steps"], facts["evaluated"], facts["stopped"]) == (4, 4, False)
    assert facts["loss"] == losses(tmp_path / "a")[-1] and "held-out loss" in facts["evaluation"]


def test_too_few_devices_are_refused_before_planning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Session, "train", lambda *_: pytest.fail("planned"))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setattr(sys, "argv", ["meshdsl", "train", TINY, "--mesh", "data=64", "--folder", str(tmp_path / "a")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "mesh data=64 needs 64 devices, and there are 8 (cpu)\nTo try it on one CPU:" in capsys.readouterr().err


def test_a_run_and_what_it_leaves(tmp_path):
    status, printed = run("--folder", tmp_path / "a", "--evaluate-every", 10)
    assert status == 0
    for part in ("plan of step on mesh data=4,model=2", "total per step", "held-out loss", "examples/s", "curves"):
        assert part in printed
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "plan.json",
        "checkpoints",
        "metrics.jsonl",
        "events.jsonl",
        "curves.png",
    }
    assert len(losses(tmp_path / "a")) == 30 and losses(tmp_path / "a")[-1] < 0.2 * losses(tmp_path / "a")[0]


def test_a_profile_of_some_steps(tmp_path):
    status, printed = run("--folder", tmp_path, "--steps", 8, "--profile", "3:5")
    assert status == 0 and f"profile in {tmp_path}/profile, of 3 steps of" in printed
    rows = [line.split() for line in (tmp_path / "profile" / "collectives.txt").read_text().splitlines()[2:]]
    assert [row[:2] for row in rows] == [["all-reduce", "data,model"]]
    assert [len(row) for row in rows] == [7]  # predicted, measured, and their ratio
    spent = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "profile seconds" in line]
    assert [line["step"] for line in spent] == [3, 6]  # before its end, and after the last one traced


def test_steps_to_profile():
    assert parse_profile("10:13") == (10, 13) and parse_profile(None) is None
    for wrong in ("10", "0:3", "5:4", "a:b"):
        with pytest.raises(ArgumentError, match=f"--profile {wrong}: not the first and the last step, such as 10:13"):
            parse_profile(wrong)
    with pytest.raises(ArgumentError, match="--profile 10:13 of a run of 9 steps"):
        Run(9, Path("a"), profile=(10, 13))


def test_a_run_goes_on_over_another_mesh_with_other_layouts(tmp_path):
    run("--folder", tmp_path / "whole")
    run("--folder", tmp_path / "parts", "--steps", 11)
    status, printed = run("--folder", tmp_path / "parts", "--mesh", "model=4,data=2", "--resume")
    assert status == 0 and "resumed after step 11" in printed
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-4)


@swept(("kind", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], kept=((signal.SIGTERM, 143),))
def test_a_signal_ends_a_run_after_its_step_saved(tmp_path, kind, status):
    process = started(*LONG, folder=tmp_path)
    wait_for_a_checkpoint(process, tmp_path)
    process.send_signal(kind)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status and "Traceback" not in err
    stopped = saved(tmp_path)
    assert f"stopped after step {stopped} of 4000; --resume continues" in out and "nan" not in out


def test_a_run_that_is_resumed_past_its_end_has_nothing_to_do(tmp_path):
    run("--folder", tmp_path / "a", "--steps", 9)
    before = losses(tmp_path / "a")
    status, printed = run("--folder", tmp_path / "a", "--steps", 6, "--resume")
    assert status == 0 and "resumed at 9 of 6 steps: nothing to do" in printed and "9/6" not in printed
    assert losses(tmp_path / "a") == before


@pytest.mark.sweep
def test_two_processes_stopped_killed_and_resumed_have_the_losses_of_one(tmp_path):
    folder = tmp_path / "two"
    process = started("--processes", 2, *LONG, folder=folder)
    wait_for_a_checkpoint(process, folder)
    process.send_signal(signal.SIGINT)  # forwarded as SIGTERM, on which they agree on a step
    out, _ = process.communicate(timeout=120)
    stopped = saved(folder)
    assert process.returncode == 130 and f"stopped after step {stopped} of 4000; --resume continues" in out
    assert len(losses(folder)) == stopped

    process = started("--processes", 2, "--resume", *LONG, folder=folder)
    wait_for_a_checkpoint(process, folder, after=stopped)
    os.kill(int((folder / "process-1").read_text()), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert (
        "process 1 of 2 ended with status -9, the others were ended" in said and str(folder / "process-1.log") in said
    )

    steps = saved(folder) + 5
    process = started("--processes", 2, "--resume", "--steps", steps, folder=folder)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0 and f"resumed after step {steps - 5}" in out, said
    run("--folder", tmp_path / "one", "--steps", steps)
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "one"), rtol=1e-4)


def test_a_state_is_saved_when_one_of_two_processes_cannot_read_its_input(tmp_path):
    process = started("--processes", 2, "--steps", 400, "--save-every", 1000, folder=tmp_path, TINY_FAIL="23")
    _, said = process.communicate(timeout=240)
    log = (tmp_path / "process-1.log").read_text()
    assert process.returncode == 2 and "process 1 of 2 ended with status 2" in said, said + log
    assert "OSError: the disk of the data is gone" in log
    assert 21 <= saved(tmp_path) <= 23 and len(losses(tmp_path)) == saved(tmp_path)
    steps = saved(tmp_path) + 3
    assert run("--folder", tmp_path, "--resume", "--accept-changes", "--steps", steps)[0] == 0
    run("--folder", tmp_path / "one", "--steps", steps)
    np.testing.assert_allclose(losses(tmp_path), losses(tmp_path / "one"), rtol=1e-4)


@pytest.mark.sweep
def test_batches_that_end_earlier_in_one_of_two_processes_end_the_run_of_both(tmp_path):
    process = started("--processes", 2, "--steps", 400, folder=tmp_path, TINY_ENDS="20,9")
    out, said = process.communicate(timeout=240)
    assert process.returncode == 0 and "the batches of process 1 end after step 9 of 400" in out, out + said
    assert saved(tmp_path) == len(losses(tmp_path)) == 9


def test_bad_input_is_refused_before_anything_runs(tmp_path, capsys, monkeypatch, nothing_is_compiled):
    (tmp_path / "part.py").write_text("import meshdsl as md\nprogram = md.Program(lambda w: w, (1.0,))\nprograms = 3\n")
    (tmp_path / "near.py").write_text("def programs(): ...\nprogram_ = 4\n")
    (tmp_path / "none.py").write_text("import jax\ndef step(w): ...\n")
    (tmp_path / "held" / "checkpoints" / "5").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for options, message in {
        ("prat.py",): "there is no file prat.py; did you mean 'part.py'?",
        ("none.py",): "none.py defines no 'program'; write program = md.Program(step, args) there",
        ("near.py",): "near.py defines no 'program'; did you mean 'programs'?",
        ("part",): "'part' is not a program: give path/to/file.py, or module:attribute",
        ("part:program_s",): "part:program_s defines no 'program_s'; did you mean 'program'?",
        ("part:programs",): "programs in part:programs: 3 is an int, not an md.Program",
        ("prt:program",): "there is no module 'prt' to import from here: No module named 'prt'",
        ("part.py",): "this program cannot be trained:\n"
        "  init: missing; it makes the arguments before the batch\n"
        "  batches: missing; it yields the batches, the step's last argument\n"
        "give them to md.Program",
        (TINY, "--topology", "gpu"): "no topology 'gpu'; did you mean 'cpu'?",
        (*TWO, "--min-processes", "3"): "--min-processes 3 is more than the 2 that --processes starts",
        (*TWO, "--min-processes", "1"): "--min-processes 1: no process is restarted; give --restarts too, such as 10",
        (TINY, "--folder", "held"): "held holds a run: --resume continues it, --folder names another place",
    }.items():
        monkeypatch.setattr(sys, "argv", ["meshdsl", "train", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"meshdsl: {message}\n"
