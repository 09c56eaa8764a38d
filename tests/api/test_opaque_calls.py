"""Calls without a rule: the same everywhere and named in the plan, run once, or refused with a way out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, PartitionSpec

import meshdsl as md
from meshdsl.errors import RuleError, TraceError
from tests.api.test_jit_semantics import same

MESH = md.Mesh(data=4, model=2)
LAYOUTS = {"x": "data=S(0)"}
X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
W = np.full((8, 8), 0.1, np.float32)


def planned(step, *args):
    """The step over 8 devices, compared with ``jax.jit``; its collectives are those of the plan."""
    sharded = md.parallelize(step, MESH, LAYOUTS)
    same(sharded(*args), jax.jit(step)(*args))
    sharded.verify(*args)
    return sharded.plan(*args)


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (mesh, jnp.sin, args[0].sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)


def kernel(x):
    def double(source, target):
        target[...] = source[...] * 2

    return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def numpy_sine(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def double_first(x):
    ref = jax.new_ref(x)
    ref[0] = ref[1] * 2
    return ref[...]


OPAQUE = {
    "pallas_call": kernel,
    "pure_callback": numpy_sine,
    "new_ref": double_first,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_the_same_everywhere(name):
    def step(x, w):
        return jnp.sum(OPAQUE[name](x @ w) * x)

    notes = planned(step, X, W).notes
    assert any(note.startswith(f"replicated: no rule for {name} at test_opaque_calls.py:") for note in notes)


def test_prints_are_made_once(capfd):
    def step(x):
        jax.debug.print("the sum is {}", jnp.sum(x).astype(int))
        return x * 2

    plan = planned(step, jnp.arange(8.0))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the sum is 28") == 2  # ours, and that of jax.jit
    assert plan.notes == (
        f"once, on the first device: debug_print at test_opaque_calls.py:{step.__code__.co_firstlineno + 1}",
    )


@pytest.mark.parametrize("ordered", [False, True])
def test_effects_happen_once_per_trip(ordered):
    heard = []

    def step(x):
        def body(carry, row):
            io_callback(lambda i, r: heard.append((int(i), r.shape)), None, carry, row, ordered=ordered)
            jax.debug.callback(lambda r: heard.append(r.shape), row)
            return carry + 1, row * 2

        return jax.lax.scan(body, jnp.int32(0), x)

    sharded = md.parallelize(step, MESH, {"x": "data=S(1)"})
    same(sharded(X), (np.int32(8), jnp.asarray(X * 2)))
    jax.effects_barrier()
    assert sorted(map(str, heard)) == sorted([*(f"({i}, (8,))" for i in range(8)), *["(8,)"] * 8])
    if ordered:
        assert [i for i, _ in (h for h in heard if len(h) == 2)] == list(range(8))


def test_callbacks_in_bodies_of_every_kind():
    """In scans, in while loops and their conditions, in branches; host calls see whole arrays there as well."""
    heard = []

    def told(x):
        jax.debug.callback(lambda y: heard.append(y.shape), x)
        return numpy_sine(x)

    def step(x):
        in_scan, _ = jax.lax.scan(lambda c, i: (told(c) + i, None), x, jnp.arange(2.0))
        in_while = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, told(s[1])), (0, x))[1]
        asked = jax.lax.while_loop(
            lambda s: (s[0] < 2) & (told(s[1]).sum() < 1e9), lambda s: (s[0] + 1, s[1] * 2), (0, x)
        )[1]
        in_branch = jax.lax.cond(x[0, 0] < 9.0, told, lambda y: y + 1, x)
        return in_scan, in_while, asked, in_branch

    sharded = md.parallelize(step, MESH, LAYOUTS)
    assert sharded.verify(X).equal
    heard.clear()
    same(sharded(X), jax.jit(step)(X))
    jax.effects_barrier()
    assert heard == [X.shape] * 2 * (2 + 2 + 3 + 1)  # ours, and those of jax.jit


class Counter:
    """Every call gives the next number, in all kinds of dtypes, beside what it was called with."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * np.float32(self.calls), self.calls % 2 == 0, np.complex64(1j * self.calls)

    def ask(self, x, ordered):
        kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype), *(jax.ShapeDtypeStruct((), t) for t in (bool, np.complex64))]
        made, even, number = io_callback(self, tuple(kinds), x, ordered=ordered)
        return jnp.where(even, made, -made), number.imag


def asked_once(ask, x, w):
    made, number = ask(x @ w)
    return made @ w + number


def asked_for_a_gradient(ask, x, w):
    made, number = ask(x @ w)
    return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w) * made) * number)(w)


def asked_in_a_loop(ask, x, w):
    def body(carry, row):
        made, number = ask(row + carry)
        return jnp.tanh(made) * number, made

    return jax.lax.scan(body, x[0], x)


def asked_in_a_branch(ask, x, w):
    return jax.lax.cond(x.sum() < w.sum() + 99, lambda x: ask(x)[0] @ w, lambda x: x, x)


def asked_while(ask, x, w):
    return jax.lax.while_loop(lambda s: s[1] < 3, lambda s: ask(s[0] @ w), (x, jnp.float32(0)))


ASKED = [asked_once, asked_for_a_gradient, asked_in_a_loop, asked_in_a_branch, asked_while]


