"""Of plans that cost the same, the one that a person would find simplest: with the fewest distinct layouts.

Collectives and moves are counted in the costs themselves (``exact``); how many layouts a plan has in all is no sum over
nodes. So one layout after the other, the rarest first, is forbidden: nodes that have it may take any states whose
layouts the plan has elsewhere, all others hold, and what that comes to is decided exactly. If it costs no more and
fits, it is the plan from then on. Most layouts need no such trial: some node without them would cost more, by more
than all moves around it.
"""

from collections.abc import Callable

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.mrf.elimination import eliminate
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Model
from meshdsl.util.arrays import Ids, unique_sorted

_LARGEST = 1 << 16  # entries of the largest table
_TRIALS, _TRIED = 8, 8_000  # at most, and nodes of all trials together


def fewest_layouts(
    model: Model, evaluator: Evaluator, best: CostedPlan, fits: Callable[[CostedPlan], bool]
) -> CostedPlan:
    """A plan that costs no more than ``best`` and has as few distinct layouts as are found."""
    model.focus()
    laid, trials = _laid(model, best), min(_TRIALS, _TRIED // len(model.nodes))
    for layout in _rarest(model, laid):
        left = _without(model, evaluator, best, laid, layout) if trials and not model.clock.is_up() else None
        if left is not None:
            trials -= 1
            found = _decided(NetworkBuilder(model, left), evaluator)
            others = _laid(model, found)
            fewer = unique_sorted(others).size < unique_sorted(laid).size
            if found.cost <= best.cost and fewer and fits(found):
                best, laid = found, others
    return best


def distinct(model: Model, choice: CostedPlan) -> int:
    """How many layouts values are made and read in."""
    return unique_sorted(_laid(model, choice)).size


def _laid(model: Model, choice: CostedPlan) -> Ids:
    """The layouts of all ports, by their numbers in every one."""
    return model.ports.named(model.ports.layouts(choice.rows))


def _rarest(model: Model, laid: Ids) -> list[int]:
    """The layouts of ports, those that occur least often first."""
    every, (found, counts) = list(model.ports.every), np.unique(laid, return_counts=True)
    ranked = sorted(zip(counts.tolist(), found.tolist(), strict=True), key=lambda pair: (pair[0], str(every[pair[1]])))
    return [layout for _, layout in ranked]


def _without(model: Model, evaluator: Evaluator, best: CostedPlan, laid: Ids, layout: int) -> dict[int, Ids] | None:
    """The states in question if no node may have a layout; None if some node has none that could cost as little."""
    ports, every = model.ports, list(model.ports.every)
    used = {every[i] for i in set(laid.tolist()) - {layout}}
    elsewhere = {value: read for read in ports.elsewhere(ports.layouts(best.rows)) for value in read.values}
    left: dict[int, Ids] = {}
    for n in unique_sorted(model.wiring.nodes[laid == layout]).tolist():
        values = dict.fromkeys(model.wiring.value((n, p)) for p in range(len(model.wiring.ports(n))))
        keep = model.units[n][tuple(model.states[n].T)] <= evaluator.around(n, values, best.rows, elsewhere)
        for p in range(len(model.wiring.ports(n))):
            keep &= _among(model, n, p, used)
        if not keep.any():
            return None
        left[n] = np.flatnonzero(keep)
    held = (n for n in range(len(model.nodes)) if n not in left)
    return left | {n: np.flatnonzero((model.states[n] == best.rows[n]).all(axis=1)) for n in held}


def _among(model: Model, n: int, p: int, used: set[Layout]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """In which states in question a port has one of these layouts."""
    value = model.wiring.value((n, p))
    places, closure = model.layout_ids(n, p, model.states[n].T), model.closure(value)
    every = model.distances[value].space.layouts
    fine = np.array([*(every[i] in used for i in closure.active), False])
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = fine[places]
    return found


def _decided(joint: NetworkBuilder, evaluator: Evaluator) -> CostedPlan:
    """The cheapest plan of the states in question, or one near it."""
    network = joint.plans()
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), _LARGEST)
    return evaluator.exact(evaluator.evaluate(joint.domains.rows(network.decode(network.order, found.states))))
