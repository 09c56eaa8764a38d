"""Every move, on every kind of value, against blocks cut by numpy."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshdsl.layouts.low_bits import FORMATS
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.reshard import ReshardStep, layout_graph, reshard_steps
from meshdsl.lowering.local.collectives import LOCAL_MOVES, apply_move, identity, move_scope, swap_pairs
from tests.lowering.blocks import assemble, full, split_numpy
from tests.sweeps import swept

TWO = Mesh(x=4, y=2)
THREE = Mesh(x=2, y=2, z=2)


def run_moves(wanted, blocks, mesh):
    """Per move, the blocks of all devices after it."""
    devices = jax.make_mesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.sizes))
    spec, rank = PartitionSpec(*mesh.names), len(mesh.sizes)

    def local(x):
        moved = [apply_move(x.reshape(x.shape[rank:]), move, mesh.sizes_by_name) for move in wanted]
        return [x.reshape((1,) * rank + x.shape) for x in moved]

    return jax.jit(jax.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False))(blocks)


def run_move(move, blocks, mesh):
    return run_moves([move], blocks, mesh)[0]


def move_of(kind, axes, source, target, before, after, mesh):
    return ReshardStep(kind, axes, source, target, full(before, mesh), full(after, mesh), 0, 0.0)


CASES = [
    ("all-gather", ("y",), S(0), B, "x=S(0) y=S(0)", "x=S(0)", TWO),
    ("all-gather", ("x",), S(0), B, "y=S(0) x=S(0)", "y=S(0)", TWO),
    ("all-gather", ("x", "y"), S(0), B, "x=S(0) y=S(0)", "", TWO),
    ("all-gather", ("y", "x"), S(0), B, "y=S(0) x=S(0)", "", TWO),
    ("all-gather", ("z", "x"), S(1), B, "y=S(1) z=S(1) x=S(1)", "y=S(1)", THREE),
    ("all-gather", ("x", "z"), S(1), B, "x=S(1) z=S(1) y=P", "y=P", THREE),
    ("all-reduce", ("x",), P, B, "x=P y=S(1)", "y=S(1)", TWO),
    ("all-reduce", ("x", "y"), P, B, "x=P y=P", "", TWO),
    ("all-reduce", ("y",), P, B, "x=P y=P", "x=P", TWO),
    ("all-reduce", ("x", "y"), P("max"), B, "x=P(max) y=P(max)", "", TWO),
    ("all-reduce", ("x",), P("min"), B, "x=P(min) y=S(0)", "y=S(0)", TWO),
    ("reduce-scatter", ("y",), P, S(0), "x=S(0) y=P", "x=S(0) y=S(0)", TWO),
    ("reduce-scatter", ("x",), P, S(0), "y=S(0) x=P", "y=S(0) x=S(0)", TWO),
    ("reduce-scatter", ("x", "y"), P, S(1), "x=P y=P", "x=S(1) y=S(1)", TWO),
    ("reduce-scatter", ("y", "x"), P, S(1), "x=P y=P", "y=S(1) x=S(1)", TWO),
    ("reduce-scatter", ("z", "x"), P, S(1), "y=S(1) z=P x=P", "y=S(1) z=S(1) x=S(1)", THREE),
    ("all-to-all", ("y",), S(0), S(1), "x=S(0) y=S(0)", "x=S(0) y=S(1)", TWO),
    ("all-to-all", ("x", "y"), S(0), S(1), "x=S(0) y=S(0)", "x=S(1) y=S(1)", TWO),
    ("all-to-all", ("y", "x"), S(1), S(0), "y=S(1) x=S(1)", "y=S(0) x=S(0)", TWO),
    ("all-to-all", ("z",), S(0), S(1), "x=S(0) z=S(0) y=S(1)", "x=S(0) y=S(1) z=S(1)", THREE),
    ("all-to-all", ("y", "z"), S(0), S(1), "x=S(0) y=S(0) z=S(0)", "x=S(0) y=S(1) z=S(1)", THREE),
    ("all-to-all", ("x",), P("max"), S(0), "x=P(max) y=S(0)", "y=S(0) x=S(0)", TWO),
    ("all-to-all", ("y", "x"), P("min"), S(1), "x=P(min) y=P(min)", "y=S(1) x=S(1)", TWO),
    ("collective-permute", ("x", "y"), S(0), S(0), "x=S(0) y=S(0)", "y=S(0) x=S(0)", TWO),
    ("collective-permute", ("y", "x"), S(1), S(1), "y=S(1) x=S(1)", "x=S(1) y=S(1)", TWO),
    ("collective-permute", ("y", "z"), S(1), S(1), "x=S(1) y=S(1) z=S(1)", "x=S(1) z=S(1) y=S(1)", THREE),
    ("collective-permute", ("x", "y", "z"), S(0), S(0), "x=S(0) y=S(0) z=S(0)", "z=S(0) x=S(0) y=S(0)", THREE),
    ("slice", ("x",), B, S(0), "y=S(0)", "y=S(0) x=S(0)", TWO),
    ("slice", ("y", "x"), B, S(1), "", "y=S(1) x=S(1)", TWO),
    ("slice", ("x",), B, S(1), "y=P", "y=P x=S(1)", TWO),
    ("pad", ("y",), S(0), P, "x=S(0) y=S(0)", "x=S(0) y=P", TWO),
    ("pad", ("x", "y"), S(0), P, "x=S(0) y=S(0)", "x=P y=P", TWO),
    ("pad", ("x", "y"), S(0), P("max"), "x=S(0) y=S(0)", "x=P(max) y=P(max)", TWO),
    ("pad", ("x",), S(1), P("min"), "x=S(1)", "x=P(min)", TWO),
    ("keep-first", ("x",), B, P, "y=S(0)", "x=P y=S(0)", TWO),
    ("keep-first", ("x", "y"), B, P, "", "x=P y=P", TWO),
    ("keep-first", ("y",), B, P("max"), "", "y=P(max)", TWO),
]


def name_of(case):
    return f"{case[0]}: {case[4] or 'B'} -> {case[5] or 'B'}"


def check_move(move, array, mesh, seed=0):
    blocks = split_numpy(array, move.before, mesh, np.random.default_rng(seed))
    moved = np.asarray(run_move(move, jnp.asarray(blocks), mesh))
    np.testing.assert_array_equal(assemble(moved, move.after, array.shape, mesh), array)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@swept("dtype", [np.float32, np.int32], kept=(np.float32,))
def test_move_keeps_the_value(case, dtype):
    *fields, mesh = case
    array = np.random.default_rng(1).permutation(np.arange(-64, 64)).reshape(8, 16).astype(dtype)
    check_move(move_of(*fields, mesh), array, mesh)


SENT = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ROUNDED = [case for case in CASES if case[0] in SENT and "max" not in case[4] and "min" not in case[4]]


@pytest.mark.parametrize("case", ROUNDED, ids=name_of)
@swept("name", FORMATS, kept=("int8",))
def test_move_in_fewer_bits_loses_no_more_than_its_format(case, name):
    *fields, mesh = case
    kind = "all-to-all" if case[0] == "reduce-scatter" else case[0]
    move = replace(move_of(*fields, mesh), kind=kind, format=name)
    array = np.random.default_rng(1).normal(0, 20, (40, 48)).astype(np.float32)
    blocks = split_numpy(array, move.before, mesh, np.random.default_rng(0))
    made = assemble(np.asarray(run_move(move, jnp.asarray(blocks), mesh)), move.after, array.shape, mesh)
    parts = prod(mesh.axis(axis) for axis in move.axes) if move.source is P else 1
    assert 0 < np.sqrt(np.mean((made - array) ** 2) / np.mean(array**2)) < 2 * parts**0.5 * FORMATS[name].error


BOOLS = [case for case in CASES if "P" not in (case[4] + case[5]).replace("P(", "p(")]


@pytest.mark.parametrize("case", BOOLS, ids=name_of)
def test_move_of_bools(case):
    *fields, mesh = case
    move = move_of(*fields, mesh)
    array = np.random.default_rng(1).random((8, 16)) > 0.5
    blocks = split_numpy(array.astype(np.int32) * 20 - 10, move.before, mesh, np.random.default_rng(0)) > 0
    moved = np.asarray(run_move(move, jnp.asarray(blocks), mesh))
    assert moved.dtype == np.bool_
    np.testing.assert_array_equal(assemble(moved, move.after, array.shape, mesh), array)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c[0] in ("all-gather", "slice", "all-to-all") and "P" not in c[4]]
)
def test_move_of_keys(case):
    *fields, mesh = case
    move = move_of(*fields, mesh)
    numbers = np.arange(8 * 8, dtype=np.uint32).reshape(8, 8)
    keys = jax.vmap(jax.vmap(jax.random.key))
    blocks = split_numpy(numbers, move.before, mesh, np.random.default_rng(0))
    flat = blocks.reshape(-1, blocks.shape[-1])
    moved = run_move(move, keys(flat).reshape(blocks.shape), mesh)
    data = np.asarray(jax.random.key_data(moved))[..., 1]
    np.testing.assert_array_equal(assemble(data, move.after, numbers.shape, mesh), numbers)


def test_one_device_moves_nothing():
    mesh = Mesh(x=1, y=1)
    move = move_of("all-gather", ("x",), S(0), B, "x=S(0)", "", mesh)
    x = jnp.arange(4.0)
    assert apply_move(x, move, mesh.sizes_by_name) is x


def test_swap_pairs_transpose_the_grid():
    sizes = {"x": 2, "y": 3}
    assert swap_pairs(("x", "y"), ("y", "x"), sizes) == [(0, 0), (1, 3), (2, 1), (3, 4), (4, 2), (5, 5)]
    assert swap_pairs(("y", "x"), ("x", "y"), sizes) == [(0, 0), (1, 2), (2, 4), (3, 1), (4, 3), (5, 5)]


def one_reduction(layout):
    return len({layout.on(axis) for axis in layout.partial()}) < 2


@pytest.mark.parametrize(("mesh", "reductions", "every"), [(TWO, ("sum", "max"), 1), (THREE, ("sum",), 8)], ids=str)
def test_every_legal_move_keeps_the_value(mesh, reductions, every):
    """All moves of the layouts of a matrix (of each eighth one on three axes), compiled together per layout."""
    array = np.random.default_rng(1).permutation(np.arange(-64, 64)).reshape(8, 16).astype(np.float32)
    kinds = set()
    for layout in filter(one_reduction, layout_graph(mesh, 2, reductions).layouts[::every]):
        legal = [move for move in reshard_steps(layout, array.shape, 4, mesh) if one_reduction(move.after)]
        blocks = split_numpy(array, layout, mesh, np.random.default_rng(0))
        for move, moved in zip(legal, run_moves(legal, jnp.asarray(blocks), mesh), strict=True):
            np.testing.assert_array_equal(assemble(np.asarray(moved), move.after, array.shape, mesh), array, str(move))
        kinds |= {move.kind for move in legal}
    assert kinds == set(LOCAL_MOVES)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int8, jnp.uint32, jnp.float32, jnp.bfloat16])
def test_identity_is_ignored(dtype):
    values = jnp.asarray([0, 1], dtype)
    assert (jnp.maximum(values, jnp.asarray(identity("max", dtype), dtype)) == values).all()
    assert (jnp.minimum(values, jnp.asarray(identity("min", dtype), dtype)) == values).all()
    assert identity("sum", dtype) == 0


def test_scope_names_kind_axes_and_dtype():
    move = move_of("all-gather", ("x", "y"), S(0), B, "x=S(0) y=S(0)", "", TWO)
    assert move_scope(move, jnp.dtype("bfloat16")) == "all-gather(x,y) bfloat16"