@pytest.mark.parametrize("step", ASKED)
@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_call_returns_is_fetched_once(step, ordered):
    ours, plain = Counter(), Counter()
    sharded = md.parallelize(lambda x, w: step(partial(ours.ask, ordered=ordered), x, w), MESH, LAYOUTS)
    expected = jax.jit(lambda x, w: step(partial(plain.ask, ordered=ordered), x, w))(X, W)
    same(sharded(X, W), expected)
    assert ours.calls == plain.calls > 0
    sharded.verify(X, W)
    (note,) = sharded.plan(X, W).notes
    assert note.startswith("once, on the first device: io_callback at test_opaque_calls.py:")


def test_what_cannot_run_inside_a_step():
    def step(x):
        jax.debug.print("{}", x, ordered=True)
        jax.debug.callback(print, x, ordered=True)
        return x

    at = step.__code__.co_firstlineno
    with pytest.raises(TraceError) as caught:
        md.parallelize(step, MESH).plan(X)
    ordered = "is ordered, which jax does on one device only; leave ordered=True out"
    assert str(caught.value).splitlines() == [
        "step cannot be planned:",
        f"  debug_print at test_opaque_calls.py:{at + 1}: {ordered}",
        f"  debug_callback at test_opaque_calls.py:{at + 2}: {ordered}",
    ]


def test_what_says_nothing_of_a_plan_or_differs_between_devices_is_refused():
    def step(x):
        jax.debug.inspect_array_sharding(x, callback=print)
        return x + jax.lax.rng_uniform(0.0, 1.0, (8, 8))

    at = step.__code__.co_firstlineno
    with pytest.raises(TraceError) as caught:
        md.parallelize(step, MESH).plan(X)
    assert str(caught.value).splitlines() == [
        "step cannot be planned:",
        f"  inspect_sharding at test_opaque_calls.py:{at + 1}: shows the sharding that a compiler chose; "
        "those of a planned step are in its plan: print(sharded.plan(...))",
        f"  rng_uniform at test_opaque_calls.py:{at + 2}: draws other numbers on every device; "
        "use jax.random.uniform and a key",
    ]


def mapped(x):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(jnp.sin, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")))(x)


def printed(x):
    jax.debug.print("{}", x)
    return x


UNRULED = {
    "shard_map": (
        mapped,
        "mapped calls shard_map, which partitions arrays itself; a function with a rule is given blocks",
    ),
    "custom_partitioning": (partitioned, "calls custom_partitioning, which partitions arrays itself"),
    "print": (printed, r"printed has effects \(a print, a callback\), so it cannot have a rule"),
}


@pytest.mark.parametrize("name", UNRULED)
def test_what_no_rule_can_speak_for(name):
    function, said = UNRULED[name]
    with pytest.raises(RuleError, match=said):
        md.parallelize(lambda x: md.rule("a b -> a b")(function)(x).sum(), MESH).plan(X)


def nested_loops(x, w):
    def body(carry, row):
        carry = jax.lax.cond(row.sum() > 1.0, lambda c: c @ w, lambda c: c * 2, carry)
        branches = [jnp.sin, jnp.cos, jnp.tanh]
        carry = jax.lax.fori_loop(0, 3, lambda i, c: jax.lax.switch(i, branches, c), carry)
        return carry, jax.lax.scan(lambda a, b: (a + b, a), row, carry)[1].sum()

    return jax.lax.scan(body, x, x)


def conditional_gradient(x, w):
    def loss(x):
        def body(c, r):
            return jax.lax.cond(r.sum() > 1.0, lambda c: jnp.tanh(c @ w), lambda c: c * 2, c), None

        return jnp.sum(jax.lax.scan(body, x, x)[0])

    return jax.grad(loss)(x)


def layer(w, x):
    return jnp.tanh(checkpoint_name(x @ w, "product"))


def twice_remat(policy):
    def loss(w, x):
        again = jax.checkpoint(layer, policy=policy)
        return jnp.sum(jax.lax.scan(lambda x, w: (again(w, x), None), again(w, x), jnp.stack([w, w]))[0])

    return lambda x, w: jax.value_and_grad(loss)(w, x)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def scaled(x, i, n, nothing=None):
    return x * i * n


def _scaled_forward(x, i, n, nothing=None):
    return scaled(x, i, n), i


def _scaled_backward(n, i, g):
    return g * i * n * 2, np.zeros(i.shape, jax.dtypes.float0), None  # twice the truth, to be seen


scaled.defvjp(_scaled_forward, _scaled_backward)


@jax.custom_jvp
def times(x, i):
    return x * i


@times.defjvp
def _times_jvp(primals, tangents):
    return times(*primals), tangents[0] * primals[1] * 3


POLICIES = jax.checkpoint_policies
INSIDE = {
    "nested loops": nested_loops,
    "a while loop": lambda x, w: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ w), (0, x)),
    "conditional gradient": conditional_gradient,
    "custom_vjp": lambda x, w: jax.grad(lambda x: jnp.sum(scaled(x @ w, jnp.arange(8), 3, None)))(x),
    "custom_jvp": lambda x, w: jax.value_and_grad(lambda x: jnp.sum(times(x @ w, jnp.arange(8))))(x),
    "barrier": lambda x, w: jax.lax.optimization_barrier((x @ w, x.sum(), 3)),
    "save nothing": twice_remat(POLICIES.nothing_saveable),
    "save products": twice_remat(POLICIES.dots_with_no_batch_dims_saveable),
    "save names": twice_remat(POLICIES.save_only_these_names("product")),
    "save others": twice_remat(POLICIES.save_anything_except_these_names("product")),
    "offload names": twice_remat(
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["product"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_read_into(name):
    notes = planned(INSIDE[name], X, W).notes
    assert [note for note in notes if not note.startswith("device_put")] == []
