"""The processes of one launch, on all machines, as the supervisor that leads sees them.

The first failure ends the launch everywhere, and only when all machines have said that their processes have ended, or
are silent, is the launch over. So a failure that others cause, who have lost a machine, is not taken for the cause.
"""

import time
from collections.abc import Callable

from meshdsl.training.supervision.hosts import HALT, STACKS, STOP, Hosts
from meshdsl.training.supervision.processes import KILLED, Command, End, Launch, Processes
from meshdsl.util.exit_status import STOPPED

_POLL = 0.05  # seconds


class Deposed(Exception):
    """Another supervisor leads."""


class Crew:
    """The processes of a launch.

    Args:
      command: what is launched.
      launch: the launch.
      own: those on this machine; None if there are none.
      hosts: the other machines; None if there are none.
      give: gives an order to the others.
    """

    def __init__(
        self, command: Command, launch: Launch, own: Processes | None, hosts: Hosts | None, give: Callable[[str], None]
    ) -> None:
        self._command, self._launch, self._own, self._hosts, self._give = command, launch, own, hosts, give
        self._own_end: End | None = None
        self._is_stopping = False
        ranks = dict.fromkeys(slot // command.each for slot in launch.present)
        self._others = [] if hosts is None else [rank for rank in ranks if rank != hosts.rank]
        self._tokens = {rank: report.token for rank in self._others if hosts and (report := hosts.of(rank))}

    def stop(self) -> None:
        """Asks all to save and end."""
        self._is_stopping = True
        if self._own is not None:
            self._own.stop()
        self._give(STOP)

    def ended(self) -> End | None:
        """How the launch ended; None while it goes on."""
        ends = self._ends()
        if any(end and end.fault for end in ends) or self._gone():
            return self.halted()
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            if any(end.status == STOPPED for end in known) and not self._is_stopping:
                self.stop()  # a machine was told to stop
            return None
        stopped = any(end.status for end in known)
        return End(STOPPED if stopped else 0, after=max(end.after for end in known))

    def halted(self, stacks: bool = False, fault: str = "") -> End:
        """Ends all, and returns why.

        Args:
          stacks: whether they write the stacks of their threads first.
          fault: what failed, unless it turns out to be a process or a machine.
        """
        own = self._own_end if self._own is None or self._own_end else self._own.ended()
        frozen = self._own.frozen if self._own is not None and own is None else []
        self._give(STACKS if stacks else HALT)
        if self._own is not None:
            self._own.kill(stacks)
            self._own_end = own or End(KILLED)
        end = time.monotonic() + (2 * self._hosts.timeout if self._hosts else 0)
        while self._unheard() and time.monotonic() < end:
            time.sleep(_POLL)
        gone = {*self._gone(), *self._unheard()}
        if gone:
            return self._lost(sorted(gone))
        faults = [each for each in self._ends() if each is not None and each.fault]
        if faults:
            return min(faults, key=lambda each: each.rank)
        return End(1, fault, who=frozen[0] if len(frozen) == 1 else None)

    def _ends(self) -> list[End | None]:
        """How the launch ended, machine by machine."""
        ends: list[End | None] = []
        if self._own is not None:
            self._own_end = self._own_end or self._own.ended()
            ends.append(self._own_end)
        if self._hosts is not None:
            self._hosts.look()
            if self._hosts.leader != self._hosts.rank:
                raise Deposed
            reports = [self._hosts.of(rank) for rank in self._others]
            ends += [report.ended(self._launch.number) if report else None for report in reports]
        return ends

    def _gone(self) -> list[int]:
        """Machines that are silent, or whose supervisor was started again: with the old one its processes ended."""
        if self._hosts is None:
            return []
        reports = {rank: self._hosts.of(rank) for rank in self._others}
        again = {rank for rank, report in reports.items() if report and report.token != self._tokens.get(rank)}
        return [rank for rank in self._others if rank in again or self._hosts.is_silent(rank)]

    def _unheard(self) -> list[int]:
        """Machines that have not said yet how the launch ended there."""
        ends, gone = self._ends(), self._gone()
        others = ends[len(ends) - len(self._others) :]
        return [rank for rank, end in zip(self._others, others, strict=True) if end is None and rank not in gone]

    def _lost(self, gone: list[int]) -> End:
        assert self._hosts is not None
        names = ", ".join(f"{rank} ({self._hosts.name_of(rank)})" for rank in gone)
        who = f"host {names} is" if len(gone) == 1 else f"hosts {names} are"
        slots = tuple(slot for slot in self._launch.present if slot // self._command.each in gone)
        return End(1, f"{who} gone, or silent for {self._hosts.timeout:g} s", self._hosts.timeout, lost=slots)
