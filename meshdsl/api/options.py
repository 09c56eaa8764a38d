"""What was asked of ``parallelize``, read into :class:`Options`; every argument that is none is named, all at once.

Each reader below takes one argument as the user wrote it, gives the value that the rest of
meshdsl works with, and adds a row to the faults where it cannot.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from os import PathLike
from typing import Any

import jax

from meshdsl.errors import ArgumentError, MeshDSLError, NotationError, faults, is_a, nearest
from meshdsl.ir.graph import Leaf
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.plan.plan import Plan
from meshdsl.schedules.spec import Pipeline
from meshdsl.trace.arguments import step_name
from meshdsl.util.paths import quote, split_path

# ---- Options ---------------------------------------------------------------------------------------------------------
# Options: all that ``parallelize`` was asked for, normalised at the edge into one frozen value.


_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
    *("jax_default_prng_impl", "jax_threefry_partitionable"),
)
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|[KMGT]i?|)B?\s*")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Options:
    """What :func:`meshdsl.parallelize` documents; memory in bytes."""

    mesh: Mesh
    layouts: Mapping[str, Layout | str] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    outputs: Mapping[str, Layout | str] = field(default_factory=dict)
    memory: float | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    plan: Plan | None = None
    devices: tuple[jax.Device, ...] | None = None
    pipeline: Pipeline | None = None
    overlap: bool = False
    time_limit: float | None = None


def settings() -> tuple[Any, ...]:
    """What of jax's configuration a trace depends on, as it stands here."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


def memory_bytes(memory: str | float | None) -> float | None:
    """Bytes of ``"60GiB"``, ``"2.5 GB"`` or a positive number; MeshDSLError for anything else."""
    if memory is None:
        return None
    match = _MEMORY.fullmatch(memory) if isinstance(memory, str) else None
    size = float(match.group(1)) * _UNITS[match.group(2)] if match else memory
    if not isinstance(size, Real) or isinstance(memory, bool) or not size > 0:
        raise MeshDSLError(f"memory={memory!r} is no size; write bytes, or text like '60GiB' or '500MB'")
    return float(size)


def argument_faults(step: Callable[..., Any], options: Options) -> list[str]:
    """A row for every static or donated argument that the step does not have, or that is both."""
    parameters = _parameters(step)
    return [*_absent_numbers(parameters, options), *_absent_names(parameters, options), *_both(parameters, options)]


def _parameters(step: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Of the step; those of ``(*args, **kwargs)`` for builtins without a signature."""
    try:
        return tuple(inspect.signature(step).parameters.values())
    except ValueError:
        return tuple(inspect.Parameter(kind.name, kind) for kind in _ANY)


def _absent_numbers(parameters: Sequence[inspect.Parameter], options: Options) -> Iterator[str]:
    count = len(_positional(parameters))
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return
    for name, numbers in (("static_argnums", options.static_argnums), ("donate_argnums", options.donate_argnums)):
        for i in numbers:
            if not -count <= i < count:
                yield f"{name}={i}: the step takes {count} positional argument{'' if count == 1 else 's'}"


def _absent_names(parameters: Sequence[inspect.Parameter], options: Options) -> Iterator[str]:
    known = [p.name for p in parameters if p.kind not in _ANY]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    for name, words in (("static_argnames", options.static_argnames), ("donate_argnames", options.donate_argnames)):
        yield from (
            f"{name}={word!r}: the step has no such argument{nearest(word, known)}"
            for word in words
            if word not in known
        )


def _both(parameters: Sequence[inspect.Parameter], options: Options) -> Iterator[str]:
    names = _positional(parameters)
    static = _meant(names, options.static_argnums, options.static_argnames)
    donated = _meant(names, options.donate_argnums, options.donate_argnames)
    yield from (f"{name}: is static, so it has no buffer to donate" for name in donated if name in static)


def _meant(names: Sequence[str], numbers: Iterable[int], words: Iterable[str]) -> list[str]:
    """Arguments by name, those that are given by number included."""
    return [*words, *(names[i] for i in numbers if -len(names) <= i < len(names))]


def _positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in _POSITIONAL]


def donated_leaves(step: Callable[..., Any], inputs: Sequence[Leaf], options: Options) -> tuple[int, ...]:
    """Flat indices of the leaves of the donated arguments."""
    if not (options.donate_argnums or options.donate_argnames):
        return ()
    parameters = _parameters(step)
    named: list[tuple[str, ...]] = [(quote(name),) for name in options.donate_argnames]
    heads = {*named, *(_head(i, parameters) for i in options.donate_argnums)}
    paths = [split_path(leaf.path) for leaf in inputs]
    return tuple(i for i, path in enumerate(paths) if path[:1] in heads or path[:2] in heads)


def _head(number: int, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """How the paths of a positional argument begin."""
    names = _positional(parameters)
    if number < len(names):
        return (quote(names[number]),)
    starred = next(p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
    return quote(starred), str(number - len(names))


# ---- Asked -----------------------------------------------------------------------------------------------------------


def parse_options(step: Callable[..., Any], **asked: Any) -> Options:
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


def parse_pin_changes(layouts: object, stated: Mapping[str, Layout | str]) -> dict[str, Layout | str]:
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
