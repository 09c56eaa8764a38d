"""Gather, scatter, dynamic slices, proved."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.lax import GatherDimensionNumbers, GatherScatterMode, ScatterDimensionNumbers

from tests.rules.data import bools, floats, ints
from tests.rules.listed import wrong
from tests.rules.prover import prove, sample
from tests.sweeps import swept

CASES = []
COLLIDE = "where updates collide, devices may let different ones win"
TABLE = floats(12, 6)
ROW = GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
ROWS = ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))


def case(*args, **options):
    CASES.append(sample(*args, **options))


def positions(*shape, low=-3, high=16, **options):
    """In and out of bounds of 12 rows."""
    return ints(*shape, low=low, high=high, **options)


def rows(mode, fill=None):
    return lambda t, i: lax.gather(t, i, ROW, (1, 6), mode=mode, fill_value=fill)


for mode in ("clip", "fill", "promise_in_bounds"):
    low, high = (0, 12) if mode == "promise_in_bounds" else (-3, 16)
    case("gather", rows(mode), TABLE, positions(12, 1, low=low, high=high))
case("gather", rows("fill", 2.5), TABLE, positions(12, 1))
case("gather", rows("fill", 0.0), TABLE, positions(12, 1))
case("gather", rows("fill"), ints(12, 6), positions(12, 1))
case("gather", rows("clip"), TABLE, positions(12, 1, dtype="int8"))
case("gather", rows("fill"), bools(12, 6), positions(12, 1))
case("gather", rows("clip"), bools(12, 6), positions(12, 1, dtype="uint8", low=0))
case("gather", lambda t, i: t[i], TABLE, positions(6, 12, low=-12, high=12))
case("gather", lambda t, i, j: t.at[i, j].get(mode="fill"), floats(12, 6, 12), positions(12), positions(12))
case("gather", lambda t, i, j: t.at[i, j].get(mode="clip"), floats(12, 12), positions(6), positions(6))
case("gather", lambda t, i: t.at[:, i].get(mode="fill"), floats(6, 12), positions(12))
case("gather", lambda t, i: jnp.take_along_axis(t, i, 1), floats(12, 6), positions(12, 6))
case("gather", lambda t, i: jnp.take_along_axis(t, i, 0, mode="clip"), floats(12, 6), positions(12, 6))
case("gather", jax.vmap(lambda t, i: t.at[i].get(mode="fill")), floats(6, 12), positions(6, 12))
case(
    "gather",  # slices of 4 rows, windows cut
    lambda t, i: lax.gather(t, i, GatherDimensionNumbers((1, 2), (), (0,)), (4, 6), mode="clip"),
    TABLE,
    positions(6, 1),
)


def scattered(function, mode, unique=False, shape=(12, 6), count=12):
    index = jnp.arange(count).reshape(-1, 1) * 5 % 17 - 2 if unique else positions(count, 1, high=4)

    def run(operand, at, updates):
        return function(operand, at, updates, ROWS, mode=mode, unique_indices=unique)

    return run, floats(*shape), index, floats(count, shape[1])


COLLIDING = ["P, B, P -> P"]
COLLIDING += [
    f"{a}, B, {b} -> P({k})"
    for k in ("max", "min")
    for a, b in ((f"P({k})", f"P({k})"), (f"P({k})", "B"), ("B", f"P({k})"))
]
KINDS = "scatter-add scatter-sub scatter-mul scatter-max scatter-min scatter".split()
for name in KINDS:
    function = getattr(lax, name.replace("-", "_"), None)
    if function is None:
        continue
    excused = dict.fromkeys(COLLIDING, COLLIDE) if name == "scatter" else {}
    case(name, *scattered(function, GatherScatterMode.FILL_OR_DROP), excused=excused)
    if name == "scatter-add":
        case(name, *scattered(function, GatherScatterMode.CLIP))
    if name != "scatter-mul":
        case(name, *scattered(function, GatherScatterMode.FILL_OR_DROP, unique=True), fixed=(1,))
case("scatter-add", lambda t, i, u: t.at[i, :3].add(u), TABLE, positions(12), floats(12, 3))
case("scatter-add", lambda t, i, u: t.at[:, i].add(u, mode="clip"), floats(6, 12), positions(12), floats(6, 12))
case("scatter-add", jax.vmap(lambda t, i, u: t.at[i].add(u)), floats(6, 12), positions(6, 12), floats(6, 12))
case("scatter-add", lambda t, i, u: t.at[i].add(u), ints(12, 6), positions(12), ints(12, 6))
case(
    "scatter-add", lambda t, i, j, u: t.at[i, j].add(u), floats(12, 6), positions(12), positions(12, high=7), floats(12)
)
case("scatter", lambda t, u: t.at[3].set(u), TABLE, floats(6))

case("scatter-add", lambda t, u: t.at[2:-1].add(u), TABLE, floats(9, 6))
case("scatter", lambda t, u: t.at[1:-1].set(u), TABLE, floats(10, 6))
case("scatter", lambda t, u: t.at[3:7, 2].set(u), TABLE, floats(4))
case("scatter", lambda t, u: t.at[:, 1:4].set(u), bools(6, 12), bools(6, 3))
case("scatter-mul", lambda t, u: t.at[3:7, 1:4].multiply(u), TABLE, floats(4, 3))
case("scatter-max", lambda t, u: t.at[-2:].max(u), ints(12, 6), ints(2, 6))
case("scatter-min", lambda t, u: t.at[:5].min(u), TABLE, floats(5, 6))
CUBE = floats(12, 6, 6)


def cut(*sizes):
    return lambda x, *starts: lax.dynamic_slice(x, starts, sizes)


case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 6)), TABLE, jnp.int32(5))
case("dynamic_slice", lambda x, i: lax.dynamic_index_in_dim(x, i), TABLE, jnp.int32(7))
case("dynamic_slice", lambda x, i: lax.dynamic_index_in_dim(x, i), bools(12, 6), jnp.int32(2))
case("dynamic_slice", lambda x, i: lax.dynamic_index_in_dim(x, i), floats(300, 12), jnp.uint8(200))
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i), (5, 5)), floats(12, 12), jnp.uint8(3))
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (5, 6)), bools(12, 6), jnp.int32(4))
case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), TABLE, floats(4, 6), jnp.int32(5))
case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), TABLE, floats(1, 6), jnp.int32(5))


@swept("starts", [(11, 9, 0), (-4, 3, 2), (5, -1, 8), (40, 40, 40)], ids=str, every=3)
def test_starts_out_of_bounds(starts):
    """They are moved into the whole operand, so every other start beyond it is right as well: listed rows only."""
    for function, *args in (
        (cut(1, 1, 6), CUBE),
        (lambda x, u, *starts: lax.dynamic_update_slice(x, u, starts), CUBE, floats(1, 1, 6)),
    ):
        name = "dynamic_slice" if len(args) == 1 else "dynamic_update_slice"
        assert wrong(name, function, *args, *map(jnp.int32, starts)) == []


def read_window(size, mode):
    numbers = lax.GatherDimensionNumbers((0, 1), (), (0,))
    return lambda t, i: lax.gather(t, i, numbers, (size, 6), mode=mode, fill_value=2.5)


def add_window(mode):
    numbers = lax.ScatterDimensionNumbers((0, 1), (), (0,))
    return lambda t, i, u: lax.scatter_add(t, i, u, numbers, mode=GatherScatterMode.from_any(mode))


@swept("start", [-3, 1, 5, 99], kept=(1,))
@pytest.mark.parametrize("size", [2, 11])
def test_windows_over_several_blocks(start, size):
    """Blocks that hold all of the window, a part or nothing; listed rows only, as above."""
    assert wrong("dynamic_slice", cut(size, 6), TABLE, jnp.int32(start), jnp.int32(0)) == []
    for mode in ("clip", "fill"):
        assert wrong("gather", read_window(size, mode), TABLE, jnp.array([start], "int32")) == []
        assert wrong("scatter-add", add_window(mode), TABLE, jnp.array([start], "int32"), floats(size, 6)) == []
    both = (floats(12, 12), floats(size, size), *map(jnp.int32, (start, 12 - start)))
    assert wrong("dynamic_update_slice", lambda x, u, *at: lax.dynamic_update_slice(x, u, at), *both) == []


@swept("case", CASES, ids=str, kind=lambda case: case.name)
def test_rule(case):
    assert prove(case) == []
