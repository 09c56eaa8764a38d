"""The user's ``jax.shard_map`` inside a step: specs hold, the body runs as it is, its collectives are in the plan."""

import re
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from tests.api.shard_map_steps import DEVICES, STEPS, drawn, over, over_data
from tests.api.test_jit_semantics import same
from tests.sweeps import swept

MESH = md.Mesh(data=4, model=2)
X = drawn(8, 8)


@swept("name", STEPS, every=2)
def test_same_numbers_and_planned_bytes(name):
    step, *args = STEPS[name]
    sharded = md.parallelize(step, MESH)
    same(sharded(*args), jax.jit(step)(*args), atol=1e-5)
    sharded.verify(*args)
    report = sharded.check(*args)
    assert max(report.divided.values()) > 0.3, report


# ---- What the plan says ----------------------------------------------------------------------------------------------


def test_the_users_collectives_are_listed():
    step, *args = STEPS["ring_attention"]
    plan = md.parallelize(step, MESH).plan(*args)
    sent = [c for c in plan.collectives if "in the user's shard_map" in c.reason]
    line = step.__code__.co_firstlineno + 12
    assert {c.source for c in sent} == {f"shard_map_steps.py:{line}"}
    assert {(c.kind, c.axes, c.bytes, c.trips) for c in sent} == {("collective-permute", ("data",), 128, 4)}
    assert [c.phase for c in sent].count("forward") == 2
    assert {c.phase for c in sent} == {"forward", "backward"}
    assert sent[0].reason.startswith("ppermute of ")


def test_specs_are_layouts_that_hold():
    """The batch arrives split as the spec says, though nobody pinned it, and nothing is sent for it."""
    step, *args = STEPS["mixup"]
    plan = md.parallelize(step, MESH).plan(*args)
    assert plan.layout("x") == md.Layout.parse("data=S(0) model=B")
    assert plan.notes == ()


def test_automatic_axes_are_planned():
    """The weights of a step that is data parallel by hand are split over ``model``, and so is its compute."""
    step, *_ = STEPS["data_parallel_by_hand"]
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 2048), (2048, 8192), (8192, 2048))]
    plan = md.parallelize(step, MESH).plan(*shapes)
    assert plan.layout("w1") == md.Layout.parse("data=B model=S(1)")
    assert plan.layout("w2") == md.Layout.parse("data=B model=S(0)")
    by_hand = [c for c in plan.collectives if "in the user's shard_map" in c.reason]
    assert [c.bytes for c in by_hand] == [2048 * 8192 * 4 // 2 * 2 * 3 // 4] * 2  # halves of the gradients


def test_a_saved_plan_runs(tmp_path):
    step, *args = STEPS["nested"]
    md.parallelize(step, MESH).plan(*args).save(tmp_path / "p.json")
    loaded = md.load_plan(tmp_path / "p.json")
    same(md.parallelize(step, MESH, plan=loaded)(*args), jax.jit(step)(*args), atol=1e-5)


def test_a_broadcast_from_one_device():
    """jax itself cannot run it on a CPU."""

    def step(x):
        def block(x):
            return lax.pbroadcast(x, ("data",), 2)

        return over(block, in_specs=P("data"), out_specs=P(), check_vma=False)(x)

    sharded = md.parallelize(step, MESH)
    np.testing.assert_array_equal(sharded(X), X[4:6])
    sharded.check(X)
    sharded.verify(X)


# ---- The mesh of the shard_map ---------------------------------------------------------------------------------------


def summed(x, mesh, **options):
    return jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), **options)(x)


def auto(sizes, names):
    return jax.sharding.AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("mesh", [MESH, "data=4,model=2,pipe=1", "pod=1,data=4"])
def test_an_abstract_mesh(mesh):
    """Its axes are those of the plan's mesh by name; the other axes of either do not matter."""
    sharded = md.parallelize(lambda x: summed(x, auto((4,), ("data",))), mesh)
    np.testing.assert_allclose(sharded(X), X.reshape(4, 2, 8).sum(0), rtol=1e-5)
    sharded.check(X)
    sharded.verify(X)


