"""Tensors with named dims: an ordinary array, and the names of its dims.

    x = md.named(tokens, "batch seq")
    y = md.dot(x, w, over="embed") + bias          # dims meet by name, wherever they stand

Nothing is added to the traced program: every operation runs the ``jax.numpy`` or ``lax``
function that one would write by hand, on the arrays, with dims in place of axis numbers.

*Order.* The dims of a result keep the order of all operands; where that leaves a choice, those
of the first come first: ``a[batch embed] * b[seq embed]`` is ``[batch seq embed]``. Only where
two operands contradict each other is one transposed: the one with fewer dims, or the second.

*Without dims.* A result without dims is an ordinary scalar array, so a loss can go to ``jax.grad``.

*Other transforms.* A named tensor is a pytree of one leaf. ``jit``, ``grad``, ``tree.map``, optax and
orbax see the array. ``lax.scan`` and ``jax.vmap`` take a leading axis off that array which the names
do not know of; the next operation on it is an error that points to :func:`meshdsl.scan` and ``vmap``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from meshdsl.dsl.blame import described, fail, labels
from meshdsl.dsl.dims import Dims, shown
from meshdsl.dsl.order import Names, aligned, common_order
from meshdsl.dsl.pinned import pinned
from meshdsl.errors import is_a

Tensor: TypeAlias = Union["NamedArray", Any]  # named, or an ordinary scalar array where no dims are left


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False, repr=False)
class NamedArray:
    """An array and the names of its dims, in order.

    Args:
      held: what a pytree put here: the array, or whatever a ``tree.map`` made of it.
      dims: one name per dim of the array.
    """

    held: Any
    dims: Names

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
        """The same tensor in another dtype."""
        return NamedArray(self.array.astype(dtype), self.dims)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, Any]], Names]:
        """The array is the only leaf; the names are structure."""
        return ((GetAttrKey("array"), self.held),), self.dims

    @classmethod
    def tree_unflatten(cls, dims: Names, leaves: Iterable[Any]) -> "NamedArray":
        """Whatever a pytree operation puts in the array's place."""
        (held,) = leaves
        return cls(held, dims)

    def __repr__(self) -> str:
        sizes = getattr(self.held, "shape", ())
        names = shown(self.dims, sizes) if len(sizes) == len(self.dims) else " ".join(self.dims)
        return f"NamedArray([{names}], {self.held!r})"

    __array_ufunc__ = None  # numpy arrays leave arithmetic with named tensors to them
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    def __add__(self, other: Any) -> Tensor:
        return lift(jnp.add, self, other)

    def __radd__(self, other: Any) -> Tensor:
        return lift(jnp.add, other, self)

    def __sub__(self, other: Any) -> Tensor:
        return lift(jnp.subtract, self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return lift(jnp.subtract, other, self)

    def __mul__(self, other: Any) -> Tensor:
        return lift(jnp.multiply, self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return lift(jnp.multiply, other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return lift(jnp.true_divide, self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return lift(jnp.true_divide, other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return lift(jnp.floor_divide, self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return lift(jnp.floor_divide, other, self)

    def __mod__(self, other: Any) -> Tensor:
        return lift(jnp.remainder, self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return lift(jnp.remainder, other, self)

    def __pow__(self, other: Any) -> Tensor:
        return lift(jnp.power, self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return lift(jnp.power, other, self)

    def __and__(self, other: Any) -> Tensor:
        return lift(jnp.bitwise_and, self, other)

    def __rand__(self, other: Any) -> Tensor:
        return lift(jnp.bitwise_and, other, self)

    def __or__(self, other: Any) -> Tensor:
        return lift(jnp.bitwise_or, self, other)

    def __ror__(self, other: Any) -> Tensor:
        return lift(jnp.bitwise_or, other, self)

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
        raise fail("@ does not say which dims to sum over; write md.dot(x, y, over='embed')")

    __rmatmul__ = __matmul__


def wrap(array: Any, dims: Names) -> Tensor:
    """The array with these names; itself if there are none."""
    return NamedArray(array, dims) if dims else array


def computed(array: Any, dims: Names) -> Tensor:
    """A result with these dims; the layout rules in force for results hold for it."""
    return wrap(pinned(array, dims), dims)


def read(x: Any) -> Tensor:
    """An operand: a named tensor (also in a flax variable) or a scalar; DimError for arrays without names."""
    if isinstance(x, NamedArray):
        return x
    x = x.get_value() if hasattr(x, "get_value") else x
    if isinstance(x, NamedArray) or not getattr(x, "shape", ()):
        return x
    raise fail(f"an array of shape {tuple(x.shape)} has no names of dims; md.named(array, 'batch embed') gives them")


def sizes_of(operands: Sequence[Any], free: Names = ()) -> dict[str, int]:
    """Sizes by name over all operands; DimError shows both tensors where two differ, but in ``free`` dims."""
    found: dict[str, tuple[int, int]] = {}
    for i, x in enumerate(operands):
        for name, size in zip(x.dims, x.array.shape, strict=True) if isinstance(x, NamedArray) else ():
            first, known = found.setdefault(name, (i, size))
            if known != size and name not in free:
                raise fail(_conflict(name, operands, first, i))
    return {name: size for name, (_, size) in found.items()}


def lift(fn: Callable[..., Any], *operands: Any) -> Tensor:
    """``fn``, elementwise on arrays, on operands that meet by name."""
    read_in = [read(x) for x in operands]
    sizes = sizes_of(read_in)
    dims = common_order(x.dims for x in read_in if isinstance(x, NamedArray))
    made = fn(*(aligned(x.array, x.dims, dims) if isinstance(x, NamedArray) else x for x in read_in))
    if tuple(jnp.shape(made)) != tuple(sizes[name] for name in dims):
        whole = shown(dims, [sizes[name] for name in dims])
        raise fail(f"{getattr(fn, '__name__', fn)} is not elementwise: of [{whole}] it makes shape {jnp.shape(made)}")
    return computed(made, dims)


def _conflict(name: str, operands: Sequence[Any], first: int, second: int) -> str:
    called = labels(len(operands))
    sides = [f"{operands[i].shape[name]} in {called[i]}{described(operands[i])}" for i in (first, second)]
    return f"dim {name!r} has two sizes: {' and '.join(sides)}"


def _stripped(dims: Names, held: Any) -> list[str]:
    if not hasattr(held, "shape"):
        return [f"[{' '.join(dims)}] holds {is_a(held)}, not an array"]
    return [
        f"[{' '.join(dims)}] holds an array of shape {tuple(held.shape)}: {len(dims)} names for {len(held.shape)} dims",
        "a raw lax.scan, jax.vmap or tree.map changed the array, of which the names do not know;",
        "md.scan(f, init, xs, over='layers') and md.vmap(f, over='batch') keep them together",
    ]
