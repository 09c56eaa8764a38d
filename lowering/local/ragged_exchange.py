"""The local program of ``md.ragged_exchange``: one ragged collective, or rounds of all-to-alls, as the platform has it.

A device has all sizes, so it knows of every row where it lies and where it goes. The compiler for CPU has no ragged
collective: there a round has equally many slots for every pair of ranks, and rounds run until the fullest pair has sent
all of its rows, on devices as many as exchange with each other. A plan for a ragged collective, run on CPU, has slots
for as many rows as balanced routing sends, so that it sends as many bytes as are planned if routing is balanced.

    ragged     x [batch m rows features], of the m ranks of a device         one slice per batch, own and other rank
    rounds     slots [batch m devices m slots features], exchanged along ``devices``
"""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.lowering.local.collectives import collective_scope
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.primitives.ragged_exchange import rows_at, rows_before, sender_of_rows, sizes_within
from meshdsl.rules.ragged_exchange import exchanged_port

_RAGGED = ("tpu", "gpu", "cuda", "rocm")  # platforms whose compilers have ragged collectives


@local("ragged_exchange")
def exchange(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> Sequence[jax.Array]:
    """Exchanges rows between the devices that split the ranks; a lookup where none do."""
    x, sizes = arrays
    axes = where.outputs[0].splitting(x.ndim - 3)
    if prod(where.sizes[axis] for axis in axes) == 1:
        return bind(op, *arrays)
    batch, ranks = x.shape[:-3], sizes.shape[-1]
    rows = x.reshape(-1, *x.shape[-3:])
    counts, me = sizes.reshape(-1, ranks, ranks), where.index(axes) * x.shape[-3]
    with jax.named_scope(collective_scope("all-to-all", axes, x.dtype)):
        if op.params["ragged"] and where.platform in _RAGGED:
            made = _ragged(rows, counts, op.params["length"], me, axes)
        else:
            most = (*op.inputs, *op.outputs)[exchanged_port(op)].shape[-2]
            made = _in_rounds(rows, counts, op.params["length"], most // ranks, me, axes)
    return (made.reshape(*batch, *made.shape[1:]),)


def _ragged(x: jax.Array, sizes: jax.Array, length: int, me: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns ``[batch m length features]`` by one collective, ``sizes`` being ``[batch sender receiver]``."""
    batch, own, rows, features = x.shape
    devices = sizes.shape[-1] // own

    def sent(table: jax.Array) -> jax.Array:
        """Entries of the own ranks as senders, by device, batch, own rank and rank of the device."""
        mine = lax.dynamic_slice_in_dim(table, me, own, 1)
        return jnp.moveaxis(mine.reshape(batch, own, devices, own), 2, 0)

    fitting = sizes_within(sizes, rows, length)
    received = lax.dynamic_slice_in_dim(fitting, me, own, 2).reshape(batch, devices, own, own)
    blocks = jnp.arange(batch * own, dtype=jnp.int32).reshape(batch, own)
    at_sender = sent(jnp.minimum(rows_before(sizes, 2), rows)) + blocks[:, :, None] * rows
    at_receiver = sent(jnp.minimum(rows_before(sizes, 1), length)) + blocks[:, None] * length
    slices = at_sender, sent(fitting), at_receiver, jnp.moveaxis(received, 1, 0)
    output = jnp.zeros((batch * own * length, features), x.dtype)
    flat = x.reshape(batch * own * rows, features), output, *(table.ravel() for table in slices)
    made: jax.Array = lax.ragged_all_to_all(*flat, axis_name=axes)
    return made.reshape(batch, own, length, features)


def _in_rounds(
    x: jax.Array, sizes: jax.Array, length: int, slots: int, me: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """Returns the same by all-to-alls of ``slots`` per pair of ranks."""
    batch, own, rows, features = x.shape
    ranks = sizes.shape[-1]
    sending = lax.dynamic_slice_in_dim(sizes, me, own, 1)[..., None]  # [batch own receiver 1]
    begins = lax.dynamic_slice_in_dim(rows_before(sizes, 2), me, own, 1)[..., None]
    sender = lax.dynamic_slice_in_dim(sender_of_rows(sizes, length), me, own, 1)  # [batch own row]
    first = jnp.swapaxes(lax.dynamic_slice_in_dim(rows_before(sizes, 1), me, own, 2), 1, 2)  # [batch own sender]
    place = jnp.arange(length) - jnp.take_along_axis(first, sender, 2, mode="fill", fill_value=0)

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        at = index * slots + jnp.arange(slots)
        at = jnp.where(at < sending, begins + at, rows).reshape(batch, own, ranks * slots)
        sent = rows_at(x, at).reshape(batch, own, ranks // own, own, slots, features)
        found = lax.all_to_all(sent, axes, 2, 2, tiled=True)
        found = jnp.moveaxis(found, 3, 1).swapaxes(2, 3).reshape(batch, own, ranks * slots, features)
        slot = place - index * slots
        is_here = (sender < ranks) & (slot >= 0) & (slot < slots)
        return jnp.where(is_here[..., None], rows_at(found, jnp.where(is_here, sender * slots + slot, 0)), total)

    rounds = (jnp.max(sizes) + slots - 1) // slots
    made: jax.Array = lax.fori_loop(0, rounds, one, jnp.zeros((batch, own, length, features), x.dtype))
    return made
