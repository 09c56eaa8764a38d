"""Products of which XLA makes one for GPUs: which they are, in which order all runs, and what then hides nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.ir.index import producers
from meshdsl.models.ring_attention import ring_attention
from meshdsl.plan.merged import merged_products

H100 = md.topology("dgx-h100")
MIB = 2**20


def of(function, *shapes, most=64 * MIB):
    """The groups of products that are merged, by position among all products, and the order of all operations."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    planned = md.parallelize(function, md.Mesh(data=1, topology=H100)).stages(*args).planned
    graph = planned.program.graph
    order = merged_products(graph, planned.plan.solution, most, {})
    products = [op.id for op in graph.ops if op.name == "dot_general"]
    groups = [[products.index(op.id) for op in ops] for ops in order if len(ops) > 1]
    return sorted(groups), [op for ops in order for op in ops], graph


def attention(x, q, k, v):
    keys = jnp.tanh(x @ k)
    return jnp.tanh(x @ q) @ keys.T @ (x @ v)


SQUARE = (256, 256)


def test_products_of_one_operand_are_one():
    groups, order, graph = of(attention, *[SQUARE] * 4)
    assert len(groups) == 1 and len(groups[0]) == 3
    made, done = producers(graph), set()
    assert sorted(op.id for op in order) == sorted(op.id for op in graph.ops[:-1])
    for op in order:  # each stands behind those that it waits for
        assert all(made[x.id].id in done for x in op.inputs if getattr(x, "id", None) in made)
        done.add(op.id)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, v: x @ jnp.tanh(x @ w) @ v,  # the second product waits for the first
        lambda x, w, v: (x @ w, v @ x),  # x is summed over other dims
        lambda x, w, v: (x @ w, jnp.tanh(x) @ v),
    ],
)
def test_products_that_wait_for_each_other_or_read_otherwise_stay_apart(function):
    assert of(function, *[SQUARE] * 3)[0] == []


def test_groups_that_would_wait_for_each_other_are_not_both_merged():
    """Of ``a @ ..`` one waits for a product of ``b``, and of ``b @ ..`` one waits for a product of ``a``."""

    def crossed(a, b, w, v):
        of_a, of_b = jnp.tanh(a @ w), jnp.tanh(b @ v)
        return a @ of_b, b @ of_a

    groups, order, graph = of(crossed, *[SQUARE] * 4)
    assert len(groups) == 1 and len(order) == len(graph.ops) - 1


@pytest.mark.parametrize(("most", "merged"), [(0, 0), (0.5 * MIB, 0), (0.75 * MIB, 1), (8 * MIB, 1)])
def test_one_of_both_has_to_be_small(most, merged):
    """256 x 256 numbers of 4 bytes: three blocks of 256 KiB, and the other product reads and writes more."""
    assert len(of(lambda x, w, v: (x @ w, x @ v), SQUARE, SQUARE, (256, 4096), most=most)[0]) == merged


def test_a_gather_is_not_hidden_behind_a_product_that_waits_for_it():
    """``v`` is gathered: beside ``x @ w``, unless both products are one."""

    def step(x, w, v):
        return jnp.tanh(x @ w), jnp.tanh(x @ v)

    x, w = jax.ShapeDtypeStruct((8 * 2048, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    layouts = {"x": "data=S(0)", "w": "data=B", "v": "data=S(0)"}

    def hidden(topology):
        plan = md.parallelize(step, md.Mesh(data=8, topology=topology), layouts, memory="80GB").plan(x, w, w)
        assert [c.kind for c in plan.collectives] == ["all-gather"]
        return plan.seconds - plan.simulated_seconds

    apart = hidden(replace(H100, merges=0.0))
    assert apart > 1e-5 and hidden(H100) == pytest.approx(0.0, abs=1e-3 * apart)


def test_a_topology_says_how_large_products_may_be():
    with pytest.raises(md.ArgumentError, match="merges=-1"):
        replace(H100, merges=-1)


def test_what_is_sent_as_one_waits_for_all_of_it():
    """Activations are gathered together in the backward loop, where merged products move what reads one of them."""

    def normalised(x):
        return x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5).astype(x.dtype)

    def layer(x, w):
        query, key, value, out, up, gate, down = w
        q, k, v = (jnp.einsum("bse,ehd->bshd", normalised(x), each) for each in (query, key, value))
        attended = ring_attention(jnp.reshape(q, (*q.shape[:2], 8, 4, 128)), k, v, 8, order="permuted")
        x = x + jnp.einsum("bshd,hde->bse", jnp.reshape(attended, q.shape), out)
        y = normalised(x)
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down, None

    def step(w, x):
        def loss(w):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2)

        return jax.tree.map(lambda a, g: a - (0.01 * g).astype(a.dtype), w, jax.grad(loss)(w))

    embed, ff = 4096, 14336
    shapes = (embed, 32, 128), (embed, 8, 128), (embed, 8, 128), (32, 128, embed), *[(embed, ff)] * 2, (ff, embed)
    w = [jax.ShapeDtypeStruct((2, *shape), "bfloat16") for shape in shapes]
    x = jax.ShapeDtypeStruct((1, 8192, embed), "bfloat16")
    plan = md.parallelize(step, md.Mesh(seq=8, topology=H100), {"x": "seq=S(1)"}, donate_argnums=0, memory="1TB").plan(
        w, x
    )
    assert 0 < plan.simulated_seconds <= plan.seconds
