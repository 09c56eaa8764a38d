"""The smallest sets of pins that cannot hold together, by name.

Moves lead from every layout of a value to every other, so pins of two values can always be met: only pins that
speak of one array contradict each other. Of those, the parts in force are looked at, which no later pin has
decided otherwise:

    "**": data=S(0)   "x": model=S(0)   "*": pod=S(1)        x float32[4], on data=4,model=2,pod=2

Each fits x alone. ``**`` and ``x`` together split four rows into eight, whatever ``*`` says, so these
two are named. Layout rules are taken apart into their entries, one per dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.rules import entry

Named = tuple[str, Layout]  # what a pin is called, and what it says


def merge(pins: Iterable[Layout]) -> Layout:
    """The pins in order, the last one that names an axis deciding it."""
    merged: dict[str, Placement] = {}
    for pin in pins:
        merged = {n: p for n, p in merged.items() if n not in pin.axes} | dict(pin.placements)
    return Layout(**merged)


def entries(rule: Layout, dims: Sequence[str]) -> list[Named]:
    """What layout rules say of an array with these dims, entry by entry."""
    split = [(dim, rule.splitting(i)) for i, dim in enumerate(dims)]
    return [
        (f"rule {entry(dim, axes)}", Layout(**dict.fromkeys(axes, rule.on(axes[0])))) for dim, axes in split if axes
    ]


def contradictions(
    pins: Sequence[Named], wrong: Callable[[Layout], Sequence[str]]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Smallest sets of pins in force that do not fit together, and what is wrong: one, then those without its last pin.

    Args:
      wrong: the faults of a layout; none of a layout with fewer axes than one without faults.
    """
    left = _in_force(pins)
    while found := next(_at_fault(left, wrong), None):
        some, texts = found
        yield ", ".join(f"{name} says {pin}" for name, pin in some), texts
        left = [pin for pin in left if pin is not some[-1]]


def _in_force(pins: Sequence[Named]) -> list[Named]:
    """Every pin with the axes that no later pin names."""
    later: set[str] = set()
    found: list[Named] = []
    for name, pin in reversed(pins):
        mine = {axis: placed for axis, placed in pin.placements if axis not in later}
        later.update(mine)
        found += [(name, Layout(**mine))] if mine else []
    return found[::-1]


def _at_fault(
    pins: Sequence[Named], wrong: Callable[[Layout], Sequence[str]]
) -> Iterator[tuple[Sequence[Named], Sequence[str]]]:
    """Sets of pins that do not fit together, the smallest first."""
    for size in range(1, len(pins) + 1):
        for some in combinations(pins, size):
            texts = wrong(merge(pin for _, pin in some))
            if texts:
                yield some, texts
