"""Runs of equal layers are found and matched."""

import numpy as np

from meshdsl.planner.problem.layers import layers_of


def test_runs_forwards_and_backwards_are_matched():
    forwards, backwards, chain = [1, 2, 3] * 6, [4, 5] * 6, [6] * 12
    kinds = np.array([0, *forwards, 9, *backwards, 8, *chain])
    reads = [(1 + 3 * i, 20 + 2 * (5 - i)) for i in range(6)]  # what a layer makes goes to its backward pass ...
    reads += [(20 + 2 * (5 - i) + 1, 33 + 2 * i + j) for i in range(6) for j in range(2)]  # ... and on to the chain
    layers = layers_of(kinds, *np.array(reads).T)
    expected = [{1 + 3 * i + j for j in range(3)} | {30 - 2 * i, 31 - 2 * i, 33 + 2 * i, 34 + 2 * i} for i in range(6)]
    assert [set(row) for row in layers.tolist()] in (expected, expected[::-1])
    assert all(len(set(kinds[column])) == 1 for column in layers.T)


def test_a_run_that_goes_through_the_layers_twice_is_matched_in_both_turns():
    kinds = np.array([0, *[1, 2, 3, 4, 5] * 6, 9, *[6] * 24, 8])  # two moments of two weights of each layer
    reads = [(1 + 5 * i + j, 32 + 12 * moment + 2 * i + j) for i in range(6) for moment in (0, 1) for j in (0, 1)]
    layers = layers_of(kinds, *np.array(reads).T)
    expected = [{1 + 5 * i + j for j in range(5)} | {32 + 2 * i, 33 + 2 * i, 44 + 2 * i, 45 + 2 * i} for i in range(6)]
    assert [set(row) for row in layers.tolist()] == expected


def test_layers_that_all_read_what_the_last_of_others_has_made_begin_with_the_first():
    kinds = np.array([0, *[1, 2] * 6, 9, *[3, 4, 5] * 6, 8])
    encoder = [(1 + j, 2 + j) for j in range(11)]
    decoder = [(14 + j, 15 + j) for j in range(17)] + [(12, 14 + 3 * i) for i in range(6)]
    layers = layers_of(kinds, *np.array(encoder + decoder).T)
    assert [set(row) for row in layers.tolist()] == [
        {1 + 2 * i, 2 + 2 * i, 14 + 3 * i, 15 + 3 * i, 16 + 3 * i} for i in range(6)
    ]


def test_what_never_repeats_has_no_layers():
    kinds = np.random.default_rng(0).permutation(200)
    assert layers_of(kinds, np.arange(199), np.arange(1, 200)).size == 0
