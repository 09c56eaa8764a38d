"""Processes of one machine that are started again, by fewer and by all of them."""

import os
import signal
import time

import numpy as np
import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.observing.events import downtimes, read_events
from meshdsl.training.saving.folder import is_alive
from meshdsl.training.supervision.contingency import Contingency, plan_file
from meshdsl.training.supervision.leader import Repeats, Supervision
from meshdsl.training.supervision.processes import KILLED, PLANNED_FILE, Command, Launch, Machine
from meshdsl.training.supervision.progress import Patience
from meshdsl.training.supervision.supervisor import start
from tests.training.test_command import LONG, losses, run, saved, started, wait_for_a_checkpoint

ONCE = "import os, sys, time; '--resume' in sys.argv or "


def command(code, folder, processes=1):
    return Command(("-c", code), Mesh(data=processes), 1, processes, folder, 120.0)


def test_one_process_that_is_killed_is_started_again(tmp_path, capfd):
    assert start(command(ONCE + "os.kill(os.getpid(), 9)", tmp_path), Supervision(restarts=1)) == 0
    said = capfd.readouterr().err
    assert "process 0 of 1 ended with status -9" in said and "restart 1 of at most 1 per hour" in said
    assert "process 0 of 1 ended with status -9, the others were ended: " in said.splitlines()[-1]  # its downtime


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("ends", "status"), [("sys.exit(0)", 0), ("os.kill(os.getpid(), 9)", 1)])
def test_what_a_process_has_started_ends_with_it(tmp_path, ends, status):
    """As the workers of a data loader, which do not see that it has ended."""
    file = tmp_path / "worker"
    code = f"import os, subprocess, sys; open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))"
    assert start(command(f"{code}; {ends}", tmp_path)) == status
    wait_until(lambda: not is_alive(int(file.read_text())))


def test_a_second_interrupt_ends_at_once_what_does_not_end(tmp_path):
    ready = tmp_path / "ready"
    ignores = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(300)"
    machine = Machine(command(ignores, tmp_path), 0)
    processes = machine.launch(Launch(1, (0,), Mesh(data=1), "", False))
    try:
        wait_until(ready.exists)
        machine.receive(signal.SIGINT, None)
        assert processes.ended() is None
        machine.receive(signal.SIGINT, None)
        wait_until(lambda: (end := processes.ended()) is not None and end.status == KILLED)
    finally:
        machine.kill()
    assert machine.received == signal.SIGINT


def test_the_log_of_a_process_is_appended_to_by_the_next_command(tmp_path):
    for _ in range(2):
        assert start(command("print('here')", tmp_path, 2)) == 0
    assert (tmp_path / "process-1.log").read_text() == "here\nhere\n"


def test_a_process_that_does_not_reach_its_first_step_hangs(tmp_path, capfd):
    supervision = Supervision(restarts=1, patience=Patience(start=0.5))
    assert start(command(ONCE + "time.sleep(100)", tmp_path), supervision) == 0
    assert "no step was done for 0.5 s; the processes wrote their stacks" in capfd.readouterr().err


def test_the_run_ends_where_too_few_processes_are_left(tmp_path, capfd):
    dies = "import os; os.environ['JAX_PROCESS_ID'] != '1' or os.kill(os.getpid(), 9); import time; time.sleep(100)"
    refuses = "import sys; '--plan-ahead' not in sys.argv or sys.exit(2); " + dies
    assert start(command(refuses, tmp_path, 2), Supervision(restarts=5, least=1)) == 1
    said = capfd.readouterr().err
    log = tmp_path / "plans" / "planning.log"
    assert f"no step was done since: no mesh of 1 processes can be planned ({log}): the run ends" in said
    assert said.count("process 1 of 2 ended with status -9, the others were ended\n") == 2


