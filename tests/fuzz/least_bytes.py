"""The least that any plan sends, for the layouts that inputs and results have: a cut of the information that flows.

What enters a device is at least the rank of how the results that it holds depend on the inputs that it does not hold,
in numbers; likewise for what leaves it, with the inputs that it alone holds. By hand, for a dim of n rows over k
devices:

    u[1:] - u[:-1]            one row of the neighbour         u[-1]      the row, by the device that has it
    u.at[0].set(u[1])         nothing                          u[::-1]    all rows of a device
    jnp.sum(u)                one number                       u[:, ::2]  nothing

The dependence is the Jacobian at a random point: for a step that adds, multiplies and moves it is what the formulas
above say, and a step that compares or selects depends on no more than that.

A loss is one number, and so is its derivative along any direction. There the second derivatives say how many products
of a device's inputs with those of others it needs; for each, a number enters or leaves the device:

    jnp.sum((u[1:] - u[:-1]) ** 2)    one row leaves, another enters
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.plan.types import Array

TOLERANCE = 1e-4  # of the largest singular value: what is below is rounding
Mask = np.ndarray  # of elements: which ones a device holds


def least_bytes(step: Callable[..., Any], args: Sequence[Any], plan: md.Plan) -> int:
    """Returns the bytes that the busiest device has to send or receive, for the layouts of the plan's boundary.

    Args:
      step: a function of arrays, of which the float32 ones count.
    """
    floats = [i for i, x in enumerate(args) if np.asarray(x).dtype == np.float32]
    flat, point = _flat(step, args, floats)
    inputs = _held([plan.inputs[i] for i in floats], plan.mesh)
    alone = inputs & (inputs.sum(0) == 1)
    first = _jacobian(flat, point)
    if len(first) == 1:
        second = _jacobian(jax.grad(lambda x: flat(x)[0]), point)
        products = max(_rank(second[own][:, ~a]) for a, own in zip(inputs, alone, strict=True))
        return 4 * max(-(-products // 2), *(_rank(first[:, ~a]) for a in inputs))
    results = _held([x for x in plan.outputs if x.dtype == "float32"], plan.mesh)
    entering = (_rank(first[b][:, ~a]) for a, b in zip(inputs, results, strict=True))
    leaving = (_rank(first[~b][:, own]) for b, own in zip(results, alone, strict=True))
    return 4 * max(*entering, *leaving)


def _flat(
    step: Callable[..., Any], args: Sequence[Any], floats: Sequence[int]
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Returns the step as a function of all its float arguments in one vector, and a random point."""
    shapes = [np.shape(args[i]) for i in floats]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

    def flat(x: jax.Array) -> jax.Array:
        given = list(args)
        for i, part, shape in zip(floats, jnp.split(x, ends[:-1]), shapes, strict=True):
            given[i] = part.reshape(shape)
        return jnp.concatenate([y.ravel() for y in jax.tree.leaves(step(*given)) if y.dtype == jnp.float32])

    return flat, jnp.asarray(np.random.default_rng(0).normal(size=ends[-1]), jnp.float32)


def _jacobian(function: Callable[[jax.Array], jax.Array], point: jax.Array) -> np.ndarray:
    """Returns the Jacobian, a column at a time: some operations are large when they are batched."""

    def column(direction: jax.Array) -> jax.Array:
        return jax.jvp(function, (point,), (direction,))[1]

    columns = jax.jit(lambda: jax.lax.map(column, jnp.eye(len(point))))()
    return np.asarray(jax.block_until_ready(columns)).T


def _held(arrays: Sequence[Array], mesh: md.Mesh) -> Mask:
    """Returns which elements of all arrays, flat, each device holds: [devices, elements]."""
    return np.concatenate([_blocks(x, mesh) for x in arrays], axis=1)


def _blocks(x: Array, mesh: md.Mesh) -> Mask:
    places = np.stack(np.unravel_index(np.arange(mesh.size), mesh.sizes))  # of devices: [axes, devices]
    held = np.ones((mesh.size, *x.shape), bool)
    for d, n in enumerate(x.shape):
        block = np.zeros(mesh.size, int)
        blocks = 1
        for axis in x.layout.splitting(d):
            block = block * mesh.axis(axis) + places[mesh.names.index(axis)]
            blocks *= mesh.axis(axis)
        rows = np.arange(n) * blocks // n == block[:, None]
        held &= rows.reshape(mesh.size, *(n if e == d else 1 for e in range(len(x.shape))))
    return held.reshape(mesh.size, -1)


def _rank(matrix: np.ndarray) -> int:
    """Returns the rank; rows and columns without entries do not matter."""
    matrix = matrix[np.abs(matrix).max(1, initial=0.0) > 0]
    matrix = matrix[:, np.abs(matrix).max(0, initial=0.0) > 0]
    if not matrix.size:
        return 0
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return int((values > TOLERANCE * values[0]).sum())
