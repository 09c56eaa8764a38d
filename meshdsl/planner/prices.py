"""What memory costs while a plan that fits is looked for."""

from dataclasses import dataclass, field

from meshdsl.planner.exact import Costs


@dataclass(frozen=True)
class Prices:
    """Seconds per byte that memory costs: by value for its own layout, by (node, port) for copies.

    Args:
      later: by (node, port), for a value that waits to be read, in the layout in which it is made or another.
      kept: by (node, port), for some copy of a value on the way there, from where it has gone to others that read it.
      again: by (node, port), the price of such a copy that another reader does not take meanwhile, and its end.
      held: by (node, port), the price of bytes that are there whatever the plan, and how many in every joint state.
    """

    own: dict[int, float] = field(default_factory=dict)
    read: dict[tuple[int, int], float] = field(default_factory=dict)
    later: dict[tuple[int, int], float] = field(default_factory=dict)
    kept: dict[tuple[int, int], float] = field(default_factory=dict)
    again: dict[tuple[int, int], tuple[float, tuple[int, int]]] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[float, Costs]] = field(default_factory=dict)
