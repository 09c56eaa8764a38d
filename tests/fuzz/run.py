"""Runs of random cases: a run is what one seed draws, so a seed is all that is needed to see it again."""

import time

import hypothesis
import jax
from hypothesis import HealthCheck

from tests.fuzz.generator import Batch, batches
from tests.fuzz.judge import judge
from tests.fuzz.tally import Tally

BATCHES, CASES = 8, 12
SETTINGS = hypothesis.settings(
    max_examples=BATCHES,
    database=None,
    deadline=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class _EnoughError(BaseException):
    """No more time to make a failing case smaller."""


def run(seed: int, tally: Tally, patience: float = 60.0) -> None:
    """About fifty cases; raises the smallest that fails, having looked for smaller ones for so many seconds."""
    failures: list[Exception] = []
    since: list[float] = []

    @hypothesis.seed(seed)
    @SETTINGS
    @hypothesis.given(batches(CASES))
    def each(batch: Batch) -> None:
        if since and time.monotonic() > since[0] + patience:
            raise _EnoughError
        try:
            found = judge(batch)
        except Exception as error:
            since.append(time.monotonic())
            failures.append(error)
            raise
        if not failures:
            tally.add(found)

    try:
        each()
    except (Exception, _EnoughError) as error:
        raise min(failures, key=lambda error: len(str(error)), default=error) from None
    finally:
        jax.clear_caches()
