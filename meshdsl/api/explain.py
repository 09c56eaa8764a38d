"""Explain why an input has its layout, by what every other layout would cost.

    print(sharded.explain("params/w1", params, opt_state, batch))

Each alternative is planned in full with that one input pinned to it, and all other pins unchanged. So the figures are
those of real plans, and for an input that the user pinned they show what removing the pin would gain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.api.stages import CallStages
from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import layout_graph
from meshdsl.plan.plan import Plan
from meshdsl.plan.text import layout_text
from meshdsl.plan.types import Array
from meshdsl.util.text import bytes_text, change_text, seconds_text, table


@dataclass(frozen=True)
class Alternative:
    """A layout of the input, and the best plan with it; None if no plan fits the memory."""

    layout: Layout
    plan: Plan | None

    @property
    def seconds(self) -> float:
        """Seconds of the plan; infinite without one."""
        return float("inf") if self.plan is None else self.plan.seconds


@dataclass(frozen=True)
class Explanation:
    """An input's layout beside all layouts that it could have, cheapest first; ``print`` shows the table.

    Args:
      input: the input, with its layout in ``plan``.
      plan: the plan that is explained.
      alternatives: every layout of the input with its best plan; empty without a program to plan.

    Example:
      >>> why = md.parallelize(step, "data=8", md.data_parallel()).explain("params/up", params, batch)
      >>> sorted(str(each.layout) for each in why.alternatives)
      ['data=B', 'data=S(0)', 'data=S(1)']
    """

    input: Array
    plan: Plan
    alternatives: tuple[Alternative, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """The explanation as plain values, for JSON: seconds, bytes sent and memory of every alternative that fits."""
        rows = [
            {"layout": str(each.layout.named(self.input.dims))}
            | {key: getattr(each.plan, key, None) for key in ("seconds", "bytes", "memory")}
            for each in self.alternatives
        ]
        layout = str(self.input.layout.named(self.input.dims))
        return {"input": self.input.path, "layout": layout, "pinned": self.input.pinned, "alternatives": rows}

    def __str__(self) -> str:
        x = self.input
        pinned = ", ".join(f"{axis} is pinned" for axis in x.pinned) or "no axis is pinned"
        lines = [f"{x.path} {x.type} has {layout_text(x.layout.named(x.dims))}; {pinned}"]
        lines += reshards_of_input(self.plan, x.path)
        if self.alternatives:
            rows = [self._row(each) for each in self.alternatives]
            lines += ["", *table([("layout", "step", "against the plan", "sent", "memory"), *rows])]
        return "\n".join(lines)

    def _row(self, each: Alternative) -> tuple[str, ...]:
        named = layout_text(each.layout.named(self.input.dims))
        if each.plan is None:
            return named, "exceeds the memory limit", "", "", ""
        more = each.plan.seconds - self.plan.seconds
        against = "the same" if abs(more) <= 1e-9 * self.plan.seconds else change_text(more / self.plan.seconds)
        seconds, sent = seconds_text(each.plan.seconds), bytes_text(each.plan.bytes)
        return named, seconds, against, sent, bytes_text(each.plan.memory)


def explain(plan: Plan, path: str, stages: CallStages | None = None) -> Explanation:
    """Return why the input at ``path`` has its layout in ``plan``.

    Args:
      path: one of the input's paths.
      stages: those of the call that ``plan`` is for, to plan alternatives; without them there are none.

    Raises:
      LayoutError: there is no such input; the error has the nearest path.
    """
    found = plan.input(path)
    alternatives = []
    if stages is not None:
        others = {glob: pin for glob, pin in stages.user_pins.layouts.items() if glob not in found.paths}
        possible = (each.within(found.layout.memory) for each in possible_layouts(found.shape, plan.mesh))
        for layout in dict.fromkeys((found.layout, *possible)):
            try:
                planned = stages.plan_pinned(others | dict.fromkeys(found.paths, layout))
            except MemoryLimitError:
                planned = None
            alternatives.append(Alternative(layout, planned))
    return Explanation(found, plan, tuple(sorted(alternatives, key=lambda each: (each.seconds, str(each.layout)))))


def reshards_of_input(plan: Plan, path: str) -> Iterator[str]:
    """Yield a line per collective that reshards the input."""
    for c in (part for each in plan.collectives for part in each.parts or (each,)):
        if c.value == path or c.value.startswith(f"{path}["):
            runs = f" x{c.trips}" if c.trips > 1 else ""
            yield f"  {c.kind} over {','.join(c.axes)}{runs}, {seconds_text(c.seconds * c.trips)}: {c.reason}"


def possible_layouts(shape: Sequence[int], mesh: Mesh) -> Iterator[Layout]:
    """Yield every layout without partial sums whose blocks are equal; axes stand in the mesh's order."""
    found = layout_graph(mesh, len(shape), ())
    yield from (layout for i, layout in enumerate(found.layouts) if found.fits(i, shape) and layout.axes == mesh.names)
