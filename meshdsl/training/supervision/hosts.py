"""The supervisors of several machines, which meet in the folder of the run.

Each writes ``hosts/RANK.json``, several times within the heartbeat timeout, and whenever it has something to say:
that it waits for the others, which launch it runs, how its processes ended, that it was told to stop. The leader, the
one of the lowest rank that is alive, writes ``hosts/orders.json``: what all do now. A machine is silent if its file has
not changed for the timeout, by the clock of who reads it. Files are written in place: network
file systems show a file that was closed to who opens it later, but a renamed one only after a while.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshdsl.errors import ArgumentError, DeviceError
from meshdsl.training.supervision.processes import End, free_port

Kind = TypeVar("Kind")
_BEATS = 10  # heartbeats within the timeout
_LOOK = 0.2  # seconds between two looks at the files of the others
_SAY = 5.0  # seconds after which a wait is spoken of
_ORDERS = "orders.json"
RUN, STOP, HALT, STACKS, QUIT = "run", "stop", "halt", "stacks", "quit"  # what an order says
WAITING, WORKING, LEFT = "waiting", "working", "left"  # what a host does


@dataclass(frozen=True)
class Order:
    """What all do now.

    Args:
      number: of the launch.
      leader: rank of who says so.
      do: ``run`` the launch; ``stop`` it, saving; ``halt`` it; ``stacks``: halt it, stacks first; ``quit``.
      present: processes of the launch.
      mesh: of theirs.
      address: where they meet.
      again: whether there was a launch before.
      status: with which the command ends, for ``quit``.
      memory: what the next leader has to know.
    """

    number: int
    leader: int
    do: str
    present: tuple[int, ...] = ()
    mesh: str = ""
    address: str = ""
    again: bool = False
    status: int = 0
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a host says of itself.

    Args:
      beat: a number that changes with every heartbeat.
      token: of the supervisor; one that is started again has another.
      host: name of the machine.
      address: where processes can meet on this machine.
      state: ``waiting``, ``working`` or ``left``.
      number: of the launch that it runs, or has run.
      end: how that ended; None while it runs.
      received: the signal that it has received, or 0.
    """

    beat: int
    token: str
    host: str
    address: str
    state: str = WAITING
    number: int = 0
    end: dict[str, Any] | None = None
    received: int = 0

    def ended(self, number: int) -> End | None:
        """How a launch ended there; None while it runs."""
        if self.number != number or self.end is None:
            return None
        lost = self.end["lost"]
        return End(**{**self.end, "lost": None if lost is None else tuple(lost)})


class CutOff(Exception):
    """This machine cannot write to the folder any more."""


