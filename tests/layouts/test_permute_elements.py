"""Elements dealt out anew: every device gets what it lacks, in as few rounds as there can be."""

import numpy as np
import pytest

from meshdsl.layouts.exchange import permute_elements


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(8))
def test_rounds_bring_what_is_lacked(seed, blocks):
    rng = np.random.default_rng(seed)
    extent, length = rng.integers(1, 6, 2).tolist()
    which = tuple(rng.integers(0, extent * blocks, length * blocks).tolist())
    if seed % 2:
        which = tuple(rng.permutation(extent * blocks).tolist())
    check(which, extent, blocks)


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(4, 2, 1), (4, 2, 3), (8, 3, 1), (2, 3, 2), (3, 2, 2)])
def test_chunks_of_stages_travel_whole_and_once(stages, chunks, layers):
    units = np.arange(stages * chunks * layers).reshape(chunks, stages, layers)
    found = check(tuple(units.swapaxes(0, 1).ravel().tolist()), chunks * layers, stages)
    assert found.unit == layers and len(found.rounds) <= chunks


def check(which, extent, blocks):
    found = permute_elements(which, extent, blocks)
    held = np.arange(extent * blocks).reshape(blocks, extent)
    got = [held]
    owner = np.reshape(which, (blocks, -1)) // extent
    moves = owner != np.arange(blocks)[:, None]
    assert len(found.rounds) * found.unit == max(*moves.sum(1), *np.bincount(owner[moves], minlength=1))
    for each in found.rounds:
        assert sorted(each.target) == list(range(blocks))
        piece = np.zeros((blocks, found.unit), int)
        for source, (target, start) in enumerate(zip(each.target, each.start, strict=True)):
            piece[target] = held[source, start : start + found.unit]
        got.append(piece)
    assert np.take_along_axis(np.concatenate(got, 1), np.array(found.places), 1).ravel().tolist() == list(which)
    return found
