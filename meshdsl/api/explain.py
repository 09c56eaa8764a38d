"""Explain: why an input has the layout it has, by what every other one would cost.

    print(sharded.explain("params/w1", params, opt_state, batch))

Each alternative is planned in full with that one input pinned to it; all other pins stay. So the
figures are those of real plans, and what the user has pinned shows what leaving it would gain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import space
from meshdsl.plan.plan import Plan
from meshdsl.plan.text import layout_text
from meshdsl.plan.types import Array
from meshdsl.util.text import bytes_text, seconds_text, table


@dataclass(frozen=True)
class Alternative:
    """A layout of the input, and the best plan with it; None if none fits the memory."""

    layout: Layout
    plan: Plan | None


@dataclass(frozen=True)
class Explanation:
    """An input's layout beside all others it could have, cheapest first.

    Args:
      plan: the plan in question.
    """

    input: Array
    plan: Plan
    alternatives: tuple[Alternative, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """As plain values."""
        rows = [
            {"layout": str(each.layout.named(self.input.dims))}
            | ({} if each.plan is None else {key: getattr(each.plan, key) for key in ("seconds", "bytes", "memory")})
            for each in self.alternatives
        ]
        layout = str(self.input.layout.named(self.input.dims))
        return {"input": self.input.path, "layout": layout, "pinned": self.input.pinned, "alternatives": rows}

    def __str__(self) -> str:
        parts = [_stated(self.input), *moves_of_input(self.plan, self.input.path)]
        if self.alternatives:
            rows = [self._row(each) for each in self.alternatives]
            parts += ["", *table([("layout", "step", "against the plan", "sent", "memory"), *rows])]
        return "\n".join(parts)

    def _row(self, each: Alternative) -> tuple[str, ...]:
        named = layout_text(each.layout.named(self.input.dims))
        if each.plan is None:
            return named, "does not fit the memory", "", "", ""
        more = each.plan.seconds - self.plan.seconds
        against = "the same" if abs(more) <= 1e-9 * self.plan.seconds else f"{more / self.plan.seconds:+.2%}"
        seconds, sent = seconds_text(each.plan.seconds), bytes_text(each.plan.bytes)
        return named, seconds, against, sent, bytes_text(each.plan.memory)


def explain(plan: Plan, path: str, replan: Callable[[Layout], Plan] | None = None) -> Explanation:
    """Why the input at ``path`` lies as it does.

    Args:
      replan: the plan with this input pinned to a layout; without it no alternatives are looked at.

    LayoutError with the nearest path if there is no such input.
    """
    stated = plan.layout(path)
    found = next(array for array in plan.inputs if array.path == path)
    tried = dict.fromkeys((stated, *layouts(found.shape, plan.mesh))) if replan else ()
    made = [Alternative(layout, _planned(layout, replan)) for layout in tried if replan]
    return Explanation(found, plan, tuple(sorted(made, key=_cost)))


def moves_of_input(plan: Plan, path: str) -> Iterator[str]:
    """What moves the input, a line each."""
    for c in plan.collectives:
        if c.value == path or c.value.startswith(f"{path}["):
            runs = f" x{c.trips}" if c.trips > 1 else ""
            yield f"  {c.kind} over {','.join(c.axes)}{runs}, {seconds_text(c.seconds * c.trips)}: {c.reason}"


def layouts(shape: Sequence[int], mesh: Mesh) -> Iterator[Layout]:
    """Every layout in which no device holds a part of a sum and the blocks come out even; axes in the mesh's order."""
    found = space(mesh, len(shape), ())
    yield from (layout for i, layout in enumerate(found.layouts) if found.fits(i, shape) and layout.axes == mesh.names)


def _stated(array: Array) -> str:
    named = layout_text(array.layout.named(array.dims))
    pinned = [f"{axis} is pinned" for axis in array.pinned] or ["no pin says so"]
    return f"{array.path} {array.type} has {named}; {', '.join(pinned)}"


def _planned(layout: Layout, replan: Callable[[Layout], Plan]) -> Plan | None:
    try:
        return replan(layout)
    except MemoryLimitError:
        return None


def _cost(each: Alternative) -> tuple[float, str]:
    return (float("inf") if each.plan is None else each.plan.seconds, str(each.layout))
