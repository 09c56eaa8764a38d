"""What free variables may use at most each, such that all fit whatever they choose: compiled.

An *allowance* is a state per variable that together stay within the limit; a variable may take every state that uses
no more than that one. So memory ties no two variables any more, and what is found fits. Prices of memory find what
is best for them only; where a few large usages compete for little room, what is best lies between, and exchanging
allowances finds it.
"""

import numpy as np

from meshdsl.planner.compiled import compiled
from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.strategies.kernels import Held

_LOWERED = 500  # allowances that are lowered at most until all fit
_NEARLY = 0.9  # of the usage of the largest state: others this large may be taken for it


@compiled
def lower(held: Held, start: Ints, free: Ints, states: Ints, room: Costs, but: int, seed: int) -> bool:
    """Lower allowances of free variables at random, except one, until all fit; whether they do.

    Args:
      room: what they leave at every point, which changes with them.
    """
    np.random.seed(seed)
    for _ in range(_LOWERED):
        if room.size == 0 or room.min() >= 0:
            return True
        v, state = _lowered(held, start, free, states, int(np.argmin(room)), but)
        if v < 0:
            return False
        _change(held, v, states[v], state, room)
        states[v] = state
    return False


@compiled
def _lowered(held: Held, start: Ints, free: Ints, states: Ints, point: int, but: int) -> tuple[int, int]:
    """A variable and a state of it that uses less at a point; -1 if there is none."""
    found, at, count = -1, -1, 0
    for v in free:
        most = _use(held, v, states[v], point) if v != but else 0.0
        state, less = -1, 0
        for s in range(start[v + 1] - start[v] if most > 0 else 0):
            if _use(held, v, s, point) < most:
                less += 1
                state = s if np.random.random() * less < 1 else state
        if less:
            count += 1
            if np.random.random() * count < 1:
                found, at = v, state
    return found, at


@compiled
def _use(held: Held, v: int, state: int, point: int) -> float:
    use = 0.0
    for k in range(held.first[v], held.first[v + 1]):
        if held.lo[k] <= point < held.hi[k]:
            use += held.use[held.begin[k] + state]
    return use


@compiled
def _change(held: Held, v: int, old: int, new: int, room: Costs) -> float:
    """Take off the room what a variable uses more in another state; returns the least room where it is live."""
    least = np.inf
    for k in range(held.first[v], held.first[v + 1]):
        more = held.use[held.begin[k] + new] - held.use[held.begin[k] + old]
        for t in range(held.lo[k], held.hi[k]):
            room[t] -= more
    for k in range(held.first[v], held.first[v + 1]):
        for t in range(held.lo[k], held.hi[k]):
            least = min(least, room[t])
    return least


@compiled
def _fits(held: Held, v: int, old: int, new: int, room: Costs) -> bool:
    least = _change(held, v, old, new, room)
    _change(held, v, new, old, room)
    return least >= 0


@compiled
def enlarge(held: Held, start: Ints, free: Ints, states: Ints, room: Costs, seed: int) -> int:
    """Allow one free variable a state that does not fit; returns which, -1 if all states of all fit."""
    np.random.seed(seed)
    found, at, count = -1, -1, 0
    for v in free:
        for s in range(start[v + 1] - start[v] if held.first[v] < held.first[v + 1] else 0):
            if not _fits(held, v, states[v], s, room):
                count += 1
                if np.random.random() * count < 1:
                    found, at = v, s
    if found >= 0:
        _change(held, found, states[found], at, room)
        states[found] = at
    return found


@compiled
def fill(held: Held, start: Ints, free: Ints, states: Ints, room: Costs, seed: int) -> None:
    """Raise allowances of free variables in random order as far as there is room."""
    np.random.seed(seed)
    for v in np.random.permutation(free):
        most, best = _total(held, v, states[v]), states[v]
        for s in range(start[v + 1] - start[v] if held.first[v] < held.first[v + 1] else 0):
            use = _total(held, v, s) * np.random.uniform(_NEARLY, 1.0)
            if use > most and _fits(held, v, states[v], s, room):
                most, best = use, s
        if best != states[v]:
            _change(held, v, states[v], best, room)
            states[v] = best


@compiled
def _total(held: Held, v: int, state: int) -> float:
    use = 0.0
    for k in range(held.first[v], held.first[v + 1]):
        use += held.use[held.begin[k] + state] * (held.hi[k] - held.lo[k])
    return use


@compiled
def allowed(held: Held, start: Ints, free: Ints, states: Ints, unary: Costs, top: float) -> Costs:
    """Costs of states, with those that use more than allowed dearer by ``top``."""
    costs = unary.copy()
    for v in free:
        for s in range(start[v + 1] - start[v]):
            for k in range(held.first[v], held.first[v + 1]):
                if held.use[held.begin[k] + s] > held.use[held.begin[k] + states[v]]:
                    costs[start[v] + s] = unary[start[v] + s] + top
    return costs
