"""Programs as people write them, to be partitioned: plain jit, explicit axes, shard_map."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AUTO = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
Program = tuple[Callable[..., Any], tuple[Any, ...]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def shape(dims: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32, mesh: Any = AUTO) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


@program
def two_matrices() -> Program:
    def loss(up, down, batch):
        return jnp.mean((jax.nn.gelu(batch @ up) @ down - batch) ** 2)

    weights = shape((8, 16), "x", "y"), shape((16, 8), "y", "x")
    return jax.value_and_grad(loss, (0, 1)), (*weights, shape((16, 8), "x"))


@program
def attention() -> Program:
    def loss(q, k, v, out):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return jnp.sum(jnp.einsum("bqhd,hde->bqe", mixed, out) ** 2)

    heads = shape((4, 8, 4, 8), "x", None, "y")
    return jax.grad(loss, (0, 1, 2, 3)), (heads, heads, heads, shape((4, 8, 16), "y"))


@program
def embedding() -> Program:
    def loss(table, ids):
        return jnp.mean(jnp.tanh(table[ids]) ** 2)

    return jax.value_and_grad(loss), (shape((32, 8), "y"), shape((16, 4), "x", dtype=jnp.int32))


@program
def accumulation() -> Program:
    def net(weights, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

    def step(weights, batches):
        zeros = jnp.zeros_like(weights)
        total, _ = jax.lax.scan(lambda total, x: (total + jax.grad(net)(weights, x), None), zeros, batches)
        return weights - 0.1 * total

    return step, (shape((3, 8, 8), None, "x"), shape((2, 8, 8), None, "x"))


@program
def stencil() -> Program:
    def step(u):
        padded = jnp.pad(u, 1)
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return around - 4 * u, jnp.roll(u, 3, 0), jnp.concatenate([-u[:, 4:], u[:, :4]], 1), u[::-1], u[1:] - u[:-1]

    return step, (shape((16, 8), "x", "y"),)


@program
def sorting() -> Program:
    def step(x):
        return jnp.sort(x, 0), jnp.argsort(x, 1), jnp.cumsum(x, 0), jnp.argmax(x, 0), jax.lax.top_k(x, 3)

    return step, (shape((16, 8), "x", "y"),)


@program
def pooled_convolutions() -> Program:
    def loss(kernel, images):
        made = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        pooled = jax.lax.reduce_window(made, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return jnp.mean(jax.nn.relu(pooled))

    return jax.value_and_grad(loss), (shape((3, 3, 4, 8), None, None, None, "y"), shape((8, 8, 8, 4), "x"))


@program
def dropout() -> Program:
    def step(key, x):
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, x.shape)
        return jnp.where(kept, x * 2, 0).sum(0), jax.random.normal(jax.random.wrap_key_data(key), (8,))

    return step, (shape((2,), dtype=jnp.uint32), shape((16, 8), "x", "y"))


@program
def uneven() -> Program:
    def step(x):
        part = jax.lax.with_sharding_constraint(x[:13] * 2, NamedSharding(AUTO, P("x")))
        return jnp.tanh(x[:13]).sum(), part.max(0), part.reshape(-1)[:26].sum()

    return step, (shape((16, 8), "x", "y"),)


@program
def explicit_axes() -> Program:
    def loss(up, batch):
        hidden = jnp.tanh(jnp.dot(batch, up, out_sharding=NamedSharding(EXPLICIT, P("x", "y"))))
        return jnp.mean(jax.sharding.reshard(hidden, NamedSharding(EXPLICIT, P("x", None))) ** 2)

    weights = shape((8, 16), None, "y", mesh=EXPLICIT), shape((16, 8), "x", mesh=EXPLICIT)
    return jax.value_and_grad(loss), weights


@program
def ring() -> Program:
    def body(x, w):
        def turn(carry, _):
            total, part = carry
            part = jax.lax.ppermute(part, "x", [(i, (i + 1) % 4) for i in range(4)])
            return (total + jnp.tanh(part @ w), part), None

        (total, _), _ = jax.lax.scan(turn, (jnp.zeros_like(x @ w), x), length=4)
        return jax.lax.psum_scatter(total, "y", scatter_dimension=1, tiled=True), jax.lax.pmax(total.sum(), ("x", "y"))

    def step(x, w):
        return jax.shard_map(body, mesh=AUTO, in_specs=(P("x"), P("y")), out_specs=(P("x", "y"), P()), check_vma=False)(
            x, w
        )

    return step, (shape((16, 8), "x"), shape((16, 16), "y"))


@program
def partly_manual() -> Program:
    def body(x, w):
        index = jax.lax.axis_index("x").astype(jnp.float32)
        gathered = jax.lax.all_gather(x, "x", tiled=True)
        return jax.lax.psum(jnp.tanh(x @ w) * index, "x"), jnp.cumsum(gathered, 0)

    def step(x, w):
        mapped = jax.shard_map(
            body, mesh=AUTO, in_specs=(P("x"), P()), out_specs=(P(), P()), axis_names={"x"}, check_vma=False
        )
        return jax.tree.map(lambda y: y * 2, mapped(x, w))

    return step, (shape((16, 8), "x"), shape((8, 8), None, "y"))
