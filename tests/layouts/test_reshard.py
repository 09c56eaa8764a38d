"""Moves and reshards, simulated on numpy blocks and compared with exhaustive search."""

from itertools import product

import pytest

from meshdsl.errors import LayoutError
from meshdsl.layouts import Layout, Mesh, P, topology
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.reshard import complete, layout_graph, reshard, reshard_steps

MESH = Mesh(x=4, y=2)


def kinds(source, target, mesh=MESH, shape=(16, 16, 16)):
    path = reshard(Layout.parse(source), Layout.parse(target), shape, 4, mesh)
    return [(m.kind, m.axes, m.bytes) for m in path if m.kind in COLLECTIVES]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("x=S(0)", "", [("all-gather", ("x",), 16384 * 3 // 4)]),
        ("x=P", "", [("all-reduce", ("x",), 2 * 16384 * 3 // 4)]),
        ("x=P", "x=S(2)", [("reduce-scatter", ("x",), 16384 * 3 // 4)]),
        ("x=S(0)", "x=S(1)", [("all-to-all", ("x",), 16384 // 4 * 3 // 4)]),
        ("x=S(0) y=S(0)", "y=S(0) x=S(0)", [("collective-permute", ("x", "y"), 16384 // 8)]),
        ("", "x=S(0) y=P", []),
        ("x=S(0)", "x=P", []),
        ("x=P y=P", "", [("all-reduce", ("x", "y"), 2 * 16384 * 7 // 8)]),
        ("x=P(max)", "x=S(0)", [("all-to-all", ("x",), 16384 * 3 // 4)]),
        ("y=S(0) x=S(2)", "x=S(1) y=S(1)", [("all-to-all", ("x",), 1536), ("all-to-all", ("y",), 1024)]),
    ],
)
def test_collectives_of_a_reshard(source, target, expected):
    assert kinds(source, target) == expected


@pytest.mark.parametrize(("source", "target"), [("B", "S(0)"), ("B", "P"), ("S(1)", "P")])
def test_a_local_move_of_two_axes_is_one_and_costs_what_it_costs_one_axis_of_as_many_devices(source, target):
    one, two = Mesh(x=4, y=4), Mesh(x=4, y=2, z=2)
    whole = reshard(Layout.parse(f"y={source}"), Layout.parse(f"y={target}"), (16, 16), 4, one)
    apart = reshard(Layout.parse(f"y={source} z={source}"), Layout.parse(f"y={target} z={target}"), (16, 16), 4, two)
    assert [(m.kind, m.seconds) for m in whole] == [(m.kind, m.seconds) for m in apart]
    assert apart[0].axes == ("y", "z")


def test_the_hierarchical_all_reduce_is_found():
    mesh = Mesh(data=8, model=8, topology=topology("dgx-h100"))
    found = kinds("data=P model=P", "", mesh, (4096, 4096))
    seconds = sum(m.seconds for m in reshard(Layout(data=P, model=P), Layout(), (4096, 4096), 4, mesh))
    one_by_one = sum(
        next(
            m
            for m in reshard_steps(Layout.parse(before), (4096, 4096), 4, mesh)
            if m.axes == (axis,) and m.target is after
        ).seconds
        for before, axis, after in (
            ("data=P model=P", "model", Layout().on("model")),
            ("data=P", "data", Layout().on("data")),
        )
    )
    assert seconds < one_by_one
    assert sum(sent for _, axes, sent in found if "data" in axes) < 2 * 4096 * 4096 * 4


def test_reshard_is_the_shortest_path():
    """Against Bellman-Ford over all moves, on every pair of layouts of a matrix."""
    shape, within = (8, 8), layout_graph(MESH, 2, ("sum",))
    for source in within.layouts:
        best = {source: 0.0}
        for _ in range(4):
            for at, cost in list(best.items()):
                for move in reshard_steps(at, shape, 4, MESH):
                    if move.kind not in ("pad", "keep-first") and move.after in within.index:
                        best[move.after] = min(best.get(move.after, 1e9), cost + move.seconds)
        for target in (t for t in best if "P" not in str(t) or t == source):
            found = sum(m.seconds for m in reshard(source, target, shape, 4, MESH))
            assert found == pytest.approx(best[target]), (source, target)


def test_costs_obey_the_triangle_inequality():
    within = layout_graph(MESH, 2, ("sum",))
    seconds = {
        (a, b): sum(m.seconds for m in reshard(a, b, (8, 8), 4, MESH)) for a, b in product(within.layouts, repeat=2)
    }
    whole = [a for a in within.layouts if "P" not in str(a)]
    for a, b, c in product(whole, repeat=3):
        assert seconds[a, c] <= seconds[a, b] + seconds[b, c] + 1e-12


def test_an_axis_leaves_and_enters_a_dim_as_its_minor_one():
    for move in reshard_steps(Layout.parse("x=S(0) y=S(0)"), (8, 8), 4, MESH):
        if move.kind in ("all-gather", "all-to-all"):
            assert move.axes in (("y",), ("x", "y"))
    slices = [m.after for m in reshard_steps(Layout.parse("y=S(0)"), (8, 8), 4, MESH) if m.kind == "slice"]
    assert complete(Layout.parse("y=S(0) x=S(0)"), MESH) in slices
    assert complete(Layout.parse("x=S(0) y=S(0)"), MESH) not in slices


def test_a_value_is_partial_in_one_way_only():
    assert all(not ("P(max)" in str(a) and "=P " in f"{a} ") for a in layout_graph(MESH, 1, ("sum", "max")).layouts)
    with pytest.raises(LayoutError, match="does not fit"):
        reshard(Layout(x=P, y=P("max")), Layout(), (8,), 4, MESH)


def test_a_layout_that_does_not_divide_is_an_error():
    with pytest.raises(LayoutError, match=r"layout x=S\(0\) y=B does not fit a tensor of shape \(6, 4\)"):
        reshard(Layout.parse("x=S(0)"), Layout(), (6, 4), 4, MESH)
