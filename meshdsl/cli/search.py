"""``meshdsl search``: how to train a program on so many devices."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli.common import (
    AsJSON,
    MemoryText,
    ProgramName,
    RulesText,
    TopologyName,
    check_folders,
    load_program,
    load_topology_named,
    progress,
    show,
)
from meshdsl.errors import ArgumentError

if TYPE_CHECKING:
    from meshdsl.api import Program
    from meshdsl.api.mesh_search import Candidate


def search(
    program: ProgramName,
    devices: Annotated[int, typer.Option(help="how many there are", show_default=False)],
    axes: Annotated[
        str | None,
        typer.Option(
            help="axes of the meshes to try, outermost first; those it names, data, model, and pipe for stages"
        ),
    ] = None,
    microbatches: Annotated[str | None, typer.Option(help="numbers of microbatches to try; 1, or 4 per stage")] = None,
    schedule: Annotated[str, typer.Option(help="schedules of stages to try, as 1f1b,interleaved")] = "1f1b",
    chunks: Annotated[str, typer.Option(help="chunks per stage to try, for interleaved")] = "1",
    recompute: Annotated[str, typer.Option(help="what stages compute again, to try: stage,none")] = "stage",
    topology: TopologyName = "cpu",
    rules: RulesText = None,
    memory: MemoryText = None,
    save: Annotated[Path | None, typer.Option(help="keep the fastest plan in this file")] = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program over every mesh of so many devices; the fastest first. Status 1 if none can be planned."""
    from meshdsl.api.mesh_search import search as searched

    check_folders(save)
    loaded = load_program(program)
    with progress.status(f"planning {program} on {devices} devices") as status:
        found = searched(
            loaded,
            devices=devices,
            topology=load_topology_named(topology),
            axes=axes.split(",") if axes else None,
            microbatches=_numbers("microbatches", microbatches) if microbatches else None,
            schedules=schedule.split(","),
            chunks=_numbers("chunks", chunks),
            recompute=recompute.split(","),
            rules=rules,
            memory=memory,
            progress=status.update,
        )
    best = found.candidates[0]
    if save is not None and best.plan:
        best.plan.save(save)
    again = ["meshdsl", "plan", program, *_options(best, loaded), "--topology", topology]
    again += [*(["--rules", rules] if rules else []), *(["--memory", memory] if memory else [])]
    said = f"{found}\n\nthe fastest: {shlex.join(again)}" if best.plan else found
    show(said, [each.facts for each in found.candidates], as_json)
    if best.plan is None:
        raise typer.Exit(1)


def _options(found: "Candidate", loaded: "Program") -> list[str]:
    """How ``meshdsl plan`` is asked for a candidate."""
    own, pipeline = loaded.pipeline, found.pipeline
    options = ["--mesh", found.mesh]
    if own or pipeline:
        options += ["--microbatches", str(found.microbatches)]
    if pipeline and found.config.schedule:
        options += ["--schedule", pipeline.name, "--chunks", str(pipeline.chunks), "--recompute", pipeline.recompute]
    return options


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of a list."""
    if not all(n.strip().isdigit() for n in text.split(",")):
        raise ArgumentError(f"--{option}: {text!r}, not numbers to try, such as 1,8,32")
    return [int(n) for n in text.split(",")]
