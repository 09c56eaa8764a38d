"""Arguments and options that several commands share, and how their results are shown."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshdsl.errors import ArgumentError
from meshdsl.layouts.topology import preset_names
from meshdsl.units import visible

ProgramName = Annotated[str, typer.Argument(help="path/to/file.py or module:attribute", show_default=False)]
MeshText = Annotated[str, typer.Option("--mesh", help="the axes of the mesh, outermost first")]
TopologyName = Annotated[
    str,
    typer.Option("--topology", help="what the mesh costs: a preset or a TOML file", autocompletion=preset_names),
]
RulesText = Annotated[str | None, typer.Option("--rules", help="dims to axes, as 'batch:data hidden:model'")]
MemoryText = Annotated[str | None, typer.Option("--memory", help="limit per device, as 60GiB; else the topology's")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", help="to take the batch in, one after the other")]
ScheduleName = Annotated[str | None, typer.Option("--schedule", help="of a pipeline's stages, as 1f1b, or a file")]
Chunks = Annotated[int | None, typer.Option("--chunks", help="of layers per stage")]
Recompute = Annotated[str | None, typer.Option("--recompute", help="by stages in the backward pass: stage or none")]
AsJSON = Annotated[bool, typer.Option("--json", help="print JSON")]

out = Console(highlight=False, soft_wrap=True)
progress = Console(stderr=True, highlight=False)


def check_folders(*files: Path | None) -> None:
    """Refuse files that cannot be, before anything takes time."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            fault = "it is a folder" if file.is_dir() else f"there is no folder {str(file.parent)!r}; make it first"
            raise ArgumentError(f"cannot write {str(file)!r}: {fault}")


def show(text: object, facts: Any, as_json: bool) -> None:
    """Print the text, or the facts as JSON."""
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        out.print(visible(str(text), kept="\n"), markup=False)
