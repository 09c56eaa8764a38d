"""How well a mesh splits a length."""

import pytest

from meshdsl.layouts.roundness import POWERS_OF_TWO, Roundness, prime_factors


@pytest.mark.parametrize("sizes", [(), (1,), (2,), (8,), (4, 2), (2, 1, 16)])
def test_meshes_of_powers_of_two_are_one(sizes):
    assert Roundness.of(sizes) is POWERS_OF_TWO
    assert [POWERS_OF_TWO.degree(n) for n in (0, 1, 6, 12, 2047, 2048)] == [1, 1, 2, 4, 1, 2048]
    assert [n for n in range(1, 20) if POWERS_OF_TWO.is_round(n)] == [4, 8, 12, 16]


def test_other_sizes_count_where_the_mesh_has_them():
    three, both, ten = Roundness.of((3,)), Roundness.of((3, 2)), Roundness.of((10, 1))
    assert [three.degree(n) for n in (2048, 2186, 2187, 18)] == [1, 1, 2187, 9]
    assert [both.degree(n) for n in (2048, 2186, 2187, 18, 35)] == [2048, 2, 2187, 18, 1]
    assert [both.devices(n) for n in (0, 4, 9, 18, 35)] == [1, 2, 3, 6, 1]
    assert [ten.degree(n) for n in (20, 25, 8, 1000)] == [20, 1, 1, 1000]


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 3), (6,), (5, 4)])
def test_the_highest_degree_of_a_range(sizes):
    measure = Roundness.of(sizes)
    for first in range(1, 80, 3):
        for last in range(first, first + 20, 4):
            assert measure.highest_degree(first, last) == max(map(measure.degree, range(first, last + 1)))


def test_prime_factors():
    assert [prime_factors(n) for n in (1, 2, 12, 49, 97)] == [[], [2], [2, 2, 3], [7, 7], [97]]
