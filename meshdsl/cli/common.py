"""What the commands share: their arguments and options, loading of programs and meshes, output, errors and statuses.

A program is named as ``path/to/file.py``, which defines ``program``, or as ``module:attribute``. A topology is a preset
or a TOML file. Every option that several commands take is defined here once, as an ``Annotated`` type.
"""

import ctypes
import importlib
import inspect
import json
import logging
import os
import runpy
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from inspect import Parameter
from math import isfinite
from pathlib import Path
from traceback import extract_tb
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.highlighter import Highlighter
from rich.status import Status
from rich.text import Text

from meshdsl.errors import (
    ArgumentError,
    CheckError,
    MemoryLimitError,
    MeshDSLError,
    VerifyError,
    faults,
    is_a,
    nearest,
)
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology, load_topology, preset_names, topology
from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.spec import SCHEDULES, Pipeline
from meshdsl.util.text import terminal_width, visible, wrapped

if TYPE_CHECKING:
    from meshdsl.api import Program  # imports jax, which help texts do without

# ---- Arguments and options -------------------------------------------------------------------------------------------

DEFAULT_MESH = "data=4,model=2"


def schedule_names() -> list[str]:
    """Names of the schedules that are built in, for completion."""
    return list(SCHEDULES)


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
SavePlan = Annotated[Path | None, typer.Option("--save", help="write the plan to this file")]
AsJSON = Annotated[bool, typer.Option("--json", help="print JSON")]


# ---- Programs, meshes and topologies ---------------------------------------------------------------------------------


def load_program(
    name: str,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
    layouts: Sequence[str] | None = None,
) -> "Program":
    """The program that a file or a module defines, or that its function of this name returns.

    Args:
      name: ``path/to/file.py`` or ``module:attribute``.
      microbatches: replaces the number of microbatches of the program's pipeline, where given; so do the others.
      schedule: name of a schedule, or a file with one.
      chunks: chunks per stage.
      recompute: what the backward pass recomputes.
      layouts: ``GLOB=LAYOUT`` each, which win over the program's layouts; those of equal globs are one layout.

    Raises:
      ArgumentError: there is no such program, or no such pipeline. Errors of the file's own code are not caught.
    """
    table = Schedule.load(schedule) if schedule and _is_file(schedule) else schedule
    options = {"microbatches": microbatches, "schedule": table, "chunks": chunks, "recompute": recompute}
    given = {option: value for option, value in options.items() if value is not None}
    pins: dict[str, str] = {}
    for glob, layout in map(_parse_pin, layouts or ()):
        pins[glob] = f"{pins[glob]} {layout}" if glob in pins else layout
    with working(f"reading {name}"):
        program = _find_program(name)
    if pins:
        from meshdsl.api.program import with_layouts

        program = with_layouts(program, pins)
    return replace(program, pipeline=_pipeline(program, given)) if given else program


def _parse_pin(text: str) -> tuple[str, str]:
    """The glob and the layout of ``GLOB=LAYOUT``."""
    glob, equals, layout = text.partition("=")
    if not glob or not equals or "=" not in layout:
        raise ArgumentError(f"--layouts: {text!r} is not GLOB=LAYOUT, such as 'batch/*=data=S(0)'")
    return glob, layout


def _is_file(schedule: str) -> bool:
    """Whether it names a file, which is then read or refused; names of schedules have no dot and no slash."""
    return Path(schedule).is_file() or bool({".", "/"} & set(schedule))


def _pipeline(program: "Program", given: dict[str, Any]) -> Pipeline:
    """The program's pipeline with the given options; ArgumentError in one line if they do not fit."""
    table = given.get("schedule")
    if table:
        given.setdefault("chunks", 1)
    if isinstance(table, Schedule):
        given.setdefault("microbatches", table.microbatches)
    if program.pipeline is None and "microbatches" not in given:
        option = "schedule" if table else next(iter(given))
        raise ArgumentError(f"--{option}: the program has no pipeline; give --microbatches too")
    try:
        return replace(program.pipeline, **given) if program.pipeline else Pipeline(**given)
    except ArgumentError as error:
        raise ArgumentError("; ".join(row.strip() for row in str(error).splitlines()[1:])) from error


