"""Strategy choice under a memory limit, against exhaustive search."""

import gzip
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from meshdsl.errors import ArgumentError, MemoryLimitError
from meshdsl.plan import Instance, load_instance, solve
from meshdsl.planner.contest.bucket_kernels import plan_elimination
from meshdsl.planner.contest.instance import core_of, unneeded_costs
from meshdsl.planner.contest.lagrangian import FlatCore, Subgradient, certify
from meshdsl.planner.contest.local_search import ForestMoves, Restarts, WideMoves
from meshdsl.planner.contest.mip import RestrictedMIP, promising_states, restricted_core
from meshdsl.planner.contest.presolve import Presolve

NEVER = 10**18
SCRIPT = Path(__file__).parents[3] / "bench" / "iopddl.py"
TINY = {
    "problem": {
        "name": "two layers and a weight that both read",
        "nodes": {
            "intervals": [[0, 9], [1, 3], [3, 5], [4, 4]],
            "costs": [[0, 6], [2, 1], [3, 1, 4], [0, 0]],
            "usages": [[8, 2], [4, 1], [4, 1, 0], [7, 7]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 2], [2, 1], [2, 3]],
            "costs": [
                [0, 2, 3, NEVER],
                [0, 5, 1, 4, 0, 0],
                [0, 1, 2, 3, 0, 1],
                [1, 0, 0, 2, 0, 1],
                [0, 9, 9, 0, 1, 1],
            ],
        },
        "usage_limit": 8,
    }
}


