"""Optimizers of whole matrices (Muon, Shampoo, SOAP) on packed parameters: every device owns some of the matrices.

The update of such an optimizer needs the whole gradient of a matrix, so a matrix has one owner, and what is split is
the dim that counts matrices. Parameters rarely have one that divides over the devices:

    layers/up/kernel      [6, 256, 1024]       -> 6 matrices ---------------.
    layers/down/kernel    [6, 1024, 256]       -> 6 matrices, transposed ----> "256x1024" [12, 256, 1024]
    layers/query/kernel   [6, 256, 8, 32]      -> 6 matrices ----.
    layers/out/kernel     [6, 8, 32, 256]      -> 6 matrices -----> "256x256" [12, 256, 256]

Matrices of equal shape, up to transposition, lie in one stack, filled with zeros up to a multiple of the owners. The
optimizer's state exists for the stacks alone, and splits evenly. The planner does the rest: gradients are
reduce-scattered to the owners of their matrices, updates all-gathered, as in ZeRO-1.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import meshdsl as md
from meshdsl.errors import ArgumentError

_UPDATE_SIZE = 0.2  # root mean square of an update's elements, per learning rate

View: TypeAlias = Callable[[str, tuple[int, ...]], tuple[int, int] | None]


def last_two(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the view of an array as the matrices of its last two dims; None if it has fewer.

    Args:
      path: where the array is in the tree of parameters, such as ``"layers/up/kernel"``.
      shape: its shape, ``[... rows columns]``.

    Example:
      >>> last_two("layers/up/kernel", (6, 256, 1024))
      (1, 1)
    """
    return (len(shape) - 2, 1) if len(shape) >= 2 else None


class _Place(NamedTuple):
    """Where the matrices of one parameter lie: in ``stack`` from ``start`` on."""

    stack: str
    start: int
    matrices: int
    rows: int
    columns: int

    @property
    def is_transposed(self) -> bool:
        return self.rows > self.columns


class _Packing:
    """Stacks of the matrices of a tree of parameters, or of what is shaped like them."""

    def __init__(self, tree: Any, multiple: int, view: View) -> None:
        self.places: list[_Place] = []
        counts: dict[str, int] = {}
        for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            stacked, rows = _viewed(jax.tree_util.keystr(keys, simple=True, separator="/"), x.shape, view)
            sizes = prod(x.shape[stacked : stacked + rows]), prod(x.shape[stacked + rows :])
            stack = f"{min(sizes)}x{max(sizes)}"
            self.places.append(_Place(stack, counts.get(stack, 0), prod(x.shape[:stacked]), *sizes))
            counts[stack] = self.places[-1].start + self.places[-1].matrices
        self.empty = {stack: -count % multiple for stack, count in counts.items()}

    def pack(self, tree: Any) -> dict[str, jax.Array]:
        """Returns ``[matrices rows columns]`` by stack, the longer side last."""
        parts: dict[str, list[jax.Array]] = {stack: [] for stack in self.empty}
        for place, x in zip(self.places, jax.tree.leaves(tree), strict=True):
            matrices = x.reshape(place.matrices, place.rows, place.columns)
            parts[place.stack].append(matrices.swapaxes(1, 2) if place.is_transposed else matrices)
        for stack, count in self.empty.items():
            first = parts[stack][0]
            parts[stack] += [jnp.zeros((count, *first.shape[1:]), first.dtype)] if count else []
        return {stack: jnp.concatenate(matrices) for stack, matrices in parts.items()}

    def unpack(self, stacks: Mapping[str, jax.Array], tree: Any) -> Any:
        """Returns the matrices in the shapes of ``tree``."""
        found = []
        for place, x in zip(self.places, jax.tree.leaves(tree), strict=True):
            matrices = stacks[place.stack][place.start : place.start + place.matrices]
            found.append((matrices.swapaxes(1, 2) if place.is_transposed else matrices).reshape(x.shape))
        return jax.tree.unflatten(jax.tree.structure(tree), found)


