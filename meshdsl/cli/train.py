"""``meshdsl train``: plan a program's step, and train with exactly that plan."""

import os
import sys
from contextlib import nullcontext
from enum import StrEnum
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshdsl.cli.options import (
    DEFAULT_MESH,
    AsJSON,
    Chunks,
    EffortWord,
    HostWord,
    LayoutTexts,
    LowBitsText,
    MemoryText,
    MeshText,
    Microbatches,
    OverlapWord,
    ProgramName,
    Recompute,
    RematWord,
    RulesText,
    ScheduleName,
    TopologyName,
)
from meshdsl.cli.output import output_to_stderr, show
from meshdsl.cli.programs import load_mesh, load_program, short_name
from meshdsl.cli.statuses import message_of, status_of
from meshdsl.errors import ArgumentError, DeviceError, MeshDSLError
from meshdsl.util.exit_status import BAD_INPUT

if TYPE_CHECKING:
    from meshdsl.training.joining.launchers import Rank
    from meshdsl.training.loop import Outcome
    from meshdsl.training.supervision.processes import Command


_OF_SUPERVISOR = (
    *("processes", "restarts", "min_processes", "grow_after"),
    *("hang_timeout", "start_timeout", "grace", "heartbeat_timeout"),
)
_MAY_DIFFER = ("program", "folder", "join_timeout", "as_json", *_OF_SUPERVISOR)  # paths may differ between machines


class OnNaN(StrEnum):
    """What to do when the loss or the state has NaNs or infinities."""

    stop = "stop"
    skip = "skip"
    ignore = "ignore"


class Tracker(StrEnum):
    """A tracker that metrics are sent to."""

    tensorboard = "tensorboard"
    wandb = "wandb"


def train(
    context: typer.Context,
    program: ProgramName,
    mesh: MeshText = DEFAULT_MESH,
    topology: TopologyName = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    effort: EffortWord = "default",
    steps: Annotated[int | None, typer.Option(min=1, help="steps of the run; default: the program's")] = None,
    folder: Annotated[
        str | None, typer.Option(help="folder of the run, also gs://bucket/run or s3://bucket/run; default: runs/NAME")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint in the folder")] = False,
    save_every: Annotated[int, typer.Option(min=1, help="steps between checkpoints")] = 50,
    evaluate_every: Annotated[int, typer.Option(min=1, help="steps between evaluations")] = 50,
    keep: Annotated[int, typer.Option(min=1, help="checkpoints to keep")] = 2,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="also keep checkpoints after multiples of this many steps")
    ] = None,
    on_nan: Annotated[
        OnNaN, typer.Option("--on-nan", help="what to do when the loss or state is not finite")
    ] = OnNaN.stop,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="resume although the program, batch or data changed")
    ] = False,
    sink: Annotated[
        str, typer.Option(help="steps in one dispatch, or 'auto': several where the first steps show that it is faster")
    ] = "1",
    profile: Annotated[
        str | None, typer.Option(help="trace these steps, such as 10:13, and compare their collectives with the plan")
    ] = None,
    log: Annotated[
        list[Tracker] | None, typer.Option(help="also send metrics to this tracker; may be repeated")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="processes to start on this machine, or on each")] = 1,
    restarts: Annotated[int, typer.Option(min=0, help="most restarts per hour when a process dies or hangs")] = 0,
    min_processes: Annotated[
        int | None,
        typer.Option(min=1, help="fewest processes to go on with when some cannot be restarted; default: all"),
    ] = None,
    grow_after: Annotated[
        float, typer.Option(min=1, help="seconds until all processes are tried again; doubled when that fails")
    ] = 600.0,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help="seconds without a step that are a hang; default: 20 times the median step, at least 60"
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="seconds until the first step that are a hang; also to evaluate or save")
    ] = 1800.0,
    grace: Annotated[float, typer.Option(min=0, help="seconds to save and end on SIGTERM")] = 120.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=1, help="seconds without a sign after which another machine is gone")
    ] = 30.0,
    plan_ahead: Annotated[bool, typer.Option("--plan-ahead", hidden=True)] = False,
    join_timeout: Annotated[
        float, typer.Option(min=1, help="seconds in which the processes of a launcher have to come together")
    ] = 300.0,
    as_json: AsJSON = False,
) -> None:
    """Plan a program's training step, and train with that plan, in one process or several.

    The folder holds the plan, checkpoints, metrics.jsonl (a line per step and evaluation) and curves.png. On Ctrl-C
    the run finishes its step, saves and ends with status 130, on SIGTERM with 143; --resume continues it, also on
    another mesh. Under SLURM, MPI, torchrun or Kubernetes start one command per process: they find each other, and an
    error in one of them ends all. With --json everything but the outcome is printed to standard error.
    """
    from meshdsl.lowering.shardings import devices_for

    try:
        from meshdsl.training.joining.launchers import find_rank
        from meshdsl.training.joining.multihost import end_with_supervisor, is_supervised, joined
        from meshdsl.training.loop import Run
        from meshdsl.training.observing.profile import parse_profile
        from meshdsl.training.observing.trackers import check_trackers
        from meshdsl.training.run import Session, check_folder, skipping
        from meshdsl.training.saving.storage import locate
        from meshdsl.training.sink import parse_sink
        from meshdsl.training.supervision.hosts import Hosts
        from meshdsl.training.supervision.leader import Supervision
        from meshdsl.training.supervision.processes import PLANNED_FILE, Command
        from meshdsl.training.supervision.progress import Patience
        from meshdsl.training.supervision.supervisor import start
    except ModuleNotFoundError as error:
        raise MeshDSLError(f"training needs {error.name}: pip install 'meshdsl[train]'") from error

    over = load_mesh(mesh, topology)
    several, measured = parse_sink(sink, save_every, evaluate_every)
    traced = parse_profile(profile)
    check_trackers(log or ())
    local, bucket = locate(folder or f"runs/{short_name(program)}")
    own = find_rank()
    if not is_supervised() and (processes > 1 or restarts):
        patience = Patience(hang_timeout, start_timeout, save_every, evaluate_every, sink=several)
        supervision = Supervision(restarts, min_processes, grow_after, patience, join_timeout)
        hosts = _hosts(own)
        command = Command(("-m", "meshdsl", *sys.argv[1:]), over, hosts, processes, local, grace)
        _check_supervised(command, min_processes, restarts, bucket)
        others = Hosts(local, own.index, hosts, heartbeat_timeout) if own else None
        raise typer.Exit(start(command, supervision, others, lambda: check_folder(local, resume, bucket)))
    if own is None and not is_supervised():
        check_folder(local, resume, bucket)
    if plan_ahead:
        os.nice(19)
        end_with_supervisor()
    given = {name: value for name, value in context.params.items() if value and name not in _MAY_DIFFER}
    common = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    together = nullcontext() if plan_ahead else joined(over, own, common, _explain, join_timeout)
    with together, output_to_stderr() if as_json else nullcontext():
        loaded = load_program(
            program, microbatches, schedule, chunks, recompute, layouts, remat, host, low_bits, overlap
        )
        trained = skipping(loaded) if on_nan is OnNaN.skip else loaded
        planned = os.environ.get(PLANNED_FILE)
        session = Session(trained, over, rules, memory, is_supervised(), planned, effort)
        if plan_ahead:
            return session.plan_ahead(local)
        devices_for(over)  # refuses too few before a plan takes its time
        run = Run(
            steps or 0,
            local,
            save_every,
            evaluate_every,
            keep=keep,
            keep_every=keep_every,
            stops_on_nan=on_nan is OnNaN.stop,
            saves_non_finite=on_nan is OnNaN.ignore,
            sink=several,
            measures_sink=measured,
            profile=traced,
            bucket=bucket,
        )
        outcome = session.train(run, accept_changes, resume or is_supervised(), log or ())
    if as_json and session.is_first:
        show("train", "", _facts(outcome, bucket or str(local)), as_json)
    if outcome.stopped:
        raise typer.Exit(128 + outcome.stopped)


