"""The user's ``jax.shard_map`` in the stages of a pipeline: the numbers of the whole batch, or a refusal by line."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from tests.api.shard_map_steps import drawn
from tests.api.test_jit_semantics import same
from tests.sweeps import swept

SIZES, NAMES = (2, 2, 2), ("pipe", "data", "model")
MESH = md.Mesh(**dict(zip(NAMES, SIZES, strict=True)))
DEVICES = jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 3)
over = partial(jax.shard_map, mesh=DEVICES)
over_two = partial(over, axis_names={"data", "model"})
ROWS, WHOLE = P("data"), P()
LAYERS, X = (drawn(4, 8, 16, seed=1) / 3, drawn(4, 16, 8, seed=2) / 4), drawn(8, 8)
COLUMNS = (ROWS, P(None, "model"), P("model"))


def trained(layer, wrap=lambda layer: layer):
    """A step that trains a scan of layers."""

    def step(layers, x):
        def loss(layers):
            h, _ = lax.scan(wrap(lambda h, w: (layer(h, *w), None)), x, layers)
            return jnp.mean(h**2)

        value, gradient = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradient), value

    return step


def planned(step, schedule="1f1b", count=2, **options):
    pipeline = md.Pipeline(count, schedule, batch="x", **options)
    return md.parallelize(step, MESH, {"layers/*": "pipe=S(0)"}, pipeline=pipeline)


def agrees(sharded, step, *args):
    same(sharded(*args), jax.jit(step)(*args), atol=1e-5)
    sharded.verify(*args)


def test_layers_that_split_arrays_are_no_shard_maps():
    """``jnp.split`` has sizes as well, of arrays."""

    def halves(x, u, v):
        a, b = jnp.split(jnp.tanh(x @ u) @ v, 2, axis=1)
        return x + jnp.tile(a * jnp.sin(b), 2)

    step = trained(halves)
    agrees(planned(step), step, LAYERS, X)


# ---- Bodies ----------------------------------------------------------------------------------------------------------


def megatron(x, u, v):
    return x + lax.psum(jnp.tanh(x @ u) @ v, "model")


def sequence_parallel(x, u, v):
    """Features are gathered before the products, and scattered after them."""
    h = jnp.tanh(lax.all_gather(x, "model", axis=1, tiled=True) @ u)
    return x + lax.psum_scatter(h @ v, "model", scatter_dimension=1, tiled=True)


def exchanges(x, u, v):
    h = jnp.tanh(x @ u) * (1 + lax.axis_index("model"))
    h = lax.all_to_all(h.reshape(-1, 2, 4), "model", 1, 2, tiled=True).reshape(-1, 8)
    return x + lax.psum(lax.ppermute(h, "model", [(0, 1), (1, 0)]) @ v, "model")


def fsdp(x, u, v):
    u, v = lax.all_gather(u, "data", tiled=True), lax.all_gather(v, "data", axis=1, tiled=True)
    return x + jnp.tanh(x @ u) @ v


def sums_over_the_stages(x, u, v):
    scale = lax.pmax(lax.stop_gradient(jnp.abs(u).max()), ("model", "pipe"))
    return x + jnp.tanh(x @ u / scale) @ v + 0.1 * lax.psum(v.mean(), ("pipe",))


def constrained(x, u, v):
    """Without a shard_map: jax's own constraints."""
    split = lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(DEVICES, P(*spec)))  # noqa: E731
    return x + split(jnp.tanh(split(x, "data") @ u), P.UNCONSTRAINED, "model") @ v


SPLIT = P("data", "model")
TWO = (
    over_two(sequence_parallel, in_specs=(SPLIT, *COLUMNS[1:]), out_specs=SPLIT),
    over_two(exchanges, in_specs=COLUMNS, out_specs=ROWS, check_vma=False),
)
ALL = over(megatron, in_specs=COLUMNS, out_specs=ROWS)
UNCHECKED = over(megatron, in_specs=COLUMNS, out_specs=ROWS, check_vma=False)
GATHERED = over(fsdp, in_specs=(ROWS, ROWS, P(None, "data")), out_specs=ROWS)
SUMS = over(sums_over_the_stages, in_specs=(ROWS, WHOLE, WHOLE), out_specs=ROWS, check_vma=False)
CASES = {
    "sequence parallel": (trained(TWO[0]), {}),
    "exchanges": (trained(TWO[1]), {"recompute": "none", "schedule": "gpipe"}),
    "over all axes": (trained(ALL), {"layers": (1, 3)}),
    "unchecked, halves of a backward": (trained(UNCHECKED), {"schedule": "zb"}),
    "fsdp, chunks": (trained(GATHERED), {"schedule": "interleaved", "chunks": 2}),
    "constraints": (trained(constrained), {}),
    "sums over the stages, recomputed": (trained(SUMS, jax.checkpoint), {}),
}


