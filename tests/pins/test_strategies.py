"""Data parallelism, FSDP and tensor parallelism as pins."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def step(params, state, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
        return jnp.mean((hidden @ params["down"]["kernel"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def values(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


PARAMS = {"up": {"kernel": values(32, 256), "bias": values(256)}, "down": {"kernel": values(256, 32)}}
ARGS = (PARAMS, OPTIMIZER.init(PARAMS), {"x": values(16, 32), "y": values(16, 32), "classes": values(3)})


def planned(layouts, mesh="data=4,model=2", args=ARGS, step=step):
    return md.parallelize(step, mesh, layouts).plan(*args)


def notes(plan):
    return [note for note in plan.notes if "padded" not in note]


def test_data_parallelism_splits_the_batch_by_rows_and_nothing_else():
    plan = planned(md.data_parallel())
    assert plan.layout("batch/x").on("data") == plan.layout("batch/y").on("data") == md.S(0)
    assert {x.path for x in plan.inputs if x.pinned} == {"batch/x", "batch/y"}
    assert notes(plan) == ["data_parallel: not split, since they do not have the batch's 16 rows: batch/classes"]


def test_fsdp_splits_large_state_along_its_first_long_dim():
    plan = planned(md.fsdp(min_size=1024), "data=8")
    assert plan.layout("params/up/kernel") == md.Layout(data=md.S(0))
    assert plan.layout("params/down/kernel") == plan.layout("state/0/trace/down/kernel") == md.Layout(data=md.S(0))
    assert any("fewer than 1024 elements: params/up/bias, state/0/trace/up/bias" in note for note in plan.notes)
    sharded = md.parallelize(step, "data=8", md.fsdp(min_size=1024))
    sharded.verify(*ARGS)
    sharded.check(*ARGS)


def test_fsdp_takes_the_axis_fsdp_where_there_is_one_and_splits_the_batch_over_both():
    plan = planned(md.fsdp(min_size=1), "data=2,fsdp=4")
    assert plan.layout("batch/x") == md.Layout(data=md.S(0), fsdp=md.S(0))
    assert plan.layout("params/up/kernel").on("fsdp") == md.S(0)


def test_errors_about_pins_name_the_strategy_that_states_them():
    odd = (*ARGS[:2], {"x": values(15, 32), "y": values(15, 32), "classes": values(3)})
    with pytest.raises(md.PinError, match=r"layouts\['batch/x'\] by md.fsdp\(\): batch/x float32\[15,32\]: dim 0 of"):
        planned(md.fsdp(), "data=8", odd)
    with pytest.raises(md.PinError, match=r"layouts\['batch/x'\] and md.data_parallel\(\): batch/x float32\[15,32\]"):
        planned(md.data_parallel() | {"batch/x": "model=B"}, args=odd)
    short = {"up": {"kernel": values(12, 64), "bias": values(64)}, "down": {"kernel": values(64, 12)}}
    args = short, OPTIMIZER.init(short), {"x": values(16, 12), "y": values(16, 12)}
    with pytest.raises(md.PinError, match=r"'params/up/kernel' by md.fsdp\(\) says data=S\(0\), '\*\*/up/kernel' says"):
        planned(md.fsdp(min_size=1) | {"**/up/kernel": "model=S(0)"}, args=args)


def test_replicas_split_the_batch_outermost():
    assert planned(md.fsdp(min_size=1), "replica=2,fsdp=4").layout("batch/x").splitting(0) == ("replica", "fsdp")


@pytest.mark.parametrize("swapped", [False, True])
def test_combined_with_tensor_parallelism_fsdp_splits_the_other_dim(swapped):
    parts = md.tensor_parallel(), md.fsdp(min_size=1024)
    plan = planned(parts[1] | parts[0] if swapped else parts[0] | parts[1])
    assert plan.layout("params/up/kernel") == md.Layout(data=md.S(0), model=md.S(1))
    assert plan.layout("params/down/kernel") == md.Layout(data=md.S(1), model=md.S(0))
    assert plan.layout("params/up/bias").on("model") == md.S(0)
    assert plan.layout("state/0/trace/up/kernel") == plan.layout("params/up/kernel")


def test_tensor_parallelism_by_globs():
    layouts = md.data_parallel() | md.tensor_parallel(columns="**/down/kernel", rows="**/up/{kernel,weight}")
    plan = planned(layouts)
    assert plan.layout("params/down/kernel").on("model") == md.S(1)
    assert plan.layout("params/up/kernel").on("model") == md.S(0)


def test_flax_projections_are_split_by_heads():
    def attention(params, x):
        query = jnp.einsum("bse,ehd->bshd", x, params["query"]["kernel"]) + params["query"]["bias"]
        out = jnp.einsum("bshd,hde->bse", query, params["out"]["kernel"])
        return jax.tree.map(lambda w: w * jnp.mean(out), params)

    made = {"query": {"kernel": values(8, 4, 16), "bias": values(4, 16)}, "out": {"kernel": values(4, 16, 8)}}
    plan = planned(md.tensor_parallel(), "model=4", (made, values(4, 6, 8)), attention)
    assert plan.layout("params/query/kernel") == md.Layout(model=md.S(1))
    assert plan.layout("params/query/bias") == plan.layout("params/out/kernel") == md.Layout(model=md.S(0))


def test_globs_win_over_strategies_whatever_the_order():
    for layouts in (md.fsdp(min_size=1) | {"params/up/*": "data=B"}, {"params/up/*": "data=B"} | md.fsdp(min_size=1)):
        plan = planned(layouts)
        assert plan.layout("params/up/kernel").on("data") == md.B
        assert plan.layout("params/down/kernel").on("data") == md.S(0)


def test_pins_can_be_changed_and_explained_under_a_strategy():
    sharded = md.parallelize(step, "data=8", md.fsdp(min_size=1024))
    changed = sharded.with_pins({"params/up/kernel": "data=S(0)"}).plan(*ARGS)
    assert changed.layout("params/up/kernel") == md.Layout(data=md.S(0))
    assert changed.layout("params/down/kernel") == md.Layout(data=md.S(0))
    explained = sharded.explain("params/up/kernel", *ARGS)
    assert {str(each.layout) for each in explained.alternatives} == {"data=B", "data=S(0)", "data=S(1)"}


def test_an_evaluation_splits_all_arguments_but_the_first():
    def evaluate(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    plan = planned(md.data_parallel(), "data=4", ({"w": values(32, 8)}, {"x": values(16, 32)}), evaluate)
    assert [x.path for x in plan.inputs if x.pinned] == ["batch/x"]


def test_the_plan_says_which_of_two_globs_decides():
    plan = planned({"batch/*": "data=B", "batch/{x,y}": "data=S(0)"})
    assert "layouts: 'batch/{x,y}' decides over 'batch/*' on data: batch/x, batch/y" in plan.notes


def test_a_program_may_have_a_strategy():
    program = md.Program(step, ARGS, layouts=md.fsdp(min_size=1024))
    found = md.search(program, devices=4)
    assert "data=4" in str(found)


@pytest.mark.parametrize(
    ("layouts", "mesh", "text"),
    [
        (lambda: md.fsdp("dat"), "data=8", "fsdp: no axis 'dat' in the mesh; did you mean 'data'?"),
        (lambda: md.fsdp(), "x=4,y=2", "fsdp: the mesh has none of the axes replica, dp, data, fsdp; name one"),
        (
            lambda: md.data_parallel(batch="bath/*"),
            "data=8",
            "batch='bath/*' matches no input with rows; did you mean 'batch/*'?",
        ),
        (
            lambda: md.tensor_parallel(columns="**/upp"),
            "model=8",
            "columns='**/upp' matches no parameter; did you mean '**/up/**'?",
        ),
    ],
)
def test_a_strategy_that_does_not_fit_is_an_error(layouts, mesh, text):
    with pytest.raises(md.PinError) as error:
        planned(layouts(), mesh)
    assert text in str(error.value)


def test_a_step_without_a_batch_is_an_error():
    def decay(w):
        return w * 0.9

    with pytest.raises(md.PinError, match="data_parallel: every array is replaced by a result, so there is no batch"):
        planned(md.data_parallel(), "data=4", (values(8, 8),), decay)


def test_an_axis_that_the_mesh_lacks_is_said_once():
    with pytest.raises(md.PinError) as error:
        planned(md.fsdp(axis=("data", "typo")), "data=8")
    assert str(error.value).count("no axis 'typo'") == 1


def test_strategies_are_refused_where_they_would_do_nothing():
    text = "strategies such as md.fsdp() belong to parallelize(layouts=...); write layouts by globs"
    with pytest.raises(md.ArgumentError) as error:
        md.parallelize(step, "data=8", outputs=md.fsdp())
    assert f"outputs: {text}" in str(error.value)
    with pytest.raises(md.ArgumentError) as error:
        md.parallelize(step, "data=8").with_pins(md.fsdp())
    assert f"layouts: {text}" in str(error.value)


def test_projections_without_usual_names_have_to_be_named():
    def plain(w, x):
        return {"bias": w["bias"], "first": w["first"] - x.mean()}

    with pytest.raises(md.PinError, match=r"no parameter has a projection's usual name \(w/first, ...\); name them"):
        planned(md.tensor_parallel(), "model=4", ({"bias": values(8), "first": values(8, 8)}, values(8, 8)), plain)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: md.fsdp(min_size="1MB"), "fsdp: min_size: '1MB' is a str, not a number of elements"),
        (lambda: md.fsdp(axis=3), "fsdp: axis: 3 is an int, neither text nor a sequence of texts"),
        (lambda: md.data_parallel(batch=0), "data_parallel: batch: 0 is an int, not a glob"),
    ],
)
def test_arguments_of_other_kinds(make, text):
    with pytest.raises(md.ArgumentError) as error:
        make()
    assert text in str(error.value)


def test_fsdp_does_not_split_a_stack_of_layers():
    def stacked(layers, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return layers - jax.grad(lambda layers: jnp.sum(jax.lax.scan(layer, x, layers)[0]))(layers)

    plan = planned(md.fsdp(min_size=1), "data=4", (values(4, 64, 64), values(8, 64)), stacked)
    assert plan.layout("layers") == md.Layout(data=md.S(1))
