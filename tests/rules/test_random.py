"""Random numbers, proved: the same bits in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.internal_test_util import test_harnesses
from jax.extend.random import threefry2x32_p

import meshdsl as md
from meshdsl.errors import TraceError
from meshdsl.lowering.local.random import _positions
from tests.rules.data import bits, ints, unit
from tests.rules.prover import prove, sample
from tests.sweeps import swept

CASES = []


def case(*args, **options):
    CASES.append(sample(*args, **options))


KEYS = jax.random.split(jax.random.key(1), 6)
for width in (8, 16, 32):
    case("random_bits", lambda k, width=width: jax.random.bits(k, (6, 12), f"uint{width}"), jax.random.key(3))
case("random_bits", jax.vmap(lambda k: jax.random.bits(k, (6,))), KEYS)
COUNTERS = next(h.fun for h in test_harnesses.all_harnesses if h.group_name == "iota_2x32_shape")
SMALL = {f" -> P, {low}": "the high words of so few counters are all zero" for low in ("B", "P(max)", "P(min)")}
case("iota_2x32_shape", lambda: COUNTERS((6, 12)), excused=SMALL)
GROWING = {"B, P(min) -> P(min)": "true of the distribution, but no promise of how it is drawn"}
case("random_gamma", jax.vmap(lambda k, a: jax.random.gamma(k, a)), KEYS, 2 + unit(6, 2), excused=GROWING)
case("random_seed", jax.vmap(jax.random.key), ints(6, low=0))
case("random_split", jax.vmap(jax.random.split), KEYS)
case("random_fold_in", jax.vmap(jax.random.fold_in), KEYS, ints(6, low=0))
case("random_clone", jax.vmap(jax.random.clone), KEYS)
case("random_unwrap", jax.random.key_data, KEYS)
case("random_wrap", jax.random.wrap_key_data, np.asarray(jax.random.key_data(KEYS)))
case("threefry2x32", lambda *words: threefry2x32_p.bind(*words), *(bits(6, dtype="uint32") for _ in range(4)))


@swept("case", CASES, ids=str, kind=lambda case: case.name)
def test_rule(case):
    assert prove(case) == []


ON_KEYS = {
    "bits": jax.vmap(lambda k: jax.random.bits(k, (4,))),
    "split": jax.vmap(lambda k: jax.random.key_data(jax.random.split(k))),
    "fold_in": jax.vmap(lambda k: jax.random.key_data(jax.random.fold_in(k, 3))),
    "gamma": jax.vmap(lambda k: jax.random.gamma(k, 2.0, (3,))),
}


@swept("impl", ["rbg", "unsafe_rbg", "threefry4x32"], kept=("rbg",))
@pytest.mark.parametrize("name", ON_KEYS)
def test_other_keys(impl, name):
    """On devices, not simulated ones: arrays of these keys change their values under ``vmap``."""
    words = jax.random.key_data(jax.random.split(jax.random.key(1, impl=impl), 4))
    step = md.parallelize(
        lambda words: ON_KEYS[name](jax.random.wrap_key_data(words, impl=impl)), "x=2", {"words": "x=S(0)"}
    )
    assert step.check(words).ok


def test_positions_beyond_32_bits():
    whole, start = (3, 70_000, 1 << 20), (2, 65_537, (1 << 20) - 2)
    high, low = _positions([jnp.int32(s) for s in start], (1, 1, 2), whole)
    expected = (start[0] * whole[1] + start[1]) * whole[2] + start[2]
    assert [(int(h) << 32) + int(l) for h, l in zip(high.ravel(), low.ravel(), strict=True)] == [expected, expected + 1]


def draws(key, x):
    def noise(key, _):
        return jax.random.split(key)[0], jax.random.bits(key, x.shape)

    one, other, *many = jax.random.split(key, 18)
    return {
        "uniform": jax.random.uniform(one, x.shape) + x,
        "normal": jax.random.normal(jax.random.fold_in(one, 3), x.shape, jnp.bfloat16) * x.astype(jnp.bfloat16),
        "shuffled": jax.random.permutation(other, x),
        "chosen": jax.random.choice(one, 8, (4,), replace=False),
        "dropout": jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0),
        "token": jax.random.categorical(other, x),
        "each": jax.vmap(lambda key: jax.random.uniform(key, (8,)))(jnp.stack(many)) * x,
        "scanned": jax.lax.scan(noise, one, None, 2),
        "copy": jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(key)),
    }


@swept("impl", ["rbg", "unsafe_rbg"], kept=("rbg",))  # XLA compiles so many draws from others for minutes
def test_draws_from_other_keys(impl):
    sharded = md.parallelize(draws, "data=4,model=2", {"x": "data=S(0)"})
    args = jax.random.key(3, impl=impl), jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)
    sharded.check(*args, divide="most")
    sharded.verify(*args)


@pytest.mark.parametrize("impl", ["philox2x32", "philox4x32"])
def test_draws_that_do_not_compile_are_refused(impl):
    with pytest.raises(TraceError) as caught:
        md.parallelize(draws, "data=4").plan(jax.random.key(3, impl=impl), jnp.ones((16, 8)))
    rows = str(caught.value).splitlines()[1:]
    assert {row.split()[0] for row in rows} == {"random_bits", "random_fold_in", "random_split"}
    assert all("test_random.py:" in row and "impl='rbg'" in row for row in rows)
