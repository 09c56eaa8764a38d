"""A step written for one of several devices, as ``jax.pmap`` runs it, as a function of whole arrays.

    step(w, x):  w - 0.1 * pmean(grad(loss)(w, x), "batch")       x: a block of 2 rows per device

    axis "batch" of 8 devices, x cut along dim 0:

    x (16, 8) --cut--> (8, 2, 8) --vmap(step, axis_name="batch")--> w (8, 8), equal on all devices
                                                                    y (8, 2, 8) --join--> (16, 8), its own per device

``DeviceMap.whole`` traces the step once with the shapes of one device, then batches its jaxpr over one axis name after
the other. A result that does not depend on the device has no dim of devices, which batching itself decides; others are
joined again. Numbers are those of ``jax.pmap`` by construction: every operation on a block stays on the block, and
collectives are the only way between blocks.

``vmap`` does not know all collectives that ``pmap`` does: groups of devices, permutations that leave some devices out,
broadcasts from one device. These are replaced before by a primitive that is batched here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import batching

from meshdsl.errors import shortened
from meshdsl.ir.graph import HeldState, Leaf
from meshdsl.trace.leaves import typed_leaf
from meshdsl.trace.pure_step import PureStep

# ---- Axes and blocks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceAxis:
    """An axis name of the step's collectives, and the mesh axes that it means.

    Args:
      name: as the step writes it.
      sizes: the size of each mesh axis, by its name, major first.
    """

    name: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """The number of devices."""
        return prod(n for _, n in self.sizes)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes, major first."""
        return tuple(axis for axis, _ in self.sizes)


Splits = tuple[tuple[str, int], ...]  # mesh axes and the dims that they split, major first for each dim