def test_plans_are_made_for_the_largest_mesh_that_can_be_planned(tmp_path):
    refuses = "import sys; sys.exit('data=3' in sys.argv)"
    plans = Contingency(["-c", refuses], tmp_path, {3: Mesh(data=3), 2: Mesh(data=2), 1: Mesh(data=1)})
    plans.wait(60, lambda: False)
    assert plans.found == (2, Mesh(data=2))
    assert [(e["mesh"], e["status"]) for e in read_events(tmp_path)] == [("data=3", 1), ("data=2", 0)]
    none = Contingency(["-c", "import time; time.sleep(100)"], tmp_path, {1: Mesh(data=1)})
    none.wait(0.2, lambda: False)
    assert none.is_ready and none.found is None


def test_a_plan_made_before_is_used_if_it_is_of_this_step(tmp_path, monkeypatch, caplog):
    run("--folder", tmp_path / "a", "--steps", 3)
    monkeypatch.setenv(PLANNED_FILE, str(tmp_path / "a" / "plan.json"))
    run("--folder", tmp_path / "a", "--steps", 6, "--resume")
    run("--folder", tmp_path / "b", "--steps", 2, "--mesh", "data=2,model=4")
    planned = [e for name in "ab" for e in read_events(tmp_path / name) if e["event"] == "planned"]
    assert [(e["mesh"], e["reused"]) for e in planned] == [
        ("data=4,model=2", False),
        ("data=4,model=2", True),
        ("data=2,model=4", False),
    ]
    assert "mesh: data=4,model=2 in the plan, data=2,model=4 here" in caplog.text
    monkeypatch.delenv(PLANNED_FILE)
    run("--folder", tmp_path / "whole", "--steps", 6)
    assert losses(tmp_path / "a") == losses(tmp_path / "whole")


@pytest.mark.sweep
def test_a_run_goes_on_with_fewer_processes_and_grows_again(tmp_path):
    folder = tmp_path / "run"
    options = ("--processes", 2, "--restarts", 5, "--min-processes", 1, "--grow-after", 1)
    process = started(*options, *LONG, folder=folder)
    wait_for_a_checkpoint(process, folder)
    (folder / "gone-1").touch()
    os.kill(int((folder / "process-1").read_text()), signal.SIGKILL)

    def wait_for(number_of_first_steps):
        end = time.monotonic() + 120
        while sum(e["event"] == "first step" for e in read_events(folder)) < number_of_first_steps:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.05)

    wait_for(2)
    (folder / "gone-1").unlink()
    wait_for(3)
    wait_for_a_checkpoint(process, folder, after=saved(folder))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said

    events = read_events(folder)
    launches = [(e["mesh"], e["processes"]) for e in events if e["event"] == "launch"]
    assert launches == [("data=4,model=2", 2), ("data=4,model=2", 2), ("data=2,model=2", 1), ("data=4,model=2", 2)]
    assert [e["reused"] for e in events if e["event"] == "planned"][-2:] == [True, True]
    assert plan_file(folder, Mesh(data=2, model=2)).exists()
    killed, gone, growth = downtimes(events)
    assert "status -9" in killed.what and "status 9" in gone.what and "all 2 processes again" in growth.what
    assert all(f"  {each.what}: " in said for each in (killed, gone, growth))
    assert "going on with 1 of 2 processes over data=2,model=2; all are tried again after 1 s" in said

    done = losses(folder)
    run("--folder", tmp_path / "whole", "--steps", len(done), "--save-every", 4000)
    np.testing.assert_allclose(done, losses(tmp_path / "whole"), rtol=0, atol=1e-6 * done[0])


def test_errors_of_input_are_final_before_a_step_and_when_they_come_again():
    repeats = Repeats()
    repeats.ended(0, stepped=False)
    assert repeats.would(shrinks=True)  # nothing ever worked
    repeats = Repeats()
    for at, stepped, final in ((40, True, False), (60, True, False), (60, True, True)):
        repeats.ended(at, stepped)
        assert repeats.would(shrinks=True) == final
    repeats = Repeats()
    repeats.ended(None, stepped=True)  # it was killed
    repeats.ended(40, stepped=False)  # its device is gone
    assert not repeats.would(shrinks=True) and not repeats.would(shrinks=False)
    repeats.ended(40, stepped=False)
    assert not repeats.would(shrinks=True) and repeats.would(shrinks=False)
