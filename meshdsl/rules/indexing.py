"""Rules of reads and writes at positions given by data: gather, scatter, dynamic slices.

The dims of a gather fall into four kinds, each of which can be split for a reason of its own:

* *batch* dims of the indices become dims of the result: each device looks up its own queries
* *window* dims, read whole: each device reads its own columns of every row
* *batching* dims pair operand and indices, like the batch of a matmul
* *looked up* dims, read one element at a time: each device returns the rows it holds and zeros for the others, so the
  result is partial (also several elements at a time, where there is only one query)

A scatter is the transpose: there the batch dims vanish, so split updates give partial results, and each device drops
the updates of rows that it does not hold. Positions refer to the whole tensor; the local programs shift them.

    gather       t[vocab@S, embed], ids[batch]               -> P       the embedding lookup
    scatter-add  t: P, ids[batch@S], g[batch@S, embed]       -> P       its gradient
    scatter-add  t[vocab@S, embed], ids[batch], g            -> S(0)    the same, without a sum
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Op
from meshdsl.layouts.placement import B, P, Placement, S
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.registry import carries, masked, rule
from meshdsl.rules.shape import kept, named

Combine = Callable[[jax.Array, jax.Array], jax.Array]  # of an old and a new value
COMBINE: dict[str, Combine] = {
    "dynamic_update_slice": lambda _, new: new,
    "scatter": lambda _, new: new,
    "scatter-add": jnp.add,
    "scatter-sub": jnp.subtract,
    "scatter-mul": jnp.multiply,
    "scatter-min": jnp.minimum,
    "scatter-max": jnp.maximum,
}
SCATTERS = tuple(name for name in COMBINE if name.startswith("scatter"))


@dataclass(frozen=True)
class Lookup:
    """The roles of the dims of a gather or scatter; *slices* is the gather's result, or the scatter's updates.

    Args:
      operand, indices, slices: a label per dim, None where it cannot be split.
      looked_up: operand dims that are addressed one element at a time.
      columns: per column of the indices, the operand dim that it addresses.
      limits: per column, the largest position that is in bounds.
      queries: dims of the slices that are batch dims of the indices, in order.
      sizes: per operand dim, how many elements a query addresses.
      windows: operand dims that are addressed by a single query, several elements at a time.
    """

    operand: tuple[str | None, ...]
    indices: tuple[str | None, ...]
    slices: tuple[str | None, ...]
    looked_up: tuple[int, ...]
    columns: tuple[int, ...]
    limits: tuple[int, ...]
    queries: tuple[int, ...]
    sizes: tuple[int, ...]
    windows: tuple[int, ...]


def gather_dims(op: Op) -> Lookup:
    """Returns the roles of the dims of a gather."""
    n = op.params["dimension_numbers"]
    removed = (*n.collapsed_slice_dims, *n.operand_batching_dims)
    pairs = tuple(zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True))
    return _lookup(op, n.start_index_map, removed, n.offset_dims, pairs, op.params["slice_sizes"], op.outputs[0].shape)


def scatter_dims(op: Op) -> Lookup:
    """Returns the roles of the dims of a scatter."""
    n = op.params["dimension_numbers"]
    removed = (*n.inserted_window_dims, *n.operand_batching_dims)
    pairs = tuple(zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True))
    updates = op.inputs[2].shape
    windows = iter(n.update_window_dims)
    sizes = tuple(1 if d in removed else updates[next(windows)] for d in range(len(op.inputs[0].shape)))
    return _lookup(op, n.scatter_dims_to_operand_dims, removed, n.update_window_dims, pairs, sizes, updates)


def _lookup(
    op: Op,
    columns: tuple[int, ...],
    removed: tuple[int, ...],
    windows: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    sizes: tuple[int, ...],
    slices: tuple[int, ...],
) -> Lookup:
    shape = op.inputs[0].shape
    queries = tuple(i for i in range(len(slices)) if i not in windows)
    indices = (*(f"q{i}" for i in range(len(queries))), None)
    batched = {d: indices[i] for d, i in pairs}
    operand = tuple(batched.get(d) or (f"w{d}" if sizes[d] == n else None) for d, n in enumerate(shape))
    applies = op.name == "scatter" and op.params["update_jaxpr"] is not None  # another function than its name says
    single = all(slices[i] == 1 for i in queries) and not applies
    seen = iter(label for d, label in enumerate(operand) if d not in removed)
    asked = iter(indices)
    return Lookup(
        operand=operand,
        indices=indices,
        slices=tuple(next(seen) if i in windows else next(asked) for i in range(len(slices))),
        looked_up=tuple(d for d in columns if sizes[d] == 1 < shape[d]),
        columns=tuple(columns),
        limits=tuple(shape[d] - sizes[d] for d in columns),
        queries=queries,
        sizes=tuple(sizes),
        windows=tuple(d for d in columns if single and 1 < sizes[d] < shape[d]),
    )


@rule("gather")
def gather(op: Op) -> Rule:
    """Batch, window and batching dims pass; looked up dims give partial results. Data movement in the operand."""
    dims = gather_dims(op)
    extra = tuple(Signature((S(d), B), (masked(op.inputs[0].dtype),)) for d in (*dims.looked_up, *dims.windows))
    inputs = (named(*dims.operand), named(*dims.indices))
    return Rule(inputs, (named(*dims.slices),), commuting=((0,),), extra=extra)


@rule("scatter-add", "scatter-sub")
def scatter_add(op: Op) -> Rule:
    """Linear in operand and updates jointly; monotone for floats only, since integers wrap."""
    rising, alone = jnp.issubdtype(op.inputs[0].dtype, jnp.floating), (2,) if _apart(op) else ()
    added = op.name == "scatter-add"
    return _scatter(
        op,
        P,
        linear=((0, 2),),
        increasing=(0, *(alone if added else ())) if rising else (),
        decreasing=() if added or not rising else alone,
    )


@rule("scatter-mul")
def scatter_mul(op: Op) -> Rule:
    """Linear in the operand."""
    return _scatter(op, None, linear=((0,),))


@rule("scatter-max")
def scatter_max(op: Op) -> Rule:
    """A maximum of operand and updates: it commutes with maxima, and is increasing."""
    return _scatter_extreme(op, P("max"))


@rule("scatter-min")
def scatter_min(op: Op) -> Rule:
    """A minimum of operand and updates: it commutes with minima, and is increasing."""
    return _scatter_extreme(op, P("min"))


@rule("scatter")
def scatter(op: Op) -> Rule:
    """Data movement, if no updates collide: of colliding ones, each device might keep another."""
    return _scatter(op, None, commuting=((0, 2),) if _apart(op) else ())


def _scatter_extreme(op: Op, held: Placement) -> Rule:
    split = tuple(Signature((B, S(q), S(at)), (held,)) for q, at in _lost(scatter_dims(op)))
    extra = (Signature((held, B, held), (held,)), Signature((B, B, held), (held,)), *split)
    return _scatter(op, held, extra=extra, increasing=(0, 2) if _apart(op) else (0,))


def _scatter(op: Op, held: Placement | None, extra: tuple[Signature, ...] = (), **properties: Any) -> Rule:
    """The rule of any scatter; ``held`` is the placement of operand and result where updates are split."""
    dims = scatter_dims(op)
    rows = [Signature((S(d), B, B), (S(d),)) for d in (*dims.looked_up, *dims.windows)]
    if held is not None:
        rows += [Signature((held, S(q), S(at)), (held,)) for q, at in _lost(dims)]
    inputs = (named(*dims.operand), named(*dims.indices), named(*dims.slices))
    return Rule(inputs, (named(*dims.operand),), extra=(*rows, *extra), **properties)


def _lost(dims: Lookup) -> list[tuple[int, int]]:
    """Batch dims that vanish in the result: pairs of a dim of the indices and a dim of the updates."""
    return [(q, at) for q, at in enumerate(dims.queries) if dims.indices[q] not in dims.operand]


def _apart(op: Op) -> bool:
    """Whether no element is updated more than once."""
    queries = op.inputs[1].shape[:-1]
    return bool(op.params["unique_indices"]) or all(n == 1 for n in queries)


@rule("dynamic_slice")
def dynamic_slice(op: Op) -> Rule:
    """Dims that are not cut; of a dim that is, each device returns its part of the window and zeros."""
    operand, sizes = op.inputs[0], op.params["slice_sizes"]
    dims, cut = window(operand.shape, sizes)
    starts = (B,) * (len(op.inputs) - 1)
    extra = tuple(Signature((S(d), *starts), (masked(operand.dtype),)) for d in cut)
    return Rule((dims, *((),) * len(starts)), (dims,), commuting=((0,),), extra=extra)


@rule("dynamic_update_slice")
def dynamic_update_slice(op: Op) -> Rule:
    """Dims that are updated whole; along others, each device writes the part of the window that falls in its block."""
    operand, update, *starts = op.inputs
    dims, cut = window(operand.shape, update.shape)
    blank = carries(masked(operand.dtype), operand.dtype)  # keys have no zeros to put around a window
    extra = tuple(Signature((S(d), B, *[B] * len(starts)), (S(d),)) for d in cut if blank)
    return Rule((dims, dims, *[()] * len(starts)), (dims,), commuting=((0, 1),), extra=extra)


def window(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Dims, tuple[int, ...]]:
    """Returns the dims, of which those taken whole can be split, and the positions of those that are cut."""
    cut = [d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size]
    return kept(len(shape), *cut), tuple(d for d in cut if sizes[d])
