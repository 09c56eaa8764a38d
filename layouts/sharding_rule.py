"""Rule: what an operation does to placements on one mesh axis, written as factors.

The dims of operands and results are labelled with *factors*, einsum style. A matmul is
``m k, k n -> m n``: factor ``m`` is in the first operand and in the result, so the operation
runs on blocks of ``m`` unchanged; ``k`` is summed away, so blocks of ``k`` give partial sums.
Beside the factors a rule states algebraic properties. The table of *rows* (one row = one
signature on one axis) is derived from both:

* factor in operands and results      -> ``S`` where it occurs, ``B`` on operands without it
* factor reduced away                 -> ``S`` on the operands, ``P(reduction)`` on the results
* ``linear`` group of operands        -> ``P`` on the group, ``B`` on the others: ``P``
* ``rounding`` group of operands      -> the same, but only if the user pins the result partial: linear up to rounding
* ``commuting`` group of operands     -> the same for ``P(max)`` and ``P(min)`` as well
* ``increasing`` / ``decreasing``     -> ``P(max)`` stays / becomes ``P(min)``, and vice versa
* always                              -> everything ``B``

A dim of several factors, ``(a b)``, is split through its major factor, into a number of blocks that divides the length
of that factor. Under a ``nested`` rule it may also be split through ``b``, by axes that come after others which divide
``a`` fully, for then the blocks are blocks of ``b``:

    a b -> (a b), a = 4     data=4: S(0) -> S(0)     then model=2: S(1) -> S(0)

``_`` is a dim that cannot be split. Rows that no property gives (a lookup in a split table, say) are listed as
``extra``, and so are those whose local programs contain collectives (exchanges).

N mesh axes need no rule of their own: each axis takes a row, and blocks nest. Rows of merged dims fit together only if
``divides`` says so.
(The idea of factors is Shardy's; rules on one axis are PyTorch DTensor's and OneFlow's.)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, P, Partial, Placement, Split

Dims = tuple[tuple[str, ...], ...]
Placements = tuple[tuple[Placement, ...], tuple[Placement, ...]]  # of a row's operands and results
_DIM = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclass(frozen=True)
class Signature:
    """One row of a rule: the placements of an operation's operands and results on one mesh axis.

    Args:
      inputs: a placement per operand.
      outputs: a placement per result.
      size: a further length that the axes splitting the row's dims have to divide together, beside the
        dims themselves; 0 for none. Splitting a dim ``(a b)`` with a = 6 and b = 4 through ``a`` has size 6:
        axes of 2 and 3 devices may both take this row, axes of 2 and 4 may not, although 8 divides 24.
      collectives: exchanges of the local program on this axis, such as the halo of a convolution. Axes
        whose rows list equal exchanges run them as one, over their product. Rows with different
        exchanges combine only if these are windows over different dims.
      majors: per operand and result, the length in front of the factor that is split, in its dim; empty if all are 1.
        Axes before this one have to divide it fully.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    size: int = 0
    collectives: tuple[Exchange, ...] = ()
    majors: tuple[int, ...] = ()

    def part(self, port: int) -> "Part":
        """Returns the part of a dim that the row splits at an operand or result, counted together."""
        return self.majors[port] if self.majors else 1, self.size

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


Part = tuple[int, int]  # of a dim, which a row splits: the length in front of it, and its own, 0 for the rest


def divides(length: int, splits: Sequence[tuple[int, Part]]) -> bool:
    """Whether axes can split a dim together.

    Args:
      length: of the dim.
      splits: devices of each axis, major first, and the part of the dim that its row splits.
    """
    blocks = 1
    for devices, (before, _) in splits:
        if blocks % before:
            return False  # a minor part, while what is in front of it is not divided fully
        blocks *= devices

    def fills(before: int, own: int) -> bool:
        return before * own % prod(devices for devices, (front, _) in splits if front <= before) == 0

    return length % blocks == 0 and all(fills(*part) for _, part in splits)


