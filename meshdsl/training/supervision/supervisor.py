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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from shutil import rmtree

from meshdsl.errors import ArgumentError, MeshDSLError
from meshdsl.training.saving.storage import reported
from meshdsl.training.supervision.crew import Deposed
from meshdsl.training.supervision.follower import Follower
from meshdsl.training.supervision.hosts import QUIT, CutOff, Hosts, Order
from meshdsl.training.supervision.leader import Leader, Supervision
from meshdsl.training.supervision.processes import Command, Machine
from meshdsl.util.exit_status import BAD_INPUT, LOST


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
        machine = Machine(command, 0 if hosts is None else hosts.rank)
        for kind in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, kind, signal.signal(kind, machine.receive))
        if hosts is not None:
            stack.enter_context(hosts)
        stack.callback(machine.kill)
        leader = Leader(command, supervision or Supervision(), machine, hosts)
        stack.callback(leader.end_planning)
        if hosts is None:
            _prepare(command, check)
            return leader.run()
        return _run_with_others(command, leader, machine, hosts, check)


def _run_with_others(
    command: Command, leader: Leader, machine: Machine, hosts: Hosts, check: Callable[[], None]
) -> int:
    """Leads or follows, and changes from one to the other."""
    try:
        if hosts.gather(leader.gathering, lambda: bool(machine.received)) and hosts.rank == 0:
            try:
                _prepare(command, check)
            except (MeshDSLError, OSError):
                hosts.give(Order(hosts.last_number + 1, hosts.rank, QUIT, status=BAD_INPUT))
                raise
            with suppress(Deposed):
                return leader.run()
        while True:
            machine.kill()  # of this machine, if another one went on while it was away
            follower = Follower(command, machine, hosts)
            if (status := follower.run()) is not None:
                return status
            with suppress(Deposed):
                return leader.succeed(follower.launch, follower.running)
    except CutOff:
        machine.kill()
        print(f"{command.folder} cannot be written any more: this host ends", file=sys.stderr)
        return LOST


def _prepare(command: Command, check: Callable[[], None]) -> None:
    check()
    rmtree(command.folder / "plans", ignore_errors=True)  # of another command
    with reported(f"{command.folder} cannot be the folder of a run", ArgumentError):
        command.folder.mkdir(parents=True, exist_ok=True)
