import re
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from math import inf
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.api.remat import Means, ResidualCosts, Rung, plan_residuals
from meshdsl.ir.graph import walk
from meshdsl.ir.rewrite import value_ids
from meshdsl.lowering import program
from meshdsl.pins import UserPins
from meshdsl.planner.solve import solve
from meshdsl.recomputation import recomputing
from meshdsl.recomputation.hosting import hostable
from meshdsl.recomputation.levels import recomputable
from meshdsl.recomputation.loop_parts import MixedChoice, dividing, loop_families
from meshdsl.recomputation.min_cut import RematChoice
from meshdsl.trace import trace
from meshdsl.util.runtime import Deadline
from tests.recomputation.steps import SINES, sines
from tests.sweeps import swept

MESH = md.Mesh(data=4, model=2)
LAYERS, WIDTH = 5, 64


def layer(x, weights):
    up, down = weights
    return x + jnp.tanh(jax.nn.gelu(x @ up) @ down)


def updated(loss, weights):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def unrolled(weights, x):
    def loss(weights):
        y = x
        for i in range(LAYERS):
            y = layer(y, [w[i] for w in weights])
        return (y**2).mean()

    return updated(loss, weights)


def scanned(weights, x):
    return updated(lambda weights: (jax.lax.scan(lambda y, w: (layer(y, w), None), x, weights)[0] ** 2).mean(), weights)


def sharded(step, **options):
    return md.parallelize(step, MESH, {"x": "data=S(0)"}, donate_argnums=0, **options)


