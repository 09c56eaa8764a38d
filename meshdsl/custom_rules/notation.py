"""The text of a user's rule, and the rules of derivatives that follow from it.

    b s h _, b t h _, b t h e -> b s h e

A letter or word names a dim; dims of one name have one length and are split together. ``_`` is a dim that cannot be
split, and so is one whose name a result lacks, unless the function reduces over it (``reduced``). The rules of
derivatives follow: a cotangent has the dims of its primal, and a dim that an operand lacks is summed over in the
operand's cotangent. If the function is right on blocks, so are its derivatives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from meshdsl.errors import RuleError, faults
from meshdsl.layouts.sharding_rule import Dims, Rule

Groups = tuple[tuple[int, ...], ...]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class RuleSpec:
    """Factors and properties of a function: the fields of ``Rule`` as hashable values."""

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduced: tuple[tuple[str, str], ...] = ()
    linear: Groups = ()
    commuting: Groups = ()
    increasing: tuple[int, ...] = ()
    decreasing: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    share: float = 1.0
    temporaries: bool = True

    def __str__(self) -> str:
        return f"{', '.join(map(_text, self.inputs))} -> {', '.join(map(_text, self.outputs))}"

    def lengths(self, shapes: Shapes) -> dict[str, int]:
        """Return the length of every factor, for operands and results of shapes that fit."""
        known = dict(self.sizes)
        dims = [(dim, n) for dims, shape in self._ports(shapes) for dim, n in zip(dims, shape, strict=True)]
        for dim, n in sorted(dims, key=lambda pair: len(pair[0])):
            missing = [f for f in dim if f not in known]
            if len(missing) == 1:
                known[missing[0]] = n // max(1, prod(known[f] for f in dim if f in known))
        return known

    def misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return a line per operand or result that the text does not fit; operands first, by name."""
        ports = list(zip(shapes, self._ports(list(shapes.values())), strict=True))
        ranks = [_wrong_rank(name, dims, shape) for name, (dims, shape) in ports if len(dims) != len(shape)]
        if ranks:
            return ranks
        known = self.lengths(list(shapes.values()))
        return [row for name, (dims, shape) in ports for row in _wrong_lengths(name, dims, shape, known)]

    def rule(self, shapes: Shapes) -> Rule:
        """Return the rule for operands and results of these shapes."""
        known, shared = self.lengths(shapes), {f for dims in (*self.inputs, *self.outputs) for f in _joined(dims)}
        return Rule(
            self.inputs,
            self.outputs,
            dict(self.reduced),
            self.linear,
            self.commuting,
            self.increasing,
            self.decreasing,
            {f: known[f] for f in sorted(shared)},
        )

    def tangent(self, which: Sequence[int], made: Sequence[int], shapes: Shapes) -> "RuleSpec":
        """Return the rule of the JVP along ``which``: operands, their tangents -> tangents of results ``made``."""
        inputs = (*self.inputs, *(self.inputs[i] for i in which))
        summed = [f for f, kind in self.reduced if kind == "sum"]
        return self._derived(inputs, [self.outputs[i] for i in made], summed, len(which), shapes)

    def cotangent(self, which: Sequence[int], made: Sequence[int], shapes: Shapes) -> "RuleSpec":
        """Return the rule of the VJP: operands, cotangents of results ``made`` -> cotangents of operands ``which``."""
        inputs = (*self.inputs, *(self.outputs[i] for i in made))
        return self._derived(inputs, [self.inputs[i] for i in which], self._divisible(), len(made), shapes)

    def mapped(self, axes: Sequence[int | None]) -> "RuleSpec":
        """Return the rule under ``vmap`` over one more dim of some operands; the results have it in front."""
        used = {f for dims in (*self.inputs, *self.outputs) for dim in dims for f in dim}
        name = next(n for i in range(len(used) + 1) if (n := f"map{i}") not in used)
        inputs = [
            dims if at is None else (*dims[:at], (name,), *dims[at:])
            for dims, at in zip(self.inputs, axes, strict=True)
        ]
        return replace(self, inputs=tuple(inputs), outputs=tuple(((name,), *dims) for dims in self.outputs))

    def _derived(
        self, inputs: Sequence[Dims], outputs: Sequence[Dims], summed: Iterable[str], count: int, shapes: Shapes
    ) -> "RuleSpec":
        """Return the rule of a derivative, which is jointly linear in its last ``count`` operands."""
        divisible = self._divisible()
        known = self.lengths(shapes)
        return RuleSpec(
            tuple(_only(dims, divisible) for dims in inputs),
            tuple(_only(dims, divisible) for dims in outputs),
            reduced=tuple((f, "sum") for f in summed),
            linear=(tuple(range(len(inputs) - count, len(inputs))),),
            sizes=tuple(sorted((f, known[f]) for dims in (*self.inputs, *self.outputs) for f in _joined(dims))),
            share=self.share,
            temporaries=self.temporaries,
        )

    def _divisible(self) -> list[str]:
        """Return the factors by which both the function and its derivatives can be split."""
        kinds = dict(self.reduced)
        names = dict.fromkeys(f for dims in (*self.inputs, *self.outputs) for dim in dims for f in dim)
        everywhere = [f for f in names if all(any(f in dim for dim in dims) for dims in self.outputs)]
        return [f for f in names if kinds.get(f) == "sum" or (f in everywhere and f not in kinds)]

    def _ports(self, shapes: Shapes) -> Iterator[tuple[Dims, tuple[int, ...]]]:
        return zip((*self.inputs, *self.outputs), shapes, strict=False)


