"""Polishing: single nodes change where several share what is moved.

The network of plans gives a value with three readers or more one chain of copies, in program order.
A plan that is found in it may share copies otherwise, and then a reader that takes one of those may be cheaper than
the network says. So at last each node next to such a value takes the state in which the plan, with the best
trees of moves for it, costs least, the others staying as they are; until none changes.
"""

from dataclasses import dataclass

from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.model import Model

_SHARED = 3  # readers from which a chain may not be the best tree


@dataclass(frozen=True)
class _Beside:
    """A node beside a value of many readers, its states, and all values that it makes or reads."""

    node: int
    states: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]


def polished(model: Model, evaluator: Evaluator, choice: Choice, most: int) -> Choice:
    """The plan after polishing; as it is if that would look at more than ``most`` states at a time."""
    nodes = _beside(model)
    if sum(len(node.states) for node in nodes) > most:
        return choice
    rows = choice.rows.copy()
    states = list(map(tuple, rows.tolist()))
    changing = True
    while changing:
        before = tuple(states)
        for beside in nodes:
            states[beside.node] = _cheapest(evaluator, beside, states)
        changing = tuple(states) != before
    for beside in nodes:
        rows[beside.node] = states[beside.node]
    found = evaluator.evaluate(rows)
    return found if found.cost < choice.cost else choice


def _cheapest(evaluator: Evaluator, beside: _Beside, states: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The best state of a node; its present one if none is better."""
    tried = (states[beside.node], *beside.states)
    costs = []
    for states[beside.node] in tried:
        costs.append(evaluator.around(beside.node, beside.values, states))
    return tried[costs.index(min(costs))]


def _beside(model: Model) -> list[_Beside]:
    problem = model.problem
    shared = [v for v in problem.defined if len(problem.used.get(v, ())) >= _SHARED]
    nodes = {n for v in shared for n, _ in (problem.defined[v], *problem.used[v])}
    return [_Beside(n, tuple(map(tuple, model.states[n].tolist())), _values(model, n)) for n in sorted(nodes)]


def _values(model: Model, n: int) -> tuple[int, ...]:
    ports = (port.value.id for port in model.nodes[n].ports)
    return tuple(dict.fromkeys(v for v in ports if v in model.problem.defined))
