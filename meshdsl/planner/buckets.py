"""Buckets: small collectives of one kind and axes that are sent as one, which costs one latency instead of many.

Horovod calls it tensor fusion, PyTorch's DDP has buckets of gradients. A reshard step can be sent at any point after
its value is produced, its earliest point, and up to the first operation that needs its result, its latest:

    g1 = product   [1------ sum g1 ------4]           g1 and g2 are sent together in front of operation 4;
    g2 = product        [2- sum g2 ------4]           the sum of l is needed before g2 is there
    l2 = f(sum l)  [0- 1]

Steps with a common point do not depend on each other: what is needed at the latest point of one was produced before
the earliest point of no other. Of the steps that could be sent together (one kind, axes, reduction and dtype, in one
graph, and as many collectives behind them on the way from their producers) the one with the earliest latest point
takes along all that are ready by then, and so on: the fewest buckets there can be, since intervals are stabbed with
fewest points so (Gavril 1972).

A bucket is priced as one collective of all bytes, and for copies: blocks are put together and cut again. So large
tensors, whose copies cost more than a latency, are sent by themselves, and can be hidden behind computation.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import numpy as np

from meshdsl.ir.graph import Graph, Value, sent_itemsize, walk
from meshdsl.ir.solution import Bucket, Solution
from meshdsl.layouts.collective_cost import BUCKETED, COLLECTIVES, step_price
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, S, Split
from meshdsl.layouts.reshard import ReshardStep

_LEAST_BITS = 16  # of floats that are put together; compilers handle narrower ones in ways of their own
Step = tuple[int, Layout]  # a value id, and the layout that a reshard step leads to


@dataclass(frozen=True)
class _Sendable:
    """A reshard step that may be sent in a bucket.

    Args:
      ready, needed: positions of the producer, and of the first operation that needs the result.
      whole: bytes that a device would hold if the axes did not split the value, by which collectives are priced.
      copied: bytes of the blocks before and after.
    """

    value: Value
    step: ReshardStep
    ready: int
    needed: int
    whole: float
    copied: float

    @property
    def key(self) -> Step:
        return self.value.id, self.step.after


def find_buckets(graph: Graph, solution: Solution, least: int) -> list[Bucket]:
    """Returns the buckets of a solution that make the step faster, in program order.

    Args:
      graph: of the program.
      solution: without buckets.
      least: number of steps from which a bucket is worth it.
    """
    return [bucket for one in every_graph(graph) for bucket in _GraphBuckets(one, solution).find(least)]


def most_savings(graph: Graph, solution: Solution, least: int) -> float:
    """Returns seconds per step that buckets cannot save more than, wherever the collectives of a plan are sent.

    Another plan may have a collective of another kind in place of each, so that all can be sent as one.
    """
    return (
        sum(_GraphBuckets(one, solution).most_savings(least) for one in every_graph(graph)) if solution.trees else 0.0
    )


def with_buckets(solution: Solution, graph: Graph, buckets: Sequence[Bucket]) -> Solution:
    """Returns a solution with these buckets; its memory is that without them."""
    saved = savings(solution, graph, buckets)
    return replace(solution, buckets=tuple(buckets), seconds=solution.seconds - saved)


def savings(solution: Solution, graph: Graph, buckets: Sequence[Bucket]) -> float:
    """Returns the seconds per step that buckets save."""
    trips = {op.id: inside.trips for inside, op in walk(graph)} if buckets else {}
    return sum(_saved(bucket, solution) * trips[bucket.before] for bucket in buckets)


def bucket_faults(graph: Graph, solution: Solution) -> Iterator[str]:
    """Yields a text per bucket that does not consist of steps of the solution that can be sent together there."""
    if not solution.buckets:
        return
    possible = [_GraphBuckets(one, solution) for one in every_graph(graph)]
    for i, bucket in enumerate(solution.buckets):
        if any(set(bucket.steps) & set(other.steps) for other in solution.buckets[:i]):
            yield f"buckets[{i}]: a reshard step of it is in an earlier bucket, too"
        if not any(each.allows(bucket) for each in possible):
            yield f"buckets[{i}]: {bucket.kind} of {len(bucket.steps)} values, which cannot be sent as one there"


def every_graph(graph: Graph) -> list[Graph]:
    """Returns a graph and all bodies in it."""
    return [graph, *(body for _, op in walk(graph) for body in op.bodies)]


def is_sendable(value: Value) -> bool:
    """Whether blocks of a value may be put together with those of others."""
    is_plain = jax.dtypes.issubdtype(value.dtype, np.floating)  # bfloat16 is one, a key is none
    return is_plain and 8 * value.itemsize >= _LEAST_BITS


def least_latency(mesh: Mesh) -> float:
    """Returns the seconds that every collective takes, however short."""
    links = mesh.topology.axis_links(mesh)
    used = [links[name] for name, size in mesh if size > 1]
    return min((min(link.latency, link.for_short.latency) for link in used), default=0.0)


def _saved(bucket: Bucket, solution: Solution) -> float:
    """Returns the seconds per iteration that a bucket saves."""
    alone = (s.seconds for value, after in bucket.steps for s in solution.trees[value] if s.after == after)
    return sum(alone) - bucket.seconds


class _GraphBuckets:
    """The buckets of one graph without its bodies.

    Attributes:
      needed: per reshard step, the position of the first operation that needs its result.
      level: per reshard step, the collectives on the way from the producer to its source.
    """

    def __init__(self, graph: Graph, solution: Solution) -> None:
        self.graph, self.solution, self.mesh = graph, solution, solution.mesh
        values = [*graph.inputs, *(v for op in graph.ops for v in op.outputs)]
        self.values = {v.id: v for v in values if v.id in solution.trees}
        self.ready = {v.id: -1 for v in graph.inputs} | {v.id: i for i, op in enumerate(graph.ops) for v in op.outputs}
        self.steps = {(v, step.after): step for v in self.values for step in solution.trees[v]}
        self.needed: dict[Step, int] = {}
        for i, op in enumerate(graph.ops if self.steps else ()):
            for operand, x in enumerate(op.inputs):
                if isinstance(x, Value) and x.id in self.values:
                    self._need(x.id, solution.uses[op.id, operand], i)
        self.level: dict[Step, int] = {}
        for (v, after), step in self.steps.items():  # each starts from a layout that is there already
            before = self.steps.get((v, step.before))
            behind = self.level.get((v, step.before), 0)
            self.level[v, after] = behind + (before is not None and before.kind in COLLECTIVES)

    def _need(self, value: int, layout: Layout, at: int) -> None:
        """Notes that a layout, and all that it is made from, is needed at a position."""
        while (value, layout) in self.steps and self.needed.get((value, layout), at + 1) > at:
            self.needed[value, layout] = at
            layout = self.steps[value, layout].before

    def find(self, least: int) -> list[Bucket]:
        """Returns the buckets; those that start from results of others are found first, as they need these early."""
        found: list[tuple[int, Bucket]] = []
        for level in sorted(set(self.level.values()), reverse=True):
            groups = defaultdict[tuple[object, ...], list[_Sendable]](list)
            for each in self._sendable(level):
                groups[self._kind(each)].append(each)
            for group in groups.values():
                for at, bucket in self._stab(group, least):
                    found.append((at, bucket))
                    for value, after in bucket.steps:
                        self._need(value, after, at)
        return [bucket for _, bucket in sorted(found, key=lambda pair: pair[0])]

    def most_savings(self, least: int) -> float:
        """Returns the seconds per step that small steps save at most, if all become steps of one kind, sent as one."""
        small = [each for level in set(self.level.values()) for each in self._sendable(level) if self._is_small(each)]
        saved = [2 * each.step.seconds - self._seconds([each, each]) for each in small]
        return self.graph.trips * sum(saved) if len(saved) >= least else 0.0

    def allows(self, bucket: Bucket) -> bool:
        """Whether a bucket consists of steps of this graph that can be sent together where it says, at its price."""
        if not all(step in self.needed for step in bucket.steps):
            return False
        levels = {self.level[step] for step in bucket.steps}
        known = {each.key: each for level in levels for each in self._sendable(level)}
        members = [known[step] for step in bucket.steps if step in known]
        at = next((i for i, op in enumerate(self.graph.ops) if op.id == bucket.before), -1)
        one_kind = len({self._kind(each) for each in members}) == len(levels) == 1 and len(members) == len(bucket.steps)
        in_time = all(each.ready < at <= each.needed for each in members)
        return one_kind and in_time and self._bucket(members, at) == bucket and self._starts_in_time(members, at)

    def _starts_in_time(self, members: Sequence[_Sendable], at: int) -> bool:
        """Whether no member starts from the result of a bucket that is sent later."""
        places = {op.id: i for i, op in enumerate(self.graph.ops)}
        sent = {step: places.get(bucket.before, at) for bucket in self.solution.buckets for step in bucket.steps}
        sources = {step for each in members for step in self._sources(each.value.id, each.step.before)}
        return all(sent.get(step, at) <= at for step in sources)

    def _sources(self, value: int, layout: Layout) -> Iterator[Step]:
        """Yields the steps by which a layout of a value is made."""
        while (value, layout) in self.steps:
            yield value, layout
            layout = self.steps[value, layout].before

    def _sendable(self, level: int) -> Iterator[_Sendable]:
        sizes = self.mesh.sizes_by_name
        for (v, after), step in self.steps.items():
            value = self.values[v]
            is_sent = step.kind in BUCKETED and step.bytes and not step.format and (v, after) in self.needed
            if is_sent and self.level[v, after] == level and is_sendable(value):
                itemsize = sent_itemsize(value.itemsize)
                before, block = (prod(x.local_shape(value.shape, sizes)) * itemsize for x in (step.before, after))
                k = prod(sizes[axis] for axis in step.axes) if isinstance(step.source, Split) else 1
                yield _Sendable(value, step, self.ready[v], self.needed[v, after], before * k, before + block)

    def _kind(self, each: _Sendable) -> tuple[object, ...]:
        """Returns what all steps of a bucket have in common."""
        step = each.step
        source = B if isinstance(step.source, Split) else step.source
        return step.kind, step.axes, source, each.value.dtype

    def _stab(self, group: Sequence[_Sendable], least: int) -> Iterator[tuple[int, Bucket]]:
        """Yields the buckets of steps of one kind, with their positions."""
        rest = [each for each in sorted(group, key=lambda each: (each.needed, each.ready)) if self._is_small(each)]
        while len(rest) >= least:
            at, together = rest[0].needed, dict[int, _Sendable]()
            for each in rest:
                if each.ready < at:
                    together.setdefault(each.value.id, each)
            members = self._profitable(list(together.values()))
            taken = {each.key for each in members if len(members) >= least} or {rest[0].key}
            if len(taken) >= least:
                yield at, self._bucket(members, at)
            rest = [each for each in rest if each.key not in taken]

    def _is_small(self, each: _Sendable) -> bool:
        """Whether a step gains by being sent with others: its copies cost less than a latency."""
        return self._seconds([each, each]) < 2 * each.step.seconds

    def _profitable(self, members: list[_Sendable]) -> list[_Sendable]:
        """Returns the members without the largest ones, until sending the rest as one saves time."""
        kept = sorted(members, key=lambda each: each.whole)
        while len(kept) > 1 and self._seconds(kept) >= sum(each.step.seconds for each in kept):
            kept.pop()
        keys = {each.key for each in kept}
        return [each for each in members if each.key in keys]

    def _seconds(self, members: Sequence[_Sendable]) -> float:
        step = members[0].step
        price = step_price(step.kind, step.axes, *_ends(step), self.mesh)
        copied = 2 * sum(each.copied for each in members) / self.mesh.topology.memory_bandwidth
        return price.seconds(sum(each.whole for each in members)) + copied

    def _bucket(self, members: Sequence[_Sendable], at: int) -> Bucket:
        step = members[0].step
        price = step_price(step.kind, step.axes, *_ends(step), self.mesh)
        return Bucket(
            steps=tuple(each.key for each in members),
            before=self.graph.ops[at].id,
            kind=step.kind,
            axes=step.axes,
            bytes=round(price.sent * sum(each.whole for each in members)),
            seconds=self._seconds(members),
            workspace=round(sum(each.copied for each in members)),
        )


def _ends(step: ReshardStep) -> tuple[Placement, Placement]:
    """Returns the placements between which a row of blocks is sent: they are contiguous."""
    if step.kind == "all-gather":
        return S(0), B
    return step.source, B if step.kind == "all-reduce" else S(0)
