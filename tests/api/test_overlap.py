"""Plans chosen by the time with overlap: where hiding pays they differ, and they are never slower with overlap."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.api.overlap import overlap_windows
from meshdsl.errors import ArgumentError
from meshdsl.ir.solution import Prefetch
from meshdsl.layouts.topology import Link, Topology
from meshdsl.models import gpt
from meshdsl.planner.costs.reshard_cost import OverlapWindow
from meshdsl.trace import trace

SLOW = Topology("slow", 1e12, 1e12, 1e12, 1e10, 0.0, (Link(1e-4, 1e9),))
MESH = md.Mesh(data=2, topology=SLOW)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Products:
    """A second for every matrix product."""

    def compute_seconds(self, op):
        return float(op.name == "dot_general")


def found(step, *args):
    program = trace(step, args)
    return overlap_windows(program, Products()), program.graph


def test_a_window_is_what_is_computed_between_a_value_and_its_first_reader():
    def step(x, y, w):
        a = x @ w
        b = y @ y @ y
        return jnp.sum(jnp.tanh(a) + b), jnp.cos(a)

    spare, graph = found(step, array(4, 4), array(4, 4), array(4, 4))
    x, y, w = (v.id for v in graph.inputs)
    a, squared, cube = (op.outputs[0].id for op in graph.ops if op.name == "dot_general")
    assert [spare[v] for v in (x, w, y, a, squared, cube)] == [0, 0, 1, 2, 0, 0]


def test_a_loop_takes_and_stacks_slices_and_sends_one_trip_ahead():
    def step(ws, x):
        def layer(x, w):
            y = x @ x
            return y @ w @ w, y

        x, ys = jax.lax.scan(layer, x, ws)
        return x, ys @ x

    spare, graph = found(step, array(8, 4, 4), array(4, 4))
    (loop,) = (op for op in graph.ops if op.name == "scan")
    body = loop.bodies[0]
    first, second, third = (op.outputs[0].id for op in body.ops if op.name == "dot_general")
    ws, ys = loop.inputs[-1].id, loop.outputs[-1].id
    assert (spare[ws], spare[ys]) == (12, 12), "24 s of loop, half of which are over when a slice is needed or made"
    carry, w = (v.id for v in body.inputs)
    assert (spare[w], spare[carry]) == (1 + 3, 0), "a slice can be sent while the trip before runs, a carry cannot"
    assert (spare[first], spare[second], spare[third]) == (0, 0, 0)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_what_hides_costs_less_and_never_less_than_nothing(seconds, window, price):
    cost = float(OverlapWindow(window, price).seconds(np.array(seconds)))
    assert max(0.0, seconds - window) <= cost * (1 + 1e-12) and cost <= seconds * (1 + 1e-12)
    assert OverlapWindow(0.0, price).seconds(np.array(seconds)) == seconds
    assert OverlapWindow(window, 1.0).seconds(np.array(seconds)) == pytest.approx(seconds)


def late(x, y, v, w):
    """``w`` is there from the start and needed at the end; what is made of it is needed at once."""
    for _ in range(4):
        y = jnp.tanh(y @ v)
    return y, x @ w


PINS = {"y": "data=S(0)", "v": "data=B", "x": "data=B", "w": "data=S(0)"}
ARGS = array(8, 2048), array(4096, 512), array(512, 512), array(2048, 256)


def planned(overlap, args=ARGS, **more):
    made = md.parallelize(late, MESH, PINS, {"0": "data=S(0)", "1": "data=B"}, overlap=overlap, **more)
    return made.plan(*args)


def test_where_hiding_pays_the_larger_collective_is_taken():
    alone, beside = planned(False), planned(True)
    assert [c.kind for c in alone.collectives] == ["all-reduce"]
    assert [(c.kind, c.value) for c in beside.collectives] == [("all-gather", "w")]
    assert beside.bytes > 10 * alone.bytes and beside.seconds > alone.seconds
    compute = sum(span.seconds * span.trips for span in beside.spans)
    assert beside.simulated_seconds == pytest.approx(compute), "all of it is hidden"
    assert beside.simulated_seconds < alone.simulated_seconds - 1e-4
    assert beside.lower_bound == pytest.approx(alone.lower_bound) and beside.gap > alone.gap >= 0
    assert "chosen by simulated time with overlap, " in beside.notes[-1] and "overlap" not in str(alone.notes)


def test_the_same_step_has_the_same_plan_and_plans_under_other_pins_are_chosen_alike():
    assert planned(True) == planned(True)
    sharded = md.parallelize(late, MESH, PINS, {"0": "data=S(0)", "1": "data=B"}, overlap=True)
    sharded.plan(*ARGS)
    other = sharded.with_pins({"v": None}).plan(*ARGS)
    assert [(c.kind, c.value) for c in other.collectives] == [("all-gather", "w")]


def test_a_gather_for_which_there_is_no_memory_is_not_hidden():
    wide = array(8, 4096), array(512, 1024), array(1024, 1024), array(4096, 256)
    alone, beside = planned(False, wide), planned(True, wide)
    assert alone.memory < beside.memory
    short = planned(True, wide, memory=(alone.memory + beside.memory) / 2)
    assert short.collectives == alone.collectives and "is also the fastest found" in short.notes[-1]


@pytest.mark.sweep
def test_a_plan_is_never_slower_with_overlap_than_the_one_without():
    program = gpt.program(gpt.Config(2, 64, 4, seq=32, vocab=64), gpt.RULES["fsdp"], batch=16)
    mesh = md.Mesh(data=4, topology=SLOW)
    alone, beside = (
        md.parallelize(program.step, mesh, rules=program.rules, overlap=overlap).plan(*program.args)
        for overlap in (False, True)
    )
    assert beside.simulated_seconds <= alone.simulated_seconds * (1 + 1e-9)
    assert alone.seconds <= beside.seconds * (1 + 1e-9) and beside.lower_bound <= alone.seconds


def test_what_is_no_answer_is_refused():
    with pytest.raises(ArgumentError, match="overlap: 'yes' is none of 'off', 'prefetch', 'full', True, False"):
        md.parallelize(late, MESH, overlap="yes")
    with pytest.raises(ArgumentError, match=r"overlap: plan= runs a plan as it is, overlap=.* looks for another one"):
        md.parallelize(late, MESH, plan=planned(False), overlap=True)
    with pytest.raises(ArgumentError, match="overlap: 1 is none of 'off', 'prefetch', 'full', True, False"):
        md.Program(late, ARGS, overlap=1)


# ---- Loops that send ahead and behind --------------------------------------------------------------------------------

LAYERS = (6, 64, 256)
SHARDED = {"p/*": "data=S(1)", "x": "data=S(0)"}
LITTLE = 0.93e6  # bytes of memory, so that parameters are gathered in the loops


def layers(p, x):
    def layer(x, p):
        up, down = (md.constrain(w, "data=B") for w in p)
        return x + jnp.tanh(x @ up) @ down, None

    def loss(p):
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def layers_args():
    rng, (count, width, hidden) = np.random.default_rng(0), LAYERS
    shapes = (count, width, hidden), (count, hidden, width), (256, width)
    *p, x = (jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for shape in shapes)
    return tuple(p), x


def test_named_loops_prefetch_within_the_memory(tmp_path):
    args = layers_args()
    overlap = md.Overlap("prefetch", loops="test_overlap.py:*")
    sharded = md.parallelize(layers, "data=8", SHARDED, memory=LITTLE, donate_argnums=0, overlap=overlap)
    plan = sharded.plan(*args)
    forward, backward = plan.prefetched
    assert forward.ahead == ("p/0[i]", "p/1[i]") and forward.bytes == 2 * 64 * 256 * 4 and not forward.behind
    assert len(backward.behind) == 2 and backward.exposed <= backward.serial and plan.memory <= LITTLE
    assert "second buffer" in str(plan) and sharded.verify(*args) and sharded.check(*args)

    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.solution.prefetch == plan.solution.prefetch
    plain = replace(plan, solution=replace(plan.solution, prefetch={}), prefetched=())
    assert "loop 1, forward   none    ahead p/0[i], p/1[i]" in str(plain.diff(plan))
    wrong = replace(
        plan, solution=replace(plan.solution, prefetch={op: Prefetch((0,)) for op in plan.solution.prefetch})
    )
    with pytest.raises(md.PlanFileError, match="input 0 of its body cannot be sent ahead"):
        md.parallelize(layers, "data=8", SHARDED, memory=LITTLE, donate_argnums=0, plan=wrong).plan(*args)


def test_loops_are_prefetched_where_devices_can():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layers_args())
    for name, memory, loops in (("tpu-v5e", 0.65e6, 1), ("tpu-v6e", 0.65e6, 0), ("cpu", LITTLE, 0)):
        mesh = md.Mesh(data=8, topology=name)
        plan = md.parallelize(layers, mesh, SHARDED, memory=memory, donate_argnums=0, overlap="prefetch").plan(*shapes)
        assert any(c.trips == 6 for c in plan.collectives) and len(plan.prefetched) == loops, name
        assert all(loop.exposed < loop.serial and not loop.behind for loop in plan.prefetched)


def test_loops_that_are_not_there_and_memory_that_does_not_suffice():
    args = layers_args()

    def plan(loops, memory=LITTLE):
        overlap = md.Overlap("prefetch", loops)
        return md.parallelize(layers, "data=8", SHARDED, memory=memory, donate_argnums=0, overlap=overlap).plan(*args)

    with pytest.raises(
        ArgumentError, match=r"overlap: no loop at 'model.py:1' in layers; its loops are at: test_overlap"
    ):
        plan("model.py:1")
    with pytest.raises(md.MemoryLimitError, match="kB without; 760 kB allowed\nname fewer loops, or raise memory="):
        plan("*", 0.76e6)
    with pytest.raises(ArgumentError, match=r"mode: 'of' is none of 'off', 'prefetch', 'full'; did you mean 'off'"):
        md.Overlap("of")
    with pytest.raises(ArgumentError, match="loops: mode 'off' prefetches in no loop"):
        md.Overlap("off", loops="*")


def test_full_overlap_gathers_in_loops_instead_of_in_front_of_them():
    """In front of a loop nothing is computed, so that stacks gathered there as a whole are waited for."""
    wide, rows = jax.ShapeDtypeStruct((8, 4096, 16384), jnp.bfloat16), jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)
    args = (wide, jax.ShapeDtypeStruct((8, 16384, 4096), jnp.bfloat16)), rows

    def plan(overlap):
        mesh = md.Mesh(data=16, topology="tpu-v5e")
        return md.parallelize(layers, mesh, SHARDED, donate_argnums=0, overlap=overlap).plan(*args)

    serial, full = plan("prefetch"), plan("full")
    assert not serial.prefetched and any(c.kind == "all-gather" and c.trips == 8 for c in full.collectives)
    assert full.simulated_seconds < 0.95 * serial.simulated_seconds and full.memory < serial.memory
