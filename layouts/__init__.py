"""The layout algebra: what a sharding is, what changes it, and what that costs. Pure Python: no jax, no numpy.

Vocabulary, each with the text of an example:

    mesh            named, ordered axes of devices, the last one innermost (fastest)     data=4,model=2
    placement       what one axis does to a tensor: split along a dim, replicated        S(0)  B  P  P(max)
                    (broadcast), or partial: the tensor is the sum (max, min) over the axis
    layout          a placement per axis                                                 data=S(0) model=P
    block           the part of a tensor that one device holds                           [8, 4] over data=S(0): [2, 4]
    reshard step    a local operation or one collective that changes a layout            all-gather over data: S(0) -> B
    signature       placements of the operands and results of an operation, on one axis  S(1), S(0) -> P
    rule            the signatures of an operation, derived from its factors             m k, k n -> m n
    exchange        a collective inside an operation's local program                     halo of a convolution
    layout rule     mesh axes by the name of a dim, for a whole model                    batch:data hidden:model
    topology        links and speeds of devices, outermost axis on the slowest link      dgx-h100

Invariants. Everything above this package relies on them.

1.  *Order.* Axes that split one dim are ordered, major first, and blocks nest: in ``x=S(0) y=S(0)`` with x=2, y=2
device
    (i, j) holds block 2 i + j. In ``y=S(0) x=S(0)`` it holds block i + 2 j: another layout.
2.  *Only that order matters.* ``x=S(0) y=S(1)`` and ``y=S(1) x=S(0)`` are equal. An axis that is not named is ``B`` in
a
    layout, and free in a pin.
3.  *Minor-most rule.* An axis leaves a dim only while it is the minor-most there, and enters as the new minor-most:
    from ``x=S(0) y=S(0)``, y can be gathered. Gathering x first would interleave rows, so it takes a permute before.
4.  *One reduction.* A value is partial in one way: ``x=P y=P(max)`` is no layout, since a sum of maxima is not a
maximum
    of sums. An axis of size 1 has the placement ``B``.
5.  *Divisibility.* A layout fits a shape only if every dim divides evenly into its blocks: 6 rows fit ``x=S(0)`` for
    x=2 and x=3, not for x=4. (Uneven dims are padded by a pass, not by the algebra.)
6.  *P never crosses the boundary.* Arguments and results of a step are split or replicated; ``P`` exists only between
    operations. A value becomes partial (pad, keep-first) only as the last step of a reshard.
7.  *Duality.* Transposition (the gradient of a linear map) swaps ``B`` and ``P`` and keeps ``S(d)``: if y uses x as
    ``B``, the devices' gradients of x are ``P``. So all-gather (S to B) is the transpose of reduce-scatter (P to S),
    and slice (B to S) of pad (S to P); all-reduce, keep-first and all-to-all are their own.
8.  *Axes are independent.* A rule states signatures on one axis. On several, each takes one of its own, and
blocks
    nest; an operation on ``data=S(0) model=S(1)`` takes one row for data and one for model.

Modules, in reading order:

    placement        S, B, P as interned values
    notation         the text of meshes, layouts and layout rules; errors with a caret
    topology         links and speeds; presets and their TOML files
    mesh             axes, and the link that each runs over
    roundness        how well a mesh can split a dim of some length
    layout           placements by axis; order, equality, block shapes
    collective_cost  alpha-beta cost of collectives and local copies
    low_bits         formats of fewer bits in which reshard steps may send floats, and their cost
    reshard          the table of reshard steps, the graph of layouts, shortest paths in it
    sharding_rule    factors and algebraic properties of an operation; its signatures
    exchange         collectives inside local programs
    axis_rules       ``md.Rules``: layout rules

Entry points: ``Mesh``, ``Layout`` and ``Rules`` (with ``parse``), ``topology``, ``reshard.reshard``,
``sharding_rule.Rule``.
"""

from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import LowBits
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Broadcast, P, Partial, Placement, S, Split
from meshdsl.layouts.topology import Link, Topology, topology

__all__ = [
    "B",
    "Broadcast",
    "Layout",
    "Link",
    "LowBits",
    "Mesh",
    "P",
    "Partial",
    "Placement",
    "Rules",
    "S",
    "Split",
    "Topology",
    "topology",
]