def _find_program(name: str) -> "Program":
    module, colon, attribute = name.partition(":")
    if name.endswith(".py"):
        file = Path(name)
        if not file.is_file():
            files = [str(each) for each in file.parent.glob("*.py") if each.is_file()] if file.parent.is_dir() else []
            raise ArgumentError(f"there is no file {file}{nearest(str(file), files)}")
        return _program(name, "program", _run(file))
    if module.endswith(".py"):
        raise ArgumentError(
            f"{name!r} is not a program: give the file alone, as {module}, which defines 'program', "
            f"or its module, as {Path(module).stem}:{attribute or 'program'}"
        )
    if not colon:
        raise ArgumentError(f"{name!r} is not a program: give path/to/file.py, or module:attribute")
    return _program(name, attribute, vars(_import(module)))


def _run(file: Path) -> dict[str, Any]:
    try:
        return runpy.run_path(str(file))
    except SystemExit as error:
        rows = [f"sys.exit({error.code!r}) while it was read; keep that under if __name__ == '__main__'"]
        raise ArgumentError(faults(f"{file} ended the command:", rows)) from error


def _import(module: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the named one imports is missing
        raise ArgumentError(f"there is no module {module!r} to import from here: {error}") from error


def _program(name: str, attribute: str, namespace: dict[str, Any]) -> "Program":
    from meshdsl.api import Program

    if attribute not in namespace:
        public = {known: value for known, value in namespace.items() if not known.startswith("_")}
        near = nearest(attribute, [known for known, value in public.items() if _may_be_program(value)])
        remedy = "" if near.endswith("?") else f"; write {attribute} = md.Program(step, args) there"
        raise ArgumentError(f"{name} defines no {attribute!r}{near}{remedy}")
    found = namespace[attribute]
    if inspect.isfunction(found) and (needed := _required_parameters(found)):
        raise ArgumentError(f"{attribute} in {name} needs {', '.join(needed)}; it is called without arguments")
    made = found() if callable(found) else found
    if not isinstance(made, Program):
        raise ArgumentError(f"{attribute} in {name}: {is_a(made)}, not an md.Program")
    return made


def _may_be_program(value: object) -> bool:
    """Whether it is a program, or a function that may return one."""
    from meshdsl.api import Program

    return isinstance(value, Program) or (inspect.isfunction(value) and not _required_parameters(value))


def _required_parameters(function: FunctionType) -> list[str]:
    given = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is Parameter.empty and each.kind not in given]


def load_mesh(text: str, topology: str | None = None) -> Mesh:
    """The mesh written as ``data=4,model=2``, with the costs of a topology; None is that of the devices at hand."""
    return Mesh.parse(text, topology=load_topology_named(topology) if topology else None)


def load_topology_named(name: str) -> Topology:
    """A preset, or the topology in a TOML file."""
    return load_topology(name) if name.endswith(".toml") else topology(name)


def short_name(name: str) -> str:
    """Short name of a program: ``gpt`` for ``examples/gpt.py``, ``tiny`` for ``models:tiny``."""
    return Path(name).stem if name.endswith(".py") else name.rpartition(":")[2]


# ---- Output ----------------------------------------------------------------------------------------------------------
# Standard output has the result alone. Whatever else would be written to it, by the program's own code or by a solver
# in C, goes to standard error, where progress is shown.

JSON_VERSION = 1  # of what --json prints; raised when a field is renamed, removed or means something else
KIND_COLORS = {  # those of the report
    "all-gather": "#5b9bdf",
    "reduce-scatter": "#3bb08d",
    "all-reduce": "#e0853f",
    "all-to-all": "#b07fd4",
    "collective-permute": "#c4ad3a",
}


class KindHighlighter(Highlighter):
    """Colours the kinds of collectives, wherever they are named."""

    def highlight(self, text: Text) -> None:
        """Colours the text in place."""
        for kind, color in KIND_COLORS.items():
            text.highlight_words([kind], color)


