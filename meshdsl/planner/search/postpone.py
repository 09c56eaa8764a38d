"""Reductions as late as they are free: behind operations of one operand, literals aside, that pass partial sums on.

A gradient is a product and its transpose, say. Whether its partial sums are added in front of the transpose or behind
it costs the same, and a search takes either; where they are added and scattered, a search scatters first, as the
transpose of a block is a little cheaper. Behind it, nobody needs the result until the optimizer starts, so that it can
be sent together with those of other gradients (``planner.buckets``).
"""

from collections.abc import Iterator

from meshdsl.ir.graph import Value
from meshdsl.ir.index import Use
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.planner.objective import CostedPlan, Evaluator, layouts_of
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.variables import Node
from meshdsl.planner.search.search import evaluate_plan


def postpone_reductions(model: Model, evaluator: Evaluator, plan: CostedPlan) -> CostedPlan:
    """Returns a plan that costs no more, and adds partial sums behind operations of one operand where it can."""
    chains = list(_chains(model, plan.rows, (B,)))
    found = _moved(model, evaluator, plan, chains)
    if found.cost <= plan.cost:
        return found
    kept = plan
    for chain in chains[: model.limits.buckets_postponed]:
        found = _moved(model, evaluator, kept, [chain])
        kept = found if found.cost <= kept.cost else kept
    return kept


def postpone_all_reductions(model: Model, evaluator: Evaluator, plan: CostedPlan) -> CostedPlan:
    """Returns a plan that adds partial sums behind operations of one operand, scattered or not, whatever that costs."""
    return _moved(model, evaluator, plan, list(_chains(model, plan.rows, (B, Split))))


_Targets = tuple[Placement | type[Split], ...]  # placements, or all of a type
_Chain = list[tuple[int, int, int]]  # node, mesh axis, and the row it takes there


def _moved(model: Model, evaluator: Evaluator, plan: CostedPlan, chains: list[_Chain]) -> CostedPlan:
    rows = plan.rows.copy()
    for chain in chains:
        for n, axis, row in chain:
            rows[n, axis] = row
    return evaluate_plan(model, evaluator, rows) if chains and evaluator.allowed(rows).all() else plan


def _chains(model: Model, rows: Assignment, targets: _Targets) -> Iterator[_Chain]:
    """Yields, per value that is reduced to one of these placements, operations behind which it can be reduced."""
    own, uses = layouts_of(model, rows)
    consumers = _only_consumers(model)
    made = (port.value.id for node in model.nodes if node.op for port in node.ports if port.defines)
    partial = (v for v in made if any(isinstance(placed, Partial) for _, placed in own[v].placements))
    yield from filter(None, (list(_chain(model, consumers, v, own, uses, targets)) for v in partial))


def _chain(
    model: Model,
    consumers: dict[int, int],
    value: int,
    own: dict[int, Layout],
    uses: dict[Use, Layout],
    targets: _Targets,
) -> Iterator[tuple[int, int, int]]:
    """Yields the rows of the operations of one operand behind a partial value that reduce it, in order."""
    placed = {name: own[value].on(name) for name in model.mesh.names}
    while value in consumers:
        n = consumers[value]
        node, (use,) = model.nodes[n], model.nodes[n].ports[:1]
        assert node.op is not None and use.use is not None
        reduced = [
            a for a, name in enumerate(model.mesh.names) if _is_reduced(placed[name], uses[use.use].on(name), targets)
        ]
        found = {axis: _partial_row(node, placed[model.mesh.names[axis]]) for axis in reduced}
        if not found or None in found.values():
            return
        yield from ((n, axis, row) for axis, row in found.items() if row is not None)
        value = node.ports[1].value.id
        after = {model.mesh.names[axis] for axis in reduced}
        placed = {name: placed[name] if name in after else own[value].on(name) for name in placed}


def _is_reduced(before: Placement, used: Placement, targets: _Targets) -> bool:
    return isinstance(before, Partial) and any(used is each or type(used) is each for each in targets)


def _partial_row(node: Node, placed: Placement) -> int | None:
    """Returns the row in which an operation of one operand takes and makes partial values; None if it has none."""
    wanted = (placed, placed)
    return next((i for i, row in enumerate(node.rows) if row.outputs == wanted and not row.collectives), None)


def _only_consumers(model: Model) -> dict[int, int]:
    """Returns per value id the node that alone uses it, if that is an operation of one operand and one result."""
    found: dict[int, int] = {}
    for n, node in enumerate(model.nodes):
        op = node.op
        used = [x for x in op.inputs if isinstance(x, Value)] if op and op.name not in ("return", "constrain") else []
        if op and len(used) == len(op.outputs) == 1 and len(model.wiring.ends_of(used[0].id)) == 2:
            found[used[0].id] = n
    return found
