"""Processes of a run meet before jax joins them, and end together.

    process 0    listens ── all are here ── is connected to all ─────────────────── says to all what failed
    process 1      └─ says who it is ─────── goes on to jax ──── ... ──── fails, or dies
    process 2      └─ says who it is ─────── goes on to jax ──── ... ──── ends with the status of process 1

Process 0 listens where jax's coordinator will, and every process, itself included, connects and says its number,
machine and what has to be the same for all. So a number that is missing or there twice, another version or another
option is one line of process 0; jax would wait for minutes, and then abort.

The connections stay open as long as the run goes on. The system closes those of a process that ends, however it ends,
and the others end as well: each may be waiting for it, in a collective or a barrier of jax.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any, NoReturn

from meshdsl.errors import DeviceError
from meshdsl.training.joining.launchers import Rank
from meshdsl.training.saving.folder import give_back
from meshdsl.util.exit_status import BAD_INPUT, PEER_ENDED
from meshdsl.util.text import visible

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_LINE = 1 << 20  # most bytes of a message
_RETRY = 0.1  # seconds between two attempts to connect or to listen
_HELLO = 10.0  # seconds in which whoever connects says who it is
_SETTLE = 0.5  # seconds after a fault in which others may be heard of, of which one is the cause
_PATIENCE = 10.0  # seconds in which process 0 answers, and in which the others end before it does
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 7}  # 100 seconds, as jax's heartbeat

Message = dict[str, Any]
OWN, ENDED, OF_JAX = range(3)  # kinds of faults: an error, a process that is gone, an error of jax that may follow


@dataclass(frozen=True)
class Fault:
    """Why a run ends, and with which exit status; of several, the one of the smallest kind is the cause."""

    text: str
    status: int
    kind: int = OWN
    of: str = ""  # the process
    is_first: bool = False  # whether that is process 0

    def message(self) -> Message:
        """What is sent of it."""
        return {"fault": self.text, "status": self.status, "kind": self.kind}


# ---- Messages: one line of JSON each ---------------------------------------------------------------------------------


def _send(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(lines: BufferedReader) -> Message | None:
    """The next message; None at the end, or if a stranger wrote something else."""
    try:
        message = json.loads(lines.readline(_LINE))
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- Process 0 -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Member:
    """A process that has connected."""

    connection: socket.socket
    index: int
    host: str
    pid: int
    facts: Mapping[str, str]
    has_left: bool = field(default=False)  # the run, at its end

    @property
    def where(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def __str__(self) -> str:
        return f"process {self.index} ({self.where})"


class _Host:
    """What process 0 does for all: it counts them, and passes on what fails.

    Args:
      rank: of process 0.
      timeout: seconds until all are here.
    """

    def __init__(self, rank: Rank, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._members: list[_Member] = []
        self._changed = threading.Condition()
        self._awaited = set(range(rank.count))  # numbers of those who have not come
        self._faults: list[Fault] = []
        self._end = time.monotonic() + timeout
        threading.Thread(target=self._listen, name="rendezvous", daemon=True).start()

    def wait_until_alone(self) -> None:
        """Waits a while for the others to come, to be told what failed, and to end.

        Clients of jax abort when its coordinator is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._awaited and len(self._members) <= 1, _PATIENCE)

    def _listen(self) -> None:
        with self._listener() as listener:
            while listener and self._awaited and time.monotonic() < self._end:
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True).start()
        if listener is None:  # this process has connected to whoever listens there, and is told
            return
        with self._changed:
            if self._faults:
                return
            if self._awaited:
                self._fault(self._missing())
                self._awaited = set()
            else:
                self._tell({"ready": True})

    @contextmanager
    def _listener(self) -> Iterator[socket.socket | None]:
        """A socket that listens; None if another process does all the time."""
        host, _, port = os.environ.get(_BIND, f":{self._rank.host_and_port[1]}").rpartition(":")
        both = socket.has_dualstack_ipv6() and not host
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        while True:
            try:
                at = (host.strip("[]"), int(port))
                listener = socket.create_server(at, family=family, dualstack_ipv6=both, backlog=self._rank.count)
                break
            except OSError:
                if time.monotonic() > self._end:
                    yield None
                    return
                time.sleep(_RETRY)
        listener.settimeout(_RETRY)
        with listener:
            yield listener

    def _serve(self, connection: socket.socket) -> None:
        member = None
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_HELLO)
            lines = connection.makefile("rb")
            hello = _receive(lines)
            if hello is None or "meshdsl" not in hello:
                return
            _keep_alive(connection)
            connection.settimeout(None)
            member = _Member(connection, **hello["meshdsl"])
            if not self._admit(member):
                return
            while message := _receive(lines):
                if "fault" in message:
                    self._add(
                        Fault(message["fault"], message["status"], message["kind"], str(member), not member.index)
                    )
                member.has_left = member.has_left or "left" in message
        if member is not None:
            self._lose(member)

    def _admit(self, member: _Member) -> bool:
        """Whether it is in time."""
        with self._changed:
            if not self._awaited:
                return False
            before = self._by_number()
            self._members.append(member)
            if self._faults:
                self._tell(self._faults[0].message())
            elif same := before.get(member.index):
                variable = f": {self._rank.variable} is wrong" if self._rank.variable else ""
                self._fault(f"two processes have number {same.index}, {same.where} and {member.where}{variable}")
            elif first := self._by_number().get(0):
                for other in self._members if member is first else [member]:
                    self._compare(first, other)
            self._awaited.discard(member.index)
            self._changed.notify_all()
            return True

    def _by_number(self) -> dict[int, _Member]:
        return {member.index: member for member in self._members}

    def _compare(self, first: _Member, other: _Member) -> None:
        names = sorted(first.facts.keys() | other.facts.keys())
        pairs = [(name, other.facts.get(name, "-"), first.facts.get(name, "-")) for name in names]
        rows = [f"{name} {its}, not {of_first}" for name, its, of_first in pairs if its != of_first]
        if rows:
            what = f"{other} does not have what {first} has: {'; '.join(rows)}"
            self._fault(f"{what}; start the same command of the same installation everywhere")

    def _fault(self, text: str) -> None:
        """Says what is wrong to all who are here, and for a while to those who come."""
        self._faults.append(Fault(text, BAD_INPUT))
        self._end = min(self._end, time.monotonic() + _PATIENCE)
        self._tell(self._faults[0].message())

    def _missing(self) -> str:
        members = self._by_number()
        here = ", ".join(str(members[index]) for index in sorted(members)) or "none"
        missing = ", ".join(map(str, sorted(self._awaited)))
        who = f"process{'es' if len(self._awaited) > 1 else ''} {missing} of {self._rank.count}"
        return f"{who} did not come to {self._rank.address} within {self._timeout:g} s (--join-timeout); here: {here}"

    def _lose(self, member: _Member) -> None:
        with self._changed:
            if member not in self._members:
                return
            self._members.remove(member)
            if self._awaited and not self._faults:
                self._awaited.add(member.index)  # it may be started again
            self._changed.notify_all()
            if not self._awaited and not member.has_left:
                self._add(Fault(f"{member} ended", PEER_ENDED, ENDED))

    def _add(self, fault: Fault) -> None:
        """Takes a fault; soon all are told of the cause."""
        with self._changed:
            self._faults.append(fault)
            if len(self._faults) == 1:
                timer = threading.Timer(_SETTLE, self._decide)
                timer.daemon = True
                timer.start()

    def _decide(self) -> None:
        with self._changed:
            cause = min(self._faults, key=lambda fault: (fault.kind, not fault.is_first))
            same = {fault.of for fault in self._faults if fault.text == cause.text}
            is_common = len(same) > 1 or cause.kind == ENDED or cause.is_first
            text = cause.text if is_common else f"{cause.of}: {cause.text}"
            self._tell(Fault(text, cause.status).message())

    def _tell(self, message: Message) -> None:
        for member in sorted(self._members, key=lambda member: -member.index):  # process 0 may end when it is told
            with suppress(OSError):
                _send(member.connection, message)


