"""A training step planned over a mesh, run several times in a row, and as its author or XLA alone would run it.

A step for ``jax.pmap`` is run by ``jax.pmap`` on as many devices as the data axes have, and XLA is given it as a
``jax.shard_map`` over them, which is what ``jax.pmap`` has become. One that changes objects of nnx in place is run by
``nnx.jit``, one on modules of equinox by ``equinox.filter_jit``, others by ``jax.jit``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bench.programs.adapter import Training
from bench.zoo.peer import chosen_layouts
from meshdsl.api import Sharded, parallelize
from meshdsl.api.axis_names import inner_of_pmap
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, S
from meshdsl.lowering.numerics import CheckReport, LeafError, check_numbers, perturb
from meshdsl.lowering.shardings import device_mesh
from meshdsl.trace import Call, PureStep, flatten_call
from meshdsl.trace.objects import holds_objects
from meshdsl.trace.pure_step import named_arrays
from meshdsl.trace.static_leaves import has_static, hide, reveal
from meshdsl.util.paths import matches

STEPS, NUDGES = 10, 2
FREE = "model"  # the mesh axis that the batch is not split over
Args = tuple[Any, ...]
Pins = Mapping[str, Layout]


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes over which the batch is split."""
    return tuple(axis for axis in mesh.names if axis != FREE)


def on_mesh(
    training: Training, mesh: Mesh, pins: Pins | None = None, outputs: Pins | None = None, memory: float | None = None
) -> Sharded:
    """Returns the step over a mesh: its batch split over the data axes, everything else left open if not pinned."""
    axes = data_axes(mesh)
    batch = {glob: Layout(**{axis: S(dim) for axis in axes}) for glob, dim in training.batch.items()}
    names = {training.axis: axes} if training.axis else None
    return parallelize(training.step, mesh, batch if pins is None else pins, outputs, memory, axis_names=names)


# ---- Steps in a row --------------------------------------------------------------------------------------------------


def in_a_row(step: Callable[..., Any], training: Training, args: Args) -> tuple[Args, Any]:
    """Returns the next arguments and the last result after ``STEPS`` steps."""
    result = step(*args)
    for i in range(1, STEPS):
        args = training.next_args(args, result, i)
        result = step(*args)
    return training.next_args(args, result, STEPS), result


def compare_in_a_row(
    sharded: Sharded, published: Callable[..., Any], training: Training, expected: tuple[Args, Any]
) -> CheckReport:
    """Returns how arguments and result after ``STEPS`` steps agree with those of the step as its author runs it.

    Every argument, and the result, is compared as a tree of its own: counts in metrics would hide errors of parameters.
    What is allowed follows from how much they change when the first arguments are perturbed by rounding errors.

    Args:
      published: the step as its author runs it.
      expected: from ``in_a_row`` of that.

    Raises:
      CheckError: some differ by more.
    """
    wanted, got = (_named(*end) for end in (expected, in_a_row(sharded, training, copied(training.args))))

    @cache
    def nudged() -> list[dict[str, Any]]:
        perturbed = (copied(training.args, lambda x, seed=seed: perturb(x, seed)) for seed in range(NUDGES))
        return [_named(*in_a_row(published, training, args)) for args in perturbed]

    def compared(paths: list[str]) -> tuple[LeafError, ...]:
        ends = [[end[path] for path in paths] for end in (wanted, got)]
        return check_numbers(*ends, paths, nudged=lambda: [[end[path] for path in paths] for end in nudged()]).leaves

    trees = groupby(wanted, lambda path: path.split(".")[: 2 if path.startswith("args") else 1])
    return CheckReport(tuple(leaf for _, tree in trees for leaf in compared(list(tree))))


def _named(args: Args, result: Any) -> dict[str, Any]:
    return named_arrays({"args": args, "result": result})[0]


def as_published(training: Training, mesh: Mesh) -> Callable[..., Any]:
    """Returns the step on one device, or under ``jax.pmap`` on as many as the data axes of a mesh have."""
    if holds_objects(training.args):
        from flax import nnx

        return nnx.jit(training.step)
    if has_static(jax.tree.structure(hide(training.args))):
        import equinox

        return equinox.filter_jit(training.step)
    return jax.jit(training.step) if training.axis is None else _pmapped(training, mesh)


def _pmapped(training: Training, mesh: Mesh) -> Callable[..., Any]:
    devices = prod(mesh.sizes_by_name[axis] for axis in data_axes(mesh))
    step = inner_of_pmap(training.step) or training.step
    call = flatten_call(step, training.args, {})
    dims = _batch_dims(training, call)
    mapped = jax.pmap(
        lambda *leaves: step(*call.arguments(leaves)[0]),
        training.axis,
        in_axes=tuple(None if dim is None else 0 for dim in dims),
        devices=jax.devices()[:devices],
    )

    def run(*args: Any) -> Any:
        leaves = zip(jax.tree.leaves(args), dims, strict=True)
        blocks = (x if dim is None else jnp.stack(jnp.split(x, devices, dim)) for x, dim in leaves)
        return jax.tree.map(_joined, mapped(*blocks))

    return run


