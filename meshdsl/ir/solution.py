"""What the planner is asked and what it answers."""

from dataclasses import dataclass, field

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.layouts.sharding_rule import Signature


@dataclass(frozen=True)
class Pins:
    """What the user fixed, parallel to the program's inputs and outputs.

    Args:
      inputs: a layout per input; axes it does not name are free.
      outputs: likewise per output.
      follows: per output, the index of the input whose layout it takes, or None.
      donated: indices of inputs whose memory the step may reuse.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    follows: tuple[int | None, ...]
    donated: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Solution:
    """A choice for every operation and value.

    Args:
      rows: per op id, one row per mesh axis in mesh order. Every op except scan, while, cond,
        return and constrain is in it (ops without a rule with all-``B`` rows).
      layouts: per value id, the layout in which it is defined.
      uses: per (op id, operand index), the layout in which the op reads that operand; "return"
        ops, loops, conds and constrains included; literals are absent.
      trees: per value id, the moves that make its other layouts, in an order that can be
        executed: each starts from the value's own layout or from one made before it.
        Values that need no move are absent.
      seconds: the objective. lower_bound: no plan of this program can be below it.
      peak: predicted bytes per device at the fullest program point; peak_op: its op id;
        held: what lives there as (value id, bytes), largest first.
    """

    mesh: Mesh
    rows: dict[int, tuple[Signature, ...]]
    layouts: dict[int, Layout]
    uses: dict[tuple[int, int], Layout]
    trees: dict[int, tuple[ReshardStep, ...]]
    seconds: float
    lower_bound: float
    peak: int
    peak_op: int
    held: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def exchanging(self, op: int) -> tuple[str, ...]:
        """The mesh axes over which the local program of an operation exchanges."""
        rows = zip(self.mesh.names, self.rows.get(op, ()), strict=False)
        return tuple(name for name, row in rows if row.collectives)
