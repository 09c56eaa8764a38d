"""Loops that send ahead and behind compute the same, and send as much as loops that send where they need it."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.api.executable import Executable
from meshdsl.ir.prefetch import pipelined_loops, prefetchable
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.numerics import check_numbers
from meshdsl.lowering.shardings import device_mesh
from meshdsl.lowering.verify import compare
from meshdsl.pins import UserPins
from meshdsl.plan.build import build_plan
from meshdsl.plan.prefetch import peak_of, with_prefetch
from meshdsl.trace import trace
from tests.fuzz.wander import wander
from tests.sweeps import swept
from tests.trials import fast_options

MESH = md.Mesh(data=4, model=2)
LAYERS, WIDTH = 5, 16


def layer(x, p):
    w, v, b = p
    h = jnp.tanh(x @ w + b)
    return x + h @ v, jnp.sum(h)


def layers(layer, reverse=False):
    def step(p, e, x):
        def loss(p, e):
            y, sums = jax.lax.scan(layer, x @ e, p, reverse=reverse)
            return jnp.mean(y**2) + 0.001 * jnp.sum(sums)

        loss, grads = jax.value_and_grad(loss, (0, 1))(p, e)
        return *jax.tree.map(lambda a, b: a - 0.1 * b, (p, e), grads), loss

    return step


def microbatches(p, e, x):
    """A loop of loops."""

    def one(total, x):
        new = layers(jax.checkpoint(layer))(p, e, x)[:2]
        return jax.tree.map(jnp.add, total, new), None

    return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, (p, e)), x.reshape(4, -1, WIDTH))[0]


def arrays(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape) / 4, dtype) for shape in shapes]


def args(length=LAYERS, rows=16):
    *p, e, x = arrays((length, WIDTH, WIDTH), (length, WIDTH, WIDTH), (length, WIDTH), (WIDTH, WIDTH), (rows, WIDTH))
    return tuple(p), e, x


def both(step, args, seed, mesh=MESH):
    """Executables of a plan at random, and of the same with all that loops can send ahead and behind."""
    program = trace(step, args)
    pins = UserPins({}).resolve(program, mesh)
    solution = wander(program, mesh, pins, np.random.default_rng(seed))
    chosen = prefetchable(program.graph, solution)
    solutions = solution, with_prefetch(program, solution, chosen, pins.donated)
    return chosen, [Executable(program, build_plan(program, each, pins), device_mesh(mesh)) for each in solutions]


def sent(compiled, mesh):
    found = Counter()
    for c in compiled_collectives(compiled.as_text(), mesh):
        found[c.kind, c.axes] += c.bytes * c.trips
    return found


def check_equal(step, args, seed, mesh=MESH):
    """Compiles and runs both, and returns what is sent ahead and behind."""
    chosen, (plain, ahead) = both(step, args, seed, mesh)
    assert chosen
    before, after = (each.lowered.compile(compiler_options=fast_options()) for each in (plain, ahead))
    placed = [jax.device_put(x, at) for x, at in zip(jax.tree.leaves(args), plain.shardings, strict=True)]
    check_numbers(before(*placed), after(*placed), [leaf.path for leaf in plain.program.outputs])
    lines = compare(ahead.plan.collectives, compiled_collectives(after.as_text(), mesh), mesh).lines
    assert not [line for line in lines if line.compiled > line.planned + line.slack]
    least = sent(before, mesh)  # plans at random also send what nobody needs, which compilers drop
    assert not least - sent(after, mesh)
    return chosen


STEPS = {
    "layers": (layers(layer), args()),
    "reverse": (layers(layer, reverse=True), args()),
    "recomputed": (layers(jax.checkpoint(layer)), args()),
    "loop of loops": (microbatches, args(4, 64)),
}


@swept("name", STEPS, kept=("layers", "recomputed"))
def test_numbers_and_bytes_are_those_of_the_plain_loop(name):
    chosen = check_equal(*STEPS[name], seed=4)
    assert any(each.ahead for each in chosen.values()) and any(each.behind for each in chosen.values())


def test_short_loops_are_left_as_they_are():
    lengths = {n: both(layers(layer), args(n), 0)[0] for n in (1, 2, 3, 4)}
    assert not lengths[1] and not lengths[2]
    assert all(not (each.ahead and each.behind) for each in lengths[3].values()) and lengths[3]
    assert any(each.ahead and each.behind for each in lengths[4].values())


def test_keys_that_a_loop_reads_and_integers_that_it_stacks():
    def step(w, keys, x):
        def layer(x, p):
            w, key = p
            x = jnp.tanh(x @ w) + 0.1 * jax.random.normal(key, x.shape)
            return x, jnp.argmax(x, 1)

        return jax.lax.scan(layer, x, (w, keys))

    w, x = arrays((6, WIDTH, WIDTH), (16, WIDTH))
    given = w, jax.random.split(jax.random.key(3), 6), x
    check_equal(step, given, seed=1)


def test_a_loop_whose_last_carry_is_dropped_sends_nothing_ahead_if_its_body_sends_more():
    """Behind the loop, compilers would drop what only that carry needs."""

    def step(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), jnp.sum(x)

        return jax.lax.scan(layer, x, w)[1]

    found = [
        check for seed in range(8) for check in both(step, arrays((5, WIDTH, WIDTH), (16, WIDTH)), seed)[0].values()
    ]
    assert not any(each.ahead for each in found)


def test_the_second_buffer_counts_as_memory():
    chosen, (plain, ahead) = both(*STEPS["recomputed"], 4)
    loops = pipelined_loops(ahead.program.graph, ahead.plan.solution)
    carried = [loops[op].second_buffer(ahead.plan.solution) for op in chosen]
    assert [loop.bytes for loop in ahead.plan.prefetched] == carried and min(carried) > 0
    alone = peak_of(plain.program, plain.plan.solution, frozenset()).bytes
    assert alone < ahead.plan.memory <= alone + 2 * max(carried)
