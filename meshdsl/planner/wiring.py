"""The ports of all nodes in one sequence, node after node, and which of them make what others read."""

from collections.abc import Sequence

import numpy as np

from meshdsl.planner.node import Node
from meshdsl.planner.numbering import Reading, array


class Wiring:
    """Per port, its node in ``nodes`` and its value, by id, in ``values``; ``first`` is the first one of each node.

    ``made`` is the port that makes a value, by its id, and ``every`` that of each port's value. ``read`` are the ports
    that read one, value after value, and ``makers`` those that make what they read. ``reading``: that of a reading.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        ports = [port for node in nodes for port in node.ports]
        sizes = array(len(node.ports) for node in nodes)
        self.nodes, self.first = np.repeat(np.arange(len(nodes)), sizes), np.cumsum(sizes) - sizes
        self.values = array(port.value.id for port in ports)
        self.made = {port.value.id: i for i, port in enumerate(ports) if port.defines}
        self.every = array(map(self.made.__getitem__, self.values.tolist()))
        uses = np.flatnonzero(self.every != np.arange(self.every.size))
        self.read = uses[np.argsort(self.every[uses], kind="stable")]
        self.makers = self.every[self.read]
        self.reading: dict[Reading, int] = {p.reader: i for i, p in enumerate(ports) if p.reader and not p.defines}

    def port(self, end: tuple[int, int]) -> int:
        """The port that an end is: a node and one of its ports."""
        return int(self.first[end[0]]) + end[1]

    def end(self, reading: Reading) -> tuple[int, int] | None:
        """The node and its port that a reading is; None for what no node reads."""
        port = self.reading.get(reading)
        return None if port is None else (int(self.nodes[port]), port - int(self.first[self.nodes[port]]))