@dataclass(frozen=True)
class Rule:
    """Factors and algebraic properties of one operation; ``rows`` derives its table.

    Args:
      inputs: per operand, per dim, the factors of that dim, major first; () cannot be split.
      outputs: the same per result.
      reduced: factors that vanish, with the reduction that removes them: sum, max or min.
      linear: groups of operands; the operation is linear in each group jointly.
      commuting: groups of operands that any elementwise reduction commutes with jointly
        (data movement: transpose, concatenate, select under one predicate).
      increasing: operands in which the operation is monotone increasing, others fixed.
      decreasing: likewise decreasing.
      sizes: length of each factor that shares a dim with others.
      extra: rows that no property gives.
      without: rows that do not hold, by their placements.
      rounding: groups of operands; the operation is linear in each but for rounding.
      nested: dims of several factors are also split through minor ones.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    commuting: tuple[tuple[int, ...], ...] = ()
    increasing: tuple[int, ...] = ()
    decreasing: tuple[int, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    extra: tuple[Signature, ...] = ()
    without: frozenset[Placements] = frozenset()
    rounding: tuple[tuple[int, ...], ...] = ()
    nested: bool = False

    @classmethod
    def parse(cls, text: str, **properties: object) -> "Rule":
        """Returns the rule written as ``"b m k, b k n -> b m n"``; an operand without dims is empty."""
        before, _, after = text.partition("->")
        return cls(_operands(before), _operands(after), **properties)  # type: ignore[arg-type]

    def rows(self) -> tuple[Signature, ...]:
        """Returns the table for one axis, every row once, all-``B`` first."""
        found = [self._row(B, range(0), B), *self._splits(), *self._partials(), *self._monotone(), *self.extra]
        return tuple(row for row in dict.fromkeys(found) if (row.inputs, row.outputs) not in self.without)

    def rows_if_pinned_partial(self) -> tuple[Signature, ...]:
        """Returns the rows that are legal only on axes over which the user pins the result partial."""
        return tuple(self._row(P, group, P) for group in self.rounding)

    def _factors(self) -> tuple[str, ...]:
        names = (name for dims in (*self.inputs, *self.outputs) for dim in dims for name in dim)
        return tuple(dict.fromkeys(names))

    def _splits(self) -> Iterator[Signature]:
        for factor in self._factors():
            row = self._split(factor)
            if row is not None:
                yield row

    def _split(self, factor: str) -> Signature | None:
        ports = [self._dim(factor, dims) for dims in (*self.inputs, *self.outputs)]
        majors = tuple(self._length_before(factor, dim) for _, dim in ports)
        is_minor = any(n > 1 for n in majors)
        if is_minor and not (self.nested and self.sizes.get(factor, 1) > 1):
            return None
        reduction = Partial(self.reduced[factor]) if factor in self.reduced else None
        placed = [Split(at) if dim else None for at, dim in ports]
        inputs, outputs = placed[: len(self.inputs)], placed[len(self.inputs) :]
        if reduction is None and any(p is None for p in outputs):
            return None
        return Signature(
            tuple(p or B for p in inputs),
            tuple(p or reduction or B for p in outputs),
            self.sizes.get(factor, 0),
            majors=majors if is_minor else (),
        )

    def _dim(self, factor: str, dims: Dims) -> tuple[int, tuple[str, ...]]:
        """Returns the position and factors of the dim that has ``factor``; no factors if none has."""
        return next(((i, dim) for i, dim in enumerate(dims) if factor in dim), (0, ()))

    def _length_before(self, factor: str, dim: tuple[str, ...]) -> int:
        """Returns the length of the factors in front of one in its dim; for one of length 1, of all others."""
        if not dim:
            return 1
        before = dim if self.sizes.get(factor, 2) == 1 else dim[: dim.index(factor)]
        return prod(self.sizes.get(other, 2) for other in before)

    def _partials(self) -> Iterator[Signature]:
        for group in (*self.linear, *self.commuting):
            yield self._row(P, group, P)
        for group in self.commuting:
            for kind in ("max", "min"):
                yield self._row(P(kind), group, P(kind))

    def _monotone(self) -> Iterator[Signature]:
        for operands, flip in ((self.increasing, False), (self.decreasing, True)):
            for i in operands:
                for kind, other in (("max", "min"), ("min", "max")):
                    yield self._row(P(kind), (i,), P(other if flip else kind))

    def _row(self, placed: Placement, group: "tuple[int, ...] | range", result: Placement) -> Signature:
        inputs = tuple(placed if i in group else B for i in range(len(self.inputs)))
        return Signature(inputs, (result,) * len(self.outputs))


def _operands(text: str) -> tuple[Dims, ...]:
    return tuple(_dims(part) for part in text.split(",")) if text.strip() or "," in text else ((),)


def _dims(text: str) -> Dims:
    found = _DIM.findall(text)
    return tuple(() if single == "_" else tuple(group.split()) if group else (single,) for group, single in found)