def test_the_ambient_mesh():
    sharded = md.parallelize(lambda x: summed(x, None), MESH)
    with jax.set_mesh(DEVICES):
        np.testing.assert_allclose(sharded(X), X.reshape(4, 2, 8).sum(0), rtol=1e-5)
        sharded.check(X)
        sharded.verify(X)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("batch=4,model=2", "divides over data=4, and the mesh has no axis 'data'; known: batch, model"),
        ("date=4,model=2", "divides over data=4, and the mesh has no axis 'data'; did you mean 'date'?"),
        ("data=2,model=4", "divides over data=4, and the mesh has data=2"),
        ("model=2,data=4", "has its axes in the order data, model, and the mesh has them in the order model, data"),
    ],
)
def test_another_mesh(mesh, said):
    def step(x):
        return summed(x, auto((4, 2), ("data", "model")), axis_names={"data"})

    with pytest.raises(md.PinError) as caught:
        md.parallelize(step, mesh).plan(X)
    names, sizes = zip(*(part.split("=") for part in mesh.split(",")), strict=True)
    assert str(caught.value).splitlines() == [
        f"the shard_maps of step do not fit the mesh {mesh}:",
        f"  shard_map at test_shard_map.py:{summed.__code__.co_firstlineno + 1}: {said}",
        f"plan on the mesh that they name, or give them this one: jax.make_mesh({tuple(map(int, sizes))}, {names})",
    ]


SPECS = [
    (
        lambda x: over(jnp.sin, in_specs=P("data"), out_specs=P("data"))(x[:6]),
        "in_specs=P('data',) splits dim 0 of args[0] float32[6,8] into 4 blocks, and 6 does not divide into them; "
        "nearest sizes that work: 4, 8",
    ),
    (
        lambda x: over(lambda d: d["b"], in_specs=({"b": P(None, ("data", "model"))},), out_specs=P())({"b": x[:, :7]}),
        "in_specs[0]['b']=P(None, ('data', 'model')) splits dim 1 of args[0]['b'] float32[8,7] into 8 blocks, and 7 "
        "does not divide into them; nearest sizes that work: 8",
    ),
    (
        lambda x: over(jnp.sin, in_specs=P("data", None, "model"), out_specs=P("data"))(x),
        "in_specs=P('data', None, 'model') has more entries (3) than float32[8,8] has dims (2)",
    ),
    (
        lambda x: over(jnp.sum, in_specs=P("data"), out_specs=P("data"))(x),
        "out_specs=P('data',) has more entries (1) than float32[] has dims (0)",
    ),
    (
        lambda x: over(jnp.sin, in_specs=P("dat"), out_specs=P("data"))(x),
        "in_specs names axis 'dat', which the shard_map does not have; did you mean 'data'?",
    ),
    (
        lambda x: over_data(jnp.sin, in_specs=P("data"), out_specs=P("model"))(x),
        "out_specs names axis 'model', which the shard_map does not have; known: data",
    ),
    (
        lambda x: over(jnp.sin, in_specs=P("data"), out_specs=P("data"), axis_names={"dat", "model"})(x),
        "axis_names has 'dat', an axis that the mesh of the shard_map lacks; did you mean 'data'?",
    ),
    (
        lambda x: over(lambda x, y: x + y, in_specs=(P("data"),), out_specs=P("data"))(x, x),
        "in_specs is for 1 of the 2 arguments of the function",
    ),
    (
        lambda x: over(lambda x: (x, x), in_specs=P("data"), out_specs=(P("data"),))(x),
        "out_specs is for 1 of the 2 results of the function",
    ),
    (
        lambda x: over(lambda x: x.sum(0), in_specs=P(("data", "model")), out_specs=P())(x),
        "out_specs=P() says that a result is equal on all devices along data, model, and jax cannot tell that; reduce "
        "it in the body, name the axis in the spec, or let check_vma=False vouch for it",
    ),
    (
        lambda x: jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))(x),
        "a spec without a mesh, and no mesh is ambient: state mesh= of jax.shard_map, or NamedSharding(mesh, spec)",
    ),
    (
        lambda x: jax.lax.with_sharding_constraint(x, P("data")),
        "a spec without a mesh, and no mesh is ambient: state mesh= of jax.shard_map, or NamedSharding(mesh, spec)",
    ),
]


