"""A machine that runs its processes as the leader says, until the run is over or the leader is gone."""

import sys
import time

from meshdsl.training.supervision.hosts import HALT, QUIT, RUN, STACKS, STOP, WORKING, Hosts, Order
from meshdsl.training.supervision.processes import KILLED, Command, End, Launch, Machine, Processes
from meshdsl.util.exit_status import STOPPED

_POLL = 0.05  # seconds


class Follower:
    """Follows the leader.

    Args:
      command: what is run.
      machine: this machine.
      hosts: the other machines.

    Attributes:
      launch: the last launch; None if this machine knows of none.
      running: processes of that which are here, and run.
    """

    def __init__(self, command: Command, machine: Machine, hosts: Hosts) -> None:
        self._command, self._machine, self._hosts = command, machine, hosts
        self.launch: Launch | None = None
        self.running: Processes | None = None

    def run(self) -> int | None:
        """Returns the status of the run when it is over, and None when this machine is to lead."""
        hosts, machine = self._hosts, self._machine
        heard, told = time.monotonic(), False
        while True:
            time.sleep(_POLL)
            hosts.look()
            if machine.received and not told:
                told = True
                hosts.report(received=machine.received)
            if self.running is not None and (end := self.running.ended()) is not None:
                self._ended(end)
            order = hosts.order
            if order is not None:
                heard = time.monotonic()
                if order.do == QUIT:
                    return order.status
                self._obey(order)
            elif self._is_next():
                return None
            if machine.received and self.running is None and (order is None or not self._slots(order.present)):
                return 128 + machine.received
            if time.monotonic() - heard > 2 * hosts.timeout + self._command.grace:
                machine.kill()
                print(f"no host leads the run any more ({hosts.folder}): this one ends", file=sys.stderr)
                return 1

    def _obey(self, order: Order) -> None:
        if order.do == RUN and (self.launch is None or order.number != self.launch.number):
            self._start(order)
        elif self.running is None or self.launch is None or order.number != self.launch.number:
            return
        elif order.do == STOP:
            self.running.stop()
        elif order.do in (HALT, STACKS):
            end = self.running.ended() or End(KILLED)
            self.running.kill(order.do == STACKS)
            self._ended(end)

    def _start(self, order: Order) -> None:
        self._machine.kill()
        mesh = self._command.parse(order.mesh)
        self.launch = Launch(order.number, order.present, mesh, order.address, order.again)
        self._hosts.report(state=WORKING, number=order.number, end=None)
        own = self._slots(order.present)
        if self._machine.received and own:
            self._ended(End(STOPPED, f"host {self._hosts.rank} was told to stop", lost=own))
        else:
            self.running = self._machine.launch(self.launch)

    def _ended(self, end: End) -> None:
        assert self.launch is not None
        self.running = None
        self._hosts.has_ended(self.launch.number, end)

    def _is_next(self) -> bool:
        """Whether this machine is to lead, as the leader is gone."""
        last = self._hosts.last_order
        return not (self.launch is None or last is None or self._machine.received) and self._hosts.is_next(last.leader)

    def _slots(self, present: tuple[int, ...]) -> tuple[int, ...]:
        """The processes of a launch that belong here."""
        return tuple(slot for slot in present if slot // self._command.each == self._hosts.rank)
