"""Optimizers of whole matrices, Muon, Shampoo and SOAP, on packed parameters: every device owns some of the matrices.

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

from collections.abc import Callable, Iterable, Mapping
from functools import partial
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
Stacks: TypeAlias = dict[str, jax.Array]


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

    def of_stacks(stacks: Any) -> Any:
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(1, 2), stacks)

    def scaled(stacks: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: _UPDATE_SIZE * x.shape[2] ** 0.5 * x, stacks)

    orthogonal = contrib.scale_by_muon(
        ns_steps=ns_steps, beta=beta, mu_dtype=mu_dtype, nesterov=nesterov, weight_dimension_numbers=of_stacks
    )
    matrices = packed(optax.chain(orthogonal, optax.stateless(scaled)), view, multiple, owners)
    return _beside_adamw("muon", matrices, rate, view, weight_decay, adam)


def _beside_adamw(
    name: str,
    matrices: optax.GradientTransformation,
    rate: Any,
    view: View,
    weight_decay: Any,
    adam: Mapping[str, Any],
) -> optax.GradientTransformation:
    """Returns the optimizer that gives matrices to ``matrices``, and all other parameters to AdamW."""

    def label(keys: Any, x: Any) -> str:
        return "adam" if view(jax.tree_util.keystr(keys, simple=True, separator="/"), x.shape) is None else name

    decayed = optax.chain(matrices, optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(rate))
    others = optax.adamw(**{"learning_rate": rate, "weight_decay": weight_decay, **adam})
    return optax.partition(
        {name: decayed, "adam": others}, lambda params: jax.tree_util.tree_map_with_path(label, params)
    )


# ---- Shampoo: statistics of rows and columns


class _StackStates(NamedTuple):
    """State of an optimizer of stacks: the number of updates so far, and what it holds by stack."""

    steps: jax.Array
    stacks: dict[str, Any]


class _Preconditioned(NamedTuple):
    """What ``shampoo`` and ``soap`` hold of a stack ``[matrices rows columns]``, in float32 at least.

    Statistics and factors are ``[matrices rows rows]`` and ``[matrices columns columns]``, of the sides that are
    preconditioned. ``shampoo``'s factors are inverse roots of the statistics, ``soap``'s their eigenbases; its squares
    are those of rotated gradients.
    """

    momentum: jax.Array
    squares: jax.Array
    statistics: tuple[jax.Array, ...]
    factors: tuple[jax.Array, ...]


def _of_each_stack(init: Callable[..., Any], update: Callable[..., Any]) -> optax.GradientTransformation:
    """Returns the optimizer that calls ``update(gradients, state, updates so far)`` with each stack."""

    def inits(stacks: Stacks) -> _StackStates:
        return _StackStates(jnp.zeros([], jnp.int32), {name: init(x) for name, x in stacks.items()})

    def updates(gradients: Stacks, state: _StackStates, params: Any = None) -> tuple[Stacks, _StackStates]:
        changed, states = {}, {}
        for name, g in gradients.items():
            found, states[name] = update(g.astype(state.stacks[name].momentum.dtype), state.stacks[name], state.steps)
            changed[name] = found.astype(g.dtype)
        return changed, _StackStates(optax.safe_increment(state.steps), states)

    return optax.GradientTransformation(inits, updates)


def _sides(x: jax.Array, largest: int) -> tuple[int, ...]:
    """Returns the dims of a stack that are preconditioned: 1 for rows, 2 for columns."""
    return tuple(side for side in (1, 2) if x.shape[side] <= largest)


def _product(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST)


def _gram(x: jax.Array, side: int) -> jax.Array:
    """Returns ``x x^T`` of every matrix for rows, ``x^T x`` for columns."""
    return _product("kic,kjc->kij" if side == 1 else "kri,krj->kij", x, x)


def _with_grams(
    statistics: tuple[jax.Array, ...], g: jax.Array, sides: tuple[int, ...], decay: float
) -> tuple[jax.Array, ...]:
    """Returns the statistics with those of new gradients averaged in."""
    return tuple(_averaged(x, _gram(g, side), decay) for x, side in zip(statistics, sides, strict=True))


def _multiplied(x: jax.Array, factors: Iterable[jax.Array], sides: tuple[int, ...]) -> jax.Array:
    """Returns ``factor x`` of every matrix for rows, ``x factor^T`` for columns, or both."""
    for factor, side in zip(factors, sides, strict=True):
        x = _product("kij,kjc->kic" if side == 1 else "kij,krj->kri", factor, x)
    return x


def _inverse_root(x: jax.Array, order: int, ridge: float) -> jax.Array:
    """Returns ``(x + ridge * largest eigenvalue)^(-1 / order)`` of positive semidefinite matrices, 1 where x is 0."""
    values, vectors = jnp.linalg.eigh(x)
    most = values[:, -1:]
    values = jnp.where(most > 0, jnp.maximum(values, 0) + ridge * most, 1)
    return _product("kij,kj,klj->kil", vectors, values ** (-1 / order), vectors)


def _check_statistics(every: int, largest: int, ridge: float, decays: Mapping[str, float]) -> None:
    for name, value, meaning in (
        ("every", every, "the number of updates between two preconditioners"),
        ("largest", largest, "the length of the longest side that is preconditioned"),
    ):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{name}={value!r}: must be {meaning}, an int of at least 1")
    if not ridge > 0:
        raise ArgumentError(f"ridge={ridge!r}: must be above 0, since statistics have eigenvalues of 0; such as 1e-4")
    for name, decay in decays.items():
        if not 0 <= decay < 1:
            raise ArgumentError(
                f"{name}={decay!r}: must be at least 0 and below 1, the part of a mean that a step keeps"
            )


def shampoo(
    rate: Any,
    view: View,
    multiple: int | None = None,
    owners: str = "",
    *,
    weight_decay: Any = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    ridge: float = 1e-4,
    every: int = 10,
    largest: int = 8192,
    adam: Mapping[str, Any] = MappingProxyType({}),
) -> optax.GradientTransformation:
    """Returns Shampoo on packed matrices, grafted to Adam, and AdamW for all other parameters.

    Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018); momentum, decaying statistics and
    grafting are those of Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo
    Optimizer" (2023), the ridge that of Anil et al., "Scalable Second Order Optimization for Deep Learning" (2020). For
    the gradient ``G`` of a matrix:

        M = b1 M + (1 - b1) G;  L = b2 L + (1 - b2) G G^T;  R = b2 R + (1 - b2) G^T G
        U = L^(-1/4) M R^(-1/4), scaled to the Frobenius norm of Adam's update

    Inverse roots are those of eigendecompositions, of the first statistics and then of every ``every``-th.

    Args:
      rate: learning rate or schedule, of both.
      view: as ``packed`` takes it; None for the parameters that AdamW takes, such as embeddings, norms and biases.
      multiple: as ``packed`` takes it.
      owners: as ``packed`` takes it.
      weight_decay: weight decay or schedule, of both, per learning rate.
      b1: decay rate of the momentum.
      b2: decay rate of the statistics, and of the squares of the grafted Adam.
      eps: what Adam adds to the roots of its squares.
      ridge: what is added to the eigenvalues of a statistic, times the largest of them. Rounding in float32 moves
        eigenvalues by about 1e-7 of the largest: with a ridge that is not far above it, equal steps drift apart.
      every: number of updates between two eigendecompositions.
      largest: length of the longest side that has a statistic; where it is only one, the root is the second.
      adam: keyword arguments of ``optax.adamw``, such as ``{"b2": 0.95, "weight_decay": 0.0}``.

    Raises:
      ArgumentError: as ``packed``; ``every`` or ``largest`` is not a positive int, ``ridge`` is not positive; ``b1``
        or ``b2`` is not in [0, 1); no side of a matrix has a statistic.
      PinError: as ``packed``.

    Example:
      >>> optimizer = shampoo(1e-3, lambda path, shape: (1, 1) if path.endswith("kernel") else None, multiple=8)
    """
    _check_statistics(every, largest, ridge, {"b1": b1, "b2": b2})

    def update(g: jax.Array, state: _Preconditioned, count: jax.Array) -> tuple[jax.Array, _Preconditioned]:
        sides = _sides(g, largest)
        momentum, squares = _averaged(state.momentum, g, b1), _averaged(state.squares, g**2, b2)
        statistics = _with_grams(state.statistics, g, sides, b2)
        roots = jax.lax.cond(
            count % every == 0,
            lambda: tuple(_inverse_root(x, 2 * len(sides), ridge) for x in statistics),
            lambda: state.factors,
        )
        grafted = _adam(momentum, squares, count + 1, b1, b2, eps)
        direction = _multiplied(momentum, roots, sides)
        size = _norm(grafted) / jnp.maximum(_norm(direction), jnp.finfo(g.dtype).tiny)
        return size * direction, _Preconditioned(momentum, squares, statistics, roots)

    matrices = packed(_of_each_stack(partial(_start, largest), update), view, multiple, owners)
    return _beside_adamw("shampoo", matrices, rate, view, weight_decay, adam)


def _start(largest: int, x: jax.Array) -> _Preconditioned:
    """Returns the zeros with which a stack starts, and statistics of at least one side."""
    sides = _sides(x, largest)
    if not sides:
        raise ArgumentError(
            f"largest={largest}: both sides of matrices {list(x.shape[1:])} are longer, which leaves nothing to "
            f"precondition; raise it to at least {x.shape[1]}, or let view return None for them"
        )

    def zeros() -> jax.Array:  # anew, since buffers that are donated must differ
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    def statistics() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((x.shape[0], x.shape[side], x.shape[side]), zeros().dtype) for side in sides)

    return _Preconditioned(zeros(), zeros(), statistics(), statistics())


def _averaged(average: jax.Array, x: jax.Array, decay: float) -> jax.Array:
    return decay * average + (1 - decay) * x


def _adam(momentum: jax.Array, squares: jax.Array, count: jax.Array, b1: float, b2: float, eps: float) -> jax.Array:
    """Returns Adam's update, with both averages corrected for their start at zero."""
    return momentum / (1 - b1**count) / (jnp.sqrt(squares / (1 - b2**count)) + eps)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x**2, (1, 2), keepdims=True))


