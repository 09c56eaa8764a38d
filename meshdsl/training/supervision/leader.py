"""The decisions of a supervised run: who is launched, over which mesh, when it hangs, and when it is over."""

import sys
import time
from dataclasses import dataclass, field, replace

from meshdsl.training.observing.events import FAULT, LAUNCH, PLANNED, STOP, add_event, downtimes, read_events
from meshdsl.training.supervision.contingency import LOG, Contingency
from meshdsl.training.supervision.crew import Crew
from meshdsl.training.supervision.hosts import QUIT, RUN, Hosts, Order, Report
from meshdsl.training.supervision.members import Members, smaller_meshes
from meshdsl.training.supervision.processes import FINAL, KILLED, Command, End, Launch, Machine, Processes, free_port
from meshdsl.training.supervision.progress import Patience, Progress
from meshdsl.util.exit_status import BAD_INPUT, STOPPED

HOUR = 3600.0
_POLL, _LOOK = 0.05, 0.5  # seconds between two looks at the processes, and at the files of the run
_SETTLE = 2.0  # seconds in which a signal reaches all machines


@dataclass(frozen=True)
class Supervision:
    """How processes are supervised.

    Args:
      restarts: most restarts within an hour, of all processes together.
      least: fewest processes to go on with; None: all.
      grow_after: seconds of training with fewer after which all are tried again; doubled when that fails.
      patience: when they hang.
      gathering: seconds in which the supervisors of several machines have to come together.
    """

    restarts: int = 0
    least: int | None = None
    grow_after: float = 600.0
    patience: Patience = field(default_factory=Patience)
    gathering: float = 300.0


