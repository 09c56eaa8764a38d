"""Layout rules: their text, what they pin, kinds of arrays, names from flax, and every way to get it wrong."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import meshdsl as md
from meshdsl.errors import ArgumentError, DimError, NotationError, PinError
from meshdsl.ir.graph import walk
from meshdsl.pins import make_pins
from meshdsl.trace import trace

MESH = md.Mesh(data=4, model=2)
D = md.dims("batch=32 embed=16 hidden=64")
optimizer = optax.adam(1e-3)


def init():
    key = jax.random.key(0)
    params = {"up": md.fan_in(key, D("embed hidden"), over="embed"), "down": md.zeros(D("hidden embed"))}
    return params, optimizer.init(params)


def loss(params, x):
    hidden = md.relu(md.dot(x, params["up"], over="embed"))
    return md.mean(md.square(md.dot(hidden, params["down"], over="hidden") - x))


def step(params, state, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


def struct(dims, dtype=jnp.float32):
    return md.named(jax.ShapeDtypeStruct(md.dims(dims).sizes, dtype), dims)


ARGS = (*jax.eval_shape(init), struct(D("batch embed")))


def pins(rules, layouts=None, mesh=MESH, step=step, args=ARGS):
    """The pins by path, as text, those that say nothing left out."""
    rules = md.Rules.of(rules)
    program = trace(step, args, inside=rules.inside)
    found = make_pins(program, mesh, layouts, rules=rules)
    return {leaf.path: str(pin) for leaf, pin in zip(program.inputs, found.inputs) if pin.axes}


def fault(rules, **more):
    with pytest.raises(PinError) as caught:
        pins(rules, **more)
    return [line.strip() for line in str(caught.value).splitlines()[1:-1]]


def test_rules_read_and_write():
    rules = md.Rules("batch:(data,fsdp), hidden: model", params="embed:data")
    assert str(rules) == "batch:(data,fsdp) hidden:model params[embed:data]"
    assert eval(f"md.{rules!r}") == rules != md.Rules.parse("batch:data")
    assert md.Rules.parse("batch:data hidden:model") == md.Rules("batch:data  hidden:model")


def test_one_table_pins_all_at_the_boundary():
    assert pins("batch:data hidden:model") == {
        "params/up": "model=S(1)",
        "params/down": "model=S(0)",
        **{
            f"state/0/{moment}/{name}": f"model=S({dim})"
            for moment in ("mu", "nu")
            for name, dim in (("up", 1), ("down", 0))
        },
        "batch": "data=S(0)",
    }


def test_fsdp_and_zero():
    fsdp = pins(md.Rules("batch:data", params="embed:data", optimizer="embed:data"))
    assert fsdp["params/up"] == fsdp["state/0/mu/up"] == "data=S(0)"
    zero = pins(md.Rules("batch:data", optimizer="embed:data"))
    assert zero["state/0/nu/down"] == "data=S(1)" and "params/up" not in zero


def test_a_kind_comes_before_all():
    assert pins(md.Rules("embed:model", params="embed:data"))["params/up"] == "data=S(0)"


def test_several_axes_are_major_first():
    mesh = md.Mesh(data=2, fsdp=2, model=2)
    assert pins("batch:(fsdp,data)", mesh=mesh)["batch"] == "fsdp=S(0) data=S(0)"


def test_globs_decide_where_both_speak():
    found = pins("batch:data hidden:model", {"params/up": "model=S(embed)", "params/down": "data=S(hidden)"})
    assert found["params/up"] == "model=S(0)"
    assert found["params/down"] == "model=S(0) data=S(0)"


def test_without_replaced_inputs_the_first_argument_is_the_parameters():
    found = pins(md.Rules("batch:data", params="embed:model"), step=loss, args=(ARGS[0], ARGS[2]))
    assert found["params/up"] == "model=S(0)" and found["x"] == "data=S(0)"


def test_results_that_replace_nothing_are_pinned():
    program = trace(lambda x: md.exp(x), ARGS[2:])
    assert str(make_pins(program, MESH, rules=md.Rules("batch:data")).outputs[0]) in ("data=S(0)", "")
    program = trace(lambda x: md.sum(x, over="embed"), ARGS[2:])
    assert str(make_pins(program, MESH, rules=md.Rules("batch:data")).outputs[0]) == "data=S(0)"


def test_sharded_equals_unsharded_and_the_plan_shows_names():
    sharded = md.parallelize(step, MESH, rules="batch:data hidden:model")
    args = (*init(), md.normal(jax.random.key(1), D("batch embed")))
    assert sharded.check(*args) and sharded.verify(*args)
    params, _, value = sharded(*args)
    assert params["up"].dims == ("embed", "hidden") and value.shape == ()
    text = str(sharded.plan(*args))
    assert "float32[hidden=64 embed=16]" in text and "model=S(hidden)" in text and "data=S(batch)" in text


def stated(rules, step=step, args=ARGS):
    graph = trace(step, args, inside=md.Rules.of(rules).inside).graph
    return [(op.params["names"], str(op.params["layout"])) for _, op in walk(graph) if op.name == "constrain"]


def test_results_inside_are_pinned_only_if_asked():
    assert stated("batch:data hidden:model") == []
    found = stated(md.Rules(activations="batch:data hidden:model"))
    assert (("batch", "hidden"), "data=S(0) model=S(1)") in found
    assert (("batch", "embed"), "data=S(0)") in found


def test_functions_that_jax_keeps_are_not_shared_between_rules():
    inner = jax.jit(loss)
    args = ARGS[0], ARGS[2]
    for rules, axis in (
        (md.Rules(), ""),
        (md.Rules(activations="batch:data"), "data"),
        (md.Rules(activations="batch:model"), "model"),
    ):
        assert {layout.partition("=")[0] for _, layout in stated(rules, inner, args)} == ({axis} if axis else set())


def test_results_inside_run_as_pinned():
    sharded = md.parallelize(step, MESH, rules=md.Rules(activations="batch:data hidden:model"))
    args = (*init(), md.normal(jax.random.key(1), D("batch embed")))
    assert sharded.check(*args) and sharded.verify(*args)


def test_constrain_takes_names():
    program = trace(lambda x: md.constrain(md.exp(x), "data=S(batch) model=S(embed)"), ARGS[2:])
    (op,) = [op for op in program.graph.ops if op.name == "constrain"]
    assert str(op.params["layout"]) == "data=S(0) model=S(1)"
    with pytest.raises(md.MeshDSLError, match=r"x\[batch=32 embed=16\]: data=S\(bach\) .* did you mean 'batch'"):
        trace(lambda x: md.constrain(x, "data=S(bach)"), ARGS[2:])


def test_under_vmap_the_dims_move_on():
    f = md.vmap(lambda x: md.exp(x), over="batch")
    assert stated(md.Rules(activations="embed:model"), f, ARGS[2:]) == [(("", "embed"), "model=S(1)")]


class Dense(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "hidden"))
        self.up = nnx.Linear(16, 64, kernel_init=kernel, use_bias=False, rngs=rngs)
        self.down = nnx.Param(jnp.zeros((64, 16)), out_sharding=("hidden", None))

    def __call__(self, x):
        return nnx.relu(self.up(x)) @ self.down


def nnx_program():
    with nnx.use_eager_sharding(False):
        graph, params = nnx.split(nnx.eval_shape(lambda: Dense(nnx.Rngs(0))))

    def step(params, state, batch):
        gradient = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(batch) ** 2))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((32, 16), jnp.float32))


def test_names_in_flax_nnx_models():
    step, args = nnx_program()
    found = pins(md.Rules("hidden:model", optimizer="embed:data"), step=step, args=args)
    assert found["params/up/kernel"] == "model=S(1)" and found["params/down"] == "model=S(0)"
    assert found["state/0/mu/up/kernel"] == "data=S(0) model=S(1)"


def test_names_in_flax_linen_models():
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
    model = nn.Dense(64, kernel_init=kernel)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 16)))

    def step(params, batch):
        gradient = jax.grad(lambda p: jnp.mean(model.apply(nn.unbox(p), batch) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradient)

    args = params, jax.ShapeDtypeStruct((32, 16), jnp.float32)
    assert pins("hidden:model", step=step, args=args) == {"params/params/kernel": "model=S(1)"}


def test_factored_moments_have_no_names():
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, ARGS[0])
    program = trace(lambda state, batch: jax.tree.map(lambda x: 2 * x, state), (state, ARGS[2]))
    assert all(len(leaf.dims) in (0, len(leaf.shape)) for leaf in program.inputs)


def test_all_faults_at_once():
    assert fault(md.Rules("batch:data hiden:model embed:dat", strict=True)) == [
        "rules: embed:dat: no axis 'dat' in the mesh; did you mean 'data'?",
        "rules: no array has a dim 'hiden'; did you mean 'hidden'?",
    ]


def test_two_dims_on_one_axis_show_the_tensor():
    both = "embed:data and hidden:data contradict; an axis splits one dim of a tensor"
    assert fault("embed:data hidden:data")[1] == f"rules: params/up float32[embed=16 hidden=64]: {both}"


def test_inside_two_dims_on_one_axis_show_the_line():
    with pytest.raises(DimError) as caught:
        pins(md.Rules(activations="batch:data hidden:data"))
    assert str(caught.value).splitlines()[0] == (
        "activations, [batch=32 hidden=64]: batch:data and hidden:data contradict; an axis splits one dim of a tensor"
    )
    assert 'md.dot(x, params["up"], over="embed")' in str(caught.value)


def test_uneven_dims_name_tensor_dim_and_axis():
    rows = fault("batch:data", args=(*ARGS[:2], struct("batch=6 embed=16")))
    assert rows[0].startswith("rules: batch float32[batch=6 embed=16]: dim batch of size 6 does not divide over data=4")


def test_named_dims_in_globs():
    assert fault("", layouts={"params/up": "model=S(hiden)"}) == [
        "layouts['params/up']: params/up float32[embed=16 hidden=64]: model=S(hiden): it has no dim 'hiden'; "
        "did you mean 'hidden'?"
    ]


@pytest.mark.parametrize(
    ("text", "why", "column"),
    [
        ("batch:data batch:model", "over several axes, major first, it is batch:(data,model)", 11),
        ("batch:data batch:data", "once is enough", 11),
        ("batch data", "dim:axis was expected", 0),
        ("batch:(data,data)", "an axis splits dim 'batch' twice", 6),
        ("batch:data hidden:", "dim:axis was expected", 11),
    ],
)
def test_text_that_is_no_table(text, why, column):
    with pytest.raises(NotationError) as caught:
        md.Rules.parse(text)
    assert why in str(caught.value)
    assert str(caught.value).splitlines()[2] == "  " + " " * column + "^"


def test_arguments_that_are_no_rules():
    with pytest.raises(ArgumentError, match="rules: 3 is an int, no layout rules"):
        md.parallelize(step, MESH, rules=3)
    with pytest.raises(ArgumentError, match="rules: 3 is an int, not layout rules"):
        md.Program(step, ARGS, rules=3)
