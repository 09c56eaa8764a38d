"""In which states a node may be by what is stated for it: pins, dims that stay split, and rows to be asked for."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshdsl.errors import PinError, faults
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.planner.node import Node
from meshdsl.planner.solution import Pins
from meshdsl.planner.tables import Table, first_state


def first_allowed(table: Table, allowed: "NDArray[np.bool_] | None") -> tuple[int, ...]:
    """A state that the node is allowed to be in, all-``B`` if it is."""
    return table.first if allowed is None else first_state(np.isfinite(table.seconds) & allowed)


def has_states(table: Table, allowed: "NDArray[np.bool_] | None") -> bool:
    """Whether there is a state that the node is allowed to be in, and whose dims divide."""
    return allowed is None or bool((allowed & np.isfinite(table.seconds)).any())


def require_states(nodes: Sequence[Node], fine: Sequence[bool]) -> None:
    """Every node has a joint state that its pin allows, or the pins are at fault."""
    bad = [node for node, has in zip(nodes, fine, strict=True) if not has]
    rows = [f"{node.what}: pinned to {node.pin}, shape {list(node.ports[0].value.shape)}" for node in bad]
    if rows:
        remedy = "a split divides its dim, and a value is partial in one way only: state another layout"
        raise PinError(faults("pins that no signature can meet:", rows, remedy))


def allowed_states(node: Node, mesh: Mesh) -> "NDArray[np.bool_] | None":
    """Joint states that agree with what is stated for the node; None if nothing is."""
    split = (name for _, axes in node.split for name in axes)
    if not node.asked and not any(name in mesh.names and mesh.axis(name) > 1 for name in (*node.pin.axes, *split)):
        return None
    masks = [_axis_mask(node, name, mesh) for name in mesh.names]
    found = masks[0]
    for mask in masks[1:]:
        found = np.logical_and.outer(found, mask)
    return found


def _axis_mask(node: Node, axis: str, mesh: Mesh) -> NDArray[np.bool_]:
    free = axis not in node.pin.axes or mesh.axis(axis) == 1
    stated = np.array([free or row.outputs[0] is node.pin.on(axis) for row in node.rows])
    ports = [p for p, axes in node.split if axis in axes]
    split = np.array([all(isinstance(row.outputs[p], Split) for p in ports) for row in node.rows])
    asked = np.array([node.takes(row, axis) for row in node.rows])
    return np.asarray(stated & split & asked)


def axis_order(pin: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Mesh order, but for axes that the pin states in another order."""
    stated = [name for name in pin.axes if name in mesh.names and isinstance(pin.on(name), Split)]
    at = iter(stated)
    return tuple(next(at) if name in stated else name for name in mesh.names)


def adds_to(pins: Pins, others: Pins, mesh: Mesh) -> bool:
    """Whether whatever ``pins`` allow is allowed by others as well."""
    mine, theirs = (*pins.inputs, *pins.outputs), (*others.inputs, *others.outputs)
    alike = (pins.follows, pins.donated) == (others.follows, others.donated)
    return alike and all(_stays(pin, other, mesh) for pin, other in zip(mine, theirs, strict=True))


def _stays(pin: Layout, other: Layout, mesh: Mesh) -> bool:
    if pin.placements == other.placements:
        return True
    stated = set(other.axes) <= set(pin.axes) and all(pin.on(axis) is placed for axis, placed in other.placements)
    return stated and axis_order(pin, mesh) == axis_order(other, mesh)
