"""What is named on the command line: a program as ``path/to/file.py`` or ``module:attribute``, a mesh, a topology."""

import importlib
import os
import runpy
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshdsl.cli.options import progress
from meshdsl.errors import ArgumentError, is_a, nearest
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology, topology
from meshdsl.layouts.topology_file import load_topology
from meshdsl.pipeline.schedule import Schedule
from meshdsl.pipeline.spec import Pipeline
from meshdsl.program import Program


def load_program(
    name: str,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
) -> Program:
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


def _pipeline(program: Program, given: dict[str, Any]) -> Pipeline:
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


def _loaded(name: str) -> Program:
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


def _program(name: str, attribute: str, names: dict[str, Any]) -> Program:
    if attribute not in names:
        raise ArgumentError(f"{name} defines no {attribute!r}{nearest(attribute, _public(names))}")
    found = names[attribute]
    made = found() if callable(found) else found
    if not isinstance(made, Program):
        raise ArgumentError(f"{attribute} in {name}: {is_a(made)}, not an md.Program")
    return made


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]