# ---- SOAP: Adam in the eigenbasis of Shampoo's statistics


def soap(
    rate: Any,
    view: View,
    multiple: int | None = None,
    owners: str = "",
    *,
    weight_decay: Any = 0.0,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    ridge: float = 1e-2,
    every: int = 10,
    largest: int = 8192,
    adam: Mapping[str, Any] = MappingProxyType({}),
) -> optax.GradientTransformation:
    """Returns SOAP on packed matrices, and AdamW for all other parameters.

    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), algorithms 3 and 4: Adam in the eigenbases
    ``Q`` and ``P`` of Shampoo's statistics. For the gradient ``G`` of a matrix:

        M = b1 M + (1 - b1) G;  V = b2 V + (1 - b2) (Q^T G P)^2
        U = Q ((Q^T M P) / (sqrt(V) + eps)) P^T, both averages corrected for their start at zero
        L = b2 L + (1 - b2) G G^T;  R = b2 R + (1 - b2) G^T G
        Q = qr((L + ridge tr(L) / rows) Q), P = qr((R + ridge tr(R) / columns) P), after every ``every``-th update

    ``Q`` and ``P`` start at the identity, and are first changed after the first update. The ridge is not the authors':
    it leaves the eigenvectors as they are, and where gradients do not determine one, such as in the first statistics of
    matrices that are not square, the basis stays what it was instead of what rounding makes of it.

    Args:
      rate: learning rate or schedule, of both.
      view: as ``packed`` takes it; None for the parameters that AdamW takes, such as embeddings, norms and biases.
      multiple: as ``packed`` takes it.
      owners: as ``packed`` takes it.
      weight_decay: weight decay or schedule, of both, per learning rate.
      b1: decay rate of the momentum.
      b2: decay rate of squares and statistics.
      eps: what is added to the roots of squares.
      ridge: what is added to the eigenvalues of a statistic in the power iteration, times their mean.
      every: number of updates between two steps of the power iteration.
      largest: length of the longest side that is rotated.
      adam: keyword arguments of ``optax.adamw``, such as ``{"b2": 0.95, "weight_decay": 0.0}``.

    Raises:
      ArgumentError: as ``shampoo``.
      PinError: as ``packed``.

    Example:
      >>> optimizer = soap(1e-3, lambda path, shape: (1, 1) if path.endswith("kernel") else None, multiple=8)
    """
    _check_statistics(every, largest, ridge, {"b1": b1, "b2": b2})

    def init(x: jax.Array) -> _Preconditioned:
        start = _start(largest, x)
        return start._replace(factors=tuple(x + jnp.eye(x.shape[1], dtype=x.dtype) for x in start.factors))

    def update(g: jax.Array, state: _Preconditioned, count: jax.Array) -> tuple[jax.Array, _Preconditioned]:
        sides = _sides(g, largest)
        turned = [x.swapaxes(1, 2) for x in state.factors]
        momentum = _averaged(state.momentum, g, b1)
        squares = _averaged(state.squares, _multiplied(g, turned, sides) ** 2, b2)
        rotated = _adam(_multiplied(momentum, turned, sides), squares, count + 1, b1, b2, eps)
        statistics = _with_grams(state.statistics, g, sides, b2)
        bases = jax.lax.cond(
            count % every == 0,
            lambda: tuple(_iterated(*pair, ridge) for pair in zip(statistics, state.factors, strict=True)),
            lambda: state.factors,
        )
        return _multiplied(rotated, state.factors, sides), _Preconditioned(momentum, squares, statistics, bases)

    matrices = packed(_of_each_stack(init, update), view, multiple, owners)
    return _beside_adamw("soap", matrices, rate, view, weight_decay, adam)


def _iterated(x: jax.Array, basis: jax.Array, ridge: float) -> jax.Array:
    """Returns the bases after a step of the power iteration with ``x`` and a ridge times its mean eigenvalue."""
    mean = jnp.trace(x, axis1=1, axis2=2)[:, None, None] / x.shape[1]
    return jnp.linalg.qr(_product("kij,kjl->kil", x, basis) + ridge * jnp.where(mean > 0, mean, 1) * basis)[0]
