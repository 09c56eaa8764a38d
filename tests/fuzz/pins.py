"""Random layouts: pins of arguments, and of values inside a step."""

from math import prod

from tests.fuzz.blocks import block, moved
from tests.fuzz.writer import Value, Writer


def layout(w: Writer, shape: tuple[int, ...], partial: bool = False, uneven: bool = False) -> str:
    """The text of a layout that divides such an array, unless it may be uneven; some axes are left free."""
    placed: dict[str, str] = {}
    for axis in _shuffled(w, w.mesh.names):
        chosen = w.pick(["", "S", "S", "B", "P" if partial else "S"])
        blocks = [_blocks(w, placed, d) * w.mesh.axis(axis) for d in range(len(shape))]
        fits = [d for d, n in enumerate(shape) if n % blocks[d] == 0 or (uneven and n > 1)]
        if chosen == "S" and fits:
            placed[axis] = f"S({w.pick(fits)})"
        elif chosen in ("B", "P"):
            placed[axis] = chosen
    return " ".join(f"{axis}={text}" for axis, text in placed.items())


def _blocks(w: Writer, placed: dict[str, str], dim: int) -> int:
    return prod(w.mesh.axis(axis) for axis, text in placed.items() if text == f"S({dim})")


def _shuffled(w: Writer, axes: tuple[str, ...]) -> list[str]:
    left, found = list(axes), []
    while left:
        found.append(left.pop(w.draw(len(left))))
    return found


@block(4)
def constrain(w: Writer) -> None:
    x = w.floats()
    stated = layout(w, x.shape, partial=True)
    if stated:
        moved(w, x, f'md.constrain({x}, "{stated}")')


def input_pins(w: Writer) -> dict[str, str]:
    """Pins of some arguments of the step; in every fourth, they need not divide."""
    uneven = w.chance(25)
    stated = {i.value.name: _pin(w, i.value, uneven) for i in w.inputs}
    return {name: text for name, text in stated.items() if text}


def _pin(w: Writer, x: Value, uneven: bool) -> str:
    return layout(w, x.shape, uneven=uneven) if x.shape and w.chance(60) else ""