@swept("name", CASES, kept=("sequence parallel", "unchecked, halves of a backward", "fsdp, chunks"))
def test_numbers_of_the_whole_batch(name):
    step, options = CASES[name]
    agrees(planned(step, **options), step, LAYERS, X)


def test_around_the_layers():
    """Before the layers, after them, and in an update that goes on after the loop."""
    embed = over(
        lambda x, e: lax.psum(x @ e, "model"),
        in_specs=(SPLIT, P("model")),
        out_specs=ROWS,
        axis_names={"data", "model"},
    )
    mean = over(lambda h: lax.pmean(jnp.mean(h**2), ("data", "pipe")), in_specs=ROWS, out_specs=WHOLE, check_vma=False)
    update = over(
        lambda w, g: w - 0.1 * g / (1 + lax.axis_index("pipe")), in_specs=(P("pipe"),) * 2, out_specs=P("pipe")
    )

    def step(layers, e, x):
        def loss(layers, e):
            h, _ = lax.scan(lambda h, w: (ALL(h, *w), None), embed(x, e), layers)
            return mean(h)

        value, (gradient, of_e) = jax.value_and_grad(loss, argnums=(0, 1))(layers, e)
        return jax.tree.map(update, layers, gradient), e - of_e, value

    sharded, args = planned(step), (LAYERS, drawn(8, 8, seed=3), X)
    agrees(sharded, step, *args)
    sharded.check(*args)


def test_collectives_of_stages_run_side_by_side():
    plan = planned(trained(over_two(megatron, in_specs=COLUMNS, out_specs=ROWS)), count=4).plan(LAYERS, X)
    sums = [c for c in plan.collectives if "in the user's shard_map" in c.reason and c.axes == ("model",)]
    assert {c.bytes for c in sums} == {8 * 4 * 2 // 2}  # of one rank: rows of its microbatch on this device


# ---- Refused ---------------------------------------------------------------------------------------------------------


def of_pipe(body, specs=(ROWS, P("pipe"), WHOLE)):
    return trained(over(body, in_specs=specs, out_specs=ROWS, check_vma=False))


def in_a_body(layers, x):
    def whole(x, *layers):
        return lax.scan(lambda h, w: (megatron(h, *w), None), x, layers)[0]

    run = over_two(whole, in_specs=(ROWS, P(None, None, "model"), P(None, "model")), out_specs=ROWS)
    return jax.value_and_grad(lambda layers: jnp.mean(run(x, *layers) ** 2))(layers)


def by_row(x, u, v):
    return x * lax.axis_index("data") + u.sum() + v.sum()


OF_STAGES = "whose devices are the stages"
REFUSED = {
    "blocks": (of_pipe(lambda x, u, v: x + u.sum() * v.sum()), rf"shard_map at \S+: divides over pipe, {OF_STAGES}"),
    "index": (
        of_pipe(lambda x, u, v: x * lax.axis_index("pipe") + u.sum(), (ROWS, WHOLE, WHOLE)),
        rf"axis_index at \S+: runs over pipe, {OF_STAGES}",
    ),
    "gathers": (
        of_pipe(lambda x, u, v: x + lax.all_gather(u.sum(), "pipe").sum() + v.sum(), (ROWS, WHOLE, WHOLE)),
        rf"all_gather at \S+: runs over pipe, {OF_STAGES}",
    ),
    "rows of the batch": (
        trained(over_two(by_row, in_specs=(ROWS, WHOLE, WHOLE), out_specs=ROWS)),
        "rows of the batch and what each device has of its own",
    ),
    "a loop in a body": (in_a_body, "it is in the body of a shard_map over data, model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_stages(name):
    step, why = REFUSED[name]
    with pytest.raises(md.PipelineError, match=why):
        planned(step).plan(LAYERS, X)


def test_remedy_names_the_other_axes():
    with pytest.raises(md.PipelineError) as caught:
        planned(REFUSED["blocks"][0]).plan(LAYERS, X)
    title, row, remedy = str(caught.value).splitlines()
    assert title == "the layers of step cannot be stages over pipe:"
    assert "test_stage_shard_maps.py:" in row
    assert remedy == "call jax.shard_map in the layer, with axis_names={'data', 'model'}"


def test_parts_between_cuts():
    run = over_two(lambda x, u: lax.psum(x @ u, "model"), in_specs=(SPLIT, P("model")), out_specs=ROWS)

    def step(w, x):
        loss = lambda w: jnp.mean(jnp.tanh(run(md.stage(jnp.tanh(x @ w)), w)) ** 2)  # noqa: E731
        return jax.value_and_grad(loss)(w)

    pipeline = md.Pipeline(2, batch="x", axis="pipe")
    with pytest.raises(md.PipelineError, match=r"shard_map at \S+: is in a part that md.stage cuts"):
        md.parallelize(step, MESH, pipeline=pipeline).plan(np.eye(8, dtype=np.float32), X)
