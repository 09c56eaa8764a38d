"""Layers dealt out to stages, against all ways to do it."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from meshdsl.schedules.partition import partition_layers


def ways(count, stages):
    for cuts in combinations(range(1, count), stages - 1):
        yield tuple(j - i for i, j in pairwise((0, *cuts, count)))


def stage_seconds(way, layers, first=0.0, last=0.0):
    parts = np.split(np.asarray(layers), np.cumsum(way)[:-1])
    found = [part.sum() for part in parts]
    found[0] += first
    found[-1] += last
    return found


@pytest.mark.parametrize("seed", range(8))
def test_no_way_has_a_smaller_largest_stage(seed):
    rng = np.random.default_rng(seed)
    count, stages = int(rng.integers(4, 10)), int(rng.integers(1, 5))
    layers, first, last = rng.integers(1, 6, count) / 8, rng.integers(0, 6) / 8, rng.integers(0, 12) / 8
    found = partition_layers(list(layers), stages, first, last)
    in_step = [max(stage_seconds(way, layers)) for way in ways(count, stages)]
    assert sum(found) == count and max(stage_seconds(found, layers)) == min(in_step)
    best = [way for way, seconds in zip(ways(count, stages), in_step, strict=True) if seconds == min(in_step)]
    assert max(stage_seconds(found, layers, first, last)) == min(
        max(stage_seconds(way, layers, first, last)) for way in best
    )


def test_equal_layers():
    assert partition_layers([0.1] * 8, 4) == (2, 2, 2, 2)
    assert partition_layers([0.1] * 10, 4, first=0.1, last=0.1) == (2, 3, 3, 2)
    assert partition_layers([0.1] * 126, 16, last=0.2)[-1] < 8


def test_what_takes_less_in_the_last_stage():
    assert partition_layers([0.3] * 6, 2, at_last=[0.2] * 6) == (2, 4)
    assert partition_layers([0.3, 0.3, 0.9], 2, at_last=[0.2, 0.2, 0.3]) == (1, 2)
