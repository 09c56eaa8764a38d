"""Scores predictions: relative errors, and rank correlation between configurations of a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import numpy as np

from bench.published.case import Case
from bench.published.predict import Prediction

Scored = tuple[Case, Prediction]


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of some rows."""

    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median error."""
        return float(np.median(self.errors)) if self.errors else float("nan")

    @property
    def most(self) -> float:
        """The 90th percentile."""
        return float(np.percentile(self.errors, 90)) if self.errors else float("nan")

    def __str__(self) -> str:
        return f"{self.median:.1%}, {self.most:.1%}" if self.errors else ""


def error(row: Scored) -> float:
    """Returns predicted over measured seconds, minus one."""
    case, prediction = row
    return prediction.seconds / case.measured - 1


def errors(rows: Iterable[Scored]) -> Errors:
    """Returns the absolute errors of rows."""
    return Errors(tuple(abs(error(row)) for row in rows))


def kendall(rows: Sequence[Scored]) -> tuple[int, int]:
    """Returns concordant and discordant pairs of configurations of one model, by device-seconds per token.

    Pairs measured within 2% of each other do not count, since repetitions differ by as much.
    """
    right = wrong = 0
    for _, group in groupby(sorted(rows, key=lambda r: r[0].model), key=lambda r: r[0].model):
        for (a, p), (b, q) in combinations(list(group), 2):
            measured = a.per_token(a.measured) / b.per_token(b.measured)
            if abs(measured - 1) > 0.02:
                agrees = (a.per_token(p.seconds) < b.per_token(q.seconds)) == (measured < 1)
                right, wrong = right + agrees, wrong + (not agrees)
    return right, wrong