class Leader:
    """Decides, launch after launch.

    Args:
      command: what is run.
      supervision: how.
      machine: this machine.
      hosts: the other machines; None if there are none.
    """

    def __init__(self, command: Command, supervision: Supervision, machine: Machine, hosts: Hosts | None) -> None:
        self._command, self._supervision, self._machine, self._hosts = command, supervision, machine, hosts
        self._members = Members(command.count, supervision.least or command.count, supervision.grow_after)
        self._meshes = {command.count: command.mesh}  # by number of processes
        self._contingencies: dict[int, Contingency] = {}  # by most processes
        self._failures: list[float] = []
        self._repeats = Repeats()
        self._grows = False  # whether the last launch was stopped to start more
        self._launch: Launch | None = None
        self._ordered = QUIT  # last, of the other machines
        self._number = self._events = 0  # of launches, and of events before this one led

    def run(self) -> int:
        """Launches until the run is over; its status."""
        self._number = self._hosts.last_number if self._hosts else 0
        self._events = len(read_events(self._command.folder))
        return self._finish(self._run_on(self._run_once()))

    def succeed(self, launch: Launch | None, own: Processes | None) -> int:
        """Goes on for a leader that is gone; the status.

        Args:
          launch: its last one.
          own: processes of that on this machine.
        """
        assert self._hosts is not None and self._hosts.last_order is not None and launch is not None
        order, self._number, self._grows = self._hosts.last_order, launch.number, False
        self._events = len(read_events(self._command.folder))
        self._members.restore(order.memory)
        self._failures = [time.monotonic()] * order.memory["failures"]
        self._repeats.worked = order.memory["worked"]
        self._meshes |= {int(count): self._command.parse(mesh) for count, mesh in order.memory["meshes"].items()}
        self._launch = launch
        crew = Crew(self._command, launch, own, self._hosts, self._give)
        left = self._hosts.has_left(order.leader)
        end = crew.halted()
        print(f"host {self._hosts.rank} leads the run, as host {order.leader} is gone", file=sys.stderr)
        lost = {slot for slot in launch.present if slot // self._command.each == order.leader} | {*(end.lost or ())}
        if left:
            return self._finish(self._run_on(End(STOPPED, lost=tuple(sorted(lost)))))
        fault = f"host {order.leader} is gone, or silent for {self._hosts.timeout:g} s"
        fault = end.fault if end.lost else fault
        end = End(1, fault, self._hosts.timeout, lost=tuple(sorted(lost)))
        add_event(self._command.folder, FAULT, what=end.fault, after=end.after)
        return self._finish(self._run_on(end))

    def end_planning(self) -> None:
        """Ends the processes that plan."""
        for contingency in self._contingencies.values():
            contingency.end()

    @property
    def gathering(self) -> float:
        """Seconds in which the machines have to come together."""
        return self._supervision.gathering

    @property
    def _present(self) -> int:
        """The number of processes now."""
        return len(self._members.present)

    # ---- One launch ----

    def _run_once(self) -> End:
        """Launches those present, and waits until they have ended; if that was to start more of them, takes these."""
        folder, patience = self._command.folder, self._supervision.patience
        self._number += 1
        mesh = self._meshes[self._present]
        add_event(folder, LAUNCH, mesh=str(mesh), processes=self._present)
        again = self._launch is not None
        launch = self._launch = Launch(self._number, self._members.present, mesh, self._address(), again)
        self._give(RUN)
        progress = Progress(folder, patience)
        crew = Crew(self._command, launch, self._machine.launch(launch), self._hosts, self._give)
        stepped = grows = False
        looked = 0.0
        while (end := crew.ended()) is None:
            time.sleep(_POLL)
            if time.monotonic() - looked < _LOOK:
                continue
            looked = time.monotonic()
            if not stepped and progress.has_stepped:
                stepped = True
                self._members.stepped()
                self._repeats.worked = True
                self._give(self._ordered)  # with what the next leader has to know now
            if self._machine.received or grows:  # they have the time of grace
                continue
            silence, allowed = progress.silence()
            if silence > allowed:
                fault = f"no step was done for {allowed:.3g} s; the processes wrote their stacks"
                end = replace(crew.halted(stacks=True, fault=fault), after=silence)
                break
            if stepped:
                self._plan_ahead()
                if self._members.may_grow and self._larger():
                    grows = True
                    crew.stop()
        if not stepped and progress.has_stepped:
            self._members.stepped()
        fails = bool(end.fault) and end.status == BAD_INPUT
        self._repeats.ended(progress.reached if fails else None, stepped or progress.has_stepped)
        self._grows = grows and end.status == STOPPED and not end.fault and not self._machine.received
        what = end.fault.partition("\n")[0]
        if self._grows:
            self._members.grow(self._larger())
            what = f"stopped to start {self._text()} again"
            print(what, file=sys.stderr)
        if end.fault:
            add_event(folder, FAULT, what=what, after=round(end.after, 3))
        elif end.status == STOPPED:
            add_event(folder, STOP, what=what or "stopped", after=round(end.after, 3))
        return end

    def _address(self) -> str:
        """Where the processes of the next launch meet: on the machine of the first one."""
        if self._hosts is None:
            return f"127.0.0.1:{free_port()}"
        ranks = dict.fromkeys(slot // self._command.each for slot in self._members.present)
        reports: list[Report | None] = [self._hosts.of(rank) for rank in ranks]
        first = reports[0] or self._hosts.own
        port = first.address.rpartition(":")[2]
        places = {(report.host, report.address.rpartition(":")[0]) for report in (first, *reports) if report}
        return first.address if len(places) > 1 else f"127.0.0.1:{port}"

    def _give(self, do: str, status: int = 0) -> None:
        """Gives an order to the other machines, if there are any."""
        self._ordered = do
        if self._hosts is None:
            return
        order = Order(self._number, self._hosts.rank, do, status=status)
        if self._launch is not None:
            meshes = {str(count): str(mesh) for count, mesh in self._meshes.items()}
            counted = {"failures": len(self._failures), "worked": self._repeats.worked, "meshes": meshes}
            memory = {**self._members.memory, **counted}
            at = self._launch
            order = replace(
                order, present=at.present, mesh=str(at.mesh), address=at.address, again=at.again, memory=memory
            )
        self._hosts.give(order)

    # ---- After a launch ----

    def _run_on(self, end: End) -> End:
        while self._goes_on(end):
            end = self._run_once()
        return end

    def _goes_on(self, end: End) -> bool:
        """Whether there is a launch after this end; its members are those present then."""
        if self._grows or self._machine.received:
            return self._grows
        lost = end.lost
        if not end.fault:
            if lost is None and end.status == STOPPED:
                lost = self._told_to_stop() or None
            return lost is not None and self._members.lost(lost, self._plannable)
        print(end.fault, file=sys.stderr)
        if not self._members.is_growing:  # whose failure costs a short while, at growing intervals
            self._failures = [at for at in self._failures if time.monotonic() - at < HOUR] + [time.monotonic()]
            if self._is_final(end) or len(self._failures) > self._supervision.restarts:
                return False
            most = self._supervision.restarts
            print(f"restart {len(self._failures)} of at most {most} per hour", file=sys.stderr)
        before = self._present
        members = self._members
        enough = members.failed(end.who, self._plannable) if lost is None else members.lost(lost, self._plannable)
        if self._machine.received:  # meanwhile
            return False
        why = "no step was done since: " if lost is None else ""
        if not enough:
            print(f"{why}{self._too_few()}", file=sys.stderr)
        elif self._present < before:
            wait = f"all are tried again after {members.wait:g} s"
            print(f"{why}going on with {self._text()} over {self._meshes[self._present]}; {wait}", file=sys.stderr)
        return enough

    def _is_final(self, end: End) -> bool:
        """Whether it would end so again."""
        if end.status == BAD_INPUT:
            return self._repeats.would(self._members.least < len(self._members.all))
        return end.status in FINAL

    def _finish(self, end: End) -> int:
        """Tells the others that the run is over, or that this machine leaves it; the status."""
        received = self._machine.received
        stopped = received and end.status in (STOPPED, KILLED)
        status = 128 + received if stopped else end.status
        status = status if status in (0, STOPPED, *FINAL) or stopped else 1
        for each in downtimes(read_events(self._command.folder)[self._events :]):
            print(each, file=sys.stderr)
        if self._hosts is not None:
            self._hosts.report(received=received)
            if not (stopped and not end.fault and self._goes_on_without()):
                self._give(QUIT, status)
        return status

    def _goes_on_without(self) -> bool:
        """Whether enough processes are on machines that were not told to stop, as this one was."""
        told = self._told_to_stop()
        return len(self._members.present) - len(told) >= self._members.least

    def _told_to_stop(self) -> tuple[int, ...]:
        """Processes on machines that received a signal."""
        if self._hosts is None:
            return ()
        end = time.monotonic() + _SETTLE
        while time.monotonic() < end:
            self._hosts.look()
            time.sleep(_POLL)
        told = {rank for rank in range(self._hosts.count) if (of := self._hosts.of(rank)) and of.received}
        told |= {self._hosts.rank} if self._machine.received else set()
        return tuple(slot for slot in self._members.present if slot // self._command.each in told)

    # ---- Fewer processes, and more ----

    def _text(self) -> str:
        count = self._command.count
        return f"all {count} processes" if self._present == count else f"{self._present} of {count} processes"

    def _plan_ahead(self) -> None:
        """Goes on to plan for a process less, and for a machine less."""
        if not self._supervision.restarts:
            return
        for fewer in dict.fromkeys((1, self._command.each if self._hosts else 1)):
            most = self._present - fewer
            if most >= self._members.least:
                contingency = self._at_most(most)
                contingency.advance()
                if not contingency.is_ready:
                    return

    def _at_most(self, most: int) -> Contingency:
        if most not in self._contingencies:
            folder, mesh = self._command.folder, self._command.mesh
            planned = [event for event in read_events(folder) if event["event"] == PLANNED]
            axes = [axis for axis in planned[-1]["batch"] if axis in mesh.names] if planned else []
            axis = axes[0] if axes else mesh.names[0]
            meshes = smaller_meshes(mesh, self._command.count, axis, most, self._members.least)
            self._contingencies[most] = Contingency(self._command.arguments, folder, meshes)
        return self._contingencies[most]

    def _plannable(self, most: int) -> int:
        """The largest number of processes that there is a plan for; waits until it is made."""
        if most in self._meshes:
            return most
        contingency = self._at_most(most)
        contingency.wait(self._supervision.patience.start, lambda: bool(self._machine.received))
        return self._take(contingency)

    def _take(self, contingency: Contingency) -> int:
        if contingency.found is None:
            return 0
        processes, mesh = contingency.found
        self._meshes[processes] = mesh
        return processes

    def _larger(self) -> tuple[int, ...]:
        """More processes than now that can be started, if there is a plan for them already."""
        here = self._members.all
        if self._hosts is not None:
            reports = {rank: self._hosts.of(rank) for rank in range(self._hosts.count)}
            ranks = {rank for rank, report in reports.items() if report and not report.received}
            here = tuple(slot for slot in here if slot // self._command.each in ranks)
        if len(here) <= self._present:
            return ()
        if len(here) in self._meshes:
            return here
        contingency = self._at_most(len(here))
        contingency.advance()
        return here[:count] if (count := self._take(contingency)) > self._present else ()

    def _too_few(self) -> str:
        least, most = self._members.least, self._present - 1
        if most < least:
            return f"no more than --min-processes {least} are left: the run ends"
        log = self._command.folder / "plans" / LOG
        numbers = f"{least} to {most}" if most > least else f"{least}"
        return f"no mesh of {numbers} processes can be planned ({log}): the run ends"


class Repeats:
    """Whether an error of the input would come again.

    The input of a run that has done steps was good. What it cannot read later may be there again when it is started
    again, as devices and file systems come and go; not if that error ends it twice after the same step.

    Attributes:
      worked: whether any launch did a step.
    """

    def __init__(self) -> None:
        self.worked = self._stepped = self._again = False
        self._at: int | None = None  # step of the last such error

    def ended(self, at: int | None, stepped: bool) -> None:
        """Takes the end of a launch.

        Args:
          at: the last step of the run, if such an error ended the launch.
          stepped: whether the launch did a step.
        """
        self.worked, self._stepped = self.worked or stepped, stepped
        if at is not None:
            self._again, self._at = at == self._at, at

    def would(self, shrinks: bool) -> bool:
        """Whether the last error would come again; where a run may go on with fewer, some may still work."""
        return not self.worked or (self._again and (self._stepped or not shrinks))
