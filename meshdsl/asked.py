"""What was asked of ``parallelize``, read into :class:`Options`; every argument that is none is named, all at once.

Each reader below takes one argument as the user wrote it, gives the value that the rest of
meshdsl works with, and adds a row to the faults where it cannot.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from typing import Any

import jax

from meshdsl.errors import ArgumentError, MeshDSLError, NotationError, faults, is_a, nearest
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.layouts.topology import Topology
from meshdsl.options import Options, argument_faults, memory_bytes
from meshdsl.pipeline.spec import Pipeline
from meshdsl.plan.value import Plan
from meshdsl.trace.arguments import step_name


def read_options(step: Callable[..., Any], **asked: Any) -> Options:
    """The options of ``parallelize(step, **asked)``; ArgumentError lists all that does not fit."""
    if not callable(step):
        raise ArgumentError(f"step: {is_a(step)}, not a function; parallelize(step, mesh) takes the step first")
    rows: list[str] = []
    plan = _plan(asked["plan"], rows)
    made = Options(
        mesh=_mesh(asked["mesh"], plan.topology if plan else None, rows),
        layouts=_table("layouts", asked["layouts"], rows),
        outputs=_table("outputs", asked["outputs"], rows),
        rules=_rules(asked["rules"], rows),
        memory=_memory(asked["memory"], rows),
        donate_argnums=_several("donate_argnums", asked["donate_argnums"], Integral, rows),
        donate_argnames=_several("donate_argnames", asked["donate_argnames"], str, rows),
        static_argnums=_several("static_argnums", asked["static_argnums"], Integral, rows),
        static_argnames=_several("static_argnames", asked["static_argnames"], str, rows),
        plan=plan,
        devices=_devices(asked["devices"], rows),
        pipeline=_pipeline(asked["pipeline"], plan, rows),
        overlap=_overlap(asked["overlap"], plan, rows),
        time_limit=_time_limit(asked["time_limit"], rows),
    )
    rows += argument_faults(step, made)
    if rows:
        raise ArgumentError(faults(f"arguments of parallelize({step_name(step)}, ...) that do not fit:", rows))
    return made


def read_changes(layouts: object, stated: Mapping[str, Layout | str]) -> dict[str, Layout | str]:
    """The pins ``stated``, changed as ``Sharded.pinned`` was asked to; ArgumentError lists all that does not fit."""
    rows: list[str] = []
    changes = _table("layouts", layouts, rows)
    unknown = [glob for glob, layout in changes.items() if layout is None and glob not in stated]
    rows += [f"layouts: no pin {glob!r} to take out{nearest(glob, stated)}" for glob in unknown]
    if rows:
        raise ArgumentError(faults("pins that cannot be changed:", rows))
    kept = {glob: layout for glob, layout in stated.items() if glob not in changes}
    return kept | {glob: layout for glob, layout in changes.items() if layout is not None}


_NO_MESH = Mesh(none=1)  # stands for a mesh that could not be read, until the faults are raised


def _mesh(mesh: object, topology: Topology | None, rows: list[str]) -> Mesh:
    """A mesh; a text states no topology, so that of the plan to run holds."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        try:
            return Mesh.parse(mesh, topology)
        except MeshDSLError as error:
            rows.append("mesh: " + str(error).replace("\n", "\n  "))
            return _NO_MESH
    rows.append(f"mesh: {is_a(mesh)}, not a mesh; {_remedy(mesh)}")
    return _NO_MESH


def _remedy(mesh: object) -> str:
    sizes = dict(mesh.shape) if isinstance(mesh, jax.sharding.Mesh) else mesh
    if isinstance(sizes, dict):
        return f"md.Mesh(**{sizes!r}) makes one"
    return "write 'data=4,model=2' or md.Mesh(data=4, model=2)"


def _table(name: str, table: object, rows: list[str]) -> dict[str, Layout | str]:
    """Layouts by globs; what they say is read with the arguments at hand."""
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        rows.append(f"{name}: {is_a(table)}, not a dict of layouts by globs; write {{'batch/*': 'data=S(0)'}}")
        return {}
    bad = [glob for glob in table if not isinstance(glob, str)]
    rows += [f"{name}: {is_a(glob)}, not a glob; write text such as 'batch/*'" for glob in bad]
    return {glob: layout for glob, layout in table.items() if glob not in bad}


def _rules(rules: Any, rows: list[str]) -> Rules:
    try:
        return Rules() if rules is None else Rules.of(rules)
    except NotationError as error:
        rows.append("rules: " + str(error).replace("\n", "\n  "))
        return Rules()


def _memory(memory: Any, rows: list[str]) -> float | None:
    try:
        return memory_bytes(memory)
    except MeshDSLError as error:
        rows.append(str(error))
        return None


def _several(name: str, given: Any, kind: type, rows: list[str]) -> tuple[Any, ...]:
    """One number or name, or several of them, as a tuple."""
    items = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    what = "the number of an argument" if kind is Integral else "the name of an argument"
    bad = [x for x in items if not isinstance(x, kind) or isinstance(x, bool)]
    rows += [f"{name}: {is_a(x)}, not {what}" for x in bad]
    return tuple(x for x in items if x not in bad)


def _plan(plan: object, rows: list[str]) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    file = isinstance(plan, str | PathLike)
    made = (
        f"md.load_plan({str(plan)!r}) reads a file" if file else "sharded.plan(*args) and md.load_plan(file) give one"
    )
    rows.append(f"plan: {is_a(plan)}, not a plan; {made}")
    return None


def _pipeline(pipeline: object, plan: Plan | None, rows: list[str]) -> Pipeline | None:
    """The pipeline; that of the plan to run if none is stated."""
    if pipeline is None:
        return plan.pipeline.asked if plan and plan.pipeline else None
    if isinstance(pipeline, Pipeline):
        return pipeline
    rows.append(f"pipeline: {is_a(pipeline)}, not a pipeline; write md.Pipeline(microbatches=8)")
    return None


def _overlap(overlap: object, plan: Plan | None, rows: list[str]) -> bool:
    if not isinstance(overlap, bool):
        rows.append(f"overlap: {is_a(overlap)}, neither True nor False")
    elif overlap and plan:
        rows.append("overlap: plan= runs a plan as it is, and overlap=True asks for another; leave one of them out")
    return overlap is True


def _time_limit(seconds: Any, rows: list[str]) -> float | None:
    if seconds is None or (isinstance(seconds, Real) and not isinstance(seconds, bool) and float(seconds) > 0):
        return None if seconds is None else float(seconds)
    rows.append(f"time_limit: {is_a(seconds)}, not a number of seconds above 0; None is no limit")
    return None


def _devices(devices: Any, rows: list[str]) -> tuple[jax.Device, ...] | None:
    """The devices, each once."""
    if devices is None:
        return None
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        rows.append(f"devices: {is_a(devices)}, not a list of devices; jax.devices() is one")
        return None
    for i, device in enumerate(devices):
        if not isinstance(device, jax.Device):
            rows.append(f"devices[{i}]: {is_a(device)}, not a device; jax.devices() lists them")
        elif device in devices[:i]:
            rows.append(f"devices[{i}]: {device} is devices[{devices.index(device)}] as well; every device serves once")
    return tuple(devices)