def _hosts(own: "Rank | None") -> int:
    """The number of machines that have a supervisor each."""
    if own is not None and not own.count:
        raise DeviceError(
            f"this is of {own.launcher}, whose supervisors need to be told who they are: set JAX_COORDINATOR_ADDRESS,\n"
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave --processes and --restarts out"
        )
    return own.count if own else 1


def _check_supervised(command: "Command", least: int | None, restarts: int, bucket: str) -> None:
    """Raises ArgumentError unless a run may go on with so few processes, and its machines have a place to meet."""
    if least is not None and least > command.count:
        raise ArgumentError(f"--min-processes {least} is more than the {command.count} that --processes starts")
    if least is not None and least < command.count and not restarts:
        raise ArgumentError(f"--min-processes {least}: no process is restarted; give --restarts too, such as 10")
    if command.hosts > 1 and bucket:
        raise ArgumentError(
            f"--folder {bucket}: supervisors of several machines meet in a folder that all share, not in a bucket\n"
            "give such a folder, or leave --processes and --restarts out and let the launcher start all again"
        )


def _explain(error: BaseException) -> tuple[str, int]:
    """Returns message and status of an error, which another process may print; a traceback is printed by this one."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + SIGINT
    if not isinstance(error, Exception):
        return f"ended by {error!r}", BAD_INPUT
    message = message_of(error)
    if "--debug" in sys.argv or not message:
        sys.excepthook(type(error), error, error.__traceback__)
    return message or f"{type(error).__name__}: {error}", status_of(error)


def _facts(outcome: "Outcome", folder: str) -> dict[str, Any]:
    """Returns the summary of a run that ``--json`` prints."""
    history = outcome.history
    step, evaluated = history.evaluations[-1] if history.evaluations else (None, {})
    last = {"loss": history.losses[-1] if history.losses else None, "evaluated": step, "evaluation": evaluated}
    return {"folder": folder, "steps": outcome.done, "stopped": bool(outcome.stopped), **last}
