"""Arguments and options that several commands share, each defined once as an ``Annotated`` type."""

from pathlib import Path
from typing import Annotated

import typer

from meshdsl.layouts.topology import preset_names
from meshdsl.schedules.spec import SCHEDULES

DEFAULT_MESH = "data=4,model=2"


def schedule_names() -> list[str]:
    """Names of the schedules that are built in, for completion."""
    return list(SCHEDULES)


def effort_names() -> list[str]:
    """Names of the efforts of planning, for completion."""
    return ["fast", "default", "prove"]


_PROGRAM = "path/to/file.py, which defines 'program', or module:attribute"
_COSTS = "costs of links and devices: a preset or a TOML file; default: those of the devices at hand"
ProgramName = Annotated[str, typer.Argument(help=_PROGRAM, show_default=False)]
OptionalProgram = Annotated[str | None, typer.Argument(help=_PROGRAM)]
SavedPlan = Annotated[Path, typer.Argument(help="a saved plan", show_default=False)]
MeshText = Annotated[str, typer.Option("--mesh", help="mesh axes with their sizes, outermost first")]
TopologyName = Annotated[str | None, typer.Option("--topology", help=_COSTS, autocompletion=preset_names)]
RulesText = Annotated[str | None, typer.Option("--rules", help="layout rules, such as 'batch:data hidden:model'")]
LayoutTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--layouts",
        metavar="GLOB=LAYOUT",
        help="a layout by a glob over arguments' paths, such as 'params/*=model=S(1)', added to the program's layouts; "
        "wins over them; may be repeated",
    ),
]
MemoryText = Annotated[
    str | None, typer.Option("--memory", help="memory limit per device, such as 60GiB; default: the topology's")
]
Microbatches = Annotated[int | None, typer.Option("--microbatches", help="number of microbatches in a step")]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="pipeline schedule, such as 1f1b, or a file with a schedule",
        autocompletion=schedule_names,
    ),
]
Chunks = Annotated[int | None, typer.Option("--chunks", help="chunks of layers per pipeline stage")]
Recompute = Annotated[
    str | None, typer.Option("--recompute", help="activations to recompute in the backward pass: stage or none")
]
RematWord = Annotated[
    str | None,
    typer.Option(
        "--remat",
        help="let the planner choose what to recompute: off, auto, or replace, without the program's own "
        "jax.checkpoint; default: the program's",
    ),
]
HostWord = Annotated[
    str | None,
    typer.Option("--host", help="let the planner use the host's memory: off or auto; default: the program's"),
]
LowBitsText = Annotated[
    str | None,
    typer.Option(
        "--low-bits",
        help="let collectives round what they send, within an error budget such as 0.01, or 0.03:float8_e4m3fn "
        "for formats of your choice; default: the program's",
    ),
]
OverlapWord = Annotated[
    str | None, typer.Option("--overlap", help="hide communication: off, prefetch or full; default: the program's")
]
EffortWord = Annotated[
    str,
    typer.Option("--effort", help="how much planning is worth: fast, default or prove", autocompletion=effort_names),
]
SavePlan = Annotated[Path | None, typer.Option("--save", help="write the plan to this file")]
AsJSON = Annotated[bool, typer.Option("--json", help="print JSON")]
