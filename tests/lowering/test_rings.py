"""Products that run in parts beside the hops of a ring: numbers, bytes and counts are those that are planned."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.executable import Executable
from meshdsl.ir.prefetch import prefetchable
from meshdsl.ir.rings import chosen_rings
from meshdsl.layouts.topology import Link, Topology
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.numerics import check_numbers
from meshdsl.lowering.shardings import device_mesh
from meshdsl.lowering.verify import compare
from meshdsl.pins import UserPins
from meshdsl.plan.build import build_plan
from meshdsl.plan.prefetch import with_prefetch
from meshdsl.trace import trace
from tests.fuzz.wander import wander
from tests.rings import with_all_rings
from tests.sweeps import swept
from tests.trials import fast_options

BYTES = Topology("bytes", 1e12, 1e12, 1e12, 1e10, 0.0, (Link(1e-9, 1e9),))  # nothing but bytes costs anything
ALL = md.Overlap("prefetch", rings="*")


def arrays(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=shape) / 4, dtype) for shape in shapes)


def at(x, layout):
    return md.constrain(x, layout)


def sequence_parallel(p, x):
    """Gathered rows are a free dim of products, and the result is scattered over its rows; the gradients likewise."""
    q, k, v, o, w, u = p

    def loss(p, x):
        q, k, v, o, w, u = p
        whole = at(x, "data=S(0) model=B")
        heads = [at(jnp.einsum("sd,dhe->she", whole, y), "data=S(0) model=S(1)") for y in (q, k, v)]
        mixed = jnp.tanh(heads[0] * heads[1]) + heads[2]
        x = x + at(at(jnp.einsum("she,hed->sd", mixed, o), "data=S(0) model=P"), "data=S(0) model=S(0)")
        h = jnp.tanh(at(at(x, "data=S(0) model=B") @ w, "data=S(0) model=S(1)"))
        return jnp.mean((x + at(at(h @ u, "data=S(0) model=P"), "data=S(0) model=S(0)")) ** 2)

    value, grads = jax.value_and_grad(loss)((q, k, v, o, w, u), x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value


def forms(x, w, b, c, y):
    """Contracted, batch and several free dims, both operands, reductions behind a transpose and over a batch dim."""
    summed = at(at(x, "model=S(1)"), "model=B") @ at(w, "model=S(1)")
    right = jnp.einsum("jk,ij->ki", at(w, "model=S(1)"), at(at(x, "model=S(0)"), "model=B"))
    batch = jnp.einsum("bij,bjk->bik", at(at(b, "model=S(0)"), "model=B"), at(c, "model=S(2)"))
    parts = at(jnp.einsum("bij,bjk->bik", at(b, "model=S(2)"), at(c, "model=S(1)")), "model=P")
    turned = at(at(x, "model=S(1)") @ at(w, "model=S(0)"), "model=P").T
    return summed, at(right, "model=S(0)"), batch, at(parts, "model=S(0)"), at(turned, "model=S(0)"), jnp.sin(y)


def run(step, args, mesh, pins):
    """Plans, compiles and runs a step with all rings that there are; returns the rings, and their kinds by phase."""
    sharded = md.parallelize(step, md.Mesh.parse(mesh, BYTES), pins, overlap=ALL)
    plan = sharded.plan(*args)
    rings = [c for c in plan.collectives if c.ring]
    assert all(c.kind == "collective-permute" and c.reason.startswith("ring beside") for c in rings)
    assert sharded.verify(*args).equal and sharded.check(*args)
    return chosen_rings(trace(step, args).graph, plan.solution), Counter((c.ring, c.phase) for c in rings)


def test_rings_of_a_sequence_parallel_block_and_its_gradients():
    p = arrays((16, 8, 4), (16, 8, 4), (16, 8, 4), (8, 4, 16), (16, 64), (64, 16))
    pins = {"p/{0,1,2,4}": "data=B model=S(1)", "p/{3,5}": "data=B model=S(0)", "x": "data=S(0) model=S(0)"}
    (x,) = arrays((64, 16))
    rings, kinds = run(sequence_parallel, (p, x), "data=2,model=4", pins)
    assert kinds["all-gather", "forward"] == kinds["reduce-scatter", "forward"] == 2
    assert kinds["all-gather", "backward"] and kinds["reduce-scatter", "backward"]
    assert max(len(ring.products) for ring in rings) == 3, "queries, keys and values read one ring"
    assert any(ring.keeps for ring in rings), "the gradients of weights read the gathered copy later"


def test_every_form_of_a_product_over_a_ring_in_short_floats():
    args = arrays((32, 16), (16, 24), (16, 8, 8), (16, 8, 24), (8,), dtype=jnp.bfloat16)
    rings, _ = run(forms, args, "data=2,model=4", {})
    assert {ring.ways for ring in rings} == {1}
    assert [(ring.step.kind, ring.products[0].cut, ring.products[0].port) for ring in rings] == [
        ("all-gather", (1, 0, None), 0),  # contracted
        ("all-gather", (None, 0, 1), 1),  # a free dim of the right operand
        ("all-gather", (0, 0, 0), 0),  # a batch dim
        ("reduce-scatter", (0, 0, 0), None),  # over a batch dim
        ("reduce-scatter", (None, 1, 1), None),  # behind a transpose
    ]


@pytest.mark.parametrize("devices", [4, 6, 7])
def test_rings_both_ways_around_a_torus(devices):
    """Blocks arrive from both sides, and sums from both sides end here; one way is longer if the number is even."""

    def step(x, y, w, v):
        summed = at(at(x, "model=S(1)"), "model=B") @ at(w, "model=S(1)")
        rows = at(at(at(y, "model=S(0)"), "model=B") @ at(v, "model=S(1)"), "model=S(1)")
        scattered = at(at(at(x, "model=S(1)") @ at(w, "model=S(0)"), "model=P"), "model=S(0)")
        return summed, rows, scattered

    link = Link(1e-9, 1e9, devices=devices, torus=(devices,), ring=devices)
    mesh, n = md.Mesh(model=devices, topology=replace(BYTES, links=(link,))), 2 * devices
    args = arrays((2 * n, n), (2 * n, n), (n, 5 * n), (n, 3 * n))
    sharded = md.parallelize(step, mesh, overlap=ALL)
    rings = chosen_rings(trace(step, args).graph, sharded.plan(*args).solution)
    assert [(ring.step.kind, ring.ways) for ring in rings] == [("all-gather", 2)] * 2 + [("reduce-scatter", 2)]
    for ring in rings:
        assert sum(parts for _, parts in ring.schedule) == devices and sum(ring.reach) == ring.hops
        assert sum(passes for passes, _ in ring.schedule) == devices // 2 == ring.reach[0]
        assert ring.seconds * ring.hops == pytest.approx(devices // 2 * (1e-9 + ring.bytes / 0.5e9))
    assert sharded.verify(*args).equal and sharded.check(*args)


def test_a_product_that_reads_a_gathered_copy_twice_reads_it_whole():
    def step(x):
        rows = at(x, "model=S(0)")
        return at(jnp.einsum("mk,nk->mn", at(rows, "model=B"), rows), "model=B")

    rings, _ = run(step, arrays((512, 8)), "model=4", {})
    assert not rings


def test_rings_of_a_product_that_is_computed_again_run_again():
    def step(v, h, u):
        @jax.checkpoint
        def scattered(h, v):
            return jnp.tanh(at(at(h @ v, "model=P"), "model=S(0)"))

        return jax.value_and_grad(lambda v: jnp.sum(scattered(h, v) * u))(v)

    pins = {"v": "model=S(0)", "h": "model=S(1)", "u": "model=S(0)"}
    _, kinds = run(step, arrays((16, 16), (32, 16), (32, 16)), "model=4", pins)
    assert kinds["reduce-scatter", "forward"] == 1 < sum(kinds.values())


def layers(p, x):
    """Loops over recomputed layers, whose parameters are gathered over one axis and whose rows over the other."""

    def layer(x, p):
        w, v = p
        h = jnp.tanh(x @ w)
        return x + h @ v, jnp.sum(h, 0)

    def loss(p):
        y, sums = jax.lax.scan(jax.checkpoint(layer), x, p)
        return jnp.mean(y**2) + 0.001 * jnp.sum(sums)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value


PLANS = [("data=2,model=4", 3), ("data=2,model=2,expert=2", 5)]


@swept(("mesh", "seed"), PLANS, ids=[mesh for mesh, _ in PLANS], every=2)
def test_random_plans_of_loops_with_all_rings_beside_prefetch(mesh, seed):
    mesh, args = md.Mesh.parse(mesh), (arrays((5, 16, 32), (5, 32, 16)), *arrays((16, 16)))
    program = trace(layers, args)
    pins = UserPins({}).resolve(program, mesh)
    solution = wander(program, mesh, pins, np.random.default_rng(seed))
    ahead = with_prefetch(program, solution, prefetchable(program.graph, solution), pins.donated)
    ringed = with_all_rings(program, ahead)
    assert ringed.rings
    plain, made = (
        Executable(program, build_plan(program, each, pins), device_mesh(mesh)) for each in (solution, ringed)
    )
    before, after = (each.lowered.compile(compiler_options=fast_options()) for each in (plain, made))
    placed = [jax.device_put(x, at) for x, at in zip(jax.tree.leaves(args), plain.shardings, strict=True)]
    check_numbers(before(*placed), after(*placed), [leaf.path for leaf in program.outputs])
    lines = compare(made.plan.collectives, compiled_collectives(after.as_text(), mesh), mesh).lines
    assert not [line for line in lines if line.compiled > line.planned + line.slack or line.compiled_runs > line.runs]
    assert any(line.kind == "collective-permute" for line in lines)
