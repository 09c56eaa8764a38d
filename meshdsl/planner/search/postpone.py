"""Reductions behind operations of one operand, literals aside, that pass partial sums on, where results wait longest.

A gradient is a product and its transpose, say. Whether its partial sums are added in front of the transpose or behind
it costs the same, and a search takes either; where they are added and scattered, a search scatters first, as the
transpose of a block is a little cheaper. Behind it, nobody needs the result until the optimizer starts, so that it can
be sent together with those of other gradients (``planner.buckets``). Behind the product with the learning rate, which
passes partial sums on as well, it is needed at once. So of the operations behind which it could be, it is behind the
one whose result waits longest for its first consumer.
"""

from collections.abc import Iterator

from meshdsl.ir.graph import Value
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.planner.objective import CostedPlan, Evaluator, layouts_of
from meshdsl.planner.problem.model import Model
from meshdsl.planner.problem.variables import Node
from meshdsl.planner.search.search import evaluate_plan


def postponed_reductions(model: Model, evaluator: Evaluator, plan: CostedPlan) -> list[CostedPlan]:
    """Returns other plans that add partial sums behind operations of one operand, where their results wait longest.

    One costs no more than ``plan`` and has all sums there for which that holds; the other has all there, scattered
    ones as well, whatever that costs.
    """
    chains_to = _Chains(model, plan)
    chains = list(chains_to.reduced((B,)))
    free = _moved(model, evaluator, plan, chains)
    if free.cost > plan.cost:
        free = plan
        for chain in chains[: model.limits.buckets_postponed]:
            found = _moved(model, evaluator, free, [chain])
            free = found if found.cost <= free.cost else free
    every = _moved(model, evaluator, plan, list(chains_to.reduced((B, Split))))
    distinct = {each.rows.tobytes(): each for each in (free, every) if each is not plan}
    return list(distinct.values())


_Targets = tuple[Placement | type[Split], ...]  # placements, or all of a type
_Chain = list[tuple[int, int, int]]  # node, mesh axis, and the row it takes there


def _moved(model: Model, evaluator: Evaluator, plan: CostedPlan, chains: list[_Chain]) -> CostedPlan:
    rows = plan.rows.copy()
    for chain in chains:
        for n, axis, row in chain:
            rows[n, axis] = row
    return evaluate_plan(model, evaluator, rows) if chains and evaluator.allowed(rows).all() else plan


class _Chains:
    """Operations of one operand behind which partial values can be reduced, in place of in front of them."""

    def __init__(self, model: Model, plan: CostedPlan) -> None:
        self._model = model
        self._own, self._uses = layouts_of(model, plan.rows)
        moved = sorted(plan.edges, key=lambda value: model.wiring.ends_of(value)[0])
        self._partial = [v for v in moved if any(isinstance(placed, Partial) for _, placed in self._own[v].placements)]

    def reduced(self, targets: _Targets) -> Iterator[_Chain]:
        """Yields the chains behind values that are reduced to one of these placements."""
        yield from filter(None, (self._chain(value, targets) for value in self._partial))

    def _chain(self, value: int, targets: _Targets) -> _Chain:
        """Returns the rows of the operations behind a partial value, up to where its sum can wait for longest."""
        names, own = self._model.mesh.names, self._own
        chain, kept, longest = _Chain(), 0, self._wait(value)
        placed = {name: own[value].on(name) for name in names}
        while (node := self._only_consumer(value)) is not None:
            n, used = self._model.wiring.ends_of(value)[1][0], node.ports[0].use
            assert used is not None
            read = self._uses[used]
            reduced = [a for a, name in enumerate(names) if _is_reduced(placed[name], read.on(name), targets)]
            found = {axis: _partial_row(node, placed[names[axis]]) for axis in reduced}
            if not found or None in found.values():
                break
            chain += ((n, axis, row) for axis, row in found.items() if row is not None)
            value = node.ports[1].value.id
            if self._wait(value) >= longest:
                kept, longest = len(chain), self._wait(value)
            after = {names[axis] for axis in reduced}
            placed = {name: placed[name] if name in after else own[value].on(name) for name in placed}
        return chain[:kept]

    def _wait(self, value: int) -> int:
        """Returns the number of nodes between the producer of a value and the first operation that reads it."""
        nodes = self._model.nodes
        (producer, _), *consumers = self._model.wiring.ends_of(value)
        return min(n if nodes[n].op else len(nodes) for n, _ in consumers) - producer

    def _only_consumer(self, value: int) -> Node | None:
        """Returns the node that alone uses a value, if that is an operation of one operand, literals aside."""
        ends = self._model.wiring.ends_of(value)
        if len(ends) != 2:
            return None
        node = self._model.nodes[ends[1][0]]
        used = [x for x in node.op.inputs if isinstance(x, Value)] if node.op else []
        is_chain = node.op and node.op.name not in ("return", "constrain") and len(used) == len(node.op.outputs) == 1
        return node if is_chain else None


def _is_reduced(before: Placement, used: Placement, targets: _Targets) -> bool:
    return isinstance(before, Partial) and any(used is each or type(used) is each for each in targets)


def _partial_row(node: Node, placed: Placement) -> int | None:
    """Returns the row in which an operation of one operand takes and makes partial values; None if it has none."""
    wanted = (placed, placed)
    return next((i for i, row in enumerate(node.rows) if row.outputs == wanted and not row.collectives), None)
