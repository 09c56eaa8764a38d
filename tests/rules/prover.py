"""The prover: every listed row is right, and no right row is missing.

An operation with concrete operands is run unsharded, and on 2 and 3 simulated devices for
*every* combination of placements of its operands and results. A combination is right if the
devices' results together equal the unsharded result on all draws. Then

* wrong   = listed, but not right;
* missing = right on 2 and on 3 devices, but neither listed nor implied by a listed row
  (a ``B`` serves wherever a ``P(max)`` or ``P(min)`` is wanted);
* pairs of rows on two axes at once, also on the same dim, must be right as well, and all those
  that exchange different things or split a minor factor behind a major one that is divided fully.

The first sample of an operation is tried in all combinations, further ones in ``BUDGET`` at random.
Partial operands are cut at random, with the reduction's identity among the parts.
"""

from dataclasses import dataclass
from itertools import cycle, permutations, product

import numpy as np

from meshdsl.custom_rules import simulate as simulated
from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.layouts.exchange import ExchangeStep, ordered_exchanges
from meshdsl.layouts.placement import B, P, Partial, Placement, S, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.layouts.sharding_rule import divides as divides_dim
from meshdsl.lowering.local.registry import PROGRAMS
from meshdsl.rules import rows_of
from meshdsl.rules.registry import all_broadcast, carries
from tests.rules.samples import SAMPLES, Sample, drawn, sample
from tests.trials import Results, Trial, run_trials

__all__ = ["SAMPLES", "Sample", "drawn", "prove", "sample"]

PAIRS = 4
BUDGET = 60  # rows tried at random, beside the listed ones, of a further sample of one operation


def prove(case: Sample) -> list[str]:
    """Every fault of the operation's table, as text."""
    rng = np.random.default_rng(0)
    op, draws = drawn(case, rng)
    listed = rows_of(op)
    whole = Trial((all_broadcast(op),), (1,))
    pairs = [trial for trial in (*two_axes(listed, rng), *nested(listed)) if divides(op, trial)]
    every = candidates(op)
    rows = every if len(every) <= BUDGET or case is SAMPLES.get(case.name, [case])[0] else some(every, op, listed, rng)
    singles = [Trial((row,), (ranks,)) for row in rows for ranks in (2, 3)]
    results = run_trials(op, draws, [whole, *(trial for trial in singles if divides(op, trial)), *pairs], rng)
    proof = Proof(op, listed, tuple(found[0] for found in results[whole]), results, case.exact)
    missing = {f"missing: {row}" for row in proof.missing()}
    excused = {f"missing: {row}" for row in case.excused}
    stale = [f"excused, but not {fault}" for fault in sorted(excused - missing) if rows is every]
    wrong_pairs = [f"wrong {trial}" for trial in pairs if not proof.holds(trial)]
    return [*proof.wrong(), *sorted(missing - excused), *stale, *wrong_pairs]


@dataclass(frozen=True)
class Proof:
    """What the devices computed, beside what they should have.

    Args:
      expected: per result, [draws, ...] unsharded.
    """

    op: Op
    listed: tuple[Signature, ...]
    expected: tuple[simulated.Array, ...]
    results: Results
    exact: bool

    def wrong(self) -> list[str]:
        """Listed rows that do not hold."""
        trials = [Trial((row,), (ranks,)) for ranks in (2, 3) for row in self.listed]
        return [f"wrong {trial}" for trial in trials if divides(self.op, trial) and not self.holds(trial)]

    def missing(self) -> list[Signature]:
        """Rows that hold on any number of devices on which they can be tried, but are not listed."""
        right = {ranks: self._right(ranks) for ranks in (2, 3)}
        tried = {row: [k for k in right if divides(self.op, Trial((row,), (k,)))] for row in right[2] | right[3]}
        always = (row for row, ks in tried.items() if all(row in right[k] for k in ks))
        return [row for row in always if not implied(row, self.listed)]

    def _right(self, ranks: int) -> set[Signature]:
        found: set[Signature] = set()
        for trial, stacks in self.results.items():
            if trial.ranks == (ranks,):
                inputs = trial.rows[0].inputs
                fits = [self._fitting(trial, i, stack) for i, stack in enumerate(stacks)]
                found |= {Signature(inputs, outputs) for outputs in product(*fits)}
        return found

    def _fitting(self, trial: Trial, i: int, stack: simulated.Array) -> list[Placement]:
        """Placements of result i that fit: of all, or of the one that the local program was told."""
        special = self.op.name in PROGRAMS
        tried = [trial.rows[0].outputs[i]] if special else placements(self.op.outputs[i])
        return [placed for placed in tried if self._equal(i, stack, (placed,))]

    def holds(self, trial: Trial) -> bool:
        """Whether the rows, one per axis, give the unsharded results."""
        stacks = self.results.get(_key(self.op, trial), ())
        return len(stacks) == len(self.expected) and all(
            self._equal(i, stack, tuple(row.outputs[i] for row in trial.rows)) for i, stack in enumerate(stacks)
        )

    def _equal(self, i: int, stack: simulated.Array, placed: tuple[Placement, ...]) -> bool:
        found = simulated.join(stack, placed)
        return found is not None and simulated.agree(found, self.expected[i], self.exact)


def implied(row: Signature, listed: tuple[Signature, ...]) -> bool:
    """Whether a listed row gives ``row`` by reading B as P(max) or P(min), which costs nothing."""
    return any(
        all(map(_serves, row.inputs, known.inputs)) and all(map(_serves, known.outputs, row.outputs))
        for known in listed
    )


def _serves(held: Placement, wanted: Placement) -> bool:
    return held is wanted or (held is B and wanted in (P("max"), P("min")))


def candidates(op: Op) -> list[Signature]:
    """Every combination of placements; results are left open where the local program does not ask."""
    results = list(product(*map(placements, op.outputs))) if op.name in PROGRAMS else [all_broadcast(op).outputs]
    return [Signature(inputs, outputs) for inputs in product(*map(placements, op.inputs)) for outputs in results]


def some(rows: list[Signature], op: Op, listed: tuple[Signature, ...], rng: simulated.Random) -> list[Signature]:
    """The listed ones of ``rows``, and ``BUDGET`` others."""
    chosen = [rows[i] for i in rng.permutation(len(rows))[:BUDGET]]
    return list(dict.fromkeys([_key(op, Trial((row,), (1,))).rows[0] for row in listed] + chosen))


def _key(op: Op, trial: Trial) -> Trial:
    """The trial under which its results were computed."""
    if len(trial.rows) > 1:
        return trial
    row = trial.rows[0]
    outputs = row.outputs if op.name in PROGRAMS else all_broadcast(op).outputs
    return Trial((Signature(row.inputs, outputs),), trial.ranks)


def two_axes(listed: tuple[Signature, ...], rng: simulated.Random) -> list[Trial]:
    """A few rows with themselves and random pairs, on two axes, and all that exchange different things."""
    rows = listed[1:]
    chosen = [(row, row) for row in rows] + [(a, b) for a, b in rng.choice(rows, (4, 2)).tolist()] if rows else []
    legal = [pair for pair in chosen if meet(*pair)]
    rng.shuffle(legal)
    both = [(a, b) for a, b in permutations(rows, 2) if a.collectives and b.collectives]
    differing = [(a, b) for a, b in both if a.collectives != b.collectives and meet(a, b)]
    return [
        Trial(pair, ranks) for pair, ranks in zip([*legal[:PAIRS], *differing], cycle(((2, 3), (2, 2))), strict=False)
    ]


def nested(listed: tuple[Signature, ...]) -> list[Trial]:
    """Every row of a minor factor behind every other row, on as many devices as what is in front of it is long."""
    minor = [(row, n) for row in listed for n in {*row.majors} - {1}]
    return [Trial((first, row), (n, k)) for row, n in minor for first in listed if meet(first, row) for k in (2, 3)]


def meet(*rows: Signature) -> bool:
    """Whether a state of the operation has these rows, one per axis."""
    return not _mixed(rows) and ordered_exchanges([row.collectives for row in rows]) is not None


def _mixed(rows: tuple[Signature, ...]) -> bool:
    """Whether a value is partial in two ways; reductions do not commute, so no such layout exists."""
    ports = zip(*((*row.inputs, *row.outputs) for row in rows), strict=True)
    return any(len({p for p in port if isinstance(p, Partial)}) > 1 for port in ports)


def divides(op: Op, trial: Trial) -> bool:
    """Whether every dim that the rows split is divided by the axes that split it, into blocks that can exchange."""
    ports = enumerate((*op.inputs, *op.outputs))
    return all(_divides(port.shape, trial, i) for i, port in ports) and _exchanges(op, trial)


def _exchanges(op: Op, trial: Trial) -> bool:
    """Whether the blocks are large enough for what the rows exchange."""
    shapes = [port.shape for port in (*op.inputs, *op.outputs)]
    return all(
        _large_enough(turn, shapes, trial) for turn in ordered_exchanges([row.collectives for row in trial.rows]) or ()
    )


def _large_enough(turn: ExchangeStep, shapes: list[tuple[int, ...]], trial: Trial) -> bool:
    e, ranks = turn.exchange, [trial.ranks[axis] for axis in turn.axes]
    extent = shapes[e.port][e.dim] // int(np.prod(ranks)) if e.dim is not None else 1
    return e.parts(extent, ranks) is not None


def _divides(shape: tuple[int, ...], trial: Trial, port: int) -> bool:
    axes = [
        ((*row.inputs, *row.outputs)[port], k, row.part(port)) for row, k in zip(trial.rows, trial.ranks, strict=True)
    ]
    return all(divides_dim(n, [(k, part) for p, k, part in axes if p is S(dim)]) for dim, n in enumerate(shape))


def placements(port: Value | Literal) -> list[Placement]:
    """Every placement that an operand or result can have."""
    if isinstance(port, Literal):
        return [B]
    partial = [p for p in (P, P("max"), P("min")) if carries(p, port.dtype)]
    return [B, *map(Split, range(len(port.shape))), *partial]
