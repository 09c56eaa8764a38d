"""A run folder is one run's: locks, stale ones, runs of something else, processes that outlive their parent."""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.cli import main
from meshdsl.errors import ArgumentError
from meshdsl.training.batches import Batches, shuffled
from meshdsl.training.loop import Run
from meshdsl.training.run import Session, check_same, skipping
from meshdsl.training.saving import folder
from meshdsl.training.saving.checkpoint import versions
from meshdsl.training.saving.folder import LOCK, STALE, FolderLock, _this_process, check_free, is_alive
from meshdsl.training.saving.storage import SharedFile
from tests.training.test_command import LONG, TINY, losses, run, saved, started, wait_for_a_checkpoint
from tests.training.tiny import X, Y, loss, program


def held(folder, **other):
    """A lock as this process would write it, or another one."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**_this_process(), "token": "another", "seen": time.time(), **other}
    (folder / LOCK).write_text(json.dumps(content))
    return content


def test_a_folder_is_held_by_one_run(tmp_path):
    with FolderLock(tmp_path / "a"):
        with pytest.raises(ArgumentError) as error:
            check_free(tmp_path / "a")
        message = f"{tmp_path / 'a'} is in use by process {os.getpid()} on {socket.gethostname()}, seen "
        assert str(error.value).startswith(message) and "--folder names another place" in str(error.value)
    assert not (tmp_path / "a" / LOCK).exists()


def test_of_runs_that_find_a_folder_free_in_the_same_instant_one_has_it(tmp_path, monkeypatch):
    both, checked = threading.Barrier(4), folder._check_free
    seen = threading.local()

    def check(*args):
        checked(*args)
        if not hasattr(seen, "first"):
            seen.first = True
            both.wait()  # for all to have seen it free

    def take(_):
        lock = FolderLock(tmp_path)
        try:
            return lock.__enter__()
        except ArgumentError as error:
            return error

    held(tmp_path, pid=2**22 + 1)  # by a process that is gone, while it wrote
    (tmp_path / f"{LOCK}.__lock").touch()
    monkeypatch.setattr(folder, "_check_free", check)
    with ThreadPoolExecutor(4) as threads:
        took = list(threads.map(take, range(4)))
    (lock,) = [each for each in took if isinstance(each, FolderLock)]
    assert json.loads((tmp_path / LOCK).read_text())["token"] == lock.token
    assert all("is in use by process" in str(each) for each in took if each is not lock)
    lock.__exit__(None, None, None)
    assert [*tmp_path.iterdir()] == []


def test_a_lock_is_lost_only_to_another_run(tmp_path, monkeypatch):
    with FolderLock(tmp_path) as lock:
        file = tmp_path / LOCK
        assert lock._lost() == ""
        own = file.read_text()
        file.unlink()
        assert lock._lost() == "was removed, or another run took and left it"
        held(tmp_path)
        assert lock._lost() == "was taken by another run"
        file.write_text(own)  # as an older copy of it
        assert lock._lost() == ""
        file.unlink()
        monkeypatch.setattr(SharedFile, "read", lambda _: Path("/proc/none").read_bytes())
        assert lock._lost() == ""  # storage does not answer
        monkeypatch.undo()
    assert not file.exists() and lock._lost() == ""


@pytest.mark.parametrize(("holder", "free"), [
    ({"host": "another"}, False),
    ({"host": "another", "seen": time.time() - STALE - 1}, True),
    ({"kernel": "another"}, False),  # a container of the same name on another machine, with a process of this number
    ({"namespace": "another"}, False),  # or on this one
    ({"started": "1"}, True),  # its number is of another process by now
    ({"pid": 2**22 + 1}, True),
    ({"seen": None}, True),  # no lock of a run
    ({"seen": "now", "host": "another"}, True),
    (None, True),
])  # fmt: skip
def test_a_holder_that_is_gone(tmp_path, holder, free):
    held(tmp_path, **holder or {})
    if holder is None:
        (tmp_path / LOCK).write_text("{")
    if free:
        with FolderLock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    else:
        with pytest.raises(ArgumentError, match=f"in use by process {os.getpid()} on"):
            check_free(tmp_path)


@pytest.mark.parametrize("waits", [False, True])
def test_processes_that_are_started_elsewhere_wait_until_the_holder_is_gone(tmp_path, monkeypatch, waits):
    monkeypatch.setattr(folder, "HEARTBEAT", 0.1)
    monkeypatch.setattr(folder, "STALE", 0.5)
    held(tmp_path, host="another")
    if not waits:
        with pytest.raises(ArgumentError, match="in use by"), folder.shared_folder(tmp_path):
            pass
        return
    with folder.shared_folder(tmp_path, supervised=True):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_folders_that_cannot_be_written(monkeypatch, capsys):
    for options in ((), ("--processes", "2")):
        monkeypatch.setattr(sys, "argv", ["meshdsl", "train", TINY, "--folder", "/proc/run", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and said.startswith("meshdsl: /proc/run cannot be the folder of a run: ")
        assert "No such file or directory" in said and "\n" not in said and "\\x00" not in said


def test_a_second_run_is_refused_and_processes_end_with_the_one_that_started_them(tmp_path):
    process = started("--processes", 2, *LONG, folder=tmp_path)
    wait_for_a_checkpoint(process, tmp_path)
    pids = [int((tmp_path / f"process-{i}").read_text()) for i in range(2)]
    with pytest.raises(ArgumentError, match=f"{tmp_path} is in use by process {pids[0]} on "):
        run("--folder", tmp_path, "--resume")
    wait_for_a_checkpoint(process, tmp_path, after=saved(tmp_path))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    end = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < end
        time.sleep(0.1)
    status, printed = run("--folder", tmp_path, "--resume", "--steps", saved(tmp_path) + 1)
    assert status == 0 and "resumed after step" in printed


def test_resuming_something_else_is_refused_until_accepted(tmp_path):
    mesh = md.Mesh.parse("data=4,model=2")
    first = Run(3, tmp_path / "a")
    Session(program, mesh).train(first)
    plan = (tmp_path / "a" / "plan.json").read_bytes()
    others = {
        "step": md.Program(**{**vars(program), "step": lambda w, key, batch: (w * 0.5, key, loss(w, batch))}),
        "data": md.Program(**{**vars(program), "batches": lambda: Batches(shuffled({"x": X, "y": Y}, seed=1), 32)}),
    }
    for name, other in others.items():
        with pytest.raises(ArgumentError) as error:
            Session(other, mesh).train(Run(6, tmp_path / "a"))
        assert f"the run in {tmp_path / 'a'} is of something else:\n  {name}: " in str(error.value)
        assert "--accept-changes resumes it nevertheless" in str(error.value)
        assert (tmp_path / "a" / "plan.json").read_bytes() == plan and saved(tmp_path / "a") == 3
    (tmp_path / "a" / "checkpoints" / "5").mkdir()  # a damaged one hides nothing from the check
    with pytest.raises(ArgumentError, match="is of something else"):
        Session(others["data"], mesh).train(Run(6, tmp_path / "a"))
    (tmp_path / "a" / "checkpoints" / "5").rmdir()
    assert Session(others["data"], mesh).train(Run(6, tmp_path / "a"), accept_changes=True).done == 6
    assert (
        Session(program, md.Mesh.parse("model=4,data=2")).train(Run(8, tmp_path / "a"), accept_changes=True).done == 8
    )


def test_other_versions_are_a_note(tmp_path):
    saved = {"versions": {**versions(), "jax": "0.9.1", "numpy": "1.0"}, "step": "a"}
    checkpoints = SimpleNamespace(newest_facts=lambda: saved)
    said = check_same(Run(1, tmp_path, facts={"step": "a"}), checkpoints)
    assert said.startswith("note: the newest checkpoint was saved with jax 0.9.1 (now ") and ", numpy 1.0 (now " in said
    saved["versions"] = versions()
    assert check_same(Run(1, tmp_path), checkpoints) == ""


def test_steps_that_are_not_finite_are_skipped(tmp_path):
    def spoilt(w, key, batch):
        after, key, value = program.step(w, key, batch)
        return after, key, jnp.where(batch["x"][0, 0] > 0, value, jnp.inf)

    other = md.Program(**{**vars(program), "step": spoilt})
    outcome = Session(skipping(other), md.Mesh.parse("data=4,model=2")).train(Run(12, tmp_path, stops_on_nan=False))
    kept = [value for value in outcome.history.losses if math.isfinite(value)]
    assert outcome.done == 12 and 2 < len(kept) < 10 and kept[-1] < kept[0]


def test_a_step_whose_state_alone_is_not_finite_is_seen_to_be_skipped(tmp_path, capsys):
    def spoilt(w, key, batch):
        after, key, value = program.step(w, key, batch)
        return jnp.where(batch["x"][0, 0] > 0, after, jnp.inf), key, value

    other = md.Program(**{**vars(program), "step": spoilt})
    run = Run(12, tmp_path, stops_on_nan=False)
    outcome = Session(skipping(other), md.Mesh.parse("data=4,model=2")).train(run)
    assert 2 < sum(map(math.isnan, outcome.history.losses)) < 10
    assert "the loss or the state is not finite" in capsys.readouterr().out


def test_the_command_skips_what_is_not_finite_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_RATE", "1e30")  # the first step is finite, and no other one
    status, _ = run("--folder", tmp_path, "--steps", 6, "--on-nan", "skip")
    assert status == 0 and saved(tmp_path) == 6
    assert [value is None for value in losses(tmp_path)] == [False, *[True] * 5]


def test_a_run_without_numbers_ends_with_a_status_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINY_RATE", "1e30")
    monkeypatch.setattr(sys, "argv", ["meshdsl", "train", TINY, "--folder", str(tmp_path / "a"), "--steps", "20"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 5 and "the loss of step " in capsys.readouterr().err
    assert losses(tmp_path / "a")[-1] is None


def test_what_would_fail_again_is_not_started_again(tmp_path):
    process = started("--restarts", 3, "--steps", 20, folder=tmp_path, TINY_RATE="1e30")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 5 and "restart" not in said and "the loss of step " in said
