"""``meshdsl search``: the fastest mesh and pipeline for a program on a number of devices."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli.options import (
    AsJSON,
    EffortWord,
    HostWord,
    LayoutTexts,
    LowBitsText,
    MemoryText,
    OverlapWord,
    ProgramName,
    RematWord,
    RulesText,
    SavePlan,
    TopologyName,
    schedule_names,
)
from meshdsl.cli.output import check_writable, out, show, working
from meshdsl.cli.programs import load_program, load_topology_named
from meshdsl.errors import ArgumentError
from meshdsl.util.exit_status import INFEASIBLE
from meshdsl.util.text import visible

if TYPE_CHECKING:
    from meshdsl.api import Program
    from meshdsl.api.mesh_search import Candidate


def search(
    program: ProgramName,
    devices: Annotated[int, typer.Option(help="number of devices", show_default=False)],
    axes: Annotated[
        str | None,
        typer.Option(
            help="mesh axes to try, outermost first; default: the program's own axes plus data, model and pipe"
        ),
    ] = None,
    microbatches: Annotated[
        str | None, typer.Option(help="numbers of microbatches to try; default: 1, or 4 per stage")
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(help="pipeline schedules to try, such as 1f1b,interleaved", autocompletion=schedule_names),
    ] = "1f1b",
    chunks: Annotated[str, typer.Option(help="chunks per stage to try, for interleaved schedules")] = "1",
    recompute: Annotated[str, typer.Option(help="recomputation in the backward pass to try: stage,none")] = "stage",
    topology: TopologyName = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    effort: EffortWord = "default",
    save: SavePlan = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program over every mesh of a number of devices, the fastest first; status 3 if none has a plan.

    --save writes the fastest plan.
    """
    from meshdsl.api.mesh_search import search as search_meshes

    check_writable(save)
    loaded = load_program(program, layouts=layouts, remat=remat, host=host, low_bits=low_bits, overlap=overlap)
    with working(f"planning {program} on {devices} devices") as status:
        found = search_meshes(
            loaded,
            devices=devices,
            topology=load_topology_named(topology) if topology else None,
            axes=None if axes is None else axes.split(","),
            microbatches=_numbers("microbatches", microbatches) if microbatches is not None else None,
            schedules=schedule.split(","),
            chunks=_numbers("chunks", chunks),
            recompute=recompute.split(","),
            rules=rules,
            memory=memory,
            effort=effort,
            progress=status.update,
        )
    best = found.candidates[0]
    if save is not None and best.plan:
        best.plan.save(save)
    command = ["meshdsl", "plan", program, *_options(best, loaded), *(["--topology", topology] if topology else [])]
    command += [part for pin in layouts or () for part in ("--layouts", pin)]
    command += [*(["--rules", rules] if rules else []), *(["--memory", memory] if memory else [])]
    command += [*(["--remat", remat] if remat else []), *(["--host", host] if host else [])]
    command += [*(["--low-bits", low_bits] if low_bits else []), *(["--overlap", overlap] if overlap else [])]
    command += ["--effort", effort] if effort != "default" else []
    facts = {"devices": devices, "candidates": [candidate.facts for candidate in found.candidates]}
    show("search", found, facts, as_json)
    if best.plan is None:
        raise typer.Exit(INFEASIBLE)
    if not as_json:  # on one line, to be copied
        out.print(f"\nthe fastest: {visible(shlex.join(command))}", markup=False)


def _options(found: "Candidate", loaded: "Program") -> list[str]:
    """The options of ``meshdsl plan`` for a candidate."""
    own, pipeline = loaded.pipeline, found.pipeline
    options = ["--mesh", found.mesh]
    if own or pipeline:
        options += ["--microbatches", str(found.microbatches)]
    if pipeline and found.config.schedule:
        options += ["--schedule", pipeline.name, "--chunks", str(pipeline.chunks), "--recompute", pipeline.recompute]
    return options


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of a comma-separated list; ArgumentError if it is another text."""
    if not all(n.strip().isdigit() for n in text.split(",")):
        raise ArgumentError(f"--{option}: {text!r}, not numbers such as 1,8,32")
    return [int(n) for n in text.split(",")]
