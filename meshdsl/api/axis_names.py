"""Axis names of a step's collectives: a step written for one device, as ``jax.pmap`` runs it, planned on whole arrays.

    def step(state, batch):                                     # batch: the rows of one device
        grads = jax.lax.pmean(jax.grad(loss)(state, batch), "batch")
        ...
    md.parallelize(step, "data=8", {"batch": "data=S(0)"}, axis_names={"batch": "data"})(state, batch)    # all rows

Arguments that are pinned split over all mesh axes of a name are cut along these dims, so the step sees the block of
its device; all others are whole on every device. Results that differ between devices are joined: along the dim that
``outputs=`` splits over these axes, else as the argument that they replace is cut, else along dim 0.

``meshdsl.trace.device_axes`` makes such a step a function of whole arrays, which is then traced and planned like any
other. A name that is not stated is found if there is only one answer, see ``find_axes``.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from meshdsl.api.options import Options
from meshdsl.errors import ArgumentError, PinError, TraceError, faults, nearest
from meshdsl.ir.graph import Graph, HeldState, Leaf, Op, TracedProgram
from meshdsl.layouts.axis_rules import layout_of
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Split
from meshdsl.pins import UserPins, replaced_inputs
from meshdsl.pins.conflicts import merge
from meshdsl.pins.read import is_named
from meshdsl.trace import Call
from meshdsl.trace.device_axes import DeviceAxis, DeviceMap, Splits, cutting, default_joint
from meshdsl.trace.leaves import typed_leaf
from meshdsl.trace.source import raised_at, raised_in_shard_map

AxisNames = Mapping[str, tuple[str, ...]]  # mesh axes by axis name, outermost first
_UNBOUND = re.compile(r"unbound axis name: (.+?)\.?(?:\s|$)")  # in jax's NameError
_NOTHING = Graph((), (Op(0, "return", None, {}, (), ()),))  # of arguments whose step is not traced yet
OF_PMAP = "the axis of jax.pmap"  # the axis name of a mapped step without collectives


def inner_of_pmap(step: Any) -> Any | None:
    """Returns the function that ``jax.pmap`` was given, if ``step`` was made by it; else None.

    What ``pmap`` returns is the only plain Python function of jax's own files that has ``lower``.
    """
    own = inspect.isfunction(step) and Path(jax.__file__).parent in Path(step.__code__.co_filename).parents
    return getattr(step, "__wrapped__", None) if own and hasattr(step, "lower") else None


# ---- Names -----------------------------------------------------------------------------------------------------------


def trace_found(
    trace: Callable[[DeviceMap | None], TracedProgram], options: Options, call: Call
) -> tuple[DeviceMap | None, TracedProgram]:
    """Returns the program that ``trace`` gives, and the map of devices to give it; None for a step on whole arrays.

    Raises:
      ArgumentError: the step's collectives have an axis name that no mesh axis answers to.
    """
    names, notes = dict(options.axis_names), list[str]()
    if options.mapped and not names:
        names = {OF_PMAP: find_axes(OF_PMAP, options, call, "jax.pmap")}
    while True:
        devices = map_of(names, options, call, notes) if names else None
        try:
            program = trace(devices)
        except NameError as error:
            found = _UNBOUND.search(str(error))
            if found is None:
                raise
            name = found.group(1)
            if options.axis_names:
                row = f"{raised_at(error)}: axis name {name!r} is none of those stated{nearest(name, names)}"
                raise _unknown(call.name, row, (name,), options) from error
            if raised_in_shard_map(error):  # which binds names of its own
                raise _unbound_in_body(call.name, f"{raised_at(error)}: axis name {name!r}", name, options) from error
            axes = find_axes(name, options, call, f"{raised_at(error)}: axis name {name!r}", error)
            if taken := [known for known, those in names.items() if known != OF_PMAP and {*those} & {*axes}]:
                row = f"{raised_at(error)}: axis names {taken[0]!r} and {name!r} would both mean {_listed(axes)}"
                raise _unknown(call.name, row, (taken[0], name), options) from error
            names = {known: those for known, those in names.items() if known != OF_PMAP} | {name: axes}
            notes.append(f"axis name {name!r} means {_listed(axes)}, which splits the batch; axis_names= states it")
        else:
            said = list(dict.fromkeys(notes))
            return devices, replace(program, notes=[*said, *program.notes], warnings=[*said, *program.warnings])


def find_axes(name: str, options: Options, call: Call, subject: str, error: Exception | None = None) -> tuple[str, ...]:
    """Returns the mesh axes that an axis name means, where there is only one answer.

    That is the mesh axis of this name, else the only axes over which pins split arguments, all along one dim.

    Raises:
      ArgumentError: there is no answer, or there are several; the error says what to state.
    """
    if name in options.mesh.names:
        return (name,)
    splits = [_split(pin) for pin in input_layouts(_inputs(call), options, call.name)]
    different = {tuple(split.items()) for split in splits if split}
    if len(different) == 1 and len({dim for _, dim in next(iter(different))}) == 1:
        return tuple(axis for axis, _ in next(iter(different)))
    where = {axis: path for path, split in reversed(list(zip(call.paths, splits, strict=True))) for axis in split}
    said = ", ".join(f"{axis} splits {path}" for axis, path in where.items()) or "no argument is pinned split"
    raise _unknown(call.name, f"{subject} means no mesh axis that could be found: {said}", (name,), options) from error


def _unknown(step: str, row: str, names: Sequence[str], options: Options) -> ArgumentError:
    """Returns the error of a name, the last, that no mesh axis answers to; others before it need another axis."""
    shown = dict(zip(("batch" if name == OF_PMAP else name for name in names), options.mesh.names, strict=False))
    remedy = f"state the mesh axis, or axes, over which the batch is split: axis_names={shown!r}"
    return ArgumentError(faults(f"{step} has collectives over an unknown axis:", [row], remedy))


def _unbound_in_body(step: str, subject: str, name: str, options: Options) -> ArgumentError:
    """Returns the error of a name that a shard_map binds for its body if it divides over that axis."""
    why = f"is none of the shard_map around it{nearest(name, options.mesh.names)}"
    if name in options.mesh.names:
        why = f"is automatic in the shard_map around it; axis_names={{..., {name!r}}} makes it one of the body's"
    remedy = "the body of a shard_map runs collectives over the axes that it divides over"
    return ArgumentError(faults(f"{step} has collectives over an unknown axis:", [f"{subject} {why}"], remedy))


def _listed(axes: Sequence[str]) -> str:
    return f"mesh axis {axes[0]}" if len(axes) == 1 else f"mesh axes {', '.join(axes)}"


# ---- Blocks of arguments and results ---------------------------------------------------------------------------------


def map_of(names: AxisNames, options: Options, call: Call, notes: list[str]) -> DeviceMap:
    """Returns where the arguments of a call are cut, and its results joined.

    Args:
      notes: a line is appended for every result that a next step could not take.

    The map raises TraceError when the step is traced, if state of the caller's objects differs between devices.

    Raises:
      PinError: a pin matches no argument, or does not fit.
      ArgumentError: no argument is split over the mesh axes of a name.
    """
    sizes = options.mesh.sizes_by_name
    axes = tuple(DeviceAxis(name, tuple((axis, sizes[axis]) for axis in meant)) for name, meant in names.items())
    inputs = _inputs(call)
    splits = tuple(_cuts(_split(pin), axes) for pin in input_layouts(inputs, options, call.name))
    idle = [axis for axis in axes if axis.size > 1 and not any(axis in cutting(at, axes) for at in splits)]
    if idle:
        likely = next((x.path for x in reversed(inputs) if x.shape), "batch")
        rows = [f"axis_names[{axis.name!r}]: no argument is split over {_listed(axis.mesh_axes)}" for axis in idle]
        pin = " ".join(f"{axis}=S(0)" for axis in idle[0].mesh_axes)
        remedy = f"pin the arguments of which every device has its own block, such as layouts={{{likely!r}: {pin!r}}}"
        raise ArgumentError(faults(f"{call.name} has no batch for its devices:", rows, remedy))

    def joints(outputs: Sequence[Leaf], held: HeldState, varying: Sequence[tuple[DeviceAxis, ...]]) -> list[Splits]:
        sources = replaced_inputs(TracedProgram(_NOTHING, devices.blocks, tuple(outputs), held=held))
        found = [_joint(*each, devices, options) for each in zip(outputs, sources, varying, strict=True)]
        differ = [
            (i, _differs(outputs[i], source, axes, devices))
            for i, (source, axes, joint) in enumerate(zip(sources, varying, found, strict=True))
            if source is not None and axes and joint is None
        ]
        lost = [text for i, text in differ if i in held.written]
        if lost:
            raise TraceError(faults(f"{call.name} cannot give back state of its devices:", lost))
        notes.extend(f"{text}, and is returned as one block per device" for _, text in differ)
        return [default_joint(axes) if joint is None else joint for axes, joint in zip(varying, found, strict=True)]

    devices = DeviceMap(axes, inputs, splits, joints)
    return devices


def _joint(
    result: Leaf, source: int | None, varying: Sequence[DeviceAxis], devices: DeviceMap, options: Options
) -> Splits | None:
    """Returns where pins, or else the argument that it replaces, say that a result is joined; None if neither does."""
    wanted = {a for axis in varying for a in axis.mesh_axes}
    stated = _split(merge(_stated(options.outputs, result)))
    before = {} if source is None else dict(devices.splits[source])
    found = next((dims for dims in (stated, before) if wanted <= dims.keys()), None)
    return None if found is None else tuple((axis, dim) for axis, dim in found.items() if axis in wanted)


def _differs(result: Leaf, source: int, varying: Sequence[DeviceAxis], devices: DeviceMap) -> str:
    name, path = varying[0].name, devices.inputs[source].path
    shared = f"which all devices of {name!r} share, but differs between them at the end"
    return f"{result.path or 'the result'} replaces {path}, {shared} (jax.lax.pmean(..., {name!r}) averages it)"


def _cuts(split: Mapping[str, int], axes: Sequence[DeviceAxis]) -> Splits:
    """Returns the splits that cut an argument: those over all mesh axes of a name."""
    named = {a for axis in cutting(tuple(split.items()), axes) for a in axis.mesh_axes}
    return tuple((axis, dim) for axis, dim in split.items() if axis in named)


def _split(pin: Layout) -> dict[str, int]:
    """Returns the dim that each axis splits, in the order of the pin."""
    return {axis: int(p.dim) for axis, p in pin.placements if isinstance(p, Split)}


def _inputs(call: Call) -> tuple[Leaf, ...]:
    shared, types = call.objects.aliases(), map(jax.typeof, call.leaves)
    leaves = map(typed_leaf, call.paths, types, call.dims)
    return tuple(replace(leaf, aliases=shared.get(i, ())) for i, leaf in enumerate(leaves))


def _stated(table: Mapping[str, Layout | str], leaf: Leaf) -> list[Layout]:
    return [Layout.of(text).numbered(leaf.dims) for glob, text in table.items() if is_named(glob, leaf)]


def input_layouts(inputs: Sequence[Leaf], options: Options, name: str) -> list[Layout]:
    """Returns the pins of the arguments, before the step is traced; PinError as for a traced step."""
    if options.layouts.strategies:
        what = "are pins of a step on whole arrays, and this one communicates over axes by name"
        raise PinError(f"layouts: strategies such as md.fsdp() {what}; pin its arguments by globs")
    layouts = options.layouts.on(options.mesh)
    UserPins(layouts).resolve(TracedProgram(_NOTHING, tuple(inputs), (), name=name), options.mesh)
    ruled = options.rules.group("activations")
    return [merge((layout_of(x.dims, ruled), *_stated(layouts, x))) for x in inputs]
