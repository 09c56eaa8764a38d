"""Processes meet, and end together: here the processes are threads, whose end is recorded."""

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from meshdsl.errors import MeshDSLError
from meshdsl.training.joining.launchers import Rank
from meshdsl.training.joining.rendezvous import OF_JAX, OWN, meet

WHERE = rf"\(pid {os.getpid()} on {socket.gethostname()}\)"
AT = WHERE[2:-2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    """Processes of one run, and the statuses with which they end."""

    def __init__(self, port=None):
        self.address = f"127.0.0.1:{port or free_port()}"
        self.ended = {}

    def meet(self, *indices, count=None, facts=lambda index: {}, timeout=30.0, supervised=False):
        """What each process gets: its peers, or the message or status with which it ends."""

        def one(index):
            rank = Rank("a test", "NUMBER", self.address, count or len(indices), index)
            try:
                return meet(rank, facts(index), timeout, supervised, partial(self.ended.setdefault, index))
            except (MeshDSLError, SystemExit) as error:
                return getattr(error, "code", str(error))

        with ThreadPoolExecutor() as pool:
            return list(pool.map(one, indices))

    def wait(self, **ended):
        end = time.monotonic() + 30
        while len(self.ended) < len(ended) and time.monotonic() < end:
            time.sleep(0.01)
        assert self.ended == {int(index[1:]): status for index, status in ended.items()}


def drop(peers):
    """What the system does when a process ends."""
    peers._connection.shutdown(socket.SHUT_RDWR)


def fail(peers, *fault):
    with pytest.raises(SystemExit):
        peers.fail(*fault)


def matches(text, pattern):
    assert re.fullmatch(pattern, text), text


@pytest.fixture(autouse=True)
def _local(monkeypatch):
    monkeypatch.setattr("meshdsl.training.joining.rendezvous._PATIENCE", 1.0)
    monkeypatch.setattr("meshdsl.training.joining.rendezvous._SETTLE", 0.1)
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)


def test_all_come_and_leave():
    group = Group()
    peers = group.meet(0, 1, 2)
    for each in reversed(peers):
        each.leave()
    time.sleep(0.2)
    for each in peers:
        drop(each)
    time.sleep(0.2)
    group.wait()


def test_a_process_that_dies_ends_the_others(capsys):
    group = Group()
    *_, last = group.meet(0, 1, 2)
    drop(last)
    group.wait(p0=69, p1=69, p2=69)
    matches(capsys.readouterr().err.splitlines()[0], f"meshdsl: process 2 {WHERE} ended")


@pytest.mark.parametrize(("supervised", "other"), [(False, 2), (True, 69)])
def test_an_error_of_one_is_said_by_process_0_and_ends_all(capsys, supervised, other):
    group = Group()
    _, second = group.meet(0, 1, supervised=supervised)
    fail(second, "no such file", 2, OWN)
    group.wait(p0=other, p1=2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + supervised  # in the log of its own
    matches(said[0], f"meshdsl: process 1 {WHERE}: no such file")


def test_an_error_of_all_is_said_once(capsys):
    group = Group()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: fail(each, "no such file", 2), group.meet(0, 1, 2)))
    group.wait(p0=2, p1=2, p2=2)
    assert capsys.readouterr().err == "meshdsl: no such file\n"


def test_an_error_of_jax_is_not_the_cause_if_a_process_died(capsys):
    group = Group()
    first, _, last = group.meet(0, 1, 2)
    with ThreadPoolExecutor() as pool:
        pool.submit(fail, first, "connection closed by peer", 2, OF_JAX)
        drop(last)
    group.wait(p0=69, p1=69, p2=69)
    matches(capsys.readouterr().err.splitlines()[0], f"meshdsl: process 2 {WHERE} ended")


def test_some_do_not_come():
    group = Group()
    first, second = group.meet(0, 2, count=4, timeout=1.0)
    here = f"process 0 {WHERE}, process 2 {WHERE}"
    matches(first, rf"processes 1, 3 of 4 did not come to {group.address} within 1 s \(--join-timeout\); here: {here}")
    assert second == 2


def test_two_have_one_number():
    first, *others = Group().meet(0, 1, 1, count=3)
    matches(first, f"two processes have number 1, {AT} and {AT}: NUMBER is wrong")
    assert others == [2, 2]
    assert all("two processes have number 0" in said for said in Group().meet(0, 0, count=2))


def test_they_differ():
    facts = {0: {"jax": "1", "--mesh": "data=4"}, 1: {"jax": "2", "--mesh": "data=4", "--rules": "x"}}
    first, _ = Group().meet(0, 1, facts=facts.get)
    what = f"process 1 {WHERE} does not have what process 0 {WHERE} has: --rules x, not -; jax 2, not 1"
    matches(first, f"{what}; start the same command of the same installation everywhere")


def test_process_0_is_not_there():
    group = Group()
    (said,) = group.meet(1, count=2, timeout=0.5)
    what = f"did not reach process 0 at {group.address}, announced by a test, within 0.5 s"
    matches(said, rf"process 1 of 2 {WHERE} {what} \(--join-timeout\): Connection refused")


def test_something_else_is_there():
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        other.settimeout(1)

        def answer():
            while True:
                try:
                    connection, _ = other.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0\r\n")

        pool.submit(answer)
        for said in Group(other.getsockname()[1]).meet(0, 1, timeout=0.5):
            assert said.endswith("something else answers there: a run that goes on, or another program")
        other.close()


def test_strangers_do_not_count():
    group = Group()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(group.meet, 0, count=2)
        host, port = group.address.split(":")
        end = time.monotonic() + 10
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"meshdsl": 3}\n', b'{"meshdsl": {"index": 1}}\n', b"\xff\n"):
            while time.monotonic() < end:
                try:
                    with socket.create_connection((host, int(port))) as stranger:
                        stranger.sendall(said)
                        break
                except OSError:
                    time.sleep(0.01)
        (second,) = group.meet(1, count=2)
        (first,) = first.result()
    for each in (second, first):
        each.leave()
        drop(each)
    time.sleep(0.2)
    group.wait()
