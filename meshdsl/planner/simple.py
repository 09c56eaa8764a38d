"""Of plans that cost the same, the one that a person would find simplest: with the fewest distinct layouts.

Collectives and moves are counted in the costs themselves (``exact``); how many layouts a plan has in all is no sum over
nodes. So one layout after the other, the rarest first, is forbidden: nodes that have it may take any states whose
layouts the plan has elsewhere, all others hold, and what that comes to is decided exactly. If it costs no more and
fits, it is the plan from then on. Most layouts need no such trial: some node without them would cost more, by more
than all moves around it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.planner.eliminate import eliminate
from meshdsl.planner.exact import Ids
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.model import Model

_LARGEST = 1 << 16  # entries of the largest table
_TRIALS, _TRIED = 8, 8_000  # at most, and nodes of all trials together


def simplest(model: Model, evaluator: Evaluator, best: Choice, fits: Callable[[Choice], bool]) -> Choice:
    """A plan that costs no more than ``best`` and has as few distinct layouts as are found."""
    model.focus()
    ports, trials = list(_ports(model, best)), min(_TRIALS, _TRIED // len(model.nodes))
    for layout in rarest(ports):
        left = _without(model, evaluator, best, ports, layout) if trials and not model.clock.is_up() else None
        if left is not None:
            trials -= 1
            found = _decided(Joint(model, left), evaluator)
            others = list(_ports(model, found))
            if found.cost <= best.cost and len(rarest(others)) < len(rarest(ports)) and fits(found):
                best, ports = found, others
    return best


def distinct(model: Model, choice: Choice) -> int:
    """How many layouts values are made and read in."""
    return len(rarest(_ports(model, choice)))


def rarest(ports: Iterable[tuple[Layout, ...]]) -> list[Layout]:
    """The layouts of nodes' ports, those that occur least often first."""
    counts = Counter(chain.from_iterable(ports))
    return sorted(counts, key=lambda layout: (counts[layout], str(layout)))


def _ports(model: Model, choice: Choice) -> Iterable[tuple[Layout, ...]]:
    """Per node, the layouts of its ports."""
    known = dict[Hashable, tuple[Layout, ...]]()
    for n, (node, row) in enumerate(zip(model.nodes, choice.rows, strict=True)):
        spaces = tuple(id(model.distances[port.value.id]) for port in node.ports)
        key = id(model.tables[n]), model.orders[n], spaces, row.tobytes()
        if key not in known:
            known[key] = tuple(model.layout(n, p, row) for p in range(len(node.ports)))
        yield known[key]


def _without(
    model: Model, evaluator: Evaluator, best: Choice, ports: Sequence[tuple[Layout, ...]], layout: Layout
) -> dict[int, Ids] | None:
    """The states in question if no node may have a layout; None if some node has none that could cost as little."""
    used, elsewhere = set(chain.from_iterable(ports)) - {layout}, model.ports.elsewhere(model.ports.layouts(best.rows))
    left: dict[int, Ids] = {}
    for n in (n for n, layouts in enumerate(ports) if layout in layouts):
        values = dict.fromkeys(port.value.id for port in model.nodes[n].ports)
        keep = model.unit(n)[tuple(model.states[n].T)] <= evaluator.around(n, values, best.rows, elsewhere)
        for p in range(len(ports[n])):
            keep &= _among(model, n, p, used)
        if not keep.any():
            return None
        left[n] = np.flatnonzero(keep)
    held = (n for n in range(len(ports)) if n not in left)
    return left | {n: np.flatnonzero((model.states[n] == best.rows[n]).all(axis=1)) for n in held}


def _among(model: Model, n: int, p: int, used: set[Layout]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """In which states in question a port has one of these layouts."""
    value = model.nodes[n].ports[p].value.id
    places, closure = model.layout_ids(n, p, model.states[n].T), model.closures[value]
    every = model.distances[value].space.layouts
    fine = np.array([*(every[i] in used for i in closure.active), False])
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = fine[places]
    return found


def _decided(joint: Joint, evaluator: Evaluator) -> Choice:
    """The cheapest plan of the states in question, or one near it."""
    network = joint.plans()
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), _LARGEST)
    return evaluator.exact(evaluator.evaluate(joint.rows(network.named(network.order, found.states))))
