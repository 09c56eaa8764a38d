"""Layout: one placement per mesh axis, with the order of the axes that split one dim.

``data=S(0) model=P`` reads: the rows are split over ``data``; over ``model`` the value is a
partial sum. Axes that split the same dim are written major first: in ``x=S(1) y=S(1)`` the
blocks of dim 1 run over x slowly and over y fast, as in ``PartitionSpec(None, ("x", "y"))``.
The order matters only among axes of one dim; layouts that differ otherwise in order are equal.

An axis that is not named is ``B``. (In a *pin* it is free instead; a pin is a layout whose
``axes`` say which it names.)

``data=S(0) @host`` is the same layout in the memory of the host, where inputs and results of a step can live. A layout
that names no memory is in that of the device; a pin that names none leaves it open.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshdsl.errors import NotationError, nearest
from meshdsl.layouts.notation import MEMORIES, parse_layout
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.util.html import tables_html


class Layout:
    """How a tensor is laid out over a mesh: a placement per axis.

    Args:
      placements: placements by axis name. Axes that split one dim are given major first; axes not named are ``B``.

    Attributes:
      memory: ``"host"`` or ``"device"`` if it is named (``within``), else empty.

    Raises:
      NotationError: a name is not that of an axis, or a value is not a placement.

    Example:
      >>> md.Layout(data=md.S(0), model=md.P) == md.Layout.parse("model=P data=S(0)")
      True
    """

    __slots__ = ("_hash", "_key", "memory", "placements")
    placements: tuple[tuple[str, Placement], ...]
    memory: str
    _key: tuple[frozenset[tuple[str, Placement]], frozenset[tuple[str, ...]], str]
    _hash: int

    def __init__(self, **placements: Placement) -> None:
        for name, placed in placements.items():
            if not name.isidentifier():
                raise NotationError(f"{name!r} is no axis name; write letters, digits and _")
            if not isinstance(placed, Placement):
                raise NotationError(f"{name}={placed!r} is no placement; write S(dim), B, P, P('max') or P('min')")
        object.__setattr__(self, "placements", tuple(placements.items()))
        self._settle("")

    def _settle(self, memory: str) -> None:
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "_key", (frozenset(self.placements), self._orders(), memory))
        object.__setattr__(self, "_hash", hash(self._key))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Returns the layout written as ``"data=S(0) model=P"``, also ``"... @host"``; errors carry a caret."""
        placements, memory = parse_layout(text)
        return cls(**placements).within(memory)

    def within(self, memory: str) -> "Layout":
        """Returns the layout in the memory of the ``"host"`` or the ``"device"``; with ``""``, no memory is named.

        Example:
          >>> print(md.Layout(data=md.S(0)).within("host"))
          data=S(0) @host
        """
        if memory not in ("", *MEMORIES):
            raise NotationError(f"no memory {memory!r}{nearest(memory, MEMORIES)}; write 'host' or 'device'")
        if memory == self.memory:
            return self
        made = Layout(**dict(self.placements))
        made._settle(memory)
        return made

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are named, as written."""
        return tuple(name for name, _ in self.placements)

    @classmethod
    def of(cls, stated: "Layout | str") -> "Layout":
        """Returns a layout, or the one that a text describes; raises NotationError for anything else."""
        if not isinstance(stated, Layout | str):
            raise NotationError(f"{stated!r} is no layout; write text such as 'data=S(0) model=B', or a Layout")
        return stated if isinstance(stated, Layout) else cls.parse(stated)

    def on(self, axis: str) -> Placement:
        """Returns the placement on one axis; ``B`` if it is not named."""
        return next((p for name, p in self.placements if name == axis), B)

    def splitting(self, dim: int | str) -> tuple[str, ...]:
        """Returns the axes that split ``dim``, major first."""
        return tuple(name for name, p in self.placements if p is Split(dim))

    def numbered(self, dims: Sequence[str]) -> "Layout":
        """Returns the layout of a tensor with these dims by their positions; other names stay."""
        return self._mapped({name: i for i, name in enumerate(dims)})

    def named(self, dims: Sequence[str]) -> "Layout":
        """Returns the layout of a tensor with these dims by their names, where they have one."""
        return self._mapped({i: name for i, name in enumerate(dims) if name})

    def _mapped(self, dims: Mapping[Any, int | str]) -> "Layout":
        if not any(isinstance(p, Split) and p.dim in dims for _, p in self.placements):
            return self

        def moved(p: Placement) -> Placement:
            return Split(dims.get(p.dim, p.dim)) if isinstance(p, Split) else p

        return Layout(**{axis: moved(p) for axis, p in self.placements}).within(self.memory)

    def partial(self) -> tuple[str, ...]:
        """Returns the axes over which the value is partial."""
        return tuple(name for name, p in self.placements if isinstance(p, Partial))

    def shards(self, rank: int, sizes: dict[str, int]) -> tuple[int, ...]:
        """Returns the blocks per dim of a tensor of ``rank`` dims, with axis ``sizes``."""
        counts = [1] * rank
        for name, placed in self.placements:
            if isinstance(placed, Split) and isinstance(placed.dim, int):
                counts[placed.dim] *= sizes[name]
        return tuple(counts)

    def local_shape(self, shape: Sequence[int], sizes: dict[str, int]) -> tuple[int, ...]:
        """Returns the shape of one device's block of a tensor of ``shape``."""
        return tuple(n // k for n, k in zip(shape, self.shards(len(shape), sizes), strict=True))

    def _orders(self) -> frozenset[tuple[str, ...]]:
        """Returns the orders of axes that share a dim."""
        splits = [p for _, p in self.placements if isinstance(p, Split)]
        shared = {p.dim for i, p in enumerate(splits) if p in splits[:i]}
        return frozenset(self.splitting(d) for d in shared)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., "Layout"], tuple[tuple[tuple[str, Placement], ...], str]]:
        return _made, (self.placements, self.memory)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a layout is a value; {name} cannot be set")

    def __repr__(self) -> str:
        within = f".within({self.memory!r})" if self.memory else ""
        return f"Layout({', '.join(f'{n}={p!r}' for n, p in self.placements)}){within}"

    def __str__(self) -> str:
        return " ".join([*(f"{n}={p}" for n, p in self.placements), *([f"@{self.memory}"] if self.memory else [])])

    def _repr_html_(self) -> str:
        """A row per mesh axis, for notebooks."""
        rows = [(axis, str(placement), placement.meaning) for axis, placement in self.placements]
        tables = [[("mesh axis", "placement", "devices along it"), *rows]] if rows else []
        return tables_html(str(self) or f"B: {B.meaning}", tables)


def _made(placements: tuple[tuple[str, Placement], ...], memory: str = "") -> Layout:
    return Layout(**dict(placements)).within(memory)