@st.composite
def instances(draw, nodes=6):
    """Small instances with parallel edges, nodes that are never live, and combinations that cannot be."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = int(rng.integers(2, nodes + 1))
    sizes = rng.integers(1, 4, n)
    costs = [rng.integers(0, 12, s) for s in sizes]
    usages = [rng.integers(0, 9, s) for s in sizes]
    lo = rng.integers(0, 6, n)
    intervals = [(int(a), int(a + b)) for a, b in zip(lo, rng.integers(0, 5, n))]
    ends = [tuple(map(int, rng.choice(n, 2, replace=False))) for _ in range(int(rng.integers(1, 2 * n)))]
    tables = [rng.integers(0, 12, (sizes[a], sizes[b])) for a, b in ends]
    for table in tables:
        table[rng.random(table.shape) < 0.2] = NEVER
    return Instance(costs, usages, intervals, ends, tables, int(rng.integers(2, 9 * n)))


def best_of(instance):
    """The least cost of a valid choice, peaks counted time point by time point; None if there is none."""
    costs = []
    for choice in product(*(range(c.size) for c in instance.costs)):
        peak = max(
            sum(int(u[s]) for u, (lo, hi), s in zip(instance.usages, instance.intervals, choice) if lo <= t < hi)
            for t in range(12)
        )
        score = instance.score(choice)
        assert score.peak == peak
        if peak <= instance.limit:
            costs.append(score.cost)
    return min(costs, default=None)


ONLY_LARGE = Instance(  # the one choice that fits has a cost that is more than all smaller ones together
    costs=[np.array([1]), np.array([0]), np.array([11, 7])],
    usages=[np.array([6]), np.array([2]), np.array([2, 6])],
    intervals=[(0, 1), (2, 6), (2, 6)],
    ends=[(0, 1)],
    tables=[np.array([[2]])],
    limit=7,
)

TWO_KINDS_OF_LARGE = Instance(  # one that no choice has, and 10, which is more than all smaller ones and needed
    costs=[np.array([0, 0]), np.array([2, 0])],
    usages=[np.array([1, 5]), np.array([1, 0])],
    intervals=[(3, 6), (0, 2)],
    ends=[(0, 1), (1, 0)],
    tables=[np.array([[3, 5], [4, 10]]), np.array([[NEVER, NEVER], [10, 2]])],
    limit=5,
)


@given(instances())
@example(ONLY_LARGE)
@example(TWO_KINDS_OF_LARGE)
@settings(max_examples=30, deadline=None)
def test_contraction_keeps_the_best_choice(instance):
    best = best_of(instance)
    assume(best is not None)
    core = core_of(instance, next(cost for cost in unneeded_costs(instance) if best < cost))
    Presolve(core).run()
    found = min(score.cost for score in scores(instance, core) if score.fits)
    assert found == best or best >= NEVER  # costs this large are rounded
    assert found <= best * (1 + 1e-9)


def test_a_cost_that_is_more_than_all_smaller_ones_is_paid_where_nothing_else_fits():
    assert solve(ONLY_LARGE, 5).score.cost == best_of(ONLY_LARGE) == 14
    assert solve(TWO_KINDS_OF_LARGE, 5).score.cost == best_of(TWO_KINDS_OF_LARGE) == 12


def scores(instance, core):
    variables = list(core.network.unary)
    for states in product(*(range(core.network.unary[v].size) for v in variables)):
        yield instance.score(core.choice(dict(zip(variables, states))))


@given(instances(), st.integers(0, 8))
@settings(max_examples=12, deadline=None)
def test_bounds_and_search_stand_on_either_side_of_the_best_choice(instance, steps):
    best = best_of(instance)
    assume(best is not None and best < unneeded_costs(instance)[0])
    core = core_of(instance, unneeded_costs(instance)[0])
    assume(core.cost_unit == 1)  # else costs are rounded down
    Presolve(core)._make_consistent()
    flat = FlatCore(core, core.cost_above_all)
    ascent = Subgradient(flat, np.zeros(flat.limit.size))
    for _ in range(steps):
        ascent.step()
    proof = certify(flat, ascent.prices)
    assert proof.bound <= best
    for v, keep in proof.remaining(best).items():
        core.restrict(v, keep)
    assert min(score.cost for score in scores(instance, core) if score.fits) == best


@given(instances())
@settings(max_examples=15, deadline=None)
def test_search_and_program_only_give_valid_choices_that_are_no_worse(instance):
    best = best_of(instance)
    assume(best is not None and best < unneeded_costs(instance)[0])
    core = core_of(instance, unneeded_costs(instance)[0])
    assume(core.cost_unit == 1)  # else costs are rounded down
    Presolve(core)._make_consistent()
    flat = FlatCore(core, core.cost_above_all)
    starts = list(map(np.array, product(*(range(core.network.unary[v].size) for v in flat.order))))
    valid = [s for s in starts if (flat.used(s) <= flat.limit).all() and flat.cost(s) < flat.top]
    search = ForestMoves(flat, valid[-1], np.zeros(flat.limit.size), seed=0)
    for _ in range(5):
        search.step()
        assert (flat.used(search.states) <= flat.limit).all()
        assert search.least <= flat.cost(valid[-1])
    search = ForestMoves(
        flat, max(starts, key=lambda s: flat.used(s).max(initial=0)), np.zeros(flat.limit.size), seed=0
    )
    for _ in range(40):
        search.step()
    assert search.least == np.inf or (flat.used(search.best) <= flat.limit).all()
    whole = [np.arange(core.network.unary[v].size) for v in flat.order]
    *_, last = RestrictedMIP(flat, whole, valid[-1]).solve(30.0)
    assert instance.score(flat.choice(last)).cost == best


def flat_and_starts(instance):
    """The core of an instance, hardly contracted, and all states of it."""
    core = core_of(instance, unneeded_costs(instance)[0])
    assume(core.cost_unit == 1)  # else costs are rounded down
    Presolve(core)._make_consistent()
    flat = FlatCore(core, core.cost_above_all)
    return flat, list(map(np.array, product(*(range(core.network.unary[v].size) for v in flat.order))))


@pytest.mark.sweep
@given(instances(), st.sampled_from([1.0, 2.0, 4.0, 20.0]), st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_what_a_plan_leaves_free_takes_its_best_states(instance, limit, seed):
    best, rng = best_of(instance), np.random.default_rng(seed)
    assume(best is not None and best < unneeded_costs(instance)[0])
    flat, starts = flat_and_starts(instance)
    candidates = rng.permutation(flat.size)[: rng.integers(1, flat.size + 1)]
    plan = plan_elimination(flat.flat, candidates, rng.random(candidates.size), limit)
    free = set(plan.order.tolist())
    assert free <= set(candidates.tolist())
    assert limit < 20 or len(free) == candidates.size
    costs = flat.priced(rng.random(flat.limit.size))
    before = starts[rng.integers(len(starts))]
    found = WideMoves(flat, rng).solve(costs, plan, before)
    held = [v for v in range(flat.size) if v not in free]
    same = [s for s in starts if (s[held] == before[held]).all()]

    def cost(states):
        own = sum(costs[flat.flat.start[:-1] + states])
        return own + sum(table[states[v], states[w]] for v, w, table in flat.edges)

    assert any((found == s).all() for s in same)
    assert cost(found) == pytest.approx(min(map(cost, same)))


@given(instances(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
@pytest.mark.sweep
def test_wide_steps_stay_within_the_limit_and_restarts_find_the_best(instance, seed):
    best = best_of(instance)
    assume(best is not None and best < unneeded_costs(instance)[0])
    flat, starts = flat_and_starts(instance)
    wide = WideMoves(flat, np.random.default_rng(seed))
    for states in starts[:: max(1, len(starts) // 8)]:
        found = wide.make_valid(states, exchange=True)
        assert found is None or (flat.used(found) <= flat.limit).all()
        fits = (flat.used(states) <= flat.limit).all()
        better = wide.improved(states, exchange=False)
        assert not fits or ((flat.used(better) <= flat.limit).all() and flat.cost(better) <= flat.cost(states))
    ascent = Subgradient(flat, np.zeros(flat.limit.size))
    for _ in range(20):
        ascent.step()
    restarts = Restarts(flat, ascent.prices, seed)
    for _ in range(30):
        restarts.step(np.inf)
    assert instance.score(flat.choice(restarts.best)).cost == best
    assert instance.score(flat.choice(restarts.best)).fits


@given(instances(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_known_choices_are_combined_as_well_as_they_can_be(instance, seed):
    best = best_of(instance)
    assume(best is not None and best < unneeded_costs(instance)[0])
    flat, starts = flat_and_starts(instance)
    fits = [s for s in starts if (flat.used(s) <= flat.limit).all() and flat.cost(s) < flat.top]
    known = [fits[i] for i in np.random.default_rng(seed).integers(len(fits), size=3)]
    some = promising_states(flat, np.zeros(flat.unary.size, dtype=np.int64), known, entries=0)
    assert [keep.tolist() for keep in some] == [sorted(set(states)) for states in zip(*(s.tolist() for s in known))]
    mixed = [s for s in fits if all(state in keep for state, keep in zip(s, some))]
    core = restricted_core(flat, some)
    part = FlatCore(core, flat.top)
    whole = [np.arange(n) for n in np.diff(part.flat.start)]
    choice = core.choice({}) if not part.size else part.choice([*RestrictedMIP(part, whole).solve(30.0)][-1])
    assert instance.score(choice).fits
    assert instance.score(choice).cost == min(instance.score(flat.choice(s)).cost for s in mixed)


@given(instances(nodes=4))
@settings(max_examples=8, deadline=None)
def test_solving(instance):
    best = best_of(instance)
    if best is None:
        with pytest.raises(MemoryLimitError):
            solve(instance, 10.0)
    else:
        answer = solve(instance, 3.0)
        assert answer.score == instance.score(answer.choice)
        assert answer.score.fits
        assert answer.bound <= best <= answer.score.cost


def test_sums_of_more_than_64_bits():
    large = np.array([2**62, 2**61])
    same = np.array([[2**61, 2**62], [2**62, 2**61]])
    instance = Instance([large] * 3, [large] * 3, [(0, 2)] * 3, [(0, 1), (1, 2)], [same] * 2, 2**63 - 1)
    assert instance.score([0] * 3).peak == 3 * 2**62
    answer = solve(instance, 60.0)
    assert answer.choice == [1] * 3
    assert answer.score.cost == 5 * 2**61
    assert answer.bound <= answer.score.cost


def write(path, content):
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_a_file_is_read_and_solved(tmp_path):
    instance = load_instance(write(tmp_path / "tiny.json.gz", TINY))
    assert instance.intervals[3] == (4, 4)
    answer = solve(instance, 120.0)
    assert answer.optimal
    assert answer.score.cost == best_of(instance)


def test_search_finds_what_is_valid_from_what_is_not(tmp_path):
    flat = FlatCore(core_of(load_instance(write(tmp_path / "tiny.json.gz", TINY)), NEVER), 1e6)
    search = ForestMoves(flat, np.zeros(4, dtype=np.int64), np.zeros(flat.limit.size), seed=0)
    assert search.least == np.inf
    for _ in range(60):
        search.step()
    assert search.least == 13


def test_what_is_no_instance_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="holds no instance"):
        load_instance(write(tmp_path / "other.json.gz", {"nodes": []}))
    wrong = json.loads(json.dumps(TINY))
    wrong["problem"]["nodes"]["usages"][0] = [1]
    with pytest.raises(ArgumentError, match="node 0: 2 costs, 1 usages"):
        load_instance(write(tmp_path / "wrong.json.gz", wrong))


@pytest.mark.parametrize("limit", [8, 1])
def test_the_script_says_what_it_found_last(tmp_path, limit):
    content = {"problem": {**TINY["problem"], "usage_limit": limit}}
    path = write(tmp_path / "tiny.json.gz", content)
    done = subprocess.run([sys.executable, SCRIPT, path, "--seconds", "120"], capture_output=True, text=True)
    best = best_of(load_instance(path))
    if best is None:
        assert done.returncode == 1
        assert "no choice" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        line = done.stdout.splitlines()[-1]
        found = re.fullmatch(r"cost=(\d+) peak=(\d+) limit=8 bound=(\d+) seconds=[\d.]+", line)
        assert (int(found[1]), int(found[3])) == (best, best)
