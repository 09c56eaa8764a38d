"""What is named on the command line: a program as ``path/to/file.py`` or ``module:attribute``, a mesh, a topology."""

import importlib
import json
import os
import runpy
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from meshdsl.errors import ArgumentError, CheckError, MemoryLimitError, MeshDSLError, VerifyError, is_a, nearest
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology, load_topology, preset_names, topology
from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.spec import Pipeline
from meshdsl.util.text import visible

if TYPE_CHECKING:
    from meshdsl.api import Program  # it loads jax, which help texts do without

# ---- Options ---------------------------------------------------------------------------------------------------------
# Arguments and options that several commands share, and how their results are shown.


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


# ---- Names -----------------------------------------------------------------------------------------------------------


def load_program(
    name: str,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
) -> "Program":
    """The ``program`` that a file or a module defines, or that its function of this name returns.

    Args:
      microbatches, schedule, chunks, recompute: of its pipeline, where given; a schedule by name, or a file with one.

    Raises ArgumentError if there is none, or no such pipeline; what the file itself raises is not touched.
    """
    table = Schedule.load(schedule) if schedule and _is_file(schedule) else schedule
    asked = {"microbatches": microbatches, "schedule": table, "chunks": chunks, "recompute": recompute}
    given = {option: value for option, value in asked.items() if value is not None}
    with progress.status(f"reading {name}"):
        program = _loaded(name)
    return replace(program, pipeline=_pipeline(program, given)) if given else program


def _is_file(schedule: str) -> bool:
    """Whether it names a file, which is then read, or refused; names of schedules have no dot and no slash."""
    return Path(schedule).is_file() or bool({".", "/"} & set(schedule))


def _pipeline(program: "Program", given: dict[str, Any]) -> Pipeline:
    """The program's pipeline with what was given; one line says what does not fit."""
    table = given.get("schedule")
    if table:
        given.setdefault("chunks", 1)
    if isinstance(table, Schedule):
        given.setdefault("microbatches", table.microbatches)
    if program.pipeline is None and "microbatches" not in given:
        raise ArgumentError(f"--{'schedule' if table else next(iter(given))} of no pipeline: say --microbatches too")
    try:
        return replace(program.pipeline, **given) if program.pipeline else Pipeline(**given)
    except ArgumentError as error:
        raise ArgumentError("; ".join(row.strip() for row in str(error).splitlines()[1:])) from error


def _loaded(name: str) -> "Program":
    module, colon, attribute = name.partition(":")
    if name.endswith(".py"):
        return _program(name, "program", runpy.run_path(str(_existing(Path(name)))))
    if module.endswith(".py"):
        asked = f"{name!r} is no program: a file is named alone, as {module}, and defines 'program'"
        raise ArgumentError(f"{asked}; or name its module, as {Path(module).stem}:{attribute or 'program'}")
    if not colon:
        raise ArgumentError(f"{name!r} is no program: give path/to/file.py, or module:attribute")
    return _program(name, attribute, vars(_imported(module)))


def load_mesh(text: str, topology: str) -> Mesh:
    """The mesh written as ``data=4,model=2``, with the costs of a topology."""
    return Mesh.parse(text, topology=load_topology_named(topology))


def load_topology_named(name: str) -> Topology:
    """A preset, or what a TOML file says."""
    return load_topology(name) if name.endswith(".toml") else topology(name)


def short_name(name: str) -> str:
    """What a program is called: ``gpt`` of ``examples/gpt.py``, ``tiny`` of ``models:tiny``."""
    return Path(name).stem if name.endswith(".py") else name.rpartition(":")[2]


def _existing(file: Path) -> Path:
    if not file.is_file():
        beside = file.parent.glob("*.py") if file.parent.is_dir() else ()
        raise ArgumentError(f"there is no file {file}{nearest(str(file), map(str, beside))}")
    return file


def _imported(module: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the named one imports
        raise ArgumentError(f"there is no module {module!r} to import from here: {error}") from error


def _program(name: str, attribute: str, names: dict[str, Any]) -> "Program":
    from meshdsl.api import Program

    if attribute not in names:
        raise ArgumentError(f"{name} defines no {attribute!r}{nearest(attribute, _public(names))}")
    found = names[attribute]
    made = found() if callable(found) else found
    if not isinstance(made, Program):
        raise ArgumentError(f"{attribute} in {name}: {is_a(made)}, not an md.Program")
    return made


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


# ---- Faults ----------------------------------------------------------------------------------------------------------
# What ends a command: one message for what is wrong with what was given, and its status.
#
# Errors of meshdsl say themselves what does not fit. Anything else that comes out of the program's own code, while its
# file is read or its step traced, is told with the line that raised it. What comes from nowhere in it is a fault of
# meshdsl, and keeps its traceback.


_OWN = Path(__file__).resolve().parent.parent
_PARTS = tuple(f"{folder}/" for folder in (_OWN, _OWN.parent / "lowering", _OWN.parent / "layouts"))
_LIBRARIES = (*_PARTS, sysconfig.get_path("stdlib") + "/", sysconfig.get_path("purelib") + "/", "<")
_JAX_FILTERS = "-----"  # how jax's note on the frames that it removed begins


def status_of(error: Exception) -> int:
    """1 if something does not hold, 2 if what was given is not right."""
    return 1 if isinstance(error, MemoryLimitError | VerifyError | CheckError) else 2


def message_of(error: Exception) -> str:
    """What to say of an error; empty if it is a fault of meshdsl itself."""
    if isinstance(error, MeshDSLError):
        return str(error)
    place = _place(error)
    if not place:
        return ""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_JAX_FILTERS)]
    rows = [f"{place}: {type(error).__name__}: {said}", *(f"  {note}" for note in notes)]
    return "\n".join([*rows, "meshdsl --debug ... shows the traceback"])


def _place(error: Exception) -> str:
    """The innermost line that is in no library; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _short(error.filename, error.lineno)
    own = [each for each in extract_tb(error.__traceback__) if not each.filename.startswith(_LIBRARIES)]
    return _short(own[-1].filename, own[-1].lineno) if own else ""


def _short(file: str, line: int | None) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
