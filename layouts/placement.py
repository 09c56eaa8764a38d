"""Placement: what one mesh axis does to a tensor (OneFlow's SBP notation).

* ``S(dim)``  split: device i of the axis holds the i-th block of dim ``dim``.
* ``B``       broadcast: every device of the axis holds the whole value.
* ``P``       partial: the value is the sum of the devices' values; ``P("max")`` and
  ``P("min")`` are the maximum and minimum instead. On bools max is *or*, min is *and*.

Placements are interned values: equal placements are the same object, so comparing and
hashing cost nothing. A dim is a number, or a name in tensors with named dims.
"""

from collections.abc import Hashable
from typing import Any, ClassVar

from meshdsl.errors import NotationError, nearest

REDUCTIONS = ("sum", "max", "min")


class Placement:
    """One of :class:`Split`, :class:`Broadcast` or :class:`Partial`."""

    __slots__ = ()

    @property
    def meaning(self) -> str:
        """What the devices along an axis hold, in words."""
        raise NotImplementedError

    def __copy__(self) -> "Placement":
        return self

    def __deepcopy__(self, memo: object) -> "Placement":
        return self


class Split(Placement):
    """``S(dim)``: blocks of one dim, one block per device of the axis.

    Example:
      >>> md.Layout(data=md.S(0), model=md.B)
      Layout(data=S(0), model=B)
      >>> md.S("embed") == md.Layout.parse("data=S(embed)").on("data")
      True
    """

    __slots__ = ("dim",)
    _known: ClassVar[dict[int | str, "Split"]] = {}
    dim: int | str

    def __new__(cls, dim: int | str) -> "Split":
        """The one placement that splits ``dim``."""
        if type(dim) is bool or not isinstance(dim, Hashable) or dim not in cls._known:
            if not _is_dim(dim):
                raise NotationError(f"S({dim!r}): a dim is a whole number from 0 on, or a name")
            dim = dim if isinstance(dim, str) else int(dim)
            made = object.__new__(cls)
            object.__setattr__(made, "dim", dim)
            cls._known[dim] = made
        return cls._known[dim]

    @property
    def meaning(self) -> str:
        """What the devices along an axis hold, in words."""
        return f"split: each holds one block of dim {self.dim}"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self} is a value; {name} cannot be set")

    def __repr__(self) -> str:
        return f"S({self.dim!r})"

    def __str__(self) -> str:
        return f"S({self.dim})"

    def __reduce__(self) -> tuple[type, tuple[int | str]]:
        return Split, (self.dim,)


def _is_dim(dim: Any) -> bool:
    if isinstance(dim, str):
        return dim.isidentifier()
    return hasattr(dim, "__index__") and not isinstance(dim, bool) and dim >= 0


class Broadcast(Placement):
    """``B``: the whole value on every device of the axis.

    Example:
      >>> md.Layout.parse("data=B").on("data") is md.B
      True
    """

    __slots__ = ()

    @property
    def meaning(self) -> str:
        """What the devices along an axis hold, in words."""
        return "broadcast: all hold the same"

    def __repr__(self) -> str:
        return "B"

    def __reduce__(self) -> str:
        return "B"


class Partial(Placement):
    """``P``: the value is the reduction of the devices' values; ``P("max")`` calls choose another.

    Example:
      >>> md.P, md.P("max")
      (P, P("max"))
    """

    __slots__ = ("reduction",)
    _known: ClassVar[dict[str, "Partial"]] = {}
    reduction: str

    def __new__(cls, reduction: str = "sum") -> "Partial":
        """The one partial placement with this reduction: sum, max or min."""
        if reduction not in REDUCTIONS:
            raise NotationError(f"P({reduction!r}): no such reduction{nearest(reduction, REDUCTIONS)}")
        if reduction not in cls._known:
            made = object.__new__(cls)
            object.__setattr__(made, "reduction", reduction)
            cls._known[reduction] = made
        return cls._known[reduction]

    def __call__(self, reduction: str) -> "Partial":
        """``P("max")``: the partial placement with this reduction."""
        return Partial(reduction)

    @property
    def meaning(self) -> str:
        """What the devices along an axis hold, in words."""
        return f"partial: each holds one operand of a {self.reduction} that is not taken yet"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self} is a value; {name} cannot be set")

    def __repr__(self) -> str:
        return "P" if self.reduction == "sum" else f'P("{self.reduction}")'

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Partial, (self.reduction,)


S = Split
B = Broadcast()
P = Partial("sum")
