"""The ports of all nodes in one sequence, node after node, and which of them make what others read."""

from collections.abc import Sequence

import numpy as np

from meshdsl.planner.arrays import array, stretches
from meshdsl.planner.exact import Ids
from meshdsl.planner.node import Node
from meshdsl.planner.numbering import Numbering

End = tuple[int, int]  # a node and one of its ports


class Wiring:
    """Per port, its node in ``nodes`` and its value, by number in ``of`` and by id in ``values``.

    ``first`` is the first port of each node, which has so many (``sizes``). ``made`` is per value, by number, the port
    that makes it, ``every`` that of each port's value, and ``reading`` per reading the port that it is; -1 for what no
    node makes or reads. ``read`` are the ports that read a value, value after value, and ``makers`` those that make
    what they read.
    """

    def __init__(self, nodes: Sequence[Node], numbers: Numbering) -> None:
        links = [n for n, node in enumerate(nodes) if node.op is None]
        ops = array(n for n, node in enumerate(nodes) if node.op is not None)
        at = numbers.position[array(node.op.id for node in nodes if node.op is not None)]
        reads, makes = numbers.first[at + 1] - numbers.first[at], numbers.makes[at + 1] - numbers.makes[at]
        self.sizes = sizes = np.empty(len(nodes), dtype=np.intp)
        sizes[ops], sizes[links] = reads + makes, array(len(nodes[n].ports) for n in links)
        self.nodes, self.first = np.repeat(np.arange(len(nodes)), sizes), np.cumsum(sizes) - sizes
        self.of, defines = np.empty(self.nodes.size, dtype=np.intp), np.zeros(self.nodes.size, dtype=np.bool_)
        self.reading = np.full(numbers.read.size, -1)
        ports, readings = stretches(self.first[ops], reads), stretches(numbers.first[at], reads)
        self.of[ports], self.reading[readings] = numbers.read[readings], ports
        ports = stretches(self.first[ops] + reads, makes)
        self.of[ports], defines[ports] = stretches(numbers.makes[at], makes), True
        linked = [port for n in links for port in nodes[n].ports]
        ports = stretches(self.first[links], sizes[links])
        self.of[ports], defines[ports] = numbers.of(port.value.id for port in linked), [p.defines for p in linked]
        self.reading[numbers.reading(p.reader for p in linked if p.reader)] = ports[[bool(p.reader) for p in linked]]
        self.values = array(v.id for v in numbers.values)[self.of]
        self.made = np.full(len(numbers.values), -1)
        self.made[self.of[defines]] = np.flatnonzero(defines)
        self.every = self.made[self.of]
        uses = np.flatnonzero(~defines)
        self.read = uses[np.argsort(self.every[uses], kind="stable")]
        self.makers = self.every[self.read]
        self._numbers, self._ends = numbers, dict[int, list[End]]()
        self._begins: list[int] = self.first.tolist()
        self._each: list[int] = self.values.tolist()
        self._makes: list[bool] = defines.tolist()

    def port(self, end: End) -> int:
        """The port that an end is."""
        return self._begins[end[0]] + end[1]

    def ports(self, n: int) -> range:
        """Those of a node."""
        return range(self._begins[n], self._begins[n] + int(self.sizes[n]))

    def makes(self, n: int) -> list[tuple[int, int]]:
        """The values that a node makes, by id, and as which of its ports."""
        return [(p, self._each[port]) for p, port in enumerate(self.ports(n)) if self._makes[port]]

    def value(self, end: End) -> int:
        """The id of the value at an end."""
        return self._each[self._begins[end[0]] + end[1]]

    def end(self, port: int) -> End:
        """The end that a port is."""
        node = int(self.nodes[port])
        return node, port - int(self.first[node])

    def ends(self, value: int) -> list[End]:
        """The end that makes a value, given by its id, and those that read it."""
        if value not in self._ends:
            made = int(self.made[self._numbers.number(value)])
            readers = self.read[slice(*np.searchsorted(self.makers, (made, made + 1)))].tolist()
            self._ends[value] = [self.end(port) for port in (made, *readers)] if made >= 0 else []
        return self._ends[value]

    def ends_of(self, ports: Ids) -> list[End]:
        """The ends that ports are."""
        nodes = self.nodes[ports]
        return list(zip(nodes.tolist(), (ports - self.first[nodes]).tolist(), strict=True))
