"""Products that run in parts beside the hops of a ring (``meshdsl.ir.rings``), as one device runs them.

Device ``i`` of ``k`` passes blocks on to device ``i + 1``. After ``s`` hops, the block of device ``i - s`` has arrived
and is multiplied while it travels on. A sum for device ``i + s`` has ``s`` hops to go: its part is computed while what
other devices have summed comes here, and the last part is the device's own. Both ways around, so do the block of device
``i + s`` and the sum for device ``i - s``; with an even number of devices, one way is a hop longer.

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
Held = tuple[Arrays, Any]  # results so far, and the gathered operand or None
_WAYS = (1, -1)  # by which a device's number differs from that of the one that it passes blocks on to


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
    (far, near), first = (ring.reach[0], ring.reach[-1]), ring.ways - 1

    def multiplied(distance: Index, block: jax.Array, held: Held) -> Held:
        at, (made, whole), found = (lax.axis_index(ring.axis) - distance) % ring.devices, held, list[jax.Array]()
        for each, known, x in zip(ring.products, operands, made, strict=True):
            read = [block if i == each.port else y for i, y in enumerate(known)]
            part, into = _part(each, read, at, ring.devices), each.cut.result
            found.append(x + part if into is None else _with_block(x, part, at, into))
        return tuple(found), None if whole is None else _with_block(whole, block, at, ring.dim)

    def arrived(s: Index, blocks: Arrays, held: Held) -> Held:
        for way, block in zip(_WAYS, blocks, strict=False):
            held = multiplied(way * s, block, held)
        return held

    def step(s: Index, state: tuple[Arrays, Held]) -> tuple[Arrays, Held]:
        return _passed_on(state[0], ring), arrived(s, *state)

    blocks, held = (block,), (made, whole)
    if ring.ways > 1:  # the own block leaves both ways, and is one part
        blocks, held = lax.optimization_barrier((_passed_on((block, block), ring), multiplied(0, block, held)))
    blocks, held = lax.optimization_barrier(lax.fori_loop(first, near, step, (blocks, held)))
    if far > near:
        blocks, held = lax.optimization_barrier((_passed_on(blocks[:1], ring), arrived(near, blocks, held)))
    made, whole = arrived(far, blocks, held)
    return tuple(x.astype(each.op.outputs[0].dtype) for each, x in zip(ring.products, made, strict=True)), whole


def scatter_ring(ring: ProductRing, operands: Arrays, block: Shape) -> jax.Array:
    """Returns this device's block of the reduced result of a product.

    Args:
      operands: of the product.
      block: the shape of the result.
    """
    (product,) = ring.products

    (far, near), nothing = (ring.reach[0], ring.reach[-1]), jnp.zeros(block, ring.value.dtype)

    def part(distance: Index) -> jax.Array:
        made = _part(product, operands, (lax.axis_index(ring.axis) + distance) % ring.devices, ring.devices)
        for op in ring.between:
            made = lax.transpose(made, op.params["permutation"]) if op.name == "transpose" else made
        return made

    def parts(distance: Index) -> Arrays:
        return tuple(part(way * distance) for way in _WAYS[: ring.ways])

    def summed(totals: Arrays, last: Arrays) -> Arrays:
        return tuple(total + part for total, part in zip(totals, last, strict=True))

    def step(s: Index, state: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        return _passed_on(summed(*state), ring), parts(near - 1 - s)

    totals = (nothing,) * ring.ways
    if far > near:
        first, operands = lax.optimization_barrier((part(far), operands))
        totals = (*_passed_on((first,), ring), nothing)
    state: tuple[Arrays, Arrays] = lax.fori_loop(0, near + 1 - ring.ways, step, (totals, parts(near)))
    (totals, last), operands = lax.optimization_barrier((state, operands))
    if ring.ways > 1:  # both sums arrive, and the own part is one
        totals, last = lax.optimization_barrier((_passed_on(summed(totals, last), ring), (part(0),)))
    total: jax.Array = sum(totals[1:], totals[0]) + last[0]
    return total


def _passed_on(blocks: Arrays, ring: ProductRing) -> Arrays:
    """Returns the neighbours' blocks, one per way around."""
    found, k = list[jax.Array](), ring.devices
    for way, x in zip(_WAYS, blocks, strict=False):
        with jax.named_scope(collective_scope("collective-permute", (ring.axis,), x.dtype)):
            found.append(lax.ppermute(x, ring.axis, [(i, (i + way) % k) for i in range(k)]))
    return tuple(found)


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