class Hosts:
    """The machines of a run, seen from one of them; a context manager that writes heartbeats meanwhile.

    Args:
      folder: of the run, which all share.
      rank: of this machine.
      count: number of machines.
      timeout: seconds without a heartbeat after which a machine is gone.
      clock: seconds.
    """

    def __init__(
        self, folder: Path, rank: int, count: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.rank, self.count, self.timeout = folder / "hosts", rank, count, timeout
        self._clock, self._began, self._looked = clock, clock(), clock() - _LOOK
        self._own = Report(0, secrets.token_hex(8), socket.gethostname(), "")
        self._lock, self._ended, self._wrote = threading.Lock(), threading.Event(), clock()
        self._reports: dict[int, Report] = {}
        self._changed: dict[int, float] = {}  # when the file of a rank changed, as seen here
        self._order: Order | None = None

    def __enter__(self) -> "Hosts":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{self.rank}.json").touch()
        except OSError as error:
            raise ArgumentError(f"{self.folder.parent} cannot be the folder of a run: {error}") from error
        self.report(address=f"{_own_address()}:{free_port()}")
        threading.Thread(target=self._beat, name="heartbeat of this host", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.report(state=LEFT)

    # ---- This one ----

    @property
    def own(self) -> Report:
        """What this machine said last."""
        return self._own

    def report(self, **facts: Any) -> None:
        """Says something of this machine."""
        with self._lock:
            self._own = Report(**{**asdict(self._own), **facts, "beat": self._own.beat + 1})
            with suppress(OSError):  # which ``look`` notices when it lasts
                _write(self.folder / f"{self.rank}.json", asdict(self._own))
                self._wrote = self._clock()

    def has_ended(self, number: int, end: End) -> None:
        """Says how a launch ended here, and where processes can meet next."""
        self.report(number=number, end=asdict(end), address=f"{_own_address()}:{free_port()}")

    def _beat(self) -> None:
        while not self._ended.wait(self.timeout / _BEATS):
            self.report()

    # ---- The others ----

    def look(self) -> None:
        """Reads what the others wrote, unless that was done just now.

        Raises:
          CutOff: this machine could not write for so long that the others soon go on without it.
        """
        if self._clock() - self._wrote > self.timeout / 2:
            raise CutOff
        away = self._clock() - self._looked
        if away < _LOOK:
            return
        if away > self.timeout / 4:  # what was not looked at was not silent
            self._began += away
            self._changed = {rank: at + away for rank, at in self._changed.items()}
        self._looked += away
        for rank in range(self.count):
            found = _read(self.folder / f"{rank}.json", Report)
            before = self._reports.get(rank)
            if found is None or (before is not None and (before.beat, before.token) == (found.beat, found.token)):
                continue
            if before is not None or rank == self.rank:  # else it may be of an earlier run
                self._changed[rank] = self._looked
            self._reports[rank] = found
        self._order = _read(self.folder / _ORDERS, Order) or self._order

    def is_alive(self, rank: int) -> bool:
        """Whether a machine was heard of, within the timeout, and has not left."""
        changed = self._changed.get(rank)
        if changed is None or self._reports[rank].state == LEFT:
            return False
        return self._looked - changed < self.timeout

    def is_silent(self, rank: int) -> bool:
        """Whether a machine has not been heard of for the timeout, or has left."""
        return self.has_left(rank) or self._looked - self._changed.get(rank, self._began) >= self.timeout

    def of(self, rank: int) -> Report | None:
        """What a machine said last, if it is alive."""
        return self._reports[rank] if self.is_alive(rank) else None

    def has_left(self, rank: int) -> bool:
        """Whether a machine said that it leaves."""
        return rank in self._changed and self._reports[rank].state == LEFT

    def name_of(self, rank: int) -> str:
        """Name of a machine."""
        return self._reports[rank].host if rank in self._reports else "never seen"

    # ---- Orders ----

    @property
    def order(self) -> Order | None:
        """What is to be done now; None if nobody who says so is alive, or was until the end of the run."""
        order = self._order
        if order is None or order.leader not in self._changed:
            return None
        leader = self._reports[order.leader]
        holds = order.do == QUIT or (leader.state == WORKING and self.is_alive(order.leader))
        return order if holds and leader.number == order.number else None

    @property
    def last_order(self) -> Order | None:
        """The last order, whoever gave it, also in an earlier run."""
        return self._order

    @property
    def last_number(self) -> int:
        """The number of the last launch, also in an earlier run."""
        return self._order.number if self._order else 0

    @property
    def leader(self) -> int | None:
        """Who gave the last order."""
        return self._order.leader if self._order else None

    def is_next(self, leader: int) -> bool:
        """Whether a leader is gone, and this machine is the first of those that know the run."""
        knowing = [rank for rank in range(self.count) if self.is_alive(rank) and self._reports[rank].state == WORKING]
        return self.is_silent(leader) and knowing[:1] == [self.rank]

    def give(self, order: Order) -> None:
        """Gives an order; this machine is the leader.

        Raises:
          CutOff: it could not be written for so long that the others soon go on without this machine.
        """
        self.report(state=WORKING, number=order.number, **({"end": None} if order.do == RUN else {}))
        end = self._clock() + self.timeout / 2
        while True:
            try:
                _write(self.folder / _ORDERS, asdict(order))
                break
            except OSError as error:
                if self._clock() >= min(end, self._wrote + self.timeout / 2):
                    raise CutOff from error
                time.sleep(_LOOK)
        self._order = order

    def gather(self, seconds: float, is_stopped: Callable[[], bool]) -> bool:
        """Waits until all are here; whether they are, and not a run of theirs that goes on without this one.

        Raises:
          DeviceError: some are missing.
        """
        end, said = self._clock() + seconds, False
        while not is_stopped():
            self.look()
            if self.order is not None:
                return False
            alive = [rank for rank in range(self.count) if self.is_alive(rank)]
            if len(alive) == self.count and all(self._reports[rank].state == WAITING for rank in alive):
                return True
            left = end - self._clock()
            missing = ", ".join(str(rank) for rank in range(self.count) if rank not in alive)
            who = f"host {missing}" if len(alive) == self.count - 1 else f"hosts {missing}"
            speaks = not alive or alive[0] == self.rank
            if left < 0:
                raise DeviceError(
                    f"{who} of {self.count} did not write to {self.folder.resolve()} within {seconds:g} s "
                    "(--join-timeout): start the command there, and give a folder that all share"
                )
            if not said and speaks and left < seconds - _SAY:
                print(f"waiting for {who} of {self.count} to write to {self.folder}", file=sys.stderr)
                said = True
            time.sleep(_LOOK)
        return False


def _own_address() -> str:
    """An address of this machine that others reach: that of the interface with the default route, or its name."""
    stated = os.environ.get("MESHDSL_HOST_ADDRESS")
    if stated:
        return stated
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address of documentation; nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _write(file: Path, facts: dict[str, Any]) -> None:
    with file.open("w") as opened:
        opened.write(json.dumps(facts) + "\n")


def _read(file: Path, kind: type[Kind]) -> Kind | None:
    """What a file holds; None if there is none, or it is being written."""
    try:
        facts = json.loads(file.read_text())
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