@pytest.fixture(scope="module")
def args():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (LAYERS, WIDTH, 2 * WIDTH), (LAYERS, 2 * WIDTH, WIDTH), (4096, WIDTH)
    up, down, x = (0.1 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return (up, down), x


@swept(("step", "share"), [(unrolled, 0.55), (scanned, 0.4), (scanned, 0.35)], kept=((scanned, 0.35),))
def test_the_compiled_step_recomputes_what_the_plan_says(step, share, args, tmp_path):
    free = sharded(step).plan(*args)
    small = sharded(step, memory=share * free.memory, remat="auto")
    plan = small.plan(*args)
    assert plan.memory <= share * free.memory and plan.recomputation.values
    assert bool(plan.recomputation.divided) == (share == 0.35)
    for found, wanted in zip(jax.tree.leaves(small(*copies(args))), jax.tree.leaves(step(*args)), strict=True):
        assert jnp.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    held = small.verify(*args).held
    assert held.compiled_flops == held.flops
    assert held.compiled_memory == pytest.approx(held.memory, rel=0.1)
    small.check(*args)

    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and sharded(step, plan=loaded).plan(*args) == plan

    first, again, rest, last = plan.waterfall
    assert (first.bytes, first.seconds) == plan.recomputation.fastest
    assert first.bytes + again.bytes + rest.bytes == last.bytes == plan.memory
    assert "computed again" in str(plan)
    assert ("last 2 of 5 iterations" in str(plan)) == (share == 0.35)


def copies(args):
    return jax.tree.map(jnp.copy, args)


def test_where_everything_fits_values_are_computed_again_only_if_that_is_faster(args):
    free, again = sharded(scanned).plan(*args), sharded(scanned, remat="auto").plan(*args)
    assert again.seconds < 0.95 * free.seconds and again.recomputation.values
    assert again.recomputation.fastest == (free.memory, free.seconds)
    small = chain_shapes(256, 256)
    free, plan = sharded(chain).plan(*small), sharded(chain, remat="auto").plan(*small)
    assert (plan.seconds, plan.recomputation) == (free.seconds, None)
    assert any(note.startswith("nothing is computed again") for note in plan.notes)


@pytest.mark.parametrize("remat", ["off", "replace"])
def test_references_are_read_in_their_order(remat):
    def step(w, x):
        def loss(w):
            kept, total = jax.new_ref(w), 0.0
            for k in (2.0, 3.0):
                total += (jax.checkpoint(jnp.sin)(x @ w) * kept[...].sum()).mean()
                kept[...] = k * w
            return total

        return w - jax.grad(loss)(w)

    args = jnp.linspace(0, 1, 64).reshape(8, 8), jnp.linspace(-1, 1, 128).reshape(16, 8)
    found = md.parallelize(step, "data=8", {"x": "data=S(0)", "w": "data=B"}, remat=remat)(*args)
    assert jnp.allclose(found, jax.jit(step)(*args), rtol=1e-5)


class Chosen(NamedTuple):
    seconds: float
    spare: float
    least: float = inf


@swept(("host", "all_pairs"), [(False, False), (False, True), (True, False)], kept=((False, False),))
def test_more_memory_is_never_slower_and_finds_the_fastest_of_all_choices(host, all_pairs):
    def step(w, x):
        def loss(w):
            return (jax.lax.scan(lambda y, w: (jnp.sin(jnp.tanh(y @ w)), None), x, w)[0] ** 2).mean()

        return updated(loss, w)

    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    mesh, user_pins = md.Mesh(data=4, topology="cpu"), UserPins({"x": "data=S(0)", "w": "data=B"})
    traced, found, plans = trace(step, shapes), {}, {}
    ops, values = recomputable(traced), hostable(traced.graph) if host else ()

    def planned(choice):
        if choice.rewrite not in found:
            if isinstance(choice, MixedChoice):
                divided = dividing(traced, dict(choice.trips))
                made = recomputing(divided.program, *divided.rewrite(choice)).program
            else:
                made = recomputing(traced, *choice.rewrite).program
            operations = tuple((op.name, op.params.get("length"), *value_ids(op.inputs)) for _, op in walk(made.graph))
            if operations not in plans:  # choices that differ in what nothing reads make one program
                plans[operations] = solve(made, mesh, user_pins.resolve(made, mesh), inf), choice
            found[choice.rewrite] = plans[operations][0]
        return found[choice.rewrite].seconds, found[choice.rewrite].peak.bytes

    def within(limit, choice):
        seconds, size = planned(choice)
        return Chosen(seconds if size <= limit else inf, limit - size, size)

    nothing = frozenset()
    every = [
        planned(RematChoice(again, nothing, nothing, again, sent)) for again in subsets(ops) for sent in subsets(values)
    ]
    free, least = found[nothing, nothing, nothing], min(size for _, size in every)
    if not host:
        choices, (family,) = [choice for _, choice in plans.values()], loop_families(traced.graph)
        some = choices if all_pairs else choices[:: len(choices) // 6]
        loops = [((*family.forward, k),) for k in range(2, family.length - 1)]
        every += [planned(MixedChoice(*pair, trips)) for pair in permutations(some, 2) for trips in loops]
    costs = ResidualCosts.of(free, 0.0, Means(recompute=True, host=host))
    for limit in (2 * free.peak.bytes, *(least + k / 8 * (free.peak.bytes - least) for k in reversed(range(8)))):
        best = plan_residuals(costs, free.peak.bytes - limit, limit, partial(within, limit), Deadline(None))
        fastest = min(seconds for seconds, size in every if size <= limit)
        assert best.seconds <= fastest * (1 + 1e-9)


def test_values_that_pay_at_one_price_are_sent_one_by_one_as_far_as_there_is_room():
    def step(w, x):
        def loss(w):
            return (jax.lax.scan(lambda y, w: (jnp.sin(jnp.tanh(y @ w)), None), x, w)[0] ** 2).mean()

        return jax.grad(loss)(w)

    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    traced, mesh = trace(step, shapes), md.Mesh(data=4, topology="cpu")
    free = solve(traced, mesh, UserPins({"x": "data=S(0)", "w": "data=B"}).resolve(traced, mesh), inf)
    costs = ResidualCosts.of(free, 0.0, Means(recompute=False, host=True))
    sent = [len(rung.choice.hosted) for rung in costs.ladder()]
    assert sent == list(range(1, len(sent) + 1)) and len(sent) > 2
    (size,) = {costs.held[v] for v in costs.ladder()[-1].choice.hosted}
    assert max(len(rung.choice.hosted) for rung in replace(costs, room=2.5 * size).ladder()) == 2


def subsets(ids):
    return [frozenset(some) for n in range(len(ids) + 1) for some in combinations(sorted(ids), n)]


def test_a_rung_is_tried_although_the_one_above_takes_all_the_room_there_is():
    class Costs:
        """Three choices, known by one operation each, that save 100, 200 and 300 bytes."""

        def ladder(self):
            return [Rung(RematChoice(*[frozenset({i})] * 4), float(i)) for i in range(3)]

        def saved(self, choice):
            return 100 * (1 + min(choice.ops))

        def seconds(self, choice):
            return 1.0

        def choice(self, price, kept, sent):
            return self.ladder()[1].choice

        again, held, results = dict.fromkeys(range(3), 0.0), {}, {}

    plans = Chosen(inf, -inf), Chosen(2.0, 5), Chosen(9.0, 1)
    found = plan_residuals(Costs(), 210, 790, lambda choice: plans[min(choice.ops)], Deadline(None))
    assert found.seconds == 2


@pytest.mark.parametrize(("short", "again"), [(5, {0}), (15, {1}), (105, {0, 1})])
def test_a_rung_that_just_does_not_fit_is_emptied(short, again):
    class Costs:
        """Two choices far apart, of which one keeps three values and the other none."""

        held, again, results = {0: 10, 1: 100, 2: 100}, {0: 1.0, 1: 5.0, 2: 6.0}, {v: (v,) for v in range(3)}

        def choice(self, price, kept=frozenset(), sent=None):
            ops = frozenset(self.held) - kept
            return RematChoice(ops, kept, frozenset(), ops)

        def ladder(self):
            return [Rung(self.choice(0.0, frozenset(self.held)), 0.0), Rung(self.choice(1.0), 1.0)]

        def saved(self, choice):
            return 1210 - sum(self.held[v] for v in choice.kept)

        def seconds(self, choice):
            return sum(self.again[op] for op in choice.ops)

    def planned(choice):
        """Returns a plan that leaves nothing, as plans fill the room that there is."""
        size = 1000 + sum(costs.held[v] for v in choice.kept)
        return Chosen(100 + costs.seconds(choice), 0) if size + short <= 1210 else Chosen(inf, -inf, size)

    costs = Costs()
    found = plan_residuals(costs, 1000 + short, 1210 - short, planned, Deadline(None))
    assert found.seconds == 100 + sum(costs.again[op] for op in again)


def test_where_nothing_fits_the_error_says_the_least_with_recomputation():
    def step(w, x):
        def loss(w):
            y = jax.lax.stop_gradient(x @ w)
            y = jax.experimental.io_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
            return (jnp.sin(y * (x @ w)) ** 2).mean()

        return w - jax.grad(loss)(w)

    with pytest.raises(md.MemoryLimitError) as caught:
        md.parallelize(step, "data=8", memory="2kB", remat="auto").plan(jnp.ones((16, 16)), jnp.ones((64, 16)))
    first, *_, but_one, last = str(caught.value).splitlines()
    assert first.startswith("no plan fits memory=2 kB per device; the least ")
    assert but_one == "that is with activations computed again (remat='auto'); a plan that keeps them all needs more"
    assert "jax.checkpoint" not in str(caught.value)
    assert re.fullmatch(r"io_callback at test_remat.py:\d+ has effects and runs once: its results are kept", last)
    with pytest.raises(md.MemoryLimitError, match="use more devices, a smaller batch, or raise memory="):
        md.parallelize(jnp.sin, "data=8", memory="1B", remat="auto").plan(jnp.ones(8))


def test_remat_is_a_word():
    with pytest.raises(
        md.ArgumentError, match="remat: 'atuo' is not 'off' or 'auto' or 'replace'; did you mean 'auto'"
    ):
        sharded(scanned, remat="atuo")
    with pytest.raises(md.ArgumentError, match=r"remat: 'replaced' is not .*; did you mean 'replace'"):
        sharded(scanned, remat="replaced")
    with pytest.raises(md.ArgumentError, match="remat: True is not 'off' or 'auto' or 'replace'"):
        md.Program(scanned, (), remat=True)


def test_replace_plans_the_step_as_if_it_had_no_checkpoint(tmp_path):
    def step(mark):
        once = mark(lambda x, w: jax.nn.gelu(jnp.sin(x @ w)))
        run = lambda weights, x: jax.lax.scan(lambda x, w: (once(x, w), None), x, weights)[0]  # noqa: E731
        return lambda weights, x: updated(lambda weights: (run(weights, x) ** 2).mean(), weights)

    kept = jax.checkpoint_policies.dots_saveable
    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (4, 64, 64)) / 8, jax.random.normal(keys[1], (256, 64))
    checkpointed = step(partial(jax.checkpoint, policy=kept))
    replacing = partial(md.parallelize, checkpointed, "data=4,model=2", {"x": "data=S(0)"})
    plan = replacing(remat="replace").plan(*args)
    plain = md.parallelize(step(lambda f: f), "data=4,model=2", {"x": "data=S(0)"}, remat="auto")
    free = plain.plan(*args)
    assert (plan.seconds, plan.memory) == pytest.approx((free.seconds, free.memory), rel=1e-9)
    assert plan.recomputation.values and not plan.checkpoints and free.checkpoints
    assert any(note.startswith("jax.checkpoint is taken out (remat='replace'): test_remat.py:") for note in plan.notes)

    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    again = replacing(plan=loaded)
    assert loaded == plan and again.plan(*args) == plan
    assert not again.with_pins({"weights": "model=S(2)"}).plan(*args).checkpoints
    found = again(*args)
    assert jnp.array_equal(found, plain(*args))
    assert jnp.allclose(found, jax.jit(checkpointed)(*args), rtol=1e-5, atol=1e-6)
    assert md.parallelize(plain.step, "data=4,model=2", {"x": "data=S(0)"}, remat="replace").plan(*args) == free


@swept("part", [0.98, 0.9], kept=(0.9,))
def test_a_limit_at_which_only_other_values_live_finds_a_plan(part):
    """The residuals do not live where the plan that keeps everything exceeds the limit."""
    free = md.parallelize(sines, "data=4", md.data_parallel()).plan(*SINES)
    limit = part * free.memory
    plan = md.parallelize(sines, "data=4", md.data_parallel(), memory=limit, remat="auto").plan(*SINES)
    assert plan.memory <= limit and plan.recomputation.values


def chain(params, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.sin(jnp.tanh(jnp.cos(y @ w) @ w))
        return jnp.mean(y**2)

    return updated(loss, params)


def chain_shapes(rows, width):
    return [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 3, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def test_other_pins_are_planned_with_recomputation_too():
    args = chain_shapes(1024, 256)
    limit = md.parallelize(chain, "data=4").plan(*args).memory
    free = md.parallelize(chain, "data=4", memory=limit, remat="auto")
    assert not free.plan(*args).recomputation
    whole = free.with_pins({"x": "data=B"}).plan(*args)
    assert whole.recomputation and whole.memory <= limit


def test_a_time_limit_leaves_recomputation_where_nothing_else_fits():
    args = chain_shapes(2048, 64)
    limit = 0.75 * md.parallelize(chain, "data=4").plan(*args).memory
    plan = md.parallelize(chain, "data=4", memory=limit, remat="auto", time_limit=1e-6).plan(*args)
    assert plan.recomputation and plan.memory <= limit


def test_a_note_says_that_the_time_limit_was_up_before_recomputation_was_tried():
    args = chain_shapes(256, 256)
    limit = 0.9 * sharded(chain).plan(*args).memory
    plan = sharded(chain, memory=limit, remat="auto", time_limit=1e-6).plan(*args)
    why = "the time limit was up before recomputation was tried"
    assert f"nothing is computed again: {why} (remat='auto')" in plan.notes


def test_random_numbers_are_computed_again_where_their_key_is_kept(monkeypatch):
    def step(params, x, keys, raw):
        def loss(params):
            y = x
            for w, key in zip(params, (keys[0], jax.random.wrap_key_data(raw), keys[1]), strict=True):
                y = jnp.tanh(y @ w) * jax.random.uniform(key, x.shape)
            return jnp.mean(y**2)

        return updated(loss, params)

    keys = jax.random.split(jax.random.key(0))
    args = [0.1 * jnp.ones((64, 64))] * 3, jnp.ones((2048, 64)), keys, jax.random.key_data(jax.random.key(1))
    free = md.parallelize(step, "data=4", md.data_parallel())
    limit = 0.7 * free.plan(*args).memory
    again = md.parallelize(step, "data=4", md.data_parallel(), memory=limit, remat="auto")
    plan = again.plan(*args)
    assert plan.recomputation
    once, twice = (each.lower(*args).compile().as_text().count(" xor(") for each in (free, again))
    assert twice > 1.5 * once
    again.check(*args)

    monkeypatch.setattr(program, "_DROP_BARRIERS", ())
    held = md.parallelize(step, "data=4", md.data_parallel(), plan=plan)
    assert re.search(r"optimization_barrier.*ui32", held.lower(*args).as_text())
