"""Products of which a compiler makes one, and the order in which operations then run.

Products that read the same operand are one product of all their other operands, put one beside the other:

    q = x @ wq ;  k = x @ wk ;  v = x @ wv        qkv = x @ [wq | wk | wv]

XLA merges them so for GPUs (``dot_merger.cc`` of OpenXLA), to start fewer and fuller kernels. The merged product waits
for the operands of all: a gather of ``wv`` cannot run beside ``x @ wq`` any more, and none of the results is there
before all are. So ``plan.simulate`` has to know. The seconds of the products are not changed.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import prod

from meshdsl.ir.graph import Graph, Op, Value
from meshdsl.ir.rings import ProductRing
from meshdsl.ir.solution import Bucket, Solution
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.reshard import steps_to


def merged_products(
    graph: Graph, solution: Solution, most: float, rings: Mapping[int, ProductRing]
) -> list[tuple[Op, ...]]:
    """The operations of a graph in the order in which they run, those that are merged as one.

    Two products are merged if they read one operand in one layout, sum over the same dims of it, do not depend on each
    other, and one of them reads and writes few bytes. The order is that of the program, but for operations that wait
    for a later one of merged products.

    Args:
      graph: without its bodies.
      solution: the plan, which says what a device has of operands and results.
      most: bytes that one of two products reads and writes at most on one device; 0 if none are merged.
      rings: by operation id, what runs in parts, and stays as it is.
    """
    ops = graph.ops[:-1]
    by_key = defaultdict[Hashable, list[int]](list)
    for at, op in enumerate(ops if most else ()):
        if op.name == "dot_general" and op.id not in rings:
            for key in _operand_keys(op, solution):
                by_key[key].append(at)
    alike = [members for members in by_key.values() if len(members) > 1]
    if not alike:
        return [(op,) for op in ops]
    groups, places = _Groups(graph, solution), {op.id: at for at, op in enumerate(ops)}
    for ring in {id(ring): ring for ring in rings.values()}.values():  # a ring runs where its first product stands
        for op in ring.ops if ring.products[0].op.id in places else ():
            groups.merge(places[ring.products[0].op.id], places[op.id])
    for members in alike:
        for i, at in enumerate(members):
            for other in members[:i]:
                if min(_bytes(ops[n], solution) for n in (at, other)) <= most and groups.merge(other, at):
                    break
    found = list[tuple[Op, ...]]()
    for members in groups.ordered():
        parts = tuple(ops[at] for at in members)
        found += zip(parts) if parts[0].id in rings else [parts]  # those of a ring stay operations of their own
    return found


def _operand_keys(op: Op, solution: Solution) -> Iterator[Hashable]:
    """What products have in common that read the same operand on one side, in the same way."""
    contracted, batch = op.params["dimension_numbers"]
    for side, x in enumerate(op.inputs[:2]):
        if isinstance(x, Value):
            dims = tuple(contracted[side]), tuple(batch[side])
            yield side, x.id, solution.uses[op.id, side], dims, op.outputs[0].dtype


def _bytes(op: Op, solution: Solution) -> float:
    """Bytes that a device reads and writes for a product."""
    sizes, result = solution.mesh.sizes_by_name, op.outputs[0]
    blocks = [(x, solution.uses[op.id, i]) for i, x in enumerate(op.inputs) if isinstance(x, Value)]
    blocks.append((result, solution.layouts[result.id]))
    return sum(prod(layout.local_shape(v.shape, sizes)) * v.itemsize for v, layout in blocks)


class _Groups:
    """Operations by position, some of which are merged; none waits for itself."""

    def __init__(self, graph: Graph, solution: Solution) -> None:
        self._solution = solution
        self._buckets = {step: bucket for bucket in solution.buckets for step in bucket.steps}
        self._places = {v.id: at for at, op in enumerate(graph.ops) for v in op.outputs}
        self._known: dict[Bucket, frozenset[int]] = {}
        self._after = [
            {
                at
                for i, x in enumerate(op.inputs)
                if isinstance(x, Value)
                for at in self._sources(x.id, solution.uses[op.id, i])
            }
            for op in graph.ops[:-1]
        ]
        self._members = {at: [at] for at in range(len(self._after))}
        self._group = list(self._members)
        self._spans: list[tuple[int, int]] = []  # the first and the last position of what was merged

    def _sources(self, value: int, layout: Layout) -> Iterator[int]:
        """Where the producer of a value in a layout stands, and those of all that is sent with it."""
        if value in self._places:
            yield self._places[value]
        for step in steps_to(layout, self._solution.trees.get(value, ())):
            if bucket := self._buckets.get((value, step.after)):
                if bucket not in self._known:
                    self._known[bucket] = frozenset[int]()  # its own steps are sent with it
                    self._known[bucket] = frozenset(at for each in bucket.steps for at in self._sources(*each))
                yield from self._known[bucket]

    def merge(self, one: int, other: int) -> bool:
        """Merges the groups of two operations, unless one of them waits for the other; returns whether they are one."""
        a, b = sorted((self._group[one], self._group[other]))
        if a == b:
            return True
        if self._waits(a, b) or self._waits(b, a):
            return False
        members = self._members[a] = sorted([*self._members[a], *self._members.pop(b)])
        for at in members:
            self._group[at] = a
        self._spans.append((members[0], members[-1]))
        return True

    def _waits(self, group: int, other: int) -> bool:
        """Whether a group waits for another one."""
        seen, rest, first = {group}, [group], self._first_before(min(self._members[other]))
        while rest:
            for before in self._before(rest.pop()) - seen:
                if before == other:
                    return True
                seen.add(before)
                if self._members[before][-1] >= first:
                    rest.append(before)
        return False

    def _first_before(self, at: int) -> int:
        """The first position from which what waits for an operation may be reached: merged ones wait for later ones."""
        while entered := [first for first, last in self._spans if first < at <= last]:
            at = min(entered)
        return at

    def _before(self, group: int) -> set[int]:
        """The groups for which a group waits."""
        return {self._group[before] for at in self._members[group] for before in self._after[at]} - {group}

    def ordered(self) -> list[list[int]]:
        """The groups in an order in which each stands behind those that it waits for, the first positions first."""
        waiting = {group: self._before(group) for group in self._members}
        followers = defaultdict[int, list[int]](list)
        for group, every in waiting.items():
            for before in every:
                followers[before].append(group)
        ready, found = [group for group, every in waiting.items() if not every], list[list[int]]()
        heapify(ready)
        while ready:
            group = heappop(ready)
            found.append(self._members[group])
            for follower in followers[group]:
                waiting[follower].discard(group)
                if not waiting[follower]:
                    heappush(ready, follower)
        return found
