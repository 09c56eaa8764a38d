"""Variants of attention: equal numbers and gradients, and what a plan counts of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.models import gpt
from meshdsl.models.attention import VARIANTS, _bidirectional, _causal, attention
from tests.models.values import quick, start
from tests.sweeps import swept

RNG = np.random.default_rng(3)


def tensors(grouped):
    dims = "batch seq heads queries head" if grouped else "batch seq heads head"
    sizes = {"batch": 2, "seq": 6, "heads": 2, "queries": 3, "head": 4}
    made = [jnp.asarray(RNG.normal(size=[sizes[d] for d in names.split()]), jnp.float32) for names in (dims, *KEYS)]
    return [md.named(x, names) for x, names in zip(made, (dims, *KEYS), strict=True)]


KEYS = ("batch seq heads head",) * 2


@swept("causal", [True, False], left=(False,))
@pytest.mark.parametrize("grouped", [True, False])
def test_every_way_has_the_same_numbers_and_gradients(grouped, causal):
    given = tensors(grouped)

    def run(way):
        def total(x):
            made = attention(*x, causal, way)
            return md.sum(md.sin(md.order(made, given[0].dims)))

        return jax.value_and_grad(total)(given)

    expected = run("products")
    for way in VARIANTS[1:5]:  # the ring has tests of its own
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(run(way)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_the_rules_of_fused_attention_hold():
    shapes = [(2, 6, 2, 3, 4), (2, 6, 2, 4), (2, 6, 2, 4)]
    arrays = [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]
    rows = _bidirectional.check(*arrays), _causal.check(*arrays, jnp.arange(6))
    assert all(any(row.outputs == (md.S(dim),) for row in found) for found in rows for dim in (0, 1, 2))


def planned(way):
    config = gpt.Config(2, 64, 4, seq=512, vocab=64, attend=way)
    program = gpt.program(config, "batch:data heads:model", batch=8)
    return md.parallelize(program.step, md.Mesh(data=2, model=2), rules=program.rules).plan(*program.args)


def test_kernels_are_planned_without_their_weights():
    whole, again, fused, flash, masked = map(planned, VARIANTS[:5])
    assert flash.memory == masked.memory < again.memory < whole.memory
    assert flash.memory < fused.memory < whole.memory  # which writes them while it runs
    assert not flash.notes and "ruled" in flash.operations
    assert flash.seconds == fused.seconds < masked.seconds < whole.seconds


def test_computing_in_bfloat16_keeps_parameters_in_float32():
    programs = [
        gpt.program(gpt.Config(1, 16, 4, seq=8, vocab=64, dtype=d), "", batch=4) for d in ("float32", "bfloat16")
    ]
    words = md.named(RNG.integers(0, 64, (4, 8), np.int32), "batch seq")
    batch = {"inputs": words, "targets": words}
    state = start(programs[0])
    made = [quick(p.step)(*state, batch) for p in programs]
    losses = [float(loss) for _, _, loss in made]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert {x.dtype for x in jax.tree.leaves(made[1][0])} == {jnp.dtype("float32")}
    text = str(jax.make_jaxpr(programs[1].step)(*programs[1].args))
    assert "bf16[4,8,64] = dot_general" in text


def test_a_variant_that_there_is_not():
    x = md.zeros(md.dims("batch=2 seq=4 heads=2 head=8"))
    with pytest.raises(md.ArgumentError, match=r"no attention variant 'fuzed'; did you mean 'fused'\?; it is one of"):
        attention(x, x, x, variant="fuzed")
