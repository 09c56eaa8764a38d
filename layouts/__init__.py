"""The layout algebra: mesh, placement, layout, rule, move, reshard. Pure Python, no jax."""

from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Broadcast, P, Partial, Placement, S, Split
from meshdsl.layouts.topology import Link, Topology, topology

__all__ = [
    "B",
    "Broadcast",
    "Layout",
    "Link",
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