# ---- Every process ---------------------------------------------------------------------------------------------------


class Peers:
    """The other processes of a run, seen from one that is connected to process 0.

    Args:
      rank: of this process.
      connection: to process 0.
      lines: that come from there.
      host: in process 0.
      is_supervised: whether a supervisor reads its status, and its errors are in a log of its own.
      end: ends this process with a status.
    """

    def __init__(
        self,
        rank: Rank,
        connection: socket.socket,
        lines: BufferedReader,
        host: _Host | None,
        is_supervised: bool,
        end: Callable[[int], Any],
    ) -> None:
        self._rank, self._connection, self._lines, self._host = rank, connection, lines, host
        self._is_supervised, self._end_process = is_supervised, end
        self._has_failed = False
        self._has_left = self._has_ended = False
        self._ending = threading.Lock()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def fail(self, text: str, status: int, kind: int = OWN) -> NoReturn:
        """Ends all processes of the run, this one too; process 0 says why."""
        self._has_failed = kind == OWN
        with suppress(OSError):
            _send(self._connection, Fault(text, status, kind).message())
            time.sleep(_PATIENCE)  # meanwhile process 0 answers, and the answer ends this process
        self._end(text, status, speaks=True)
        raise SystemExit(status)  # where that does not end it, as in tests

    def leave(self) -> None:
        """Says that this process has done its part: its end does not end the others."""
        self._has_left = True
        with suppress(OSError):
            _send(self._connection, {"left": True})

    def _listen(self) -> None:
        try:
            message = _receive(self._lines)
        except OSError:
            message = None
        speaks = self._is_supervised or self._rank.index == 0
        if message is not None:  # supervisors are to see who failed, launchers why
            status = message["status"] if self._has_failed or not self._is_supervised else PEER_ENDED
            self._end(message["fault"], status, speaks)
        elif not self._has_left:
            lowest = self._rank.index == 1  # of those that are left to say so
            self._end(f"process 0 of {self._rank.count} ended", PEER_ENDED, speaks or lowest)

    def _end(self, text: str, status: int, speaks: bool) -> None:
        with self._ending:  # one thread does it, and another one waits for the end
            if self._has_ended:
                return
            self._has_ended = True
            if speaks:
                print("meshdsl:", visible(text, allowed="\n"), file=sys.stderr)
            give_back()
            if self._host is not None:
                self._host.wait_until_alone()
            sys.stdout.flush()
            sys.stderr.flush()
            self._end_process(status)


