"""Random programs under random pins and plans, the same ones every time; ``make fuzz`` runs others."""

from tests.fuzz.run import run
from tests.fuzz.tally import Tally
from tests.sweeps import swept

SEEDS = range(2)  # the second one makes 55 cases


@swept("seed", SEEDS, kept=(1,))
def test_random_programs(seed):
    tally = Tally()
    run(seed, tally)
    assert tally.cases > 0
    assert not tally.above, "\n\n".join(tally.above)
