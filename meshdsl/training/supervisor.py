"""The supervisor of processes that train together: the end of one ends all, and all start again.

    launch ── first step ── ... steps ... ── fault ──▶ launch           (as ``Supervision`` allows)
                  └─ plans for fewer are made (``contingency``)

``start`` launches the processes and waits until they end, or hang (``progress``); ``leader`` decides what then, and
``members`` who goes on. What happens is written to ``events.jsonl`` (``events``), and at the end it says how long no
step was done. On several machines there is one supervisor on each (``hosts``). One of them leads, and the others run
their processes as it says. When it is gone, the next one leads.
"""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from shutil import rmtree
from types import FrameType

from meshdsl.errors import ArgumentError, MeshDSLError
from meshdsl.training.crew import Deposed
from meshdsl.training.hosts import HALT, QUIT, RUN, STACKS, STOP, WORKING, CutOff, Hosts, Order
from meshdsl.training.leader import Leader, LocalMachine, Supervision, mesh_of
from meshdsl.training.processes import KILLED, Command, End, Launch, Processes
from meshdsl.training.storage import reported
from meshdsl.util.exit_status import BAD_INPUT, LOST, STOPPED

_POLL = 0.05  # seconds


def start(
    command: Command,
    supervision: Supervision | None = None,
    hosts: Hosts | None = None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Runs the processes of a command, and returns an exit status.

    It is 0 if all end well, 1 if one fails, and the status of a process whose failure would repeat (``FINAL``). SIGTERM
    and Ctrl-C are forwarded to all; the status is then 128 and the signal, as of one process. The output of the first
    process is shown, that of the others is in ``folder/process-1.log`` and so on.

    Args:
      command: what is run, and by how many.
      supervision: when they are started again, with ``--resume``, and when fewer; by default never.
      hosts: the other machines; None if there are none.
      check: raises an error if the run may not start.
    """
    with ExitStack() as stack:
        supervisor = _Supervisor(command, supervision or Supervision(), hosts)
        for kind in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, kind, signal.signal(kind, supervisor.receive))
        if hosts is not None:
            stack.enter_context(hosts)
        stack.callback(supervisor.kill)
        return supervisor.run(check)


class _Supervisor:
    """The supervisor of this machine."""

    def __init__(self, command: Command, supervision: Supervision, hosts: Hosts | None) -> None:
        self._command, self._supervision, self._hosts = command, supervision, hosts
        self._received = 0  # signal
        self._own: Processes | None = None  # of this machine
        self._leader: Leader | None = None

    def run(self, check: Callable[[], None]) -> int:
        leads = self._hosts is None or self._hosts.gather(self._supervision.gathering, lambda: bool(self._received))
        try:
            if leads and (self._hosts is None or not self._hosts.rank):
                self._prepare(check)
                with suppress(Deposed):  # this machine was away for a while
                    return self._new_leader().run()
                self.kill()
            while True:
                with suppress(Deposed):
                    return self._follow()
                self.kill()
        except CutOff:
            self.kill()
            print(f"{self._command.folder} cannot be written any more: this host ends", file=sys.stderr)
            return LOST

    def receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if self._own is not None:
            self._own.stop()

    def kill(self) -> None:
        if self._leader is not None:
            self._leader.end_planning()
        if self._own is not None:
            self._own.kill()

    def _prepare(self, check: Callable[[], None]) -> None:
        try:
            check()
            rmtree(self._command.folder / "plans", ignore_errors=True)  # of another command
            with reported(f"{self._command.folder} cannot be the folder of a run", ArgumentError):
                self._command.folder.mkdir(parents=True, exist_ok=True)
        except (MeshDSLError, OSError):
            if self._hosts is not None:
                self._hosts.give(Order(self._hosts.last_number + 1, self._hosts.rank, QUIT, status=BAD_INPUT))
            raise

    def _new_leader(self) -> Leader:
        local = LocalMachine(self._launch, lambda: self._received)
        self._leader = Leader(self._command, self._supervision, local, self._hosts)
        return self._leader

    def _launch(self, launch: Launch) -> Processes | None:
        rank = 0 if self._hosts is None else self._hosts.rank
        here = any(slot // self._command.each == rank for slot in launch.present)
        self._own = Processes(self._command, launch, rank) if here else None
        if self._received and self._own is not None:  # meanwhile
            self._own.stop()
        return self._own

    # ---- Another one leads ----

    def _follow(self) -> int:
        """Runs the processes of this machine as the leader says, and leads if it is gone; the status."""
        assert self._hosts is not None
        hosts, heard, told, number = self._hosts, time.monotonic(), False, 0
        running: Processes | None = None
        launch: Launch | None = None
        while True:
            time.sleep(_POLL)
            hosts.look()
            if self._received and not told:
                told = True
                hosts.report(received=self._received)
            if running is not None and (end := running.ended()) is not None:
                running = None
                hosts.has_ended(number, end)
            order = hosts.order
            if order is None:
                last = hosts.last_order
                if launch is not None and last is not None and not self._received and hosts.is_next(last.leader):
                    return self._new_leader().succeed(last, launch, running)
            elif order.do == QUIT:
                return order.status
            elif order.do == RUN and order.number != number:
                self.kill()
                number = order.number
                launch = Launch(number, order.present, mesh_of(order, self._command), order.address, order.again)
                hosts.report(state=WORKING, number=number, end=None)
                running = None if self._received else self._launch(launch)
                if self._received and self._is_here(order):
                    own = tuple(slot for slot in order.present if slot // self._command.each == hosts.rank)
                    hosts.has_ended(number, End(STOPPED, f"host {hosts.rank} was told to stop", lost=own))
            elif running is not None and order.number == number and order.do == STOP:
                running.stop()
            elif running is not None and order.number == number and order.do in (HALT, STACKS):
                end = running.ended() or End(KILLED)
                running.kill(order.do == STACKS)
                running = None
                hosts.has_ended(number, end)
            heard = time.monotonic() if order is not None else heard
            if self._received and running is None and (order is None or not self._is_here(order)):
                return 128 + self._received
            if time.monotonic() - heard > 2 * hosts.timeout + self._command.grace:
                self.kill()
                print(f"no host leads the run any more ({hosts.folder}): this one ends", file=sys.stderr)
                return 1

    def _is_here(self, order: Order) -> bool:
        """Whether a launch has processes on this machine."""
        assert self._hosts is not None
        return any(slot // self._command.each == self._hosts.rank for slot in order.present)