def meet(
    rank: Rank,
    facts: Mapping[str, str],
    timeout: float,
    is_supervised: bool = False,
    end: Callable[[int], Any] = os._exit,
) -> Peers:
    """Waits until all processes of a run are here, and returns them.

    Args:
      rank: of this process.
      facts: what has to be the same for all, by name.
      timeout: seconds.
      is_supervised: whether a supervisor reads its status, and its errors are in a log of its own.
      end: ends this process with a status.

    Raises:
      DeviceError: process 0 cannot be reached; in process 0, some are missing, two have one number, or they differ.
      SystemExit: process 0 says why.
    """
    host = _Host(rank, timeout) if rank.index == 0 else None
    hello = {"index": rank.index, "host": socket.gethostname(), "pid": os.getpid()}
    facts = {"number of processes": str(rank.count), **facts}
    connection, lines, answer = _ask(rank, {"meshdsl": {**hello, "facts": facts}}, timeout)
    if "fault" in answer:
        if host is not None:
            host.wait_until_alone()  # while the others are told
        if host is not None or is_supervised:
            raise DeviceError(answer["fault"])
        raise SystemExit(answer["status"])
    return Peers(rank, connection, lines, host, is_supervised, end)


def _ask(rank: Rank, hello: Message, timeout: float) -> tuple[socket.socket, BufferedReader, Message]:
    """Connects to process 0, and waits for its answer."""
    end, fault = time.monotonic() + timeout, "nobody answers"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(rank.host_and_port, timeout=min(left, _HELLO))
            _keep_alive(connection)
            _send(connection, hello)
            connection.settimeout(max(0.0, end - time.monotonic()) + _PATIENCE)  # process 0 ends its own time
            lines = connection.makefile("rb")
            if answer := _receive(lines):
                connection.settimeout(None)
                return connection, lines, answer
            fault = "something else answers there: a run that goes on, or another program"
        except OSError as error:
            fault = error.strerror or str(error)
        time.sleep(_RETRY)
    who = f"process {rank.index} of {rank.count} (pid {os.getpid()} on {socket.gethostname()})"
    raise DeviceError(
        f"{who} did not reach process 0 at {rank.address}, announced by {rank.launcher}, within {timeout:g} s "
        f"(--join-timeout): {fault}"
    )


def wait_for_coordinator(rank: Rank, timeout: float) -> None:
    """Waits until jax's coordinator listens: a client that comes too early waits for a second."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(rank.host_and_port, timeout=_HELLO):
            return
        time.sleep(_RETRY / 10)
