"""Products that run in parts beside the hops of a ring (``meshdsl.ir.rings``), as one device runs them.

Device ``i`` of ``k`` passes blocks on to device ``i + 1``. In step ``s``, the block of device ``i - s`` has arrived and
is multiplied while it travels on; of a reduction, the part of device ``i - s - 1`` is computed while the sum that it is
added to travels, and the last part is the device's own.

The steps are a loop, since a compiler that sees several products of one operand makes one of them, behind all hops. The
last step has no hop and stands behind the loop and a barrier, which keeps it apart where a loop of one step is inlined.
A sum is carried beside the part that it waits for: added at once, the two would become one product that waits for the
hop.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.rings import ProductParts, ProductRing
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.collectives import collective_scope
from meshdsl.lowering.local.registry import bind

Index = int | jax.Array
Shape = tuple[int, ...]


def gather_ring(
    ring: ProductRing, block: jax.Array, operands: Sequence[Arrays], results: Sequence[Shape]
) -> tuple[Arrays, jax.Array | None]:
    """Returns the results of the products, and the gathered operand if the ring keeps it.

    Args:
      block: this device's block of the gathered operand.
      operands: of each product, with this block for the one that travels.
      results: the shape of each on one device.
    """
    sizes = [ring.devices * n if d == ring.dim else n for d, n in enumerate(block.shape)]
    whole = jnp.zeros(sizes, block.dtype) if ring.keeps else None
    made = tuple(jnp.zeros(shape, each.dtype) for each, shape in zip(ring.products, results, strict=True))

    def multiplied(s: Index, block: jax.Array, made: Arrays, whole: jax.Array | None) -> tuple[Arrays, Any]:
        at, found = (lax.axis_index(ring.axis) - s) % ring.devices, list[jax.Array]()
        for each, known, x in zip(ring.products, operands, made, strict=True):
            read = [block if i == each.port else y for i, y in enumerate(known)]
            part, into = _part(each, read, at, ring.devices), each.cut.result
            found.append(x + part if into is None else _with_block(x, part, at, into))
        return tuple(found), None if whole is None else _with_block(whole, block, at, ring.dim)

    def step(s: Index, state: tuple[jax.Array, Arrays, Any]) -> tuple[jax.Array, Arrays, Any]:
        block, made, whole = state
        return _passed_on(block, ring), *multiplied(s, block, made, whole)

    state = lax.fori_loop(0, ring.hops, step, (block, made, whole))
    made, whole = multiplied(ring.hops, *lax.optimization_barrier(state))
    return tuple(x.astype(each.op.outputs[0].dtype) for each, x in zip(ring.products, made, strict=True)), whole


def scatter_ring(ring: ProductRing, operands: Arrays, block: Shape) -> jax.Array:
    """Returns this device's block of the reduced result of a product.

    Args:
      operands: of the product.
      block: the shape of the result.
    """
    (product,) = ring.products

    def part(s: Index) -> jax.Array:
        made = _part(product, operands, (lax.axis_index(ring.axis) - 1 - s) % ring.devices, ring.devices)
        for op in ring.between:
            made = lax.transpose(made, op.params["permutation"]) if op.name == "transpose" else made
        return made

    def step(s: Index, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, last = state
        return _passed_on(total + last, ring), part(s + 1)

    nothing = jnp.zeros(block, ring.value.dtype)
    state: tuple[jax.Array, jax.Array] = lax.fori_loop(0, ring.hops, step, (nothing, part(0)))
    total, last = lax.optimization_barrier(state)
    summed: jax.Array = total + last
    return summed


def _passed_on(x: jax.Array, ring: ProductRing) -> jax.Array:
    """Returns the neighbour's block."""
    pairs = [(i, (i + 1) % ring.devices) for i in range(ring.devices)]
    with jax.named_scope(collective_scope("collective-permute", (ring.axis,), x.dtype)):
        passed: jax.Array = lax.ppermute(x, ring.axis, pairs)
    return passed


def _part(product: ProductParts, operands: Sequence[jax.Array], at: Index, devices: int) -> jax.Array:
    """Returns the part of a product that belongs to the block of device ``at``."""
    cut = [
        x if dim is None or i == product.port else _block(x, at, dim, devices)
        for i, (x, dim) in enumerate(zip(operands, product.cut[:2], strict=True))
    ]
    return bind(product.op, *cut)[0]


def _block(x: jax.Array, at: Index, dim: int, devices: int) -> jax.Array:
    size = x.shape[dim] // devices
    return lax.dynamic_slice_in_dim(x, at * size, size, dim)


def _with_block(x: jax.Array, block: jax.Array, at: Index, dim: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, block, at * block.shape[dim], dim)
