"""Proof of the listed rows alone, where the prover cannot try all placements."""

from itertools import permutations

import numpy as np

from meshdsl.rules import rows_of
from meshdsl.rules.registry import all_broadcast
from tests.rules.prover import Proof, Sample, _key, divides, drawn, meet
from tests.trials import Trial, run_trials


def wrong(name, function, *args):
    """Listed rows of the operation ``name`` that do not hold on 2 or 3 devices."""
    rng = np.random.default_rng(0)
    op, draws = drawn(Sample(name, function, args), rng)
    whole = Trial((all_broadcast(op),), (1,))
    trials = [Trial((row,), (ranks,)) for row in rows_of(op) for ranks in (2, 3)]
    tried = dict.fromkeys(_key(op, trial) for trial in trials if divides(op, trial))
    results = run_trials(op, draws, [whole, *tried], rng)
    return Proof(op, rows_of(op), tuple(found[0] for found in results[whole]), results, exact=False).wrong()


def proved_together(name, function, *args):
    """Of all pairs of listed rows that exchange along different dims, 2 by 3: how many run, and those that fail."""
    rng = np.random.default_rng(0)
    op, draws = drawn(Sample(name, function, args), rng)
    whole, rows = Trial((all_broadcast(op),), (1,)), [row for row in rows_of(op) if row.collectives]
    trials = [Trial(pair, (2, 3)) for pair in permutations(rows, 2) if meet(*pair)]
    tried = [trial for trial in trials if divides(op, trial)]
    results = run_trials(op, draws, [whole, *tried], rng)
    proof = Proof(op, rows_of(op), tuple(found[0] for found in results[whole]), results, exact=False)
    return len(tried), [str(trial) for trial in tried if not proof.holds(trial)]