@pytest.mark.parametrize(("step", "said"), SPECS)
def test_specs_that_do_not_fit(step, said):
    with pytest.raises(md.TraceError) as caught:
        md.parallelize(step, MESH).plan(X)
    _, row, remedy = str(caught.value).splitlines()
    assert re.fullmatch(r"  test_shard_map.py:\d+: (.*)", row).group(1) == said
    assert remedy.endswith("change the spec, or pad the dim")


def test_an_axis_named_twice():
    """jax says so when it compiles; its own check passes."""
    with pytest.raises(md.TraceError, match=r"test_shard_map.py:\d+: its in_specs name axis 'data' twice"):
        md.parallelize(lambda x: over(jnp.sin, in_specs=P("data", "data"), out_specs=P("data"))(x), MESH).plan(X)


@pytest.fixture(params=["auto", "off", "tracebackhide"])
def tracebacks(request):
    """How jax filters its frames from tracebacks; under IPython it hides them."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", request.param)
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.usefixtures("tracebacks")
@pytest.mark.parametrize("layouts", [{}, {"x": "data=S(0)"}])
@pytest.mark.parametrize("collective", [lax.psum, lax.all_gather])
def test_a_collective_over_a_name_that_no_shard_map_binds(layouts, collective):
    """Outside of a shard_map, the pin of the batch would make it the axis of a step for ``jax.pmap``."""

    def step(x):
        return over(lambda x: collective(x, "dat"), in_specs=P("data"), out_specs=P(), check_vma=False)(x)

    row = f"test_shard_map.py:{step.__code__.co_firstlineno + 1}: axis name 'dat' is none of the shard_map around it"
    with pytest.raises(md.ArgumentError) as caught:
        md.parallelize(step, MESH, layouts).plan(X)
    assert str(caught.value).splitlines()[1] == f"  {row}; did you mean 'data'?"


def test_a_collective_over_an_axis_that_is_left_automatic():
    with pytest.raises(md.ArgumentError) as caught:
        md.parallelize(
            lambda x: over_data(lambda x: lax.psum(x, "model"), in_specs=P("data"), out_specs=P("data"))(x), MESH
        ).plan(X)
    assert re.sub(r"py:\d+", "py:12", str(caught.value)) == (
        "step has collectives over an unknown axis:\n"
        "  test_shard_map.py:12: axis name 'model' is automatic in the shard_map around it; axis_names={..., 'model'} "
        "makes it one of the body's\n"
        "the body of a shard_map runs collectives over the axes that it divides over"
    )


@pytest.mark.usefixtures("tracebacks")
def test_the_same_where_jax_says_nothing():
    def step(x):
        return over(lambda x: lax.psum(x, "dat"), in_specs=P("data"), out_specs=P())(x)

    with pytest.raises(AssertionError) as caught:
        md.parallelize(step, MESH).plan(X)
    line = f"test_shard_map.py:{step.__code__.co_firstlineno + 1}"
    assert any(note.startswith(f"{line}: jax asserts, without words,") for note in caught.value.__notes__)


def test_a_constraint_on_a_manual_axis():
    def step(x):
        return over(lambda x: md.constrain(x, "data=S(1)"), in_specs=P("data"), out_specs=P("data"))(x)

    with pytest.raises(md.PinError, match=r"data=S\(1\): the shard_map around it divides over data itself"):
        md.parallelize(step, MESH).plan(X)


@pytest.mark.parametrize(
    ("axes", "groups", "said"),
    [
        (("data", "model"), [[0, 1, 2, 3], [4, 5, 6, 7]], "runs in groups over several axes"),
        ("data", [[0], [1, 2, 3]], "runs in groups of different sizes"),
    ],
)
def test_groups_that_are_refused(axes, groups, said):
    def step(x):
        spec = P(("data", "model"))
        block = over(
            lambda x: lax.psum(x, axes, axis_index_groups=groups), in_specs=spec, out_specs=spec, check_vma=False
        )
        return block(x)

    with pytest.raises(md.TraceError, match=rf"psum at test_shard_map.py:\d+: {said} \(axis_index_groups\)"):
        md.parallelize(step, MESH).plan(X)


def test_groups_send_what_a_group_sends():
    def step(x):
        block = lambda x: lax.all_gather(x, "data", axis_index_groups=[[0, 1], [2, 3]], tiled=True)  # noqa: E731
        return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)

    (sent,) = md.parallelize(step, MESH).plan(X).collectives
    assert (sent.kind, sent.axes, sent.bytes) == ("all-gather", ("data",), 2 * 8 * 4)
    assert sent.reason.endswith("in the user's shard_map, in groups of 2")


def test_a_ragged_exchange():
    """It is planned at the bytes of what it writes to; jax has it on accelerators only."""

    def step(x):
        def block(x):
            ones, at = jnp.ones(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
            to = jnp.full(4, lax.axis_index("data"), jnp.int32)
            return lax.ragged_all_to_all(x[:1].repeat(4, 0), jnp.zeros_like(x), at, ones, to, ones, axis_name="data")

        return over(block, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)

    (sent,) = md.parallelize(step, MESH).plan(drawn(16, 8)).collectives
    assert (sent.kind, sent.axes, sent.bytes) == ("all-to-all", ("data",), 4 * 8 * 4 * 3 // 4)


def test_a_weight_that_a_body_gathers_is_gathered_outside_too():
    """Compilers would see that both are equal."""

    def block(x, w):
        return jnp.sin(x @ lax.all_gather(w, "data", tiled=True))

    run = over_data(block, in_specs=(P("data"), P("data")), out_specs=P("data"))
    sharded = md.parallelize(lambda w, x: run(x @ w, w) @ w.T, MESH, {"*": "data=S(0)"})
    gathers = [c.axes for c in sharded.plan(X, X).collectives if c.kind == "all-gather"]
    assert gathers == [("data",)] * 2
    sharded.verify(X, X)


def test_branches_by_platform():
    """The plan counts all of them, as of any conditional; a program has that of its devices."""

    def block(x):
        branches = {
            "cpu": lambda x: lax.psum(jnp.sin(x), "data"),
            "default": lambda x: lax.all_gather(x, "data").sum(0),
        }
        return lax.platform_dependent(x, **branches)

    def step(w, x):
        run = over_data(block, in_specs=P("data"), out_specs=P(), check_vma=False)
        return lax.scan(lambda h, _: (run(x @ h), None), w, None, length=2)[0]

    w, x = drawn(8, 8), drawn(32, 8, seed=1) / 4
    sharded = md.parallelize(step, MESH)
    same(sharded(w, x), jax.jit(step)(w, x), atol=1e-4)
    assert {c.kind for c in sharded.plan(w, x).collectives} >= {"all-reduce", "all-gather"}
    assert "all-gather" not in {line.kind for line in sharded.verify(w, x).lines}
    sharded.check(w, x)


# ---- Types over Explicit axes ----------------------------------------------------------------------------------------

TYPED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
UNREDUCED = P(unreduced={"data"})


def split(x, *spec):
    return jax.sharding.reshard(x, P(*spec))


def leaves_summands(w, x):
    y = jax.shard_map(lambda x: lax.pcast(x.T @ x, "data", to="unreduced"), in_specs=P("data"), out_specs=UNREDUCED)
    return split(y(split(x, "data"))) * 2


def enters_summands(w, x):
    y = jnp.einsum("bi,bj->ij", split(x, "data"), split(x, "data"), out_sharding=UNREDUCED)
    return jax.shard_map(lambda y: lax.psum(y, "data"), in_specs=UNREDUCED, out_specs=P())(y) * 2


def scatters_summands(w, x):
    y = jax.shard_map(lambda x: lax.pcast(x.T @ x, "data", to="unreduced"), in_specs=P("data"), out_specs=UNREDUCED)
    scatter = jax.shard_map(lambda y: lax.psum_scatter(y, "data", tiled=True), in_specs=UNREDUCED, out_specs=P("data"))
    return scatter(y(split(x, "data"))) * 2


def gathers_reduced(w, x):
    def block(w, x):
        return x @ lax.pcast(lax.all_gather(w, "data", tiled=True, to="reduced"), "data", to="varying")

    run = jax.shard_map(block, in_specs=(P("data"), P("data")), out_specs=P("data"))
    return jax.grad(lambda w: (run(w, split(x, "data")) ** 2).sum())(split(w, "data"))


def enters_reduced(w, x):
    def block(w, x):
        return x @ lax.pcast(w, "data", to="varying")

    run = jax.shard_map(block, in_specs=(P(reduced={"data"}), P("data")), out_specs=P("data"))
    return jax.grad(lambda w: (run(jax.sharding.reshard(w, P(reduced={"data"})), split(x, "data")) ** 2).sum())(w)


def gram(w, x):
    return 2 * x.T @ x


def gradient(w, x):
    return 2 * x.T @ (x @ w)


@pytest.mark.parametrize(
    ("step", "plain"),
    [
        (leaves_summands, gram),
        (enters_summands, gram),
        (scatters_summands, gram),
        (gathers_reduced, gradient),
        (enters_reduced, gradient),
    ],
)
def test_partial_sums_cross_the_boundary(step, plain):
    w, x = drawn(8, 8), drawn(16, 8, seed=1)
    with jax.set_mesh(TYPED):
        sharded = md.parallelize(step, MESH)
        same(sharded(w, x), plain(w, x), atol=1e-4)
        sharded.check(w, x)
        sharded.verify(w, x)


def centred(w, x):
    block = jax.shard_map(lambda x: x - lax.pmean(x, "data"), mesh=TYPED, in_specs=P("data"), out_specs=P("data"))
    return block(jnp.sin(x)) @ w


@pytest.mark.parametrize("ambient", [False, True])
def test_specs_that_are_compared_with_types(ambient):
    x = jax.device_put(drawn(16, 8), NamedSharding(TYPED, P("data")))
    w = jax.device_put(drawn(8, 8), NamedSharding(TYPED, P()))
    with jax.set_mesh(TYPED) if ambient else nullcontext():
        sharded = md.parallelize(centred, MESH)
        same(sharded(w, x), jax.jit(centred)(w, x), atol=1e-5)
        sharded.check(w, x)
        sharded.verify(w, x)


def test_specs_that_are_not_the_types():
    line = centred.__code__.co_firstlineno + 2
    with pytest.raises(md.TraceError) as caught:
        md.parallelize(centred, MESH).plan(X, X)
    assert str(caught.value).splitlines()[1] == (
        f"  test_shard_map.py:{line}: in_specs=P('data', None) is not the type P(None, None) of float32[8,8], and the "
        "axes of the mesh are Explicit; make it with axis_types=(jax.sharding.AxisType.Auto,) * n, or use "
        "jax.sharding.reshard"
    )


@pytest.mark.parametrize("ambient", [False, True])
def test_specs_that_are_not_stated(ambient):
    def step(x):
        return jax.shard_map(lambda x: x - x.mean(0), mesh=None if ambient else TYPED, out_specs=P("data"))(x)

    x = jax.device_put(X, NamedSharding(TYPED, P("data")))
    said = rf"test_shard_map.py:{step.__code__.co_firstlineno + 1}: its in_specs are not stated"
    with jax.set_mesh(TYPED) if ambient else nullcontext(), pytest.raises(md.TraceError, match=said):
        md.parallelize(step, MESH).plan(x)


def test_specs_that_are_not_stated_in_a_later_call():
    """A plan of arrays without types does not run for typed ones, of which a device has other blocks."""
    whole = lambda x: jax.shard_map(lambda x: x * 2, mesh=TYPED, out_specs=P("data"))(x)[:8]  # noqa: E731
    placed = [jax.device_put(X, NamedSharding(TYPED, spec)) for spec in (P(), P("data"))]
    sharded = md.parallelize(whole, MESH)
    same(sharded(X), jax.jit(whole)(X))
    same(sharded(placed[0]), jax.jit(whole)(placed[0]))
    for run in (sharded, sharded.verify, sharded.with_pins({"x": "model=S(1)"}).plan):
        with pytest.raises(md.TraceError, match=r"test_shard_map.py:\d+: its in_specs are not stated"):
            run(placed[1])


def test_stated_specs_hold_wherever_later_arguments_lie():
    sharded = md.parallelize(lambda x: centred(jnp.eye(8), x), MESH, outputs={"*": "model=S(1)"})
    first = jax.device_put(X, NamedSharding(TYPED, P("data")))
    for x in (first, jax.device_put(X, NamedSharding(TYPED, P())), X, sharded(first)):
        sines = np.sin(np.asarray(x))
        same(sharded(x), sines - np.tile(sines.reshape(4, 2, 8).mean(0), (4, 1)), atol=1e-5)


def test_the_page_of_the_docs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "shard_map.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), {})
    assert "ppermute of " in capsys.readouterr().out
