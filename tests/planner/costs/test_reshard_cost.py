"""Moves made in bulk against moves made layout by layout."""

from math import prod

import pytest

import meshdsl as md
from meshdsl.layouts.low_bits import Rounding
from meshdsl.layouts.reshard import LayoutGraph, makes_partial
from meshdsl.planner.costs.fixed_point import FixedPoint
from meshdsl.planner.costs.reshard_cost import ReshardCosts, edge_arrays, known_costs

MESHES = [
    md.Mesh(x=4),
    md.Mesh(x=4, y=2),
    md.Mesh(x=8, y=1, z=16, topology="dgx-h100"),
    md.Mesh(x=2, y=3, z=2),
    md.Mesh(w=2, x=2, y=2, z=2),
]


SIZES = (1.0, 1e9)


def _priced(found):
    """Seconds of all moves, for a short and a long message."""
    return [(found.fixed + found.per_byte * size).min(axis=1) for size in SIZES]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("reductions", [(), ("sum",), ("sum", "max")], ids=str)
def test_moves_in_bulk_are_the_moves_of_every_layout(mesh, rank, reductions):
    if len(mesh.names) == 4 and (rank > 2 or len(reductions) > 1):
        pytest.skip("too many to go through one by one")
    within = LayoutGraph(mesh, rank, reductions)
    found = edge_arrays(within).edges
    bulk = sorted(
        zip(found.source.tolist(), found.target.tolist(), *map(list, _priced(found)), found.partial, strict=True)
    )
    single = sorted(
        (i, to, *map(arc.price.seconds, SIZES), makes_partial(arc))
        for i in range(len(within.layouts))
        for arc, to in within.edges(i)
    )
    assert len(bulk) == len(single)
    for ours, theirs in zip(bulk, single, strict=True):
        assert ours[:2] == theirs[:2] and ours[4] == theirs[4]
        assert ours[2:4] == pytest.approx(theirs[2:4], rel=1e-12)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("shape", "itemsize"), [((), 4), ((48,), 4), ((48, 336), 2), ((1440, 1920), 4)], ids=str)
def test_prices_in_fewer_bits_are_those_of_every_step(mesh, shape, itemsize):
    formats = ("bfloat16", "int8")[2 - itemsize // 2 :]
    low = ReshardCosts(mesh, shape, itemsize, ("sum", "max"), FixedPoint.of(1e-7), formats=formats)
    rounding, within = Rounding(prod(shape), itemsize, formats), low.space
    found = {
        (a, b): low.scale.seconds(price)
        for partial in (False, True)
        for a, b, price in zip(*low.edges(partial), strict=True)
    }
    steps = [
        (i, to, edge.of(prod(shape) * itemsize, rounding))
        for i in low.feasible.tolist()
        for edge, to in within.edges(i)
        if within.fits(to, shape)
    ]
    for i, to, step in steps:
        assert found[i, to] == pytest.approx(step.seconds, rel=1e-6, abs=1e-12)
    kinds = {(step.kind, step.format) for *_, step in steps if step.format}
    assert len(kinds) >= (2 if prod(shape) > 1e6 else 0) and ("all-reduce", "int8") not in kinds
    for i, to, step in steps:
        if step.format:
            plain = step.in_full
            assert plain.bytes < prod(shape) * itemsize
            (edge,) = (
                e for e, end in within.edges(i) if end == to and e.kind == plain.kind and e.source is step.source
            )
            assert step.seconds < edge.price.seconds(prod(shape) * itemsize)


@pytest.mark.parametrize("mesh", MESHES[:4], ids=str)
def test_orders_in_bulk(mesh):
    within = LayoutGraph(mesh, 2, ())
    for order in (mesh.names, mesh.names[::-1]):
        found = edge_arrays(within).ordered(order)
        for layout, fine in zip(within.layouts, found.tolist(), strict=True):
            splits = [layout.splitting(dim) for dim in range(2)]
            assert fine == all(list(axes) == sorted(axes, key=order.index) for axes in splits)


def test_costs_on_two_axes_are_remembered_from_step_to_step():
    """At about as many seconds in all; of three axes they would fill the memory."""

    def costs(seconds, shape=(48, 16), mesh=MESHES[1]):
        return known_costs(mesh, shape, 4, ("sum",), FixedPoint.of(seconds))

    assert costs(0.9).domain is costs(0.6).domain
    assert len({costs(0.9), costs(0.6), costs(0.4), costs(0.9, (16, 48)), costs(0.9, mesh=md.Mesh(x=2, y=4))}) == 4
    assert costs(0.9, mesh=MESHES[3]) is not costs(0.9, mesh=MESHES[3])
