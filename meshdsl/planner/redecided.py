"""A better plan within a limit of memory, from a known one: some operations hold, drawn at random, the others do not.

Where memory is short, messages settle badly, and plans at the same price differ in much at a time. With a part of the
operations held as they are the others are decided exactly, or nearly so, memory aside and at a low price in turn
(large neighbourhood search, Shaw 1998). What comes out cheaper is the plan from then on if it fits; if not, as much of
it is taken over as does (``mix``). The draws are the same every time.
"""

from collections.abc import Callable, Sequence

import numpy as np

from meshdsl.planner.boxed import boxed
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.model import Model
from meshdsl.planner.near import as_two
from meshdsl.planner.prices import Prices
from meshdsl.planner.search import evaluated

_SEED = 1998
_LEAST, _MOST = 0.05, 0.5  # part of the nodes that hold
_DRAWS, _FEWER, _WORK = 24, 8, 40_000  # at most, at most in a neighbourhood, and nodes of all draws together
Fitting = Callable[[Choice, Choice], Choice]


def redecided_on_many_axes(
    model: Model, evaluator: Evaluator, best: Choice, prices: Sequence[Prices], fitting: Fitting
) -> Choice:
    """As ``redecided``, where all mesh axes are too many: from neighbourhood to neighbourhood of the best plan."""
    for groups in as_two(model.wide):
        model.focus(groups, best.rows)
        best = redecided(Joint(model), evaluator, best, prices, fitting, _FEWER)
    return best


def redecided(
    joint: Joint, evaluator: Evaluator, best: Choice, prices: Sequence[Prices], fitting: Fitting, draws: int = _DRAWS
) -> Choice:
    """A plan that is better than ``best`` and fits, or that one.

    Args:
      joint: the networks of all states. prices: of memory, one after the other.
      fitting: of two plans, the second being cheaper, one that fits and costs no more than the first.
      draws: at most.
    """
    model = joint.model
    networks = [boxed(joint, each, Joint.plans, best.rows) for each in prices]
    random = np.random.default_rng(_SEED)
    for i in range(min(draws, _WORK // len(model.nodes))):
        if model.clock.is_up():
            break
        part = random.uniform(_LEAST, _MOST) if i >= len(networks) else 0.0
        held = np.flatnonzero(random.random(len(model.nodes)) < part).tolist()
        network = networks[i % len(networks)]
        rows = network.decided(network.held(best.rows, held)).rows
        choice = evaluated(model, evaluator, rows)
        better = fitting(best, choice) if choice.cost < best.cost else best
        if better.cost < best.cost:
            best = better
            for each in networks:
                each.begin(best.rows)
    return best