def block_shape(shape: Sequence[int], splits: Splits, axes: Sequence[DeviceAxis]) -> tuple[int, ...]:
    """Returns the shape of one device's block of an array that is split so."""
    sizes = _sizes(axes)
    return tuple(n // prod(sizes[axis] for axis, dim in splits if dim == d) for d, n in enumerate(shape))


def cut(x: jax.Array, splits: Splits, axes: Sequence[DeviceAxis]) -> jax.Array:
    """Returns an array as its blocks, with a leading dim of devices for each axis name that cuts it."""
    sizes = _sizes(axes)
    shape: list[int] = []
    place: dict[str, int] = {}  # of each mesh axis in ``shape``
    own: list[int] = []  # places of the dims of a block
    for d, n in enumerate(block_shape(x.shape, splits, axes)):
        for axis in (axis for axis, dim in splits if dim == d):
            place[axis] = len(shape)
            shape.append(sizes[axis])
        own.append(len(shape))
        shape.append(n)
    named = cutting(splits, axes)
    leading = [place[a] for axis in named for a in axis.mesh_axes]
    blocks = jnp.transpose(jnp.reshape(x, shape), (*leading, *own))
    return jnp.reshape(blocks, (*(axis.size for axis in named), *(shape[i] for i in own)))


def join(blocks: jax.Array, splits: Splits, axes: Sequence[DeviceAxis]) -> jax.Array:
    """Returns blocks as one array: the inverse of ``cut``; scalars become a vector.

    Args:
      blocks: they have a leading dim of devices for each of ``axes``.
      splits: for every mesh axis of ``axes`` the dim along which blocks are joined.
    """
    expanded = [n for axis in axes for _, n in axis.sizes]
    place = {a: i for i, a in enumerate(a for axis in axes for a in axis.mesh_axes)}
    shape = blocks.shape[len(axes) :] or (1,)
    order: list[int] = []
    joined: list[int] = []
    for d, n in enumerate(shape):
        outer = [place[axis] for axis, dim in splits if dim == d]
        order += [*outer, len(expanded) + d]
        joined.append(n * prod(expanded[i] for i in outer))
    return jnp.reshape(jnp.transpose(jnp.reshape(blocks, (*expanded, *shape)), order), joined)


def cutting(splits: Splits, axes: Sequence[DeviceAxis]) -> tuple[DeviceAxis, ...]:
    """Returns the axis names all of whose mesh axes split an array: its blocks differ between their devices."""
    split = {axis for axis, _ in splits}
    return tuple(axis for axis in axes if split.issuperset(axis.mesh_axes))


def default_joint(axes: Sequence[DeviceAxis]) -> Splits:
    """Returns the joint of blocks along their first dim."""
    return tuple((axis, 0) for each in axes for axis in each.mesh_axes)


def _sizes(axes: Sequence[DeviceAxis]) -> dict[str, int]:
    return {name: n for axis in axes for name, n in axis.sizes}


# ---- The step on whole arrays ----------------------------------------------------------------------------------------

Joints = Callable[[Sequence[Leaf], HeldState, Sequence[tuple[DeviceAxis, ...]]], Sequence[Splits]]


@dataclass(frozen=True)
class DeviceMap:
    """How a step on one device is run on whole arrays.

    Args:
      axes: the axis names of its collectives, outermost first.
      inputs: the whole arrays that it takes.
      splits: where each of them is cut; empty for those that are whole on every device.
      joints: from the outputs of one device, the state among them, and per output the axes on whose devices it may
        differ, to where it is joined.
    """

    axes: tuple[DeviceAxis, ...]
    inputs: tuple[Leaf, ...]
    splits: tuple[Splits, ...]
    joints: Joints

    @property
    def blocks(self) -> tuple[Leaf, ...]:
        """The inputs of one device: a block of each."""
        pairs = zip(self.inputs, self.splits, strict=True)
        return tuple(replace(x, shape=block_shape(x.shape, at, self.axes)) for x, at in pairs)

    def whole(self, step: PureStep) -> Callable[..., list[Any]]:
        """Returns the step of one device as a function of whole arrays."""

        def on_whole_arrays(*leaves: Any) -> list[Any]:
            names = [(axis.name, axis.size) for axis in self.axes]
            given = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak) for x in self.blocks]
            try:
                closed, shapes = jax.make_jaxpr(step, axis_env=names, return_shape=True)(*given)
            except Exception as error:
                error.add_note(self._shapes_on_one_device())
                raise
            cut_by = [cutting(splits, self.axes) for splits in self.splits]
            program = map_devices(closed, cut_by, self.axes)
            blocks = (cut(x, splits, self.axes) for x, splits in zip(leaves, self.splits, strict=True))
            results = program.run(*blocks)
            outputs = [typed_leaf(each.path, x, each.dims) for each, x in zip(step.outputs, shapes, strict=True)]
            where = self.joints(outputs, step.held, program.varying)
            each = zip(results, where, program.varying, strict=True)
            return [join(x, splits, axes) if axes else x for x, splits, axes in each]

        return on_whole_arrays

    def _shapes_on_one_device(self) -> str:
        names = ", ".join(repr(axis.name) for axis in self.axes)
        cuts = [f"{x.path} {x.type}" for x, splits in zip(self.blocks, self.splits, strict=True) if splits]
        return f"one device of {names} has {', '.join(shortened(cuts))} as pinned, and all of the other arguments"


# ---- Batching --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceProgram:
    """A step over blocks of all devices.

    Args:
      run: from blocks with leading dims of devices to results with leading dims of devices.
      varying: per result, the axis names on whose devices it may differ; it has a leading dim for each of them.
    """

    run: Callable[..., list[Any]]
    varying: tuple[tuple[DeviceAxis, ...], ...]


def map_devices(
    closed: ClosedJaxpr, cut_by: Sequence[Sequence[DeviceAxis]], axes: Sequence[DeviceAxis]
) -> DeviceProgram:
    """Returns a step on one device as a program over the blocks of all devices.

    Args:
      closed: with the axis names in its collectives.
      cut_by: per input, the axes that cut it.
      axes: outermost first.
    """
    varying: list[list[DeviceAxis]] = [[] for _ in closed.jaxpr.outvars]
    for i, axis in reversed(list(enumerate(axes))):
        around = [(outer.name, outer.size) for outer in axes[:i]]
        run = jaxpr_as_fun(_with_known_collectives(closed, axis, [(a.name, a.size) for a in axes[: i + 1]]))
        cuts = [axis in some for some in cut_by]
        inputs = [_struct(v.aval, (axis.size,) * is_cut) for v, is_cut in zip(closed.jaxpr.invars, cuts, strict=True)]
        over = partial(jax.vmap, in_axes=[0 if is_cut else None for is_cut in cuts], axis_name=axis.name)
        over = partial(over, axis_size=axis.size)
        differs = _Varying()
        jax.make_jaxpr(over(_marked(run, differs)), axis_env=around)(*inputs)
        places = [0 if j in differs.found else None for j in range(len(varying))]
        closed = jax.make_jaxpr(over(run, out_axes=places), axis_env=around)(*inputs)
        for j in differs.found:
            varying[j].insert(0, axis)
    return DeviceProgram(jaxpr_as_fun(closed), tuple(map(tuple, varying)))


