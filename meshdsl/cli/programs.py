"""Loading of what the command line names: programs, meshes and topologies.

A program is named as ``path/to/file.py``, which defines ``program``, or as ``module:attribute``. A topology is a preset
or a TOML file.
"""

import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdsl.cli.output import working
from meshdsl.errors import ArgumentError, faults, is_a, nearest, required_parameters
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology, load_topology, topology
from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.spec import Pipeline

if TYPE_CHECKING:
    from meshdsl.api import Program  # imports jax, which help texts do without


def load_program(
    name: str,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
    layouts: Sequence[str] | None = None,
    remat: str | None = None,
    host: str | None = None,
    low_bits: str | None = None,
    overlap: str | None = None,
) -> "Program":
    """The program that a file or a module defines, or that its function of this name returns.

    Args:
      name: ``path/to/file.py`` or ``module:attribute``.
      microbatches: replaces the number of microbatches of the program's pipeline, where given; so do the others.
      schedule: name of a schedule, or a file with one.
      chunks: chunks per stage.
      recompute: what the backward pass recomputes.
      layouts: ``GLOB=LAYOUT`` each, which win over the program's layouts; those of equal globs are one layout.
      remat: whether the planner chooses what is computed again, in place of what the program says.
      host: whether it chooses what lives in the host's memory, likewise.
      low_bits: how much collectives may round what they send, likewise.
      overlap: how communication is hidden, likewise.

    Raises:
      ArgumentError: there is no such program, or no such pipeline. Errors of the file's own code are not caught.
    """
    table = Schedule.load(schedule) if schedule and _is_file(schedule) else schedule
    schedules = {"microbatches": microbatches, "schedule": table, "chunks": chunks, "recompute": recompute}
    given = {option: value for option, value in schedules.items() if value is not None}
    pins: dict[str, str] = {}
    for glob, layout in map(_parse_pin, layouts or ()):
        pins[glob] = f"{pins[glob]} {layout}" if glob in pins else layout
    with working(f"reading {name}"):
        program = _find_program(name)
    if pins:
        from meshdsl.api.program import with_layouts

        program = with_layouts(program, pins)
    options: dict[str, Any] = {"remat": remat, "host": host, "low_bits": low_bits, "overlap": overlap}
    program = replace(program, **{option: value for option, value in options.items() if value is not None})
    return replace(program, pipeline=_pipeline(program, given)) if given else program


def python_file(name: str) -> Path:
    """The Python file of this name; ArgumentError with the nearest name if there is none, or if it is a saved plan."""
    file = Path(name)
    if file.suffix == ".json":
        raise ArgumentError(f"{name!r} is no Python script; what was saved is shown by: meshdsl report {name}")
    if not file.is_file():
        files = [str(each) for each in file.parent.glob("*.py") if each.is_file()] if file.parent.is_dir() else []
        raise ArgumentError(f"there is no file {file}{nearest(str(file), files)}")
    return file


def _parse_pin(text: str) -> tuple[str, str]:
    """The glob and the layout of ``GLOB=LAYOUT``."""
    glob, equals, layout = text.partition("=")
    if not glob or not equals or not {"=", "@"} & set(layout):
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
        return _program(name, "program", _run(python_file(name)))
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
    if inspect.isfunction(found) and (needed := required_parameters(found)):
        raise ArgumentError(f"{attribute} in {name} needs {', '.join(needed)}; it is called without arguments")
    made = found() if callable(found) else found
    if not isinstance(made, Program):
        raise ArgumentError(f"{attribute} in {name}: {is_a(made)}, not an md.Program")
    return made


def _may_be_program(value: object) -> bool:
    """Whether it is a program, or a function that may return one."""
    from meshdsl.api import Program

    return isinstance(value, Program) or (inspect.isfunction(value) and not required_parameters(value))


def load_mesh(text: str, topology: str | None = None) -> Mesh:
    """The mesh written as ``data=4,model=2``, with the costs of a topology; None is that of the devices at hand."""
    return Mesh.parse(text, topology=load_topology_named(topology) if topology else None)


def load_topology_named(name: str) -> Topology:
    """A preset, or the topology in a TOML file."""
    return load_topology(name) if name.endswith(".toml") else topology(name)


def short_name(name: str) -> str:
    """Short name of a program: ``gpt`` for ``examples/gpt.py``, ``tiny`` for ``models:tiny``."""
    return Path(name).stem if name.endswith(".py") else name.rpartition(":")[2]
