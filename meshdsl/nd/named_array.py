"""Tensors with named dims: an ordinary array, and the names of its dims.

    x = md.named(tokens, "batch seq")
    y = md.dot(x, w, over="embed") + bias          # dims meet by name, wherever they stand

Nothing is added to the traced program: every operation runs the ``jax.numpy`` or ``lax`` function that one would write
by hand, on the arrays, with dims in place of axis numbers.

*Order.* The dims of a result keep the order of all operands; where that leaves a choice, those of the first come first:
``a[batch embed] * b[seq embed]`` is ``[batch seq embed]``. Only where two operands contradict each other, one is
transposed: the one with fewer dims, or the second.

*Without dims.* A result without dims is an ordinary scalar array, so a loss can be passed to ``jax.grad``.

*Other transforms.* A named tensor is a pytree of one leaf. ``jit``, ``grad``, ``tree.map``, optax and orbax see the
array. ``lax.scan`` and ``jax.vmap`` remove a leading axis of that array without the names; the next operation on it
raises an error that points to :func:`meshdsl.scan` and :func:`meshdsl.vmap`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from meshdsl.errors import is_a
from meshdsl.layouts.axis_rules import Table, conflicts, layout_of
from meshdsl.nd.diagnostics import absent, described, fail, labels, shown
from meshdsl.nd.named_dims import Dims, DimsLike, read_dims, read_names
from meshdsl.primitives.constrain import bind_constrain

# ---- Order -----------------------------------------------------------------------------------------------------------
# The common order of dims of several tensors, and arrays transposed into it.


Names = tuple[str, ...]


def common_order(orders: Iterable[Names]) -> Names:
    """Return all names, in an order that keeps that of every operand if there is one."""
    return reduce(_merge, orders, ())


def _merge(a: Names, b: Names) -> Names:
    if [name for name in a if name in b] != [name for name in b if name in a]:
        lead, other = (a, b) if len(a) >= len(b) else (b, a)
        return lead + tuple(name for name in other if name not in lead)
    merged: list[str] = []
    rest = list(b)
    for name in a:
        if name in b:
            at = rest.index(name)
            merged += rest[:at]
            del rest[: at + 1]
        merged.append(name)
    return (*merged, *rest)


def permuted(array: Any, dims: Names, wanted: Names) -> Any:
    """Return the array transposed to the order ``wanted``; unchanged if it has that order."""
    if dims == wanted:
        return array
    return jnp.transpose(array, [dims.index(name) for name in wanted])


def aligned(array: Any, dims: Names, wanted: Names) -> Any:
    """Return the array in a shape that ``jax.numpy`` broadcasts against arrays with the dims ``wanted``."""
    present = [name for name in wanted if name in dims]
    array = permuted(array, dims, tuple(present))
    missing = [i for i, name in enumerate(wanted) if name not in dims]
    if jax.config.jax_numpy_rank_promotion == "allow":  # type: ignore[attr-defined]
        lead = leading(missing)
        missing = [i - lead for i in missing[lead:]]
    return jnp.expand_dims(array, missing) if missing else array


def leading(positions: Sequence[int]) -> int:
    """Return how many of the positions, from the first, are 0, 1, 2, ..."""
    return next((n for n, i in enumerate(positions) if n != i), len(positions))


def promoted(*arrays: Any) -> list[Any]:
    """Return the arrays in their common dtype, by the promotion rules of ``jax.numpy``."""
    common = jnp.result_type(*arrays)
    return [x if x.dtype == common else x.astype(common) for x in arrays]


# ---- Pins of results -------------------------------------------------------------------------------------------------
# While a step is traced under ``Rules(activations=...)``, the functions of this package constrain the layout of their
# results, as ``md.constrain`` does; otherwise nothing is added. The active rules are part of the key under which jax
# caches traced functions, so no function is traced under one set of rules and used under another.


_ACTIVE_RULES = jax.make_user_context(None)


def pinning(table: Table | None) -> AbstractContextManager[Any]:
    """Return a context in which results are constrained by these rules."""
    manager: AbstractContextManager[Any] = _ACTIVE_RULES(tuple(table.items()) if table else None)
    return manager


def pinned(array: Any, dims: Names) -> Any:
    """Return an array with these dims, constrained if the active rules name one of them."""
    rules = _ACTIVE_RULES.value
    if not rules or not dims:
        return array
    table = dict(rules)
    wrong = conflicts(dims, table)
    if wrong:
        raise fail([f"activations, [{shown(dims, array.shape)}]: {row}" for row in wrong])
    layout = layout_of(dims, table)
    return bind_constrain(array, layout, dims) if layout.axes else array


# ---- Array -----------------------------------------------------------------------------------------------------------


Tensor: TypeAlias = Union["NamedArray", Any]  # named, or an ordinary scalar array where no dims are left


def _both_ways(fn: Callable[..., Any]) -> tuple[Callable[[Any, Any], Tensor], Callable[[Any, Any], Tensor]]:
    """Return the binary operator of ``fn`` and its reflected version."""
    return lambda x, y: lift(fn, x, y), lambda x, y: lift(fn, y, x)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False, repr=False)
class NamedArray:
    """An array and the names of its dims, in order, as :func:`named` returns it.

    Arithmetic operators, comparisons and ``abs`` work as on arrays, with operands that meet by name.

    Args:
      held: the array, or whatever a ``tree.map`` put in its place.
      dims: one name per dim of the array, none twice.

    Example:
      >>> x = md.named(jnp.zeros((32, 512)), "batch embed")
      >>> (x.dims, x.shape["embed"], x.array.shape)
      (('batch', 'embed'), 512, (32, 512))
    """

    held: Any
    dims: Names

    def __post_init__(self) -> None:
        if not isinstance(self.dims, tuple):
            raise fail(f"{is_a(self.dims)}, not a tuple of names; md.named(array, 'batch seq') reads text")
        if len(set(self.dims)) < len(self.dims):
            raise fail(_doubled(self))

    @property
    def array(self) -> Any:
        """The ordinary array; DimError if a raw transform changed its rank."""
        shape = getattr(self.held, "shape", None)
        if shape is None or len(shape) != len(self.dims):
            raise fail(_stripped(self.dims, self.held))
        return self.held

    @property
    def shape(self) -> Dims:
        """The dims with their sizes."""
        return Dims(dict(zip(self.dims, self.array.shape, strict=True)))

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.held.dtype

    def astype(self, dtype: Any) -> "NamedArray":
        """Return the tensor in another dtype."""
        return NamedArray(self.array.astype(dtype), self.dims)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, Any]], Names]:
        """Return the array as the only leaf; the names are structure."""
        return ((GetAttrKey("array"), self.held),), self.dims

    @classmethod
    def tree_unflatten(cls, dims: Names, leaves: Iterable[Any]) -> "NamedArray":
        """Return a tensor with whatever a pytree operation puts in the array's place."""
        (held,) = leaves
        return cls(held, dims)

    def __repr__(self) -> str:
        return f"NamedArray([{_sized(self)}], {self.held!r})"

    __array_ufunc__ = None  # numpy arrays leave arithmetic with named tensors to them
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    __add__, __radd__ = _both_ways(jnp.add)
    __sub__, __rsub__ = _both_ways(jnp.subtract)
    __mul__, __rmul__ = _both_ways(jnp.multiply)
    __truediv__, __rtruediv__ = _both_ways(jnp.true_divide)
    __floordiv__, __rfloordiv__ = _both_ways(jnp.floor_divide)
    __mod__, __rmod__ = _both_ways(jnp.remainder)
    __pow__, __rpow__ = _both_ways(jnp.power)
    __and__, __rand__ = _both_ways(jnp.bitwise_and)
    __or__, __ror__ = _both_ways(jnp.bitwise_or)
    __xor__, __rxor__ = _both_ways(jnp.bitwise_xor)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return lift(jnp.equal, self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return lift(jnp.not_equal, self, other)

    def __lt__(self, other: Any) -> Tensor:
        return lift(jnp.less, self, other)

    def __le__(self, other: Any) -> Tensor:
        return lift(jnp.less_equal, self, other)

    def __gt__(self, other: Any) -> Tensor:
        return lift(jnp.greater, self, other)

    def __ge__(self, other: Any) -> Tensor:
        return lift(jnp.greater_equal, self, other)

    def __neg__(self) -> Tensor:
        return lift(jnp.negative, self)

    def __abs__(self) -> Tensor:
        return lift(jnp.abs, self)

    def __invert__(self) -> Tensor:
        return lift(jnp.invert, self)

    def __matmul__(self, other: Any) -> Tensor:
        raise fail("@ does not name the dims to sum over; write md.dot(x, y, over='embed')")

    __rmatmul__ = __matmul__

    def __getitem__(self, at: Any) -> Tensor:
        raise fail(
            "x[...] does not name a dim; select with md.index(x, seq=0), iterate with md.scan(f, init, x, over='seq')"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise fail(f"{described(self)} is not converted to a numpy array, which would lose the names; use .array")

    def __bool__(self) -> bool:
        return bool(
            _scalar(
                self,
                "has no single truth value",
                "reduce it with md.any or md.all; write a < x < b as (a < x) & (x < b)",
            )
        )

    def __float__(self) -> float:
        return float(
            _scalar(
                self, "cannot be converted to float", "reduce it, as with md.mean, or select an element with md.index"
            )
        )

    def __int__(self) -> int:
        return int(
            _scalar(self, "cannot be converted to int", "reduce it, as with md.sum, or select an element with md.index")
        )


def wrap(array: Any, dims: Names) -> Tensor:
    """Return the array with these names; the plain array if there are none."""
    return NamedArray(array, dims) if dims else array


def computed(array: Any, dims: Names) -> Tensor:
    """Return a result with these dims, constrained by the active rules."""
    return wrap(pinned(array, dims), dims)


def read(x: Any) -> Tensor:
    """Return an operand: a named tensor (also of a flax variable) or a scalar; DimError for arrays without names."""
    if isinstance(x, NamedArray):
        return x
    x = x.get_value() if hasattr(x, "get_value") else x
    if isinstance(x, NamedArray | bool | int | float | complex) or getattr(x, "shape", None) == ():
        return x
    if not hasattr(x, "shape"):
        raise fail(f"{is_a(x)}, not a tensor or scalar; name an array's dims with md.named(array, 'batch embed')")
    raise fail(f"an array of shape {tuple(x.shape)} has no named dims; name them with md.named(array, 'batch embed')")


def given(x: Any) -> str:
    """Return what was given, for an error: ``"[batch=32] is a tensor"`` or ``"3 is an int"``."""
    return f"{described(x)} is a tensor" if isinstance(x, NamedArray) else is_a(x)


def sizes_of(operands: Sequence[Any], free: Names = (), first: int = 0) -> dict[str, int]:
    """Return the sizes of all dims by name; DimError shows two tensors whose sizes differ, except in ``free`` dims.

    Args:
      first: position of the first operand among the arguments of the user's call.
    """
    found: dict[str, tuple[int, int]] = {}
    for i, x in enumerate(operands):
        for name, size in zip(x.dims, x.array.shape, strict=True) if isinstance(x, NamedArray) else ():
            known_in, known = found.setdefault(name, (i, size))
            if known != size and name not in free:
                raise fail(_conflict(name, operands, (known_in, i), labels(len(operands), first)))
    return {name: size for name, (_, size) in found.items()}


def lift(fn: Callable[..., Any], *operands: Any, first: int = 0) -> Tensor:
    """Return the elementwise ``fn`` of operands that meet by name; ``first`` as in :func:`sizes_of`."""
    read_in = [read(x) for x in operands]
    sizes = sizes_of(read_in, first=first)
    dims = common_order(x.dims for x in read_in if isinstance(x, NamedArray))
    made = fn(*(aligned(x.array, x.dims, dims) if isinstance(x, NamedArray) else x for x in read_in))
    if tuple(jnp.shape(made)) != tuple(sizes[name] for name in dims):
        whole = shown(dims, [sizes[name] for name in dims])
        raise fail(f"{getattr(fn, '__name__', fn)} is not elementwise: it maps [{whole}] to shape {jnp.shape(made)}")
    return computed(made, dims)


def _conflict(name: str, operands: Sequence[Any], pair: tuple[int, int], called: Sequence[str]) -> str:
    sides = [f"{operands[i].shape[name]} in {called[i]}{described(operands[i])}" for i in pair]
    return f"dim {name!r} has two sizes: {' and '.join(sides)}"


def _sized(x: NamedArray) -> str:
    """Return the dims with their sizes; without sizes if the held value has another rank."""
    sizes = getattr(x.held, "shape", ())
    return shown(x.dims, sizes) if len(sizes) == len(x.dims) else " ".join(x.dims)


def _doubled(x: NamedArray) -> str:
    twice = next(name for name in x.dims if x.dims.count(name) > 1)
    return f"duplicate dim {twice!r} in [{_sized(x)}]; rename one of them first with md.rename"


def _scalar(x: NamedArray, problem: str, remedy: str) -> Any:
    if x.dims:
        raise fail([f"a tensor with dims {described(x)} {problem}", remedy])
    return x.array


def _stripped(dims: Names, held: Any) -> list[str]:
    if not hasattr(held, "shape"):
        return [f"[{' '.join(dims)}] holds {is_a(held)}, not an array"]
    return [
        f"[{' '.join(dims)}] holds an array of shape {tuple(held.shape)}: {len(dims)} names for {len(held.shape)} dims",
        "a raw lax.scan, jax.vmap or tree.map changed the array's rank, but not the names;",
        "use md.scan(f, init, xs, over='layers') or md.vmap(f, over='batch'), which change both",
    ]


# ---- Operands --------------------------------------------------------------------------------------------------------
# Names given to arrays, and the operands and dims of an operation.


def named(array: Any, dims: DimsLike) -> Tensor:
    """Return the array with names for its dims.

    Args:
      array: an array, a ``jax.ShapeDtypeStruct``, or anything that ``jax.numpy.asarray`` takes.
      dims: one name per dim, ``"batch seq"``; a size, ``"batch=32 seq"``, has to be the array's.

    Returns:
      A named tensor of the array's shape and dtype; a scalar array is returned as it is.

    Raises:
      DimError: the number of names is not that of dims, or a size differs.

    Example:
      >>> x = md.named(tokens, "batch seq")
    """
    if isinstance(array, NamedArray):
        raise fail(
            f"{described(array)} already has named dims; change them with md.rename, or take the plain array, .array"
        )
    array = array if hasattr(array, "shape") and hasattr(array, "dtype") else jnp.asarray(array)
    wanted, shape = read_dims(dims), tuple(array.shape)
    if len(wanted) != len(shape):
        raise fail(f"{len(wanted)} names [{wanted}] for an array of {len(shape)} dims, shape {shape}")
    off = [(n, size) for n, size in zip(wanted, shape, strict=True) if wanted.size_of(n) not in (None, size)]
    if off:
        raise fail(
            [
                f"dim {n!r} has size {size} in the array of shape {shape}, but {wanted[n]} in the names"
                for n, size in off
            ]
        )
    return wrap(array, wanted.names)


def named_operand(x: Any) -> NamedArray:
    """Return an operand that must have dims; DimError otherwise."""
    x = read(x)
    if isinstance(x, NamedArray):
        return x
    raise fail(f"{is_a(x)}, not a tensor with named dims; make one with md.named(array, 'batch embed')")


def positions_of(x: Any, first: int = 0) -> Tensor:
    """Return an operand of integers, with or without dims; ``first`` as in :func:`axes`."""
    x = read(x)
    dtype = jnp.result_type(x.array if isinstance(x, NamedArray) else x)
    if not jnp.issubdtype(dtype, jnp.integer):
        said = f"{labels(1, first)[0]}{described(x)}" if isinstance(x, NamedArray) else repr(x)
        raise fail(f"positions must be integers, not {dtype} as in {said}")
    return x


def number(x: Any, argument: str) -> Any:
    """Return an argument that must be one number, traced or not."""
    x = read(x)
    if isinstance(x, NamedArray):
        raise fail(f"{argument} must be a scalar, not a tensor with dims {described(x)}")
    return x


def one_name(given: DimsLike, argument: str = "over") -> str:
    """Return the name in an argument that takes one dim."""
    names = read_names(given)
    if len(names) != 1:
        raise fail(f"{argument}={' '.join(names)!r} names {len(names)} dims; expected exactly one")
    return names[0]


def is_whole(n: Any) -> bool:
    """Return whether ``n`` is an integer that is known while the step is traced, and no bool."""
    return isinstance(n, int | np.integer) and not isinstance(n, bool)


def is_position(n: Any) -> bool:
    """Return whether ``n`` is an integer or a scalar array of one, traced or not."""
    scalar = getattr(n, "shape", None) == () and jnp.issubdtype(n.dtype, jnp.integer)
    return scalar or is_whole(n)


def is_pair(widths: Any) -> bool:
    """Return whether ``widths`` is a pair of integers: (before, after)."""
    return isinstance(widths, tuple | list) and len(widths) == 2 and all(map(is_whole, widths))


def axes(x: NamedArray, over: DimsLike | None, first: int = 0) -> tuple[int, ...]:
    """Return the positions of the dims ``over``, all for None; DimError with the nearest name.

    Args:
      first: position of ``x`` among the arguments of the user's call.
    """
    if over is None:
        return tuple(range(len(x.dims)))
    names = read_names(over)
    missing = [name for name in names if name not in x.dims]
    if missing:
        (label,) = labels(1, first)
        raise fail([absent(name, label, x) for name in missing])
    return tuple(sorted(x.dims.index(name) for name in names))


def axis(x: NamedArray, over: DimsLike, first: int = 0) -> int:
    """Return the position of one dim."""
    return axes(x, (one_name(over),), first)[0]


# ---- Names -----------------------------------------------------------------------------------------------------------
# Names of dims in a tree of arguments: those of named tensors, and those in the metadata of a flax model, which need
# not be rewritten:
#
# * ``nnx.Param(value, out_sharding=("embed", "hidden"))``, or ``nnx.with_partitioning`` around an
#   initialiser, in the variables of ``nnx.state(model)`` and of the optimizer state made from them;
# * ``nn.with_partitioning`` and ``nn.with_logical_partitioning``: linen's boxes, and optax states of them.
#
# flax is not imported; objects are recognised by these attributes.


METADATA = ("out_sharding", "sharding_names", "sharding")  # keys of dim names in flax's versions, newest first


def has_names(node: Any) -> bool:
    """Return whether a node of a tree names the dims of the array below it."""
    return names_of(node) is not None


def names_of(node: Any) -> Names | None:
    """Return the names of the dims of the array below a node, "" for a dim without one; None if it has none."""
    if isinstance(node, NamedArray):
        return node.dims
    kind = type(node)  # an object may make attributes when they are read, as nnx.Rngs makes random keys
    if hasattr(kind, "get_metadata") and hasattr(kind, "get_value"):
        return _of_variable(node)
    if hasattr(kind, "unbox") and hasattr(node, "names"):
        return _texts(node.names)
    return None


def _of_variable(variable: Any) -> Names | None:
    value = variable.get_value()
    if isinstance(value, NamedArray):
        return value.dims
    metadata = variable.get_metadata()
    names = next((metadata[key] for key in METADATA if metadata.get(key) is not None), None)
    return _texts(names) if isinstance(names, tuple) else None


def _texts(names: Any) -> Names:
    return tuple(name if isinstance(name, str) else "" for name in names)
