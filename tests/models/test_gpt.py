"""GPT in the DSL: one step is that of a plain JAX model; its strategies plan and run; sizes are the papers'."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.errors import ArgumentError
from meshdsl.models import gpt

CONFIG = gpt.Config(layers=2, embed=16, heads=4, seq=8, vocab=64)
TOKENS = md.named(jax.random.randint(jax.random.key(1), (8, 8), 0, 64), "batch seq")
BATCH = {"inputs": TOKENS, "targets": md.roll(TOKENS, -1, over="seq")}


def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def block_by_hand(x, p):
    def linear(name, x, spec):
        return jnp.einsum(spec, x, p[name]["kernel"]) + p[name]["bias"]

    y = norm(x, p["norm1"])
    q, k, v = (linear(name, y, "bse,ehd->bshd") for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / 2.0
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e9))
    x = x + linear("out", jnp.einsum("bhst,bthd->bshd", weights, v), "bshd,hde->bse")
    return x + linear("down", jax.nn.gelu(linear("up", norm(x, p["norm2"]), "bse,eh->bsh")), "bsh,he->bse")


def loss_by_hand(p, inputs, targets):
    x = p["embed"][inputs] + p["position"]
    for i in range(2):
        x = block_by_hand(x, jax.tree.map(lambda w: w[i], p["blocks"]["block"]))
    logits = norm(x, p["norm"]) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def plain(tree):
    """A state of variables as a dict of arrays."""
    if hasattr(tree, "items"):
        return {key: plain(value) for key, value in tree.items()}
    return tree.get_value().array


def test_a_step_is_that_of_the_plain_model():
    program = gpt.program(CONFIG, gpt.RULES["tensor"], batch=8)
    params, state = program.init()
    after, _, value = jax.jit(program.step)(params, state, BATCH)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95, weight_decay=0.1))
    before = plain(params)
    arrays = (BATCH["inputs"].array, BATCH["targets"].array)
    expected, gradient = jax.jit(jax.value_and_grad(loss_by_hand))(before, *arrays)
    updates, _ = optimizer.update(gradient, optimizer.init(before), before)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    got, want = plain(after), optax.apply_updates(before, updates)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    size = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
    for x, y, g in zip(*map(jax.tree.leaves, (got, want, gradient))):
        moved = jnp.abs(g) > 1e-4 * size  # Adam's first step is the sign of the gradient, which rounding turns near 0
        np.testing.assert_allclose(jnp.where(moved, x, 0), jnp.where(moved, y, 0), rtol=1e-5, atol=2e-5)


def test_tensor_parallelism_runs_as_planned():
    program = gpt.program(CONFIG, gpt.RULES["tensor"], batch=8)
    sharded = md.parallelize(program.step, "data=4,model=2", rules=program.rules)
    args = (*program.init(), BATCH)
    assert sharded.check(*args) and sharded.verify(*args)


def test_a_strategy_says_where_parameters_lie():
    program = gpt.program(CONFIG, gpt.RULES["fsdp+tensor"], batch=8)
    plan = md.parallelize(program.step, "data=4,model=2", rules=program.rules).plan(*program.args)
    dims = ("layers", "embed", "heads", "head")
    assert str(plan.layout("params/blocks/block/query/kernel").named(dims)) == "data=S(embed) model=S(heads)"


@pytest.mark.parametrize(("name", "size"), [("gpt2-124m", 124e6), ("gpt2-1.5b", 1.56e9), ("gpt3-175b", 175e9)])
def test_sizes_are_the_papers(name, size):
    program = models.build(name, batch=8)
    assert sum(x.size for x in jax.tree.leaves(program.args[0])) == pytest.approx(size, rel=0.01)


def test_names_that_there_are_not():
    with pytest.raises(ArgumentError, match="no model 'gpt2-124'; did you mean 'gpt2-124m'"):
        models.build("gpt2-124")
    with pytest.raises(ArgumentError, match="gpt2-124m has no strategy 'fdsp'; did you mean 'fsdp'"):
        models.build("gpt2-124m", "fdsp")