def _viewed(path: str, shape: tuple[int, ...], view: View) -> tuple[int, int]:
    """Returns the numbers of stacked dims and row dims, checked."""
    found = view(path, shape)
    if found is None:
        raise ArgumentError(
            f"packed: {path} {list(shape)} is no matrix; give it to another optimizer with optax.partition, or use muon"
        )
    stacked, rows = found
    if stacked < 0 or rows < 1 or stacked + rows >= len(shape):
        raise ArgumentError(
            f"view: {path} {list(shape)} has {len(shape)} dims, which {stacked} stacked dims and {rows} row dims do "
            "not leave a column; return (stacked dims, row dims), such as (1, 1) for [layers rows columns]"
        )
    return stacked, rows


def packed(
    optimizer: optax.GradientTransformation, multiple: int = 1, view: View = last_two, owners: str = ""
) -> optax.GradientTransformation:
    """Returns an optimizer that gives ``optimizer`` the matrices of equal shape in one stack.

    Args:
      optimizer: takes a dict of stacks ``[matrices rows columns]``, rows at most columns. It must treat the matrices
        of a stack separately, and a matrix as its transpose, as Muon, Shampoo and SOAP do; scales may depend on the
        longer side alone (as with ``consistent_rms`` of ``optax.contrib.muon``).
      multiple: stacks are filled with zeros up to a multiple of it: the number of devices that own matrices.
      view: from path and shape of a parameter to its number of leading stacked dims and of dims that are rows; the
        others are columns.
      owners: the mesh axis over which the batch is split, to send the fewest bytes: gradients go straight to the owners
        of their matrices, whole updates back. By default, the planner chooses what is fastest.

    Raises:
      ArgumentError: ``multiple`` is no positive number; a parameter is no matrix (when the optimizer is used).

    Example:
      >>> shampoo = packed(scale_by_shampoo(), multiple=8)    # state: {"256x1024": [16, 256, 256], ...}
    """
    if multiple < 1:
        raise ArgumentError(f"multiple={multiple}: must be the number of devices that own matrices, at least 1")

    def init(params: Any) -> Any:
        return optimizer.init(_Packing(params, multiple, view).pack(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        packing = _Packing(updates, multiple, view)
        stacks = None if params is None else packing.pack(params)
        gradients = laid(packing.pack(updates), "P")
        changed, state = optimizer.update(gradients, state, stacks)
        return packing.unpack(laid(laid(changed, "S(0)"), "B"), updates), state

    def laid(stacks: Any, placement: str) -> Any:
        return jax.tree.map(lambda x: md.constrain(x, f"{owners}={placement}"), stacks) if owners else stacks

    return optax.GradientTransformation(init, update)


def muon(
    rate: Any, multiple: int = 1, view: View = last_two, owners: str = "", **adam: Any
) -> optax.GradientTransformation:
    """Returns Muon on packed matrices, and AdamW for all other parameters.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); updates are scaled to the size of
    AdamW's, a root mean square of 0.2 (Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2).

    Args:
      rate: learning rate or schedule, of both.
      multiple: number of devices that own matrices, as ``packed`` takes it.
      view: as ``packed`` takes it; None for the parameters that AdamW takes, such as embeddings, norms and biases.
      owners: as ``packed`` takes it.
      adam: keyword arguments of ``optax.adamw``.

    Raises:
      ArgumentError: as ``packed``.

    Example:
      >>> optimizer = muon(1e-3, multiple=8, view=lambda path, shape: (1, 1) if path.endswith("kernel") else None)
    """

    def label(keys: Any, x: Any) -> str:
        return "adam" if view(jax.tree_util.keystr(keys, simple=True, separator="/"), x.shape) is None else "muon"

    def of_stacks(stacks: Any) -> Any:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(1, 2), stacks)

    def scaled(stacks: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: _UPDATE_SIZE * x.shape[2] ** 0.5 * x, stacks)

    orthogonal = contrib.scale_by_muon(weight_dimension_numbers=of_stacks)
    matrices = optax.chain(orthogonal, optax.stateless(scaled), optax.scale_by_learning_rate(rate))
    return optax.partition(
        {"muon": packed(matrices, multiple, view, owners), "adam": optax.adamw(rate, **adam)},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )
