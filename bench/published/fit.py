"""Fits the matmul efficiency of each hardware on one half of the rows.

Two parameters of a topology are fitted: the rate of large matmuls, and the side at which a matmul reaches half of it
(``half_side``). Rows without pipeline stages are planned once; their operations are then costed again for every pair
on a grid. The pair with the smallest mean absolute logarithmic error, averaged over tables with equal weight, is copied
into the preset by hand.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

import meshdsl as md
from bench.published.case import Case
from meshdsl.ir.graph import walk
from meshdsl.layouts.topology import Topology, topology
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons

PEAKS = {"dgx-a100": 312e12, "dgx-h100": 989e12, "tpu-v5e": 197e12, "tpu-v5p": 459e12}  # bf16 FLOP/s, from data sheets
SHARES = np.arange(0.5, 1.001, 0.02)
HALF_SIDES = np.array(
    [32.0, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
)  # a matmul thinner than a tile never reaches the full rate
_NODES = np.arange(4.0)  # half sides at which the cubic polynomial of an operation's FLOPs is interpolated
_FREE = 1e30  # a rate at which the term costs nothing


@dataclass(frozen=True)
class FittedRow:
    """A planned row whose matmuls can be costed again.

    Args:
      table: the row's table.
      measured: measured seconds.
      seconds: seconds predicted with the rate and half side ``before``.
      before: rate and half side of the plan.
      powers: effective FLOPs as a cubic polynomial in the half side, ``[operation 4]``.
      traffic: seconds of memory traffic, ``[operation]``.
      trips: iterations, ``[operation]``.
    """

    table: str
    measured: float
    seconds: float
    before: tuple[float, float]
    powers: np.ndarray
    traffic: np.ndarray
    trips: np.ndarray

    def compute(self, rate: float, half_side: float) -> float:
        """Returns the seconds of all operations."""
        flops = self.powers @ half_side ** np.arange(4.0)
        return float(self.trips @ np.maximum(flops / rate, self.traffic))

    def error(self, rate: float, half_side: float) -> float:
        """Returns the logarithm of predicted over measured seconds."""
        before = self.compute(*self.before)
        return float(np.log(self.seconds * self.compute(rate, half_side) / before / self.measured))


def fit(cases: Iterable[Case]) -> dict[str, tuple[float, float, float]]:
    """Returns rate, half side and mean error by hardware."""
    fitted = (c for c in cases if c.fitted and c.hardware in PEAKS and c.stages == 1)
    chosen = sorted(fitted, key=lambda c: c.hardware)
    best = {}
    for hardware, rows in groupby(chosen, key=lambda c: c.hardware):
        planned = [_plan(case) for case in rows]
        grid = [(_loss(planned, share * PEAKS[hardware], h), share, h) for share in SHARES for h in HALF_SIDES]
        loss, share, h = min(grid)
        best[hardware] = share * PEAKS[hardware], h, loss
        print(
            f"{hardware}: {share:.2f} of the peak, half side {h:g}, error {loss:.3f} on {len(planned)} rows", flush=True
        )
    return best


def _loss(planned: list[FittedRow], rate: float, half_side: float) -> float:
    errors: dict[str, list[float]] = {}
    for row in planned:
        errors.setdefault(row.table, []).append(abs(row.error(rate, half_side)))
    return float(np.mean([np.mean(each) for each in errors.values()]))


def _plan(case: Case) -> FittedRow:
    sharded, args = case.sharded(topology(case.hardware))
    planned = sharded.stages(*args).planned
    program, plan = planned.program, planned.plan
    solution, reasons = plan.solution, Reasons(program, plan.solution)

    def seconds(changed: Topology) -> np.ndarray:
        mesh = md.Mesh(topology=changed, **plan.mesh.sizes_by_name)
        work = OpTimes(program, replace(solution, mesh=mesh), reasons)
        return np.array([work.compute_seconds(op) for _, op in walk(program.graph)])

    known = plan.topology
    fast = replace(known, memory_bandwidth=_FREE, overhead=0.0)
    flops = np.stack([seconds(replace(fast, flops16=1.0, half_side=h)) for h in _NODES], axis=1)
    powers = flops @ np.linalg.inv(np.vander(_NODES, increasing=True)).T
    traffic = seconds(replace(known, flops16=_FREE))
    trips = np.array([graph.trips for graph, _ in walk(program.graph)])
    before = known.flops16, known.half_side
    seconds_now = plan.simulated_seconds if case.overlap else plan.seconds
    return FittedRow(case.table, case.measured, seconds_now, before, powers, traffic, trips)
