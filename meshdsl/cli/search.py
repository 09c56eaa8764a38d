"""``meshdsl search``: how to train a program on so many devices."""

from typing import Annotated

import typer

from meshdsl.cli.names import load_program, load_topology_named
from meshdsl.cli.options import AsJSON, MemoryText, ProgramName, RulesText, TopologyName, progress, show
from meshdsl.errors import ArgumentError


def search(
    program: ProgramName,
    devices: Annotated[int, typer.Option(help="how many there are", show_default=False)],
    axes: Annotated[
        str, typer.Option(help="axes of the meshes to try, outermost first; pipe has stages")
    ] = "data,model",
    microbatches: Annotated[str, typer.Option(help="numbers of microbatches to try")] = "1",
    schedule: Annotated[str, typer.Option(help="schedules of stages to try, as 1f1b,interleaved")] = "1f1b",
    chunks: Annotated[str, typer.Option(help="chunks per stage to try, for interleaved")] = "1",
    recompute: Annotated[str, typer.Option(help="what stages compute again, to try: stage,none")] = "stage",
    topology: TopologyName = "cpu",
    rules: RulesText = None,
    memory: MemoryText = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program over every mesh of so many devices; the fastest first. Status 1 if none can be planned."""
    from meshdsl.searched import search as searched

    loaded = load_program(program)
    with progress.status(f"planning {program} on {devices} devices") as status:
        found = searched(
            loaded,
            devices=devices,
            topology=load_topology_named(topology),
            axes=axes.split(","),
            microbatches=_numbers("microbatches", microbatches),
            schedules=schedule.split(","),
            chunks=_numbers("chunks", chunks),
            recompute=recompute.split(","),
            rules=rules,
            memory=memory,
            progress=status.update,
        )
    show(found, [each.facts for each in found.candidates], as_json)
    if found.candidates[0].plan is None:
        raise typer.Exit(1)


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of a list."""
    if not all(n.strip().isdigit() for n in text.split(",")):
        raise ArgumentError(f"--{option}: {text!r}, not numbers to try, such as 1,8,32")
    return [int(n) for n in text.split(",")]
