"""What a TPU keeps in 16 bits, or not at all: read of a step under a layout."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.planner.liveness.aliasing import one_hot_scatters, operand_uses
from meshdsl.trace import trace


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def narrow(step, *args):
    """Names of the operations that make values which only products read."""
    graph = trace(step, args).graph
    found = operand_uses(graph)
    return {op.name for _, op in walk(graph) if op.outputs and not found.needs_full(op.outputs[0])}


def high(x, y):
    return jax.lax.dot(x, y, precision="highest")


X = array(64, 64)
STEPS = {
    "only a product": (lambda x: jnp.sum(jnp.exp(x) @ x), {"exp"}),
    "a product in full precision": (lambda x: jnp.sum(high(jnp.exp(x), x)), set()),
    "another reader": (lambda x: jnp.sum((y := jnp.exp(x)) @ x) + y.sum(), set()),
    "handed on": (
        lambda x: jnp.sum(jnp.exp(x).reshape(32, 128).T @ jnp.ones((32, 8))),
        {"exp", "reshape", "transpose"},
    ),
    "returned": (lambda x: ((y := jnp.exp(x)), y @ x), set()),
    "no float32": (lambda x: jnp.sum(jnp.exp(x.astype(jnp.bfloat16)) @ x.astype(jnp.bfloat16)), set()),
}


@pytest.mark.parametrize(("step", "names"), STEPS.values(), ids=STEPS)
def test_what_only_products_read(step, names):
    assert narrow(step, X) & {"exp", "reshape", "transpose"} == names


def layers(w, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0] ** 2)


def test_the_stack_of_a_loop_that_products_read_in_another():
    graph = trace(jax.grad(layers), (array(4, 64, 64), X)).graph
    found = operand_uses(graph)
    forward = next(op for op in graph.ops if op.name == "scan")
    stacks = [found.needs_full(value) for value in forward.outputs[forward.params["num_carry"] :]]
    assert sorted(stacks) == [False, True]  # the layer's input, for its weight's gradient, and cos(x @ w)


def peak(step, *args, topology):
    return md.parallelize(step, md.Mesh(data=1, topology=topology)).plan(*args).memory


def test_memory_of_a_tpu():
    def step(x, w):
        return jnp.sum(jnp.sort(jnp.exp(x), axis=0) @ w)  # sort is no product's operand that could be fused

    args = array(1024, 1024), array(1024, 1)
    given, whole = 4 * (2**20 + 2**10), 4 * 2**20
    assert peak(step, *args, topology="dgx-h100") >= given + 2 * whole
    assert given + 1.4 * whole <= peak(step, *args, topology="tpu-v5e") < given + 2 * whole


def test_a_label_per_row_is_picked_by_comparing():
    def loss(x, label):
        return jnp.take_along_axis(jax.nn.log_softmax(x), label[:, None], axis=-1).sum()

    graph = trace(jax.grad(loss), (array(256, 512), array(256, dtype=jnp.int32))).graph
    kept = one_hot_scatters(graph)
    assert {op.name for _, op in walk(graph) if op.outputs and op.outputs[0].id in kept} == {
        "scatter-add",
        "broadcast_in_dim",
    }
    embed = trace(jax.grad(lambda e, i: e[i].sum()), (array(512, 64), array(256, dtype=jnp.int32))).graph
    assert one_hot_scatters(embed) == frozenset()