out = Console(highlighter=KindHighlighter(), soft_wrap=True)
progress = Console(stderr=True, highlight=False)


def check_writable(*files: Path | None) -> None:
    """Refuses files that cannot be written, before anything takes time."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            fault = "it is a folder" if file.is_dir() else f"there is no folder {str(file.parent)!r}; make it first"
            raise ArgumentError(f"cannot write {str(file)!r}: {fault}")


@contextmanager
def working(text: str) -> Iterator[Status]:
    """Shows what is being done, on a terminal, and keeps standard output for the result."""
    with output_to_stderr(), progress.status(text) as status, _CompileNotice(text, status):
        yield status


class _CompileNotice(logging.Handler):
    """Says that the planner's loops are being compiled, while it takes longer for that; a context manager.

    Args:
      text: what is being done.
      status: the line on the terminal.
    """

    def __init__(self, text: str, status: Status) -> None:
        super().__init__()
        self._text, self._status, self._logger = text, status, logging.getLogger("meshdsl.compile")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the reason to the line."""
        self._status.update(f"{self._text} (the first plan on this machine compiles the planner's loops)")

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Sends standard output to standard error, that of Python and that of compiled code."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        libc.fflush(None)  # text that C keeps for later would come out after the end
        os.dup2(kept, 1)
        os.close(kept)


def show(command: str, text: object, facts: Mapping[str, Any], as_json: bool) -> None:
    """Prints the text, or the facts as one JSON object that starts with its format and version.

    On a terminal the text is as wide as the terminal, and kinds of collectives have colours; elsewhere it is plain.
    """
    if as_json:
        head = {"format": f"meshdsl {command} --json", "version": JSON_VERSION}
        print(json.dumps(_plain({**head, **facts}), indent=2, allow_nan=False))
    else:
        with terminal_width(out.width) if out.is_terminal else nullcontext():
            out.print(visible(wrapped(str(text)), allowed="\n"), markup=False)


def _plain(value: Any) -> Any:
    """The value with ``None`` for numbers that JSON lacks: infinite ones, and NaN."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# ---- Errors and statuses ---------------------------------------------------------------------------------------------
# An error of meshdsl says itself what is wrong. Any other error that comes out of the program's own code, while its
# file is read or its step traced, is reported with the line that raised it. An error without such a line is a fault of
# meshdsl, and keeps its traceback. ``docs/reference/cli.md`` has the table of statuses.

CHANGED, BAD_INPUT, INFEASIBLE, DIFFERENT_PROGRAM = 1, 2, 3, 4
OWN_FAULT = 70  # EX_SOFTWARE of sysexits.h
_PACKAGE = Path(__file__).resolve().parent.parent
_OWN = tuple(f"{folder}/" for folder in (_PACKAGE, _PACKAGE.parent / "lowering", _PACKAGE.parent / "layouts"))
_LIBRARIES = (*_OWN, sysconfig.get_path("stdlib") + "/", sysconfig.get_path("purelib") + "/", "<")
_JAX_FILTERS = "-----"  # the first characters of jax's note on the frames that it removed


def status_of(error: Exception) -> int:
    """The exit status of a command that ends with this error."""
    if isinstance(error, MemoryLimitError):
        return INFEASIBLE
    if isinstance(error, VerifyError | CheckError):
        return CHANGED
    return BAD_INPUT if message_of(error) else OWN_FAULT


def message_of(error: Exception) -> str:
    """The message that ends the command; empty if the error is a fault of meshdsl itself."""
    if isinstance(error, MeshDSLError):
        return str(error)
    line = _innermost_line(error)
    if not line:
        return ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_JAX_FILTERS)]
    rows = [f"{line}: {type(error).__name__}: {text}", *(f"  {note}" for note in notes)]
    return "\n".join([*rows, "meshdsl --debug ... shows the traceback"])


def _innermost_line(error: Exception) -> str:
    """The innermost line of the traceback outside of libraries, as ``file.py:12``; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _line_text(error.filename, error.lineno)
    own = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    return _line_text(own[-1].filename, own[-1].lineno) if own else ""


def _line_text(file: str, line: int | None) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