def _joined(x: jax.Array) -> jax.Array:
    """Returns what all devices agree on, or their blocks as one array: along dim 0, of scalars one per device."""
    plain = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    if np.array_equal(plain, np.broadcast_to(plain[:1], plain.shape), equal_nan=jnp.issubdtype(x.dtype, jnp.inexact)):
        return x[0]
    return jnp.concatenate(x) if x.ndim > 1 else x


def copied(args: Args, change: Callable[[Any], Any] = lambda x: x) -> Args:
    """Returns arguments that share nothing with these, their arrays changed."""

    def copy(x: Any) -> Any:
        return jnp.array(change(x), copy=True)

    if not holds_objects(args):
        return reveal(jax.tree.map(copy, hide(args)))
    from flax import nnx

    graph, state = nnx.split(args)
    return nnx.merge(graph, jax.tree.map(copy, state))


def _batch_dims(training: Training, call: Call) -> list[int | None]:
    """Returns the dim of each argument that the data axes split."""
    globs = training.batch.items()
    return [next((dim for glob, dim in globs if matches(glob, path)), None) for path in call.paths]


# ---- As XLA alone divides it -----------------------------------------------------------------------------------------


def xla_program(training: Training, mesh: Mesh) -> tuple[Any, list[Layout], list[Layout]]:
    """Returns the step compiled with only its batch sharded, and the input and output layouts that XLA chose."""
    _, call, pure, dims = _pure(training)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in call.leaves]
    if training.axis is None:
        inputs = _split(dims, mesh)
        compiled = jax.jit(pure, in_shardings=inputs, keep_unused=True).lower(*shapes).compile()
        return compiled, *chosen_layouts(compiled, mesh)
    compiled = jax.jit(_mapped(pure, dims, training, mesh), keep_unused=True).lower(*shapes).compile()
    whole = Layout(**dict.fromkeys(mesh.names, B))
    split = [whole if dim is None else Layout(**{a: B if a == FREE else S(dim) for a in mesh.names}) for dim in dims]
    return compiled, split, [whole] * len(pure.outputs)


def jitted_step(training: Training, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step under ``jax.jit``, and its arguments as shapes that lie on a mesh, the batch alone split."""
    step, call, pure, dims = _pure(training)
    if training.axis is not None:
        shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype) for x in call.leaves)
        return jax.jit(_mapped(pure, dims, training, mesh)), shapes
    whole = NamedSharding(device_mesh(mesh), PartitionSpec())
    shapes = tuple(
        jax.ShapeDtypeStruct(jnp.shape(x), jax.typeof(x).dtype, sharding=at or whole, weak_type=jax.typeof(x).weak_type)
        for x, at in zip(call.leaves, _split(dims, mesh), strict=True)
    )
    if holds_objects(training.args) or has_static(jax.tree.structure(hide(training.args))):
        return jax.jit(pure), shapes
    args, _ = call.arguments(shapes)
    return jax.jit(step), args


def _pure(training: Training) -> tuple[Callable[..., Any], Call, PureStep, list[int | None]]:
    """Returns the step, a call of it, the same as a function of flat arrays, and the dims of these that are split."""
    step = inner_of_pmap(training.step) or training.step
    call = flatten_call(step, training.args, {})
    pure = PureStep(step, call)
    pure.__name__ = call.name  # for jax.jit
    return step, call, pure, _batch_dims(training, call)


def _split(dims: Sequence[int | None], mesh: Mesh) -> list[NamedSharding | None]:
    """Returns shardings over the data axes; if there is none, whole ones, since XLA would compile for one device."""
    devices, axes = device_mesh(mesh), data_axes(mesh)
    unsplit = NamedSharding(devices, PartitionSpec()) if dims == [None] * len(dims) else None
    return [unsplit if dim is None else NamedSharding(devices, _spec(dim, axes)) for dim in dims]


def _mapped(pure: PureStep, dims: Sequence[int | None], training: Training, mesh: Mesh) -> Callable[..., Any]:
    """Returns a step for ``jax.pmap`` as a ``jax.shard_map`` over its axis."""
    devices = jax.sharding.Mesh(device_mesh(mesh).devices.reshape(-1, mesh.axis(FREE)), (training.axis, FREE))
    specs = [PartitionSpec() if dim is None else _spec(dim, (training.axis,)) for dim in dims]
    mapped: Callable[..., Any] = jax.shard_map(
        pure, mesh=devices, in_specs=tuple(specs), out_specs=PartitionSpec(), check_vma=False
    )
    return mapped


def _spec(dim: int, axes: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(*(None,) * dim, tuple(axes))
