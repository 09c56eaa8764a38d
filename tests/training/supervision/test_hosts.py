"""Supervisors of several machines: what they see of each other, and a run that loses and regains them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshdsl.errors import DeviceError
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.observing.events import downtimes, read_events
from meshdsl.training.supervision import leader as leading
from meshdsl.training.supervision.crew import Crew
from meshdsl.training.supervision.hosts import HALT, LEFT, QUIT, RUN, STOP, WORKING, CutOff, Hosts, Order
from meshdsl.training.supervision.leader import Leader, Supervision
from meshdsl.training.supervision.processes import Command, End, Launch, Machine
from meshdsl.training.supervision.progress import Progress
from meshdsl.util.exit_status import STOPPED

ROOT = Path(__file__).parents[3]


def group(folder, count, timeout=10.0):
    """Supervisors without threads, on one clock, which moves in steps of a second."""
    now = [0.0]
    hosts = [Hosts(folder, rank, count, timeout, lambda: now[0]) for rank in range(count)]
    hosts[0].folder.mkdir(exist_ok=True)

    def beat(*ranks, seconds=1):
        for _ in range(seconds):
            now[0] += 1.0
            for rank in ranks:
                hosts[rank].report()
            for rank in ranks:
                hosts[rank].look()

    return hosts, beat


def test_who_is_heard_of_is_alive_and_who_was_not_for_the_timeout_is_gone(tmp_path):
    old, _ = group(tmp_path, 2)
    old[1].report()  # of an earlier run
    (first, second), beat = group(tmp_path, 2)
    beat(0, seconds=9)
    assert not first.is_alive(1) and not first.is_silent(1)
    beat(0, 1, seconds=2)
    assert first.is_alive(1) and second.is_alive(0) and first.of(1).state == "waiting"
    beat(0, seconds=9)
    assert first.is_alive(1)
    beat(0)
    assert first.is_silent(1) and first.of(1) is None
    beat(1)
    second.report(state=LEFT)
    beat(0)
    assert first.has_left(1) and first.is_silent(1)


def test_who_was_not_looked_at_was_not_silent(tmp_path):
    (first, second), beat = group(tmp_path, 2)
    beat(0, 1, seconds=2)
    beat(1, seconds=8)  # while the first one did something else
    beat(1)
    first.report()
    first.look()
    assert first.is_alive(1) and not second.is_silent(0)
    beat(0, seconds=10)
    assert first.is_silent(1)


def test_an_order_holds_as_long_as_its_leader_lives(tmp_path):
    (first, second, third), beat = group(tmp_path, 3)
    beat(0, 1, 2, seconds=2)
    first.give(Order(1, 0, RUN, (0, 1, 2), "data=3", "a:1", memory={"failures": 0}))
    beat(0, 1, 2)
    assert second.order == Order(1, 0, RUN, (0, 1, 2), "data=3", "a:1", memory={"failures": 0})
    for each in (second, third):
        each.report(state=WORKING, number=1)
    second.has_ended(1, End(-9, "process 1 ended", 0.5, 1))
    beat(0, 1, 2)
    assert first.of(1).ended(1) == End(-9, "process 1 ended", 0.5, 1) and first.of(2).ended(1) is None
    assert first.of(1).ended(2) is None
    assert not second.is_next(0)
    beat(1, 2, seconds=10)
    assert second.order is None and second.is_next(0) and not third.is_next(0)
    second.give(Order(1, 1, HALT))
    beat(1, 2)
    assert third.order.do == HALT
    beat(0)
    assert first.leader == 1  # it sees that another one leads
    second.give(Order(2, 1, QUIT, status=3))
    second.report(state=LEFT)
    beat(2)
    assert third.order.status == 3
    after, beat_after = group(tmp_path, 3)
    beat_after(0, 1, 2, seconds=2)
    assert after[0].order is None and after[0].last_number == 2  # of an earlier run


def test_a_machine_that_cannot_write_ends_before_the_others_go_on_without_it(tmp_path):
    (first, _), beat = group(tmp_path, 2)
    beat(0)
    shutil.rmtree(first.folder)
    beat(0, seconds=5)
    with pytest.raises(CutOff):
        beat(0)


def test_an_order_is_written_again_until_the_others_soon_go_on(tmp_path, monkeypatch):
    (first, second), beat = group(tmp_path, 2)
    beat(0, 1, seconds=2)
    place, waits = first.folder / "orders.json", []
    place.mkdir()

    def sleep(_):
        waits.append(beat(0, 1))
        if len(waits) == 3:
            place.rmdir()

    monkeypatch.setattr(time, "sleep", sleep)
    first.give(Order(1, 0, RUN))
    beat(0, 1)
    assert len(waits) == 3 and second.order == Order(1, 0, RUN)
    place.unlink()
    place.mkdir()
    with pytest.raises(CutOff):
        first.give(Order(1, 0, STOP))
    assert len(waits) == 3 + 5 and first.order == Order(1, 0, RUN)


def leader_of(hosts, folder):
    """One that leads two machines with two processes each."""
    command = Command((), Mesh(data=4), 2, 2, folder, 1.0)
    machine = Machine(command, hosts.rank)
    machine.launch = lambda _: None
    return Leader(command, Supervision(least=1), machine, hosts)


def test_what_is_ordered_stays_so_at_the_first_step(tmp_path, monkeypatch):
    (first, _), beat = group(tmp_path, 2)
    beat(0, 1, seconds=2)

    class Stopped:
        """Told to stop before its first step was seen."""

        def __init__(self, command, launch, own, hosts, give):
            self.give, self.ends = give, iter((None, End(STOPPED)))

        def ended(self):
            self.give(STOP)
            return next(self.ends)

    monkeypatch.setattr(leading, "Crew", Stopped)
    monkeypatch.setattr(Progress, "has_stepped", True)
    gave = []
    monkeypatch.setattr(first, "give", gave.append)
    leader_of(first, tmp_path)._run_once()
    assert [(order.do, order.memory["worked"]) for order in gave] == [
        (RUN, False),
        (STOP, False),
        (STOP, True),
        (STOP, True),
    ]


def test_the_next_leader_has_the_meshes_of_the_one_before(tmp_path, monkeypatch):
    (first, second), beat = group(tmp_path, 2)
    beat(0, 1, seconds=2)
    launch = Launch(0, (0, 1, 2, 3), Mesh(data=4), "a:1", False)
    before, after = leader_of(first, tmp_path), leader_of(second, tmp_path)
    before._meshes[3], before._launch = Mesh(data=3), launch
    before._give(RUN)
    beat(0, 1)
    monkeypatch.setattr(Crew, "halted", lambda _: End(1))
    monkeypatch.setattr(Leader, "_run_on", lambda *_: End(0))
    assert after.succeed(launch, None) == 0
    assert after._meshes == {3: Mesh(data=3), 4: Mesh(data=4)} and after._plannable(3) == 3


def test_machines_that_do_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hosts, beat = group(tmp_path, 3)
    with pytest.raises(DeviceError) as error:
        hosts[1].gather(20.0, lambda: beat(1, 2))
    assert str(error.value) == (
        f"host 0 of 3 did not write to {tmp_path / 'hosts'} within 20 s (--join-timeout): start the command there, and "
        "give a folder that all share"
    )
    assert all(each.gather(20.0, lambda: beat(0, 1, 2)) for each in hosts)


SUPERVISOR = """
import sys
from pathlib import Path
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.supervision.hosts import Hosts
from meshdsl.training.supervision.leader import Supervision
from meshdsl.training.supervision.processes import Command
from meshdsl.training.supervision.supervisor import start
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
command = Command((str(folder / "child.py"),), Mesh(data=2), 2, 1, folder, 20.0)
sys.exit(start(command, Supervision(restarts=9, least=1, grow_after=0.5), Hosts(folder, rank, 2, 2.0)))
"""
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
if "--plan-ahead" in sys.argv:
    sys.exit(0)
folder, parent = Path(__file__).parent, os.getppid()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
own = folder / ("own-" + os.environ["JAX_PROCESS_ID"])
own.write_text(str(os.getpid()))
os.replace(own, folder / ("pid-" + os.environ["JAX_PROCESS_ID"]))
if os.environ["JAX_PROCESS_ID"] == "0":
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": "first step"}) + chr(10))
while not (folder / "finish").exists():
    if os.getppid() != parent:
        sys.exit(143)
    time.sleep(0.02)
"""


