"""Arguments of ``parallelize``, read into one frozen value, :class:`Options`.

``parse_options`` reads every argument as the user wrote it into the value that the rest of meshdsl works with. Each
``_parse_*`` function appends a row to ``faults`` where it cannot, so one ArgumentError lists all faults at once, before
anything is traced.
"""

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from os import PathLike
from typing import Any

import jax

from meshdsl.api.overlap_option import OFF, Overlap, parse_overlap
from meshdsl.errors import (
    ArgumentError,
    LayoutError,
    MeshDSLError,
    NotationError,
    called,
    faults,
    is_a,
    likely,
    nearest,
)
from meshdsl.ir.graph import TracedProgram
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import LowBits
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.pins import AS_GIVEN, GivenLayouts, LayoutTable, replaced_inputs, spread
from meshdsl.plan.plan import Plan
from meshdsl.planner.limits import EFFORTS
from meshdsl.schedules.spec import Pipeline
from meshdsl.shardings import StatedMesh, mesh_of, pin_of, topology_at_hand
from meshdsl.trace.arguments import step_name
from meshdsl.util.paths import quote, split_path

MEMORY_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|[KMGT]i?|)B?\s*")
BYTES_PER_UNIT = {
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
REMAT = ("off", "auto", "replace")  # who says what is computed again: the step, the planner as well, or it alone
HOSTS = ("off", "auto")  # who says what lives in the host's memory: the layouts alone, or the planner too
UNEVEN = ("error", "replicate", "pad")  # what becomes of a pin that does not divide
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
CONSTRAINTS = ("keep", "ignore")  # what becomes of shardings that jax's own functions state
log = logging.getLogger("meshdsl")
NO_MESH = Mesh(none=1)  # stands for a mesh that could not be read, until the faults are raised


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`meshdsl.parallelize`, normalised; memory in bytes, time limit in seconds.

    Args:
      mapped: the step was given as ``jax.pmap`` returned it.
      notes: for the plan, on what was found when something is planned: the topology, where arguments lie.
    """

    mesh: Mesh
    layouts: LayoutTable = field(default_factory=LayoutTable)
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
    overlap: Overlap = OFF
    time_limit: float | None = None
    effort: str = "default"
    axis_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constraints: str = "keep"
    mapped: bool = False
    uneven: str = "error"
    remat: str = "off"
    host: str = "off"
    low_bits: LowBits | None = None
    notes: tuple[str, ...] = ()

    def at_hand(self) -> "Options":
        """Return the same with the topology of the devices at hand, if the mesh states none.

        Raises:
          LayoutError: the mesh does not fit that topology.
        """
        if self.mesh.states_topology:
            return self
        found = topology_at_hand(self.mesh, self.devices)
        if found.assumed:
            log.warning("%s", found.note)
        try:
            mesh = mesh_of(self.mesh, found.topology)
        except LayoutError as error:
            raise LayoutError(
                f"{error}\nthe topology is that of the devices at hand; md.Mesh(..., topology=) states another"
            ) from None
        return replace(self, mesh=mesh, notes=(found.note,) if found.note else ())

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the step's ``jax.checkpoint`` stays as written; a plan runs the program that it was made for."""
        return self.remat != "replace" if self.plan is None else self.plan.checkpoints

    def as_given(self, given: GivenLayouts) -> "Options":
        """Return the same with arguments pinned as they lie."""
        return replace(self, layouts=replace(self.layouts, given=given.pins), notes=(*self.notes, *given.notes))


def memory_bytes(memory: str | float | None) -> float | None:
    """Return the bytes of ``"60GiB"``, ``"2.5 GB"`` or a positive number; MeshDSLError for anything else."""
    if memory is None:
        return None
    match = MEMORY_TEXT.fullmatch(memory) if isinstance(memory, str) else None
    size = float(match.group(1)) * BYTES_PER_UNIT[match.group(2)] if match else memory
    if not isinstance(size, Real) or isinstance(memory, bool) or not size > 0:
        raise MeshDSLError(f"memory={memory!r} is not a size; write bytes, or text like '60GiB' or '500MB'")
    return float(size)


# ---- Arguments by number and by name ---------------------------------------------------------------------------------


def argument_faults(step: Callable[..., Any], options: Options) -> list[str]:
    """Return a row per static or donated argument that the step does not have, or that is both."""
    parameters = _parameters(step)
    positional = _positional(parameters)
    kinds = {p.kind for p in parameters}
    rows = []
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        count = len(positional)
        for name, numbers in (("static_argnums", options.static_argnums), ("donate_argnums", options.donate_argnums)):
            text = f"the step takes {count} positional argument{'' if count == 1 else 's'}"
            rows += [f"{name}={i}: {text}" for i in numbers if not -count <= i < count]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        known = [p.name for p in parameters if p.kind not in VARIADIC]
        for name, words in (("static_argnames", options.static_argnames), ("donate_argnames", options.donate_argnames)):
            rows += [
                f"{name}={word!r}: the step has no such argument{nearest(word, known)}"
                for word in words
                if word not in known
            ]
    static = _names(positional, options.static_argnums, options.static_argnames)
    donated = _names(positional, options.donate_argnums, options.donate_argnames)
    return rows + [f"{name}: is static, so it has no buffer to donate" for name in donated if name in static]


def donated_leaves(step: Callable[..., Any], program: TracedProgram, options: Options) -> tuple[int, ...]:
    """Return the flat indices of the leaves of donated arguments; state in objects that nothing replaces stays."""
    if not (options.donate_argnums or options.donate_argnames):
        return ()
    parameters = _parameters(step)
    heads: set[tuple[str, ...]] = {(quote(name),) for name in options.donate_argnames}
    heads |= {_path_head(i, parameters) for i in options.donate_argnums}
    kept = program.held.inputs.difference(replaced_inputs(program))
    return tuple(
        i
        for i, leaf in enumerate(program.inputs)
        if i not in kept and any(path[:n] in heads for path in map(split_path, leaf.paths) for n in (1, 2))
    )


def _path_head(number: int, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """Return the first parts of the paths of a positional argument's leaves: ``params``, or ``args/0``."""
    names = _positional(parameters)
    if number < len(names):
        return (quote(names[number]),)
    starred = next(p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
    return quote(starred), str(number - len(names))


def _parameters(step: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of the step; those of ``(*args, **kwargs)`` for builtins without a signature."""
    try:
        return tuple(inspect.signature(step).parameters.values())
    except ValueError:
        return tuple(inspect.Parameter(kind.name, kind) for kind in VARIADIC)


def _positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in POSITIONAL]


def _names(positional: Sequence[str], numbers: Iterable[int], words: Iterable[str]) -> list[str]:
    """Return arguments by name, including those that are given by number."""
    return [*words, *(positional[i] for i in numbers if -len(positional) <= i < len(positional))]


# ---- Parsing ---------------------------------------------------------------------------------------------------------


def parse_options(step: Callable[..., Any], **given: Any) -> Options:
    """Return the options of ``parallelize(step, **given)``; ArgumentError lists all faults at once."""
    if not callable(step):
        raise ArgumentError(f"step: {is_a(step)}, not a function; parallelize(step, mesh) takes the step first")
    rows: list[str] = []
    plan = _parse_plan(given["plan"], rows)
    mesh = _parse_mesh(given["mesh"], plan.topology if plan else None, rows)
    made = Options(
        mesh=mesh,
        layouts=_parse_layouts(given["layouts"], mesh, rows),
        outputs=_parse_table("outputs", given["outputs"], mesh, rows),
        rules=_parse_rules(given["rules"], rows),
        memory=parse_memory(given["memory"], rows),
        donate_argnums=_parse_several("donate_argnums", given["donate_argnums"], Integral, rows),
        donate_argnames=_parse_several("donate_argnames", given["donate_argnames"], str, rows),
        static_argnums=_parse_several("static_argnums", given["static_argnums"], Integral, rows),
        static_argnames=_parse_several("static_argnames", given["static_argnames"], str, rows),
        plan=plan,
        devices=_parse_devices(given["devices"], given["mesh"], rows),
        pipeline=_parse_pipeline(given["pipeline"], plan, rows),
        overlap=_parse_overlap(given["overlap"], plan, rows),
        time_limit=_parse_time_limit(given["time_limit"], rows),
        effort=parse_effort(given["effort"], rows),
        axis_names=_parse_axis_names(given["axis_names"], mesh, rows),
        constraints=parse_constraints(given["constraints"], rows),
        mapped=given["mapped"],
        uneven=parse_choice("uneven", given["uneven"], UNEVEN, rows),
        remat=_parse_search("remat", given["remat"], REMAT, plan, rows),
        host=_parse_search("host", given["host"], HOSTS, plan, rows),
        low_bits=_parse_low_bits(given["low_bits"], plan, rows),
    )
    rows += argument_faults(step, made)
    if rows:
        raise ArgumentError(faults(f"invalid arguments of parallelize({step_name(step)}, ...):", rows))
    return made


def parse_pin_changes(layouts: object, current: LayoutTable, mesh: Mesh) -> LayoutTable:
    """Return the ``current`` pins changed by ``layouts``, where None removes a pin; ArgumentError lists all faults."""
    rows: list[str] = []
    changes = _parse_table("layouts", layouts, mesh, rows)
    unknown = [glob for glob, layout in changes.items() if layout is None and glob not in current]
    rows += [f"layouts: no pin {glob!r} to remove{nearest(glob, current)}" for glob in unknown]
    if rows:
        raise ArgumentError(faults("pins that cannot be changed:", rows))
    unchanged = {glob: layout for glob, layout in current.items() if glob not in changes}
    stated = {glob: layout for glob, layout in changes.items() if layout is not None}
    return replace(current, globs=unchanged | stated)


def _parse_mesh(mesh: object, topology: Topology | None, rows: list[str]) -> Mesh:
    """Return the mesh; one that states no topology has that of the plan to run."""
    if isinstance(mesh, StatedMesh):
        try:
            return mesh_of(mesh, topology)
        except MeshDSLError as error:
            rows.append("mesh: " + str(error).replace("\n", "\n  "))
            return NO_MESH
    rows.append(f"mesh: {is_a(mesh)}, not a mesh; {_mesh_remedy(mesh)}")
    return NO_MESH


def _mesh_remedy(mesh: object) -> str:
    if isinstance(mesh, dict):
        return f"md.Mesh(**{mesh!r}) makes one"
    return "write 'data=4,model=2' or md.Mesh(data=4, model=2)"


def _parse_layouts(table: object, mesh: Mesh, rows: list[str]) -> LayoutTable:
    """Return what ``layouts=`` states: globs, strategies such as ``md.fsdp()``, or that arguments stay as they lie."""
    if isinstance(table, str):
        if table != AS_GIVEN:
            rows.append(f"layouts: {table!r} is neither {AS_GIVEN!r} nor {_table_remedy('layouts')}")
        return LayoutTable(as_given=True)
    if not isinstance(table, LayoutTable):
        return LayoutTable(_parse_table("layouts", table, mesh, rows))
    return replace(table, globs=_parse_table("layouts", table.globs, mesh, rows))


def _parse_table(name: str, table: object, mesh: Mesh, rows: list[str]) -> dict[str, Any]:
    """Return layouts by globs; texts of layouts are parsed later, when the arguments are known."""
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        rows.append(f"{name}: {is_a(table)}, not {_table_remedy(name)}{called(table)}")
        return {}
    if isinstance(table, LayoutTable) and table.strategies:
        rows.append(f"{name}: strategies such as md.fsdp() belong to parallelize(layouts=...); write layouts by globs")
    found: dict[str, Any] = {}
    for glob, layout in spread(table).items():
        if not isinstance(glob, str):
            rows.append(f"{name}: {is_a(glob)}, not a glob; write text such as 'batch/*'")
            continue
        try:
            found[glob] = pin_of(layout, mesh.names)
        except NotationError as error:
            rows.append(f"{name}[{glob!r}]: {error}")
    return found


def _table_remedy(name: str) -> str:
    strategy = ", or a strategy such as md.fsdp()" if name == "layouts" else ""
    return f"a dict of layouts by globs; write {{'batch/*': 'data=S(0)'}}{strategy}"


def _parse_rules(rules: Any, rows: list[str]) -> Rules:
    try:
        return Rules() if rules is None else Rules.of(rules)
    except NotationError as error:
        rows.append("rules: " + str(error).replace("\n", "\n  "))
        return Rules()


def parse_memory(memory: Any, rows: list[str]) -> float | None:
    """Return the limit in bytes; append a fault if it is no size."""
    try:
        return memory_bytes(memory)
    except MeshDSLError as error:
        rows.append(str(error))
        return None


def _parse_several(name: str, given: Any, kind: type, rows: list[str]) -> tuple[Any, ...]:
    """Return one number or name, or several, as a tuple."""
    items = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    what = "the number of an argument" if kind is Integral else "the name of an argument"
    bad = [x for x in items if not isinstance(x, kind) or isinstance(x, bool)]
    rows += [f"{name}: {is_a(x)}, not {what}" for x in bad]
    return tuple(x for x in items if x not in bad)


def _parse_plan(plan: object, rows: list[str]) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    file = isinstance(plan, str | PathLike)
    made = (
        f"md.load_plan({str(plan)!r}) reads a file" if file else "sharded.plan(*args) and md.load_plan(file) give one"
    )
    rows.append(f"plan: {is_a(plan)}, not a plan; {made}")
    return None


def _parse_pipeline(pipeline: object, plan: Plan | None, rows: list[str]) -> Pipeline | None:
    """Return the pipeline; that of the plan to run if none is given."""
    if pipeline is None:
        return plan.pipeline.asked if plan and plan.pipeline else None
    if isinstance(pipeline, Pipeline):
        return pipeline
    rows.append(f"pipeline: {is_a(pipeline)}, not a pipeline; write md.Pipeline(microbatches=8)")
    return None


def _parse_overlap(overlap: object, plan: Plan | None, rows: list[str]) -> Overlap:
    found = parse_overlap(overlap, rows)
    if found != OFF and plan:
        rows.append(
            f"overlap: plan= runs a plan as it is, overlap={overlap!r} looks for another one; leave one of them out"
        )
    return found


def _parse_time_limit(seconds: Any, rows: list[str]) -> float | None:
    if seconds is None or (isinstance(seconds, Real) and not isinstance(seconds, bool) and float(seconds) > 0):
        return None if seconds is None else float(seconds)
    rows.append(f"time_limit: {is_a(seconds)}, not a number of seconds above 0; None is no limit")
    return None


def parse_effort(effort: object, rows: list[str]) -> str:
    """Return how much planning is worth; append a fault if it is none of ``EFFORTS``."""
    if isinstance(effort, str) and effort in EFFORTS:
        return effort
    rows.append(f"effort: {effort!r} is none of {', '.join(map(repr, EFFORTS))}{likely(effort, EFFORTS)}")
    return "default"


def _parse_axis_names(given: object, mesh: Mesh, rows: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the mesh axes of each axis name, major first; a mesh axis belongs to one name."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        rows.append(f"axis_names: {is_a(given)}, not a dict of mesh axes by axis names; write {{'batch': 'data'}}")
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for name, meant in given.items():
        label = f"axis_names[{name!r}]"
        axes = tuple(re.split(r"[\s,]+", meant.strip("() \t"))) if isinstance(meant, str) else meant
        if not isinstance(axes, Sequence) or not axes or not all(isinstance(axis, str) for axis in axes):
            rows.append(f"{label}: {is_a(meant)}, not a mesh axis; write 'data', or '(data,fsdp)' for several")
            continue
        if mesh is not NO_MESH:
            unknown = [axis for axis in axes if axis not in mesh.names]
            rows += [f"{label}: no axis {axis!r} in the mesh{nearest(axis, mesh.names)}" for axis in unknown]
        taken = {axis: other for other, those in found.items() for axis in those}
        rows += [f"{label}: axis {axis!r} is meant by {taken[axis]!r} already" for axis in axes if axis in taken]
        rows += [f"{label}: axis {axis!r} is named twice" for axis in dict.fromkeys(axes) if axes.count(axis) > 1]
        found[name] = tuple(axes)
    return found


def parse_constraints(given: object, rows: list[str]) -> str:
    """Return what becomes of shardings that jax's functions state; append a fault if it is none of ``CONSTRAINTS``."""
    if not isinstance(given, str) or given not in CONSTRAINTS:
        rows.append(f"constraints: {is_a(given)}, neither 'keep' nor 'ignore'{likely(given, CONSTRAINTS)}")
        return CONSTRAINTS[0]
    return given


def parse_choice(name: str, given: object, choices: Sequence[str], rows: list[str]) -> str:
    """Return what is given for an option if it is one of its words; else append a fault, and return the first."""
    if isinstance(given, str) and given in choices:
        return given
    rows.append(f"{name}: {given!r} is not {' or '.join(map(repr, choices))}{likely(given, choices)}")
    return choices[0]


def _parse_search(name: str, given: object, choices: Sequence[str], plan: Plan | None, rows: list[str]) -> str:
    """Return what is given for an option that looks for another plan; beside ``plan=``, only its first word may be."""
    found = parse_choice(name, given, choices, rows)
    if found != choices[0] and plan:
        rows.append(
            f"{name}: plan= runs a plan as it is, {name}={given!r} looks for another one; leave one of them out"
        )
    return found


def parse_low_bits(given: LowBits | float | str | None, rows: list[str]) -> LowBits | None:
    """Return the error budget of collectives; append a fault if it is none, or no format meets it."""
    try:
        return None if given is None else LowBits.of(given)
    except ArgumentError as error:
        rows.append(str(error))
        return None


def _parse_low_bits(given: LowBits | float | str | None, plan: Plan | None, rows: list[str]) -> LowBits | None:
    """Return the error budget; beside ``plan=``, it is that of the plan."""
    if given is not None and plan:
        rows.append(
            f"low_bits: plan= runs a plan as it is, low_bits={given} looks for another one; leave one of them out"
        )
    return parse_low_bits((plan.low_bits or None) if plan else given, rows)


def _parse_devices(devices: Any, mesh: object, rows: list[str]) -> tuple[jax.Device, ...] | None:
    """Return the devices, by default those of a mesh of jax; each may occur once."""
    if devices is None:
        return tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        rows.append(f"devices: {is_a(devices)}, not a list of devices; jax.devices() is one")
        return None
    for i, device in enumerate(devices):
        if not isinstance(device, jax.Device):
            rows.append(f"devices[{i}]: {is_a(device)}, not a device; jax.devices() lists them")
        elif device in devices[:i]:
            rows.append(f"devices[{i}]: {device} is devices[{devices.index(device)}] as well; list every device once")
    return tuple(devices)
