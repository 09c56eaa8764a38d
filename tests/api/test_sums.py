"""``verify`` compares results with the unsharded step's: planned programs agree, faulty ones are errors with a line."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.api import sums
from meshdsl.lowering.simulation.check import check_planned
from meshdsl.lowering.simulation.comparison import differs
from meshdsl.lowering.simulation.numbers import Reals
from meshdsl.lowering.simulation.sharding import blocks_of

MESH = "data=4,model=2"


def step(w, table, x, unused):
    def loss(w, table):
        return jnp.mean(jnp.tanh(table[x] @ w) ** 2)

    return jax.tree.map(lambda p, g: p - g, (w, table), jax.grad(loss, (0, 1))(w, table)), unused.shape[0]


ARGS = jnp.ones((8, 16)), jnp.ones((32, 8)), jnp.arange(16), jnp.ones(3)


@pytest.fixture
def changed(monkeypatch):
    """Changes the texts that are compared."""

    def by(pattern, instead):
        def changing(name, modules, *rest, **options):
            lowered, count = re.subn(pattern, instead, modules.lowered, count=1)
            assert count == 1
            return check_planned(name, type(modules)(**{**modules.__dict__, "lowered": lowered}), *rest, **options)

        monkeypatch.setattr(sums, "check_planned", changing)

    return by


def sharded(**options):
    return md.parallelize(step, MESH, {"x": "data=S(0) model=B", "w": "data=B model=S(1)", **options})


def test_results_of_planned_programs_agree():
    report = sharded().verify(*ARGS)
    assert report.sums.agreeing == ("0/0", "0/1", "1") and not report.sums.unfollowed
    line = "sums: 3 of 3 results are those of the unsharded step, compared in exact arithmetic on simulated devices"
    assert str(report).splitlines()[-1] == line


def fitted(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


@pytest.mark.parametrize(
    "pattern, instead, kind",
    [
        (r"all-reduce\(([\w.\-]+)\), .*to_apply=[\w.\-]+", r"copy(\1)", "missing reduction: dot over data"),
        (
            r"replica_groups=(?:\{\{0,2,4,6\},\{1,3,5,7\}\}|mesh\[[^\]]*\] \{[^}]*\})",
            "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
            "reduction over other axes: all-reduce over model",
        ),
    ],
)
def test_a_wrong_sum_is_an_error_with_its_line(changed, pattern, instead, kind):
    changed(pattern, instead)
    whole = md.parallelize(fitted, MESH, {"x": "data=S(0) model=B", "w": "data=B model=B"})
    with pytest.raises(md.VerifyError) as caught:
        whole.verify(jnp.ones((8, 8)), jnp.ones((16, 8)))
    assert "fitted on mesh data=4,model=2: 0 of 1 results agree with the step" in str(caught.value)
    assert f"{kind} of test_sums.py:57 (lowered program)" in str(caught.value)


def test_devices_that_should_have_the_same_are_compared():
    """Only the first device along an axis has the block of the result."""
    blocks = blocks_of("{devices=[2,2]<=[4] last_tile_dim_replicate}", 1, 4)
    same = np.array([[1, 2], [1, 2], [3, 4], [3, 4]])
    assert blocks.joined(same, (4,)).tolist() == [[1, 2, 3, 4]]
    other = np.array([[1, 2], [0, 2], [3, 4], [3, 4]])
    assert differs(Reals(), blocks.joined(other, (4,)), [np.array([1, 2, 3, 4])] * 4)


def test_scalars_of_devices_are_joined():
    """NaN is the same everywhere; other scalars are those of every device."""
    whole = blocks_of("{replicated}", 0, 2)
    assert np.isnan(whole.joined(np.array([np.nan, np.nan]), ())).tolist() == [True]
    assert whole.joined(np.array([1.0, 2.0]), ()).tolist() == [1, 2]


def test_large_steps_are_not_checked():
    report = sharded().verify(*ARGS, sums=100)
    assert report.sums is None and "sums: not checked, more than 100 elements would be computed" in str(report)
    assert "sums" not in str(sharded().verify(*ARGS, sums=0))
    with pytest.raises(md.ArgumentError, match="sums=True is no number of elements"):
        sharded().verify(*ARGS, sums=True)


def test_loops_that_do_not_end_are_not_followed_for_ever():
    """Where a number is random that ends the loop of the call."""

    def step(x, factor):
        return jax.lax.while_loop(lambda c: c < 10.0, lambda c: c * factor, jnp.float32(1.0)) + x.sum()

    report = md.parallelize(step, "data=8", {"x": "data=S(0)"}).verify(jnp.ones((8, 4)), jnp.float32(2.0), sums=1e5)
    assert report.sums is None and "or fewer iterations" in report.unchecked


def test_operations_that_are_not_followed_are_listed():
    def step(x):
        return jnp.linalg.cholesky(x[0] @ x[0].T + jnp.eye(8)), x * 2

    report = md.parallelize(step, "data=8", {"x": "data=S(0)"}).verify(jnp.ones((8, 8, 8)))
    assert report.sums.agreeing == ("1",) and "not followed: 0\n  custom-call of " in str(report)


def test_integers_of_the_call_are_indices():
    """Rows whose indices are out of range are undefined here; those of the call are not."""

    def step(x, i):
        return x.at[i].get(mode="promise_in_bounds")

    sharded = md.parallelize(step, "data=8", {"x": "data=S(0)"})
    assert sharded.verify(jnp.ones((8, 4)), jnp.arange(4)).sums.agreeing == ("the result",)


def test_keys_are_those_of_the_call():
    keys = jax.random.split(jax.random.key(3), 4)
    ((place, found),) = sums._integers([jnp.ones(2), keys])
    assert place == 1
    np.testing.assert_array_equal(found, jax.random.key_data(keys))


def test_constants_are_rounded_to_their_type_where_programs_have_them_folded():
    """Random numbers are ``bits * (1 - low) + low``, and ``1 - low`` is 2 in bfloat16."""

    def step(x, key):
        return x + jax.random.normal(key, x.shape, x.dtype)

    key = jax.eval_shape(lambda: jax.random.key(0))
    report = md.parallelize(step, "data=8", {"x": "data=S(0)"}).verify(jax.ShapeDtypeStruct((64, 8), "bfloat16"), key)
    assert report.sums.agreeing == ("the result",)


def test_positions_without_elements_are_cut_into_no_blocks():
    """An update of all rows is a scatter at an array of no positions, an operand of the compiled shard_map."""

    def step(x):
        return md.constrain(x.at[:].set(x * 2), "data=B")

    assert md.parallelize(step, md.Mesh(data=4), {"x": "data=S(0)"}).verify(jnp.ones((16, 8))).equal
