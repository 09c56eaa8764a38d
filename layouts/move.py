"""(replaced below by its author) A move between two layouts."""

from dataclasses import dataclass

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Placement


@dataclass(frozen=True)
class Move:
    """One step of a reshard.

    Args:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
        or a local one: "slice" (B -> S), "pad" (S -> P), "keep-first" (B -> P).
      axes: the mesh axes it runs over, major first (for collective-permute: the order before).
      source: placement of those axes before; target: after.
      before: layout before; after: layout after.
      bytes: what one device sends; 0 for local moves.
      seconds: predicted.
    """

    kind: str
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: Layout
    after: Layout
    bytes: int
    seconds: float
