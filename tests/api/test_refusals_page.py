"""Every refusal that docs/reference/refusals.md lists is made, in these words, before anything is compiled."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "refusals.md"
MESH = md.Mesh(data=4, model=2)
X = np.ones((8, 8), np.float32)


def planned(step, *args, layouts=None, mesh=MESH, **options):
    return lambda: md.parallelize(step, mesh, layouts, **options).plan(*args)


def double(x):
    return x * 2


def chooses(x):
    if x.sum() > 0:
        return x
    return -x


def prints_in_order(x):
    jax.debug.print("{}", x, ordered=True)
    return x


def whole_batch(w, batch):
    return w - 0.1 * jax.grad(lambda w: jnp.log(jnp.mean((batch @ w) ** 2)))(w)


def plans_inside(x):
    return md.parallelize(double, MESH)(x) + 1


def constrains_badly(x):
    return md.constrain(x * 2, "modle=S(0)")


def constrains_unevenly(x):
    return md.constrain(x[:6] * 2, "data=S(0)")


def remembers(x):
    SEEN.append(x)
    return x


def grouped(x):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("data")
    both = [[0, 1, 2, 3], [4, 5, 6, 7]]
    summed = lambda x: jax.lax.all_gather(x, ("data", "model"), axis_index_groups=both)  # noqa: E731
    return jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def over_data(f, *args, **options):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.shard_map(f, mesh=mesh, out_specs=jax.sharding.PartitionSpec("data"), **options)(*args)


def splits_unevenly(x):
    return over_data(jnp.sin, x[:6], in_specs=jax.sharding.PartitionSpec("data"))


def sums_over_a_typo(x):
    rows = jax.sharding.PartitionSpec("data")
    return over_data(lambda x: jax.lax.psum(x, "dat"), x, in_specs=rows, check_vma=False)


def left_to_types():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    rows = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(lambda x: x - x.mean(0), mesh=mesh, out_specs=rows)
    planned(lambda x: mapped(x), jax.device_put(X, jax.sharding.NamedSharding(mesh, rows)))()


def neighbours(w, x):
    """Rows travel around the devices."""
    rows, around = jax.sharding.PartitionSpec("data"), [(0, 1), (1, 2), (2, 3), (3, 0)]
    return over_data(lambda x: jax.lax.ppermute(x, "data", around), x, in_specs=rows).sum(1) + w.sum()


def layers_of_stages(w, x):
    columns, rows = jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec("data")
    gathered = lambda x, w: x @ jax.lax.all_gather(w, "model", axis=1, tiled=True)  # noqa: E731
    product = lambda x, w: over_data(gathered, x, w, in_specs=(rows, columns), check_vma=False)  # noqa: E731
    return jax.grad(lambda w: jax.lax.scan(lambda x, w: (product(x, w), None), x, w)[0].sum())(w)


def layers_in_a_body(w, x):
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    net = lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]  # noqa: E731
    return over_data(net, w, x, in_specs=(whole, rows), check_vma=False)


def body_between_cuts(w, x):
    rows = jax.sharding.PartitionSpec("data")
    return over_data(jnp.tanh, md.stage(x @ w), in_specs=rows)


def averages(x):
    return jax.lax.pmean(x, axis_name="batch")


def maps_elsewhere(x):
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def noisy(x):
    jax.debug.print("{}", x)
    return x


def draws(x, key):
    return x + jax.random.uniform(key, x.shape)


def draws_without_key(x):
    return x + jax.lax.rng_uniform(0.0, 1.0, x.shape)


def looks(x):
    jax.debug.inspect_array_sharding(x, callback=print)
    return x


def ruled(x):
    return md.rule("a b -> a b")(noisy)(x)


def run_twice():
    sharded = md.parallelize(double, MESH, donate_argnums=0)
    gone = jnp.asarray(X)
    gone.delete()
    sharded(gone)


SEEN = []
MICROBATCHES = md.Pipeline(2, batch="x")
STACK, STAGES = np.stack([X, X]), {"layouts": {"w": "model=S(0)"}, "pipeline": MICROBATCHES}
PLANNED = md.parallelize(double, MESH)
CASES = {
    "Python decides by a value": planned(chooses, X),
    "an argument is no array": planned(double, "text"),
    "a result is no array": planned(lambda x: {"x": x, "name": "text"}, X),
    "an argument is a `jax.Ref`": lambda: planned(double, jax.new_ref(jnp.asarray(X)))(),
    "a static argument cannot be hashed": planned(lambda x, sizes: x, X, [1], static_argnames="sizes"),
    "a change that a call cannot give back": planned(remembers, X),
    "effects in order": planned(prints_in_order, X),
    "draws from a Philox key": planned(draws, X, jax.random.key(0, impl="philox2x32")),
    "numbers without a key": planned(draws_without_key, X),
    "a look at the compiler's sharding": planned(looks, X),
    "a gradient of a planned step": lambda: jax.grad(lambda x: PLANNED(x).sum())(X),
    "`vmap` of a planned step": lambda: jax.vmap(PLANNED)(X),
    "a planned step inside a planned step": planned(plans_inside, X),
    "`shard_map` over other axes": planned(maps_elsewhere, X),
    "a collective over an axis that is not found": planned(averages, X),
    "a spec of jax that does not fit": planned(splits_unevenly, X),
    "a collective over a name that no `shard_map` around it binds": planned(
        sums_over_a_typo, X, layouts={"x": "data=S(0)"}
    ),
    "specs of a `shard_map` left to types": left_to_types,
    "collectives in groups of several axes, inside `shard_map`": planned(grouped, X),
    "a rule for a function with effects": planned(ruled, X),
    "a pin that does not divide": planned(double, X[:6], layouts={"x": "data=S(0)"}),
    "a pin that matches nothing": planned(double, X, layouts={"y": "data=S(0)"}),
    "pins that contradict": planned(double, X[:4], layouts={"x": "data=S(0)", "*": "model=S(0)"}),
    "a partial argument": planned(double, X, layouts={"x": "data=P"}),
    "host memory inside a step": planned(lambda x: md.constrain(x, "@host"), X),
    "host memory where there is none": planned(
        double, X, layouts={"x": "@host"}, mesh=md.Mesh(data=4, model=2, topology="tpu-v4")
    ),
    "a constraint over an axis that the mesh lacks": planned(constrains_badly, X),
    "a constraint that does not divide": planned(constrains_unevenly, X),
    "layout rules of which none applies": planned(double, X, rules="batch:data"),
    "microbatches of what needs the whole batch": planned(whole_batch, X, X, pipeline=md.Pipeline(microbatches=2)),
    "microbatches of a `shard_map` that depends on where rows are": planned(neighbours, X, X, pipeline=MICROBATCHES),
    "stages that a `shard_map` in their layers divides": planned(layers_of_stages, STACK, X, **STAGES),
    "layers in the body of a `shard_map` as stages": planned(layers_in_a_body, STACK, X, **STAGES),
    "a `shard_map` in a part that `md.stage` cuts": planned(
        body_between_cuts, X, X, pipeline=md.Pipeline(2, batch="x", axis="model")
    ),
    "a memory limit that no plan meets": planned(double, X, memory="10"),
    "values are needed, shapes are given": lambda: PLANNED(jax.ShapeDtypeStruct((8, 8), jnp.float32)),
    "an argument that was donated": run_twice,
    "more devices than there are": lambda: md.parallelize(double, "data=16")(X),
    "a plan of another step": lambda: md.parallelize(jnp.sin, MESH, plan=PLANNED.plan(X)).plan(X),
    "`check` of a step without results": lambda: md.parallelize(lambda x: None, MESH).check(X),
}


ROW = re.compile(r"\| (?P<what>[^|]+) \| `(?P<said>[^|]+)` \| [^|]+ \| [^|]+ \|")
LISTED = {row["what"]: row["said"] for row in map(ROW.fullmatch, PAGE.read_text().splitlines()) if row}


def test_every_refusal_is_listed():
    assert list(LISTED) == list(CASES)


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("what", CASES)
def test_a_refusal_says_what_the_page_says(what):
    with pytest.raises(md.MeshDSLError) as caught:
        CASES[what]()
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert LISTED[what] in [re.sub(rf"{Path(__file__).name}:\d+", "step.py:12", line) for line in lines]