@pytest.fixture
def supervisor(tmp_path):
    started = []

    def start(rank):
        command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(rank)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def test_a_run_loses_a_machine_regains_it_and_loses_its_leader(tmp_path, supervisor):
    (tmp_path / "child.py").write_text(CHILD)

    def wait_for_launches(count):
        end = time.monotonic() + 60
        while sum(e["event"] == "first step" for e in read_events(tmp_path)) < count:
            assert time.monotonic() < end, read_events(tmp_path)
            time.sleep(0.05)

    def process(index):
        end = time.monotonic() + 60
        while not (tmp_path / f"pid-{index}").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        return int((tmp_path / f"pid-{index}").read_text())

    first, second = supervisor(0), supervisor(1)
    wait_for_launches(1)
    os.kill(process(1), signal.SIGKILL)
    wait_for_launches(2)
    second.kill()
    second.communicate()
    wait_for_launches(3)
    second = supervisor(1)
    wait_for_launches(4)
    first.kill()
    _, said = first.communicate()
    wait_for_launches(5)
    assert "process 1 of 2 ended with status -9, the others were ended" in said
    assert "host 1 (" in said and "going on with 1 of 2 processes over data=1" in said
    assert "stopped to start all 2 processes again" in said
    first = supervisor(0)
    wait_for_launches(6)
    first.send_signal(signal.SIGTERM)  # this machine leaves, and the others go on
    assert first.wait(timeout=60) == 143
    wait_for_launches(7)
    (tmp_path / "finish").touch()
    _, said = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert "host 1 leads the run, as host 0 is gone" in said
    launches = [(e["mesh"], e["processes"]) for e in read_events(tmp_path) if e["event"] == "launch"]
    assert launches == [("data=2", 2)] + [("data=2", 2), ("data=1", 1)] * 3
    gone = ["is gone" in each.what for each in downtimes(read_events(tmp_path))]
    assert gone == [False, True, False, True, False, False]
