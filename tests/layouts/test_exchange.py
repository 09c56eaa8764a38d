"""Exchanges as data: which collectives they are, and what those cost."""

from itertools import product

import numpy as np
import pytest

from meshdsl.layouts import Layout, Mesh
from meshdsl.layouts.collective_cost import COLLECTIVES, exchange_price
from meshdsl.layouts.exchange import Exchange, moving_axes, ordered_exchanges, sort_rounds, window_pieces
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.reshard import reshard_steps


@pytest.mark.parametrize("extent", [1, 2, 5])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 1), (3, 0), (0, 7), (4, -4), (-2, 2), (7, -7)])
def test_pieces_are_the_window(before, after, extent):
    if extent + after + before <= 0:
        return
    found = [d * extent + i for d, a, b in window_pieces(before, after, extent) for i in range(a, b)]
    assert found == list(range(-before, extent + after))
    assert all(0 <= a < b <= extent for _, a, b in window_pieces(before, after, extent))


@pytest.mark.parametrize("distance", [-3, -2, -1, 1, 2, 4, 6])
def test_steps_leave_out_axes_on_which_nobody_moves(distance):
    sizes = (3, 2, 2)
    axes, apart = moving_axes(distance, sizes)
    places = np.stack(np.unravel_index(np.arange(12), sizes))
    pairs = [(i, i + distance) for i in range(12) if 0 <= i + distance < 12]
    assert axes == tuple(a for a in range(3) if any(places[a, i] != places[a, j] for i, j in pairs))
    assert apart * int(np.prod(sizes[len(axes) :])) == distance


def test_parts_of_an_exchange():
    def parts(exchange, extent, *sizes):
        found = exchange.parts(extent, sizes)
        return found if found is None else [(p.kind, p.axes, p.distance, p.stop - p.start) for p in found]

    halo = Exchange("window", 0, 0, before=1, after=2)
    assert parts(halo, 4, 4) == [("collective-permute", (0,), 3, 1), ("collective-permute", (0,), 1, 2)]
    both_ends = [("collective-permute", (0,), distance, 0) for distance in (1, 2)]
    assert parts(Exchange("window", 0, 0, before=8, after=8), 4, 3) == both_ends
    assert parts(Exchange("window", 0, 0, before=5), 4, 2) == [("collective-permute", (0,), 1, 0)]
    whole = [("collective-permute", (0,), 1, 0)]
    assert parts(Exchange("cycle", 0, 0, before=4, after=-4), 4, 2) == whole == parts(Exchange("mirror", 0), 4, 2)
    assert parts(Exchange("mirror", 0), 4, 4) == [("collective-permute", (0,), 0, 0)]
    assert parts(Exchange("cycle", 0, 0, before=4, after=-4), 1, 4, 2) == [("collective-permute", (0,), 4, 0)]
    assert parts(Exchange("cycle", 0, 0, before=8, after=-8), 4, 2) == []
    assert parts(Exchange("gather", 0, 1, length=3), 4, 4) == [("all-gather", (0,), 0, 3)]
    assert parts(Exchange("gather", 0, 1, length=3), 3, 4) is None


def test_windows_over_several_dims_are_exchanged_in_their_order():
    height = Exchange("window", 0, 1, before=1, after=2), Exchange("window", 1, 1, before=3)
    width = Exchange("window", 0, 2, after=4), Exchange("window", 1, 2, before=5)
    turns = ordered_exchanges([width, (), height, width])
    assert [(turn.exchange, turn.axes) for turn in turns] == [
        *((e, (2,)) for e in height),
        *((e, (0, 3)) for e in width),
    ]
    assert [turn.widened((1, 8, 8)) for turn in turns] == [[1, 8, 8], [1, 8, 8], [1, 11, 8], [1, 11, 8]]


def test_exchanges_that_are_no_windows_over_different_dims_do_not_meet():
    window, wider = Exchange("window", 0, 1, before=1), Exchange("window", 0, 1, before=2)
    sums = Exchange("gather", 0, 2, length=1)
    assert ordered_exchanges([(window,), (wider,)]) is ordered_exchanges([(window,), (sums,)]) is None
    assert ordered_exchanges([(), ()]) == ()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7, 8])
def test_rounds_sort_any_order(blocks):
    """A network that sorts all sequences of zeros and ones sorts everything."""
    for bits in product((0, 1), repeat=blocks):
        held = list(bits)
        for partners in sort_rounds(blocks):
            assert [partners[j] for j in partners] == list(range(blocks))
            held = [min(held[i], held[j]) if i < j else max(held[i], held[j]) for i, j in enumerate(partners)]
        assert held == sorted(bits)


def test_what_does_not_divide_is_not_dealt():
    uneven = Exchange("deal", 0, 0, which=(0, 1, 2, 2, 3, 4, 5, 5))  # of 6
    assert uneven.parts(6 // 4, (4,)) is None and uneven.parts(6 // 3, (3,)) is None
    assert [part.kind for part in uneven.parts(6 // 2, (2,))] == ["collective-permute"] * len(uneven.parts(3, (2,)))


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_prices_are_those_of_moves(axes):
    mesh = Mesh(a=4, b=2, topology="dgx-h100")
    whole, split = Layout(), Layout(**dict.fromkeys(axes, S(0)))
    partial = Layout(**dict.fromkeys(axes, P))
    shape, block = (16, 24), 16 * 24 * 4 // mesh.size * (mesh.size // int(np.prod([mesh.axis(a) for a in axes])))
    for source in (whole, split, partial):
        for move in reshard_steps(source, shape, 4, mesh):
            if move.axes == axes and move.kind in COLLECTIVES and move.target in (S(0), B):  # blocks are contiguous
                given = 16 * 24 * 4 if move.source is P else block
                cost = exchange_price(move.kind, axes, mesh)
                assert (round(cost.sent * given), cost.seconds(given)) == (move.bytes, pytest.approx(move.seconds))
