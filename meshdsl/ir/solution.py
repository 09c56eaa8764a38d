"""The contract between planner and lowering: ``Pins`` go in, a ``Solution`` comes out; both are plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshdsl.ir.graph import Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.layouts.sharding_rule import Signature


@dataclass(frozen=True)
class Pins:
    """The layouts that the user fixed, parallel to the program's inputs and outputs.

    Args:
      inputs: a layout per input; axes that it does not name are free.
      outputs: a layout per output, likewise.
      follows: per output, the index of the input that it replaces and whose layout it takes, or None.
      donated: indices of inputs whose memory the step may reuse.
      hosted: indices of inputs that are pinned to the host's memory.
      hosted_outputs: indices of outputs that are, or that replace such inputs.
      on_device: indices of inputs that are pinned to the device's memory.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    follows: tuple[int | None, ...]
    donated: frozenset[int] = frozenset()
    hosted: frozenset[int] = frozenset()
    hosted_outputs: frozenset[int] = frozenset()
    on_device: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Prefetch:
    """What of a scan is sent beside the compute of other iterations; see ``meshdsl.ir.prefetch``.

    Args:
      ahead: positions, among the inputs of the body, of slices whose collectives are sent one iteration ahead.
      behind: positions, among the values that the body returns, of slices whose collectives are sent one iteration
        behind.
    """

    ahead: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ahead or self.behind)


@dataclass(frozen=True)
class Bucket:
    """Reshard steps of several values that are sent as one collective.

    Args:
      steps: per step, the value id and the layout that it leads to, in program order.
      before: id of the operation in front of which the bucket is sent: the first one that needs a result.
      kind, axes: of every step.
      bytes: what one device sends.
      seconds: predicted, with those of putting the blocks together and cutting the results.
      workspace: bytes of these copies.
    """

    steps: tuple[tuple[int, Layout], ...]
    before: int
    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    workspace: int


@dataclass(frozen=True)
class Ring:
    """A gather or reduce-scatter over one axis whose hops are sent beside parts of products; see ``meshdsl.ir.rings``.

    Args:
      value, layout: the reshard step that it replaces: a value id and the layout that the step leads to.
      products: ids of the operations that run in parts, in program order: those that read the gathered copy, or the one
        whose result is reduced.
    """

    value: int
    layout: Layout
    products: tuple[int, ...]


@dataclass(frozen=True)
class Solution:
    """A layout or signature for every value and operation, with cost, bound and memory.

    Args:
      rows: per op id, one row per mesh axis in mesh order. Every op except scan, while, cond,
        return and constrain is in it (ops without a rule with all-``B`` rows).
      layouts: per value id, the layout at its producer.
      uses: per (op id, operand index), the layout in which the op uses that operand; "return" ops, loops, conds and
        constrains included; literals are absent.
      trees: per value id, the reshard steps to its other layouts, in executable order: each starts from the layout at
        the producer or from one reached before. Values without reshards are absent.
      seconds: the objective.
      lower_bound: seconds that no plan of this program can be below.
      peak: predicted bytes per device at the program point of peak memory.
      peak_op: the op id of that point.
      held: the live buffers there as (value id, bytes), largest first.
      notes: remarks for the reader of the plan.
      prefetch: per op id of a scan, what it sends ahead and behind; other loops send where they need it.
      buckets: reshard steps that are sent as one; no step is in two.
      rings: gathers and reduce-scatters that are sent beside parts of products; no step or product is in two.
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
    prefetch: Mapping[int, Prefetch] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = field(default=())
    rings: tuple[Ring, ...] = field(default=())

    def local_bytes(self, value: Value) -> int:
        """Returns the bytes of a value on one device, in the layout of its producer."""
        shape = self.layouts[value.id].local_shape(value.shape, self.mesh.sizes_by_name)
        return Value(value.id, shape, value.dtype).bytes

    def exchanging(self, op: int) -> tuple[str, ...]:
        """Returns the mesh axes over which the local program of an operation exchanges data."""
        rows = zip(self.mesh.names, self.rows.get(op, ()), strict=False)
        return tuple(name for name, row in rows if row.collectives)
