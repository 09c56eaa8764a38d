"""Optimizers of whole matrices, such as Muon, on packed parameters: every device owns some of the matrices.

The update of such an optimizer needs the whole gradient of a matrix, so a matrix has one owner, and what is split is
the dim that counts matrices. Parameters rarely have one that divides over the devices:

    layers/up/kernel      [6, 256, 1024]       -> 6 matrices ---------------.
    layers/down/kernel    [6, 1024, 256]       -> 6 matrices, transposed ----> "256x1024_float32" [12, 256, 1024]
    layers/query/kernel   [6, 256, 8, 32]      -> 6 matrices ----.
    layers/out/kernel     [6, 8, 32, 256]      -> 6 matrices -----> "256x256_float32" [12, 256, 256]

Matrices of one dtype and of equal shape, up to transposition, lie in one stack, filled with zeros up to a multiple of
the owners. The optimizer's state exists for the stacks alone, and splits evenly. The planner does the rest: gradients
are reduce-scattered to the owners of their matrices, updates all-gathered, as in ZeRO-1.
"""

from collections.abc import Callable, Mapping
from math import prod
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import meshdsl as md
from meshdsl.errors import ArgumentError

_UPDATE_SIZE = 0.2  # root mean square of an update's elements, per learning rate

View: TypeAlias = Callable[[str, tuple[int, ...]], tuple[int, int] | None]


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
            stack = f"{min(sizes)}x{max(sizes)}_{x.dtype}"
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
    match found:
        case (int(stacked), int(rows)):
            pass
        case _:
            raise ArgumentError(
                f"view: {found!r} for {path} {list(shape)} is not (stacked dims, row dims); "
                "return (1, 1) for [layers rows columns], None for what is no matrix"
            )
    if stacked < 0 or rows < 1 or stacked + rows >= len(shape):
        raise ArgumentError(
            f"view: {path} {list(shape)} has {len(shape)} dims, which {stacked} stacked dims and {rows} row dims do "
            "not leave a column; return (stacked dims, row dims), such as (1, 1) for [layers rows columns]"
        )
    return stacked, rows


def _checked_multiple(multiple: int | None, owners: str) -> int:
    """Returns the number that the matrices of a stack are a multiple of."""
    if multiple is None:
        if owners:
            raise ArgumentError(
                f"multiple=None with owners={owners!r}: give the number of devices along {owners}, such as multiple=8"
            )
        return 1
    if not isinstance(multiple, Integral) or isinstance(multiple, bool) or multiple < 1:
        raise ArgumentError(
            f"multiple={multiple!r}: must be the number of devices that own matrices, an int of at least 1, such as "
            "multiple=8"
        )
    return int(multiple)


def packed(
    optimizer: optax.GradientTransformation, view: View, multiple: int | None = None, owners: str = ""
) -> optax.GradientTransformation:
    """Returns an optimizer that gives ``optimizer`` the matrices of equal shape and dtype in one stack.

    Args:
      optimizer: takes a dict of stacks ``[matrices rows columns]``, rows at most columns. It must treat the matrices
        of a stack separately, and a matrix as its transpose; scales may depend on the longer side alone (as with
        ``consistent_rms`` of ``optax.contrib.muon``).
      view: from path and shape of a parameter, such as ``"layers/up/kernel"`` and ``(6, 256, 1024)``, to its number of
        leading stacked dims and of dims that are rows, here ``(1, 1)``; the others are columns.
      multiple: stacks are filled with zeros up to a multiple of it: the number of devices that own matrices, or a
        multiple of that. By default nothing is filled.
      owners: the mesh axis over which the batch is split, to send the fewest bytes: gradients go straight to the owners
        of their matrices, whole updates back. By default, the planner chooses what is fastest.

    Raises:
      ArgumentError: ``multiple`` is not a positive int, or missing beside ``owners``; ``view`` is not a function; a
        parameter is no matrix, or not of as many dims as ``view`` says (when the optimizer is used).
      PinError: the axis ``owners`` has a size that does not divide ``multiple`` (when a step is planned).

    Example:
      >>> def normalized(stacks, _):
      ...     return jax.tree.map(lambda x: x / (1e-8 + jnp.linalg.norm(x, axis=(1, 2), keepdims=True)), stacks)
      >>> optimizer = packed(optax.stateless(normalized), lambda path, shape: (1, 1), multiple=8)
    """
    multiple = _checked_multiple(multiple, owners)
    if not callable(view):
        raise ArgumentError(
            f"view={view!r}: must be a function of path and shape, such as lambda path, shape: (1, 1) for parameters "
            "[layers rows columns]"
        )

    def init(params: Any) -> Any:
        return optimizer.init(_Packing(params, multiple, view).pack(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        packing = _Packing(updates if params is None else params, multiple, view)
        stacks = None if params is None else packing.pack(params)
        gradients = laid(packing.pack(updates), "P")
        changed, state = optimizer.update(gradients, state, stacks)
        return packing.unpack(laid(laid(changed, "S(0)"), "B"), updates), state

    def laid(stacks: Any, placement: str) -> Any:
        return jax.tree.map(lambda x: md.constrain(x, f"{owners}={placement}"), stacks) if owners else stacks

    return optax.GradientTransformation(init, update)


def muon(
    rate: Any,
    view: View,
    multiple: int | None = None,
    owners: str = "",
    *,
    weight_decay: Any = 0.0,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    mu_dtype: Any = None,
    adam: Mapping[str, Any] = MappingProxyType({}),
) -> optax.GradientTransformation:
    """Returns Muon on packed matrices, and AdamW for all other parameters.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); updates are scaled to the size of
    AdamW's, a root mean square of 0.2, and weights decay as AdamW's do (Liu et al., "Muon is Scalable for LLM
    Training", 2025, section 2.2).

    Args:
      rate: learning rate or schedule, of both.
      view: as ``packed`` takes it; None for the parameters that AdamW takes, such as embeddings, norms and biases.
      multiple: as ``packed`` takes it.
      owners: as ``packed`` takes it.
      weight_decay: weight decay or schedule, of both, per learning rate.
      beta: decay rate of the momentum of matrices.
      nesterov: whether that momentum is Nesterov's.
      ns_steps: number of Newton-Schulz iterations.
      mu_dtype: dtype of that momentum; by default, that of the parameters.
      adam: keyword arguments of ``optax.adamw``, such as ``{"b2": 0.95, "weight_decay": 0.0}``.

    Raises:
      ArgumentError: as ``packed``.
      PinError: as ``packed``.

    Example:
      >>> optimizer = muon(1e-3, lambda path, shape: (1, 1) if path.endswith("kernel") else None, multiple=8)
    """

    def label(keys: Any, x: Any) -> str:
        return "adam" if view(jax.tree_util.keystr(keys, simple=True, separator="/"), x.shape) is None else "muon"

    def of_stacks(stacks: Any) -> Any:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(1, 2), stacks)

    def scaled(stacks: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: _UPDATE_SIZE * x.shape[2] ** 0.5 * x, stacks)

    orthogonal = contrib.scale_by_muon(
        ns_steps=ns_steps, beta=beta, mu_dtype=mu_dtype, nesterov=nesterov, weight_dimension_numbers=of_stacks
    )
    matrices = optax.chain(
        packed(optax.chain(orthogonal, optax.stateless(scaled)), view, multiple, owners),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    others = optax.adamw(**{"learning_rate": rate, "weight_decay": weight_decay, **adam})
    return optax.partition(
        {"muon": matrices, "adam": others}, lambda params: jax.tree_util.tree_map_with_path(label, params)
    )