def check_fit(
    name: str,
    given: RuleSpec,
    operands: Mapping[str, tuple[int, ...]],
    results: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """RuleError lists the operands, and the results once they are known, that the text of a rule does not fit."""
    counts = [("operands", len(given.inputs), operands)]
    counts += [] if results is None else [("results", len(given.outputs), results)]
    rows = [f"{what}: the text has {n}, the call {len(x)} ({', '.join(x)})" for what, n, x in counts if n != len(x)]
    rows = rows or given.misfits({**operands, **(results or {})})
    if rows:
        raise RuleError(faults(f"the rule of {name} does not fit, {given}:", rows))


def parse(
    text: str,
    reduced: Mapping[str, str],
    sizes: Mapping[str, int],
    share: float = 1.0,
    temporaries: bool = True,
    **groups: Groups,
) -> RuleSpec:
    """Parse the text of a rule; RuleError lists all its faults."""
    found = Rule.parse(text)
    properties = {name: tuple(value) for name, value in groups.items()}
    given = RuleSpec(
        found.inputs,
        found.outputs,
        reduced=tuple(reduced.items()),
        sizes=tuple(sorted(sizes.items())),
        share=share,
        temporaries=temporaries,
        **properties,  # type: ignore[arg-type]
    )
    rows = list(_text_faults(text, given))
    if rows:
        raise RuleError(faults(f"{text!r} is not a rule:", rows, "a rule reads 'b m k, b k n -> b m n'"))
    return given


def _text_faults(text: str, given: RuleSpec) -> Iterator[str]:
    if text.count("->") != 1:
        yield "it needs one '->'"
    operands = {f for dims in given.inputs for dim in dims for f in dim}
    results = dict.fromkeys(f for dims in given.outputs for dim in dims for f in dim)
    yield from (
        f"{f} is in a result, but in no operand; write _ if it cannot be split" for f in results if f not in operands
    )
    if not (isinstance(given.share, int | float) and 0 < given.share <= 1):
        yield f"share={given.share!r} is not a fraction of its multiplications, above 0 and up to 1"
    if not isinstance(given.temporaries, bool):
        yield f"temporaries={given.temporaries!r} is neither True nor False"
    yield from (f"{f} is reduced, but in no operand" for f, _ in given.reduced if f not in operands)
    for f, kind in given.reduced:
        if kind not in ("sum", "max", "min"):
            yield f"{f} is reduced by {kind!r}; reductions are sum, max and min"
    count = len(given.inputs)
    for name in ("linear", "commuting", "increasing", "decreasing"):
        stated = getattr(given, name)
        numbers = stated if name.endswith("ing") and name != "commuting" else [i for group in stated for i in group]
        yield from (
            f"{name}: there is no operand {i}; they count from 0 to {count - 1}" for i in numbers if not 0 <= i < count
        )


def _text(dims: Dims) -> str:
    return " ".join("_" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


def _joined(dims: Dims) -> Iterator[str]:
    """Yield the factors that share a dim with others."""
    return (f for dim in dims if len(dim) > 1 for f in dim)


def _only(dims: Dims, factors: Iterable[str]) -> Dims:
    """Return the dims, indivisible unless their major factor is among ``factors``."""
    divisible = set(factors)
    return tuple(dim if dim and dim[0] in divisible else () for dim in dims)


def _wrong_rank(name: str, dims: Dims, shape: tuple[int, ...]) -> str:
    return f"{name} of shape {shape} has {len(shape)} dims, the text names {len(dims)}: {_text(dims) or 'none'}"


def _wrong_lengths(name: str, dims: Dims, shape: tuple[int, ...], known: Mapping[str, int]) -> Iterator[str]:
    for i, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        unknown = [f for f in dim if f not in known]
        if unknown:
            yield f"{name} of shape {shape}: the lengths of {', '.join(unknown)} in dim {i} are unknown; pass sizes="
        elif dim and prod(known[f] for f in dim) != n:
            lengths = ", ".join(f"{f}={known[f]}" for f in dim)
            yield f"{name} of shape {shape} ({_text(dims)}): dim {i} is {n}, elsewhere {lengths}"