def _struct(aval: Any, leading: Sequence[int] = ()) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*leading, *aval.shape), aval.dtype, weak_type=aval.weak_type)


@dataclass(eq=False)
class _Varying:
    """Numbers of the results that were batched."""

    found: set[int] = field(default_factory=set)


def _marked(run: Callable[..., list[Any]], differs: _Varying) -> Callable[..., list[Any]]:
    return lambda *args: [_mark_p.bind(x, number=i, differs=differs) for i, x in enumerate(run(*args))]


def _note_batched(args: Sequence[Any], dims: Sequence[Any], *, number: int, differs: _Varying) -> tuple[Any, Any]:
    differs.found.add(number)
    return args[0], dims[0]


_mark_p = Primitive("mark")  # the identity; records which results are batched
_mark_p.def_impl(lambda x, *, number, differs: x)
_mark_p.def_abstract_eval(lambda x, *, number, differs: x)
batching.primitive_batchers[_mark_p] = _note_batched


# ---- Collectives that vmap does not know -----------------------------------------------------------------------------
# A primitive of ours stands for them. Its first operand is the device's position, which is batched whatever the other
# one is, so that the batching rule always runs, and sees the operands of all devices in their order.


def _with_known_collectives(closed: ClosedJaxpr, axis: DeviceAxis, env: Sequence[tuple[str, int]]) -> ClosedJaxpr:
    """Returns the jaxpr with our primitive in place of collectives over ``axis`` that ``vmap`` cannot batch."""
    return ClosedJaxpr(_known(closed.jaxpr, axis, env), closed.consts)


