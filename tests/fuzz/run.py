"""Runs of random cases: a run is what one seed draws, so a seed is all that is needed to see it again."""

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


def run(seed: int, tally: Tally) -> None:
    """About fifty cases; raises the smallest case found that fails."""
    failed = False  # from then on only to make the case smaller

    @hypothesis.seed(seed)
    @SETTINGS
    @hypothesis.given(batches(CASES))
    def each(batch: Batch) -> None:
        nonlocal failed
        try:
            found = judge(batch)
        except Exception:
            failed = True
            raise
        if not failed:
            tally.add(found)

    each()
    jax.clear_caches()