def _known(jaxpr: Jaxpr, axis: DeviceAxis, env: Sequence[tuple[str, int]]) -> Jaxpr:
    found = [new for eqn in jaxpr.eqns for new in _known_eqns(eqn, axis, env)]
    same = len(found) == len(jaxpr.eqns) and all(x is y for x, y in zip(found, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=found)


def _known_eqns(eqn: JaxprEqn, axis: DeviceAxis, env: Sequence[tuple[str, int]]) -> Iterator[JaxprEqn]:
    over_all = _unknown_to_vmap(eqn, axis)
    if over_all is None:
        inside = {name: _known_in(value, axis, env) for name, value in eqn.params.items()}
        same = all(inside[name] is value for name, value in eqn.params.items())
        yield eqn if same else eqn.replace(params=inside)
        return
    (operand,), (result,) = eqn.invars, eqn.outvars
    made = jax.make_jaxpr(
        lambda x: _across_p.bind(lax.axis_index(axis.name), x, over_all=over_all, shape=result.aval), axis_env=env
    )(_struct(operand.aval))
    (index, across) = made.jaxpr.eqns
    yield index.replace(source_info=eqn.source_info)
    yield across.replace(invars=[index.outvars[0], operand], outvars=[result], source_info=eqn.source_info)


def _known_in(value: Any, axis: DeviceAxis, env: Sequence[tuple[str, int]]) -> Any:
    """A parameter of an equation, with the jaxprs in it rewritten."""
    if isinstance(value, ClosedJaxpr):
        inner = _known(value.jaxpr, axis, env)
        return value if inner is value.jaxpr else ClosedJaxpr(inner, value.consts)
    if isinstance(value, Jaxpr):
        return _known(value, axis, env)
    if type(value) is tuple:
        items = tuple(_known_in(x, axis, env) for x in value)
        return value if all(x is y for x, y in zip(items, value, strict=True)) else items
    return value


Across = Callable[[jax.Array], jax.Array]  # from the operands of all devices, in their order, to their results


def _unknown_to_vmap(eqn: JaxprEqn, axis: DeviceAxis) -> Across | None:
    """Returns a collective as a function of all operands; None for equations that ``vmap`` can batch."""
    params, name, n = eqn.params, eqn.primitive.name, axis.size
    over = params.get("axes", params.get("axis_name"))
    if (over if isinstance(over, tuple) else (over,)) != (axis.name,):
        return None
    if name == "ppermute" and sorted(to for _, to in params["perm"]) != list(range(n)):
        return partial(_permuted, pairs=tuple(params["perm"]))
    if name == "pbroadcast":
        return lambda x: jnp.broadcast_to(x[params["source"]], x.shape)
    groups = params.get("axis_index_groups")
    if groups is None or name not in _IN_GROUP:
        return None
    return partial(_grouped, groups=groups, within=partial(_IN_GROUP[name], params=params))


def _permuted(x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Returns the block that each device receives: zeros if no other sends to it."""
    n, source = x.shape[0], {to: start for start, to in pairs}
    unused = iter(sorted(set(range(n)) - set(source.values())))
    order = np.array([source[i] if i in source else next(unused) for i in range(n)])
    receives = np.array([i in source for i in range(n)])
    return jnp.where(jnp.expand_dims(receives, range(1, x.ndim)), x[order], jnp.zeros_like(x))


def _grouped(x: jax.Array, groups: Sequence[Sequence[int]], within: Across) -> jax.Array:
    """Runs a collective within each group of devices."""
    members = np.concatenate([np.asarray(group) for group in groups])
    if len({len(group) for group in groups}) == 1:  # one array with a dim of groups, as the compiler knows it
        grouped = x[members].reshape(len(groups), -1, *x.shape[1:])
        results = jax.vmap(within)(grouped)
        results = results.reshape(len(members), *results.shape[2:])
    else:
        results = jnp.concatenate([within(x[np.asarray(group)]) for group in groups])
    return results[np.argsort(members)]


def _reduced(x: jax.Array, reduce: Callable[..., jax.Array], params: Any) -> jax.Array:
    return jnp.broadcast_to(reduce(x, (0,)), x.shape)


def _gathered(x: jax.Array, params: Any) -> jax.Array:
    dim = params["all_gather_dimension"]
    whole = jnp.concatenate(list(x), dim) if params["tiled"] else jnp.moveaxis(x, 0, dim)
    return jnp.broadcast_to(whole, (x.shape[0], *whole.shape))


def _scattered(x: jax.Array, params: Any) -> jax.Array:
    dim, total = params["scatter_dimension"], x.sum(0)
    if not params["tiled"]:
        return jnp.moveaxis(total, dim, 0)
    return jnp.stack(jnp.split(total, x.shape[0], dim))


def _exchanged(x: jax.Array, params: Any) -> jax.Array:
    split, place = params["split_axis"], params["concat_axis"]
    pieces = jnp.stack(jnp.split(x, x.shape[0], 1 + split))  # receiver, sender, piece
    return jnp.stack([jnp.concatenate(list(piece), place) for piece in pieces])


_IN_GROUP: dict[str, Callable[..., jax.Array]] = {
    "psum": partial(_reduced, reduce=lax.reduce_sum),
    "pmax": partial(_reduced, reduce=lax.reduce_max),
    "pmin": partial(_reduced, reduce=lax.reduce_min),
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
}


def _batch_across(args: Sequence[Any], dims: Sequence[Any], *, over_all: Across, shape: Any) -> tuple[Any, int]:
    index, x = args
    n = index.shape[dims[0]]
    blocks = jnp.broadcast_to(x, (n, *x.shape)) if dims[1] is None else jnp.moveaxis(x, dims[1], 0)
    return over_all(blocks), 0


_across_p = Primitive("across")  # a collective: device's position, operand -> result
_across_p.def_abstract_eval(lambda index, x, *, over_all, shape: shape)
batching.primitive_batchers[_across_p] = _batch_across
