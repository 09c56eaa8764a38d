"""The simulated step: jobs on streams against a clock, and what a plan's jobs add up to."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshdsl as md
from meshdsl.errors import MeshDSLError
from meshdsl.ir.graph import walk
from meshdsl.layouts.topology import KINDS, Link, Topology
from meshdsl.models import gpt
from meshdsl.plan.simulate import COMPUTE, SimulatedTask, exposed_seconds, list_schedule, stacks
from meshdsl.trace import trace
from tests.sweeps import swept

LINK, OTHER = "link", "other link"


def job(stream, seconds, *after, follows=False):
    return SimulatedTask(stream, seconds, frozenset(after), follows)


def ends_of(jobs, contention=0.0):
    return [span.end for span in list_schedule(jobs, contention)]


def test_what_nobody_waits_for_runs_beside_the_computation():
    jobs = [job(LINK, 2.0), job(COMPUTE, 3.0, 0), job(LINK, 2.0), job(COMPUTE, 3.0, 1, 2), job(OTHER, 9.0)]
    assert ends_of(jobs) == [2.0, 5.0, 4.0, 8.0, 9.0]


def test_what_the_next_operation_needs_stands_in_its_way():
    jobs = [job(COMPUTE, 1.0), job(LINK, 4.0, 0), job(COMPUTE, 1.0, 1)]
    assert ends_of(jobs) == [1.0, 5.0, 6.0]


def test_a_link_takes_what_is_due_first_and_never_two_at_a_time():
    jobs = [job(COMPUTE, 1.0), job(LINK, 5.0, 0), job(LINK, 1.0), job(LINK, 1.0)]
    assert ends_of(jobs) == [1.0, 6.0, 1.0, 7.0]


def test_seconds_without_computation_belong_to_the_transfers_in_them():
    jobs = [job(COMPUTE, 1.0), job(LINK, 4.0), job(OTHER, 2.0, 0), job(COMPUTE, 1.0, 1)]
    assert exposed_seconds(jobs, list_schedule(jobs)) == [0.0, 1.0 + 1.0, 1.0, 0.0]


def test_computation_takes_longer_beside_transfers():
    jobs = [job(COMPUTE, 4.0), job(LINK, 3.0), job(OTHER, 2.0, 1), job(COMPUTE, 2.0, 0), job(COMPUTE, 1.0, 2, 3)]
    spans = list_schedule(jobs, 0.5)  # beside 5 s of transfers, 10/3 s of computation take half as long again
    assert [span.end for span in spans] == pytest.approx([17 / 3, 3.0, 5.0, 23 / 3, 26 / 3])
    assert ends_of([job(COMPUTE, 4.0), job(LINK, 3.0)], 0.5) == [5.0, 3.0]
    assert ends_of([job(COMPUTE, 4.0), job(LINK, 60.0)], 0.5) == [6.0, 60.0]
    jobs = [job(LINK, 1.0), job(COMPUTE, 2.0, 0), job(LINK, 1.5, 0), job(LINK, 1.0, 1)]
    assert ends_of(jobs, 1.0) == [1.0, 3.75, 2.5, 4.75]
    assert ends_of(jobs) == [1.0, 3.0, 2.5, 4.0]


def product(seconds, *after):
    return SimulatedTask(COMPUTE, seconds, frozenset(after), product=True)


def test_collectives_beside_products_alone_wait_while_anything_else_is_computed():
    jobs = [job(LINK, 3.0), job(COMPUTE, 2.0), product(1.0, 1), job(COMPUTE, 4.0, 2), job(COMPUTE, 1.0, 0, 3)]
    assert ends_of(jobs) == [3.0, 2.0, 3.0, 7.0, 8.0]
    spans = list_schedule(jobs, beside_products=True)  # of 3 s, 1 s beside the product, and 2 s beside nothing
    assert [span.end for span in spans] == [9.0, 2.0, 3.0, 7.0, 10.0]
    assert exposed_seconds(jobs, spans)[0] == 2.0


def test_collectives_beside_products_alone_go_one_by_one_where_nothing_is_computed():
    jobs = [job(LINK, 3.0), job(OTHER, 2.0), job(COMPUTE, 1.0, 0, 1)]
    assert ends_of(jobs) == [3.0, 2.0, 4.0]
    assert [span.end for span in list_schedule(jobs, beside_products=True)] == [3.0, 5.0, 6.0]
    jobs = [product(2.0), *jobs]  # both go on beside a product
    assert [span.end for span in list_schedule(jobs, beside_products=True)][1:3] == [3.0, 3.0 - 1.0]
    stopped = SimulatedTask(COMPUTE, 4.0, link=OTHER)
    assert [span.end for span in list_schedule([job(LINK, 1.0), stopped], beside_products=True)] == [5.0, 4.0]


@given(st.lists(st.tuples(st.sampled_from([LINK, OTHER, COMPUTE]), st.integers(1, 9), st.booleans()), max_size=12))
def test_beside_products_alone_nothing_is_sent_sooner(made):
    jobs = [
        SimulatedTask(stream, float(seconds), frozenset(range(max(0, i - 2), i, 2)), product=is_product)
        for i, (stream, seconds, is_product) in enumerate(made)
    ]
    spans = list_schedule(jobs, beside_products=True)
    for task, span in zip(jobs, spans, strict=True):
        assert span.end - span.begin >= task.seconds - 1e-9
        assert all(spans[i].end <= span.begin + 1e-9 for i in task.after)


def test_what_follows_is_due_behind_the_job_that_it_waits_for():
    for follows, expected in ((True, [1.0, 3.0, 2.0]), (False, [1.0, 2.0, 3.0])):
        assert ends_of([job(COMPUTE, 1.0), job(COMPUTE, 1.0), job(COMPUTE, 1.0, 0, follows=follows)]) == expected
    assert ends_of([]) == [] and ends_of([job(LINK, 0.0), job(COMPUTE, 0.0, 0)]) == [0.0, 0.0]


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 12))
    streams = st.sampled_from([COMPUTE, LINK, OTHER])
    return [
        job(
            draw(streams),
            float(draw(st.integers(1, 4))),
            *draw(st.sets(st.integers(0, i - 1), max_size=3) if i else st.just(())),
            follows=draw(st.booleans()),
        )
        for i in range(count)
    ]


def by_the_clock(jobs):
    """Tick by tick: whoever is free takes the first job that is due of those whose predecessors are over."""
    due: list[int] = []
    for i, one in enumerate(jobs):
        due.append(max((due[j] for j in one.after), default=i) if one.follows else i)
    begun, over = {}, {}
    for now in range(int(sum(one.seconds for one in jobs)) + 1):
        over |= {i: t + jobs[i].seconds for i, t in begun.items() if t + jobs[i].seconds == now}
        for stream in (COMPUTE, LINK, OTHER):
            if any(jobs[i].stream == stream and i not in over for i in begun):
                continue
            able = [i for i, x in enumerate(jobs) if x.stream == stream and i not in begun and x.after <= set(over)]
            if able:
                begun[min(able, key=lambda i: (due[i], i))] = now
    return [over[i] for i in range(len(jobs))]


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_random_jobs_end_as_by_the_clock(jobs):
    ends = ends_of(jobs)
    assert ends == by_the_clock(jobs)
    busiest = max(sum(x.seconds for x in jobs if x.stream == s) for s in (COMPUTE, LINK, OTHER))
    assert busiest <= max(ends) <= sum(x.seconds for x in jobs)


TOPOLOGY = Topology("two by two", 1e12, 1e12, 1e11, 1e10, 0.0, (Link(1e-6, 2e10, 2), Link(1e-5, 2e9)))
MESH = md.Mesh(data=2, model=2, topology=TOPOLOGY)


@swept(
    ("strategy", "microbatches"),
    [("data", 1), ("sequence", 1), ("fsdp", 8), ("fsdp+tensor", 8)],
    kept=(("fsdp", 8),),
)
def test_a_simulated_step_is_shorter_than_one_thing_after_the_other(strategy, microbatches):
    program = gpt.program(gpt.Config(6, 64, 4, seq=32, vocab=64, remat="all"), gpt.RULES[strategy], batch=16)
    pipeline = md.Pipeline(microbatches) if microbatches > 1 else None
    plan = md.parallelize(program.step, MESH, rules=program.rules, pipeline=pipeline).plan(*program.args)
    compute = sum(span.seconds * span.trips for span in plan.spans)
    assert compute < plan.simulated_seconds * (1 + 1e-9) and plan.simulated_seconds < plan.seconds
    assert len(plan.exposed) == len(plan.collectives) and min(plan.exposed) >= 0
    assert sum(plan.exposed) == pytest.approx(plan.simulated_seconds - compute, abs=1e-9 * compute)


def layers(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def test_gathering_the_next_layer_is_hidden_behind_this_one():
    """A compute-bound loop over layers: only what comes before the first layer is seen."""
    ws, x = jnp.zeros((8, 512, 512)), jnp.zeros((8192, 512))
    pins = {"ws": "data=S(1)", "x": "data=S(0)"}
    named = md.Overlap("prefetch", loops="*")
    cases = (True, "off", 1 / 8), (False, "off", 1), (False, named, 1 / 8)  # other systems, our programs, on request
    for across, overlap, part in cases:
        topology = Topology("slow", 1e11, 1e11, 1e11, 1e10, 0.0, (Link(0.0, 1e9),), across_loops=across)
        step = md.parallelize(
            layers, md.Mesh(data=2, topology=topology), pins, outputs={"**": "data=S(0)"}, overlap=overlap
        )
        plan = step.plan(ws, x)
        (gather,) = plan.collectives
        sent, compute = gather.seconds * gather.trips, sum(span.seconds * span.trips for span in plan.spans)
        assert plan.seconds == pytest.approx(compute + sent)
        assert plan.simulated_seconds == pytest.approx(compute + part * sent)
        assert plan.exposed == pytest.approx([part * sent])


@pytest.mark.parametrize(
    ("kinds", "hidden"),
    [(KINDS, ("all-gather", "all-reduce")), (("all-gather",), ("all-gather",)), ((), ())],
)
def test_only_kinds_that_the_compiler_makes_asynchronous_are_hidden(kinds, hidden):
    """A gather and a reduction beside a product of 2 ms."""
    topology = Topology("t", 1e12, 1e12, 1e13, 1e10, 0.0, (Link(1e-4, 1e9),), asynchronous=kinds)
    pins, outputs = {"x": "data=B", "w": "data=S(0)", "b": "data=S(0)"}, {"**": "data=B"}
    mesh = md.Mesh(data=2, topology=topology)
    step = md.parallelize(lambda x, w, b: (2 * w, jnp.sum(b, 0), jnp.tanh(x @ x)), mesh, pins, outputs=outputs)
    plan = step.plan(jnp.zeros((1024, 1024)), jnp.zeros((64, 64)), jnp.zeros((64, 64)))
    exposed = {c.kind: e / c.seconds for c, e in zip(plan.collectives, plan.exposed, strict=True)}
    assert exposed == pytest.approx(
        {kind: float(kind not in hidden) for kind in ("all-gather", "all-reduce")}, abs=0.02
    )


@pytest.mark.parametrize("bandwidth", [1e8, 1e10])
@pytest.mark.parametrize(
    ("pins", "output", "summed"),
    [
        ({"x": "model=S(0)", "w": "model=S(1)"}, "model=S(1)", 512),
        ({"x": "model=S(1)", "w": "model=S(0)"}, "model=S(0)", 4096),
    ],
    ids=["gathered in front of the product", "reduced behind it"],
)
def test_collectives_beside_a_product_are_sent_in_pieces_if_the_system_does_so(pins, output, summed, bandwidth):
    """As a pipeline of two: all of the longer one, and a piece of the other."""

    def planned(pieces):
        link = Link(0.0, bandwidth)
        mesh = md.Mesh(model=2, topology=Topology("pieces", 1e12, 1e12, 1e14, 1e10, 0.0, (link,), pieces=pieces))
        step = md.parallelize(lambda x, w: x @ w, mesh, pins, outputs={"*": output})
        return step.plan(jnp.zeros((1024, summed)), jnp.zeros((summed, 1024)))

    plan = planned(1)
    (collective,), compute = plan.collectives, sum(span.seconds * span.trips for span in plan.spans)
    short, long = sorted((collective.seconds, compute))
    assert plan.simulated_seconds == pytest.approx(short + long)
    for pieces in (2, 4):
        assert planned(pieces).simulated_seconds == pytest.approx(long + short / pieces)
        assert planned(pieces).seconds == plan.seconds


def test_no_number_of_pieces():
    with pytest.raises(MeshDSLError, match="topology none: pieces=0 is not a number of pieces; 1 sends whole"):
        Topology("none", 1e12, 1e12, 1e11, 1e10, 0.0, (Link(0.0, 1e9),), pieces=0)


def test_what_only_happens_to_be_as_long_as_a_loop_is_no_stack():
    """Eight sequences beside eight layers, in a loop over microbatches."""

    def step(ws, x, u):
        def loss(ws, u, x):
            short = ws.astype(jnp.bfloat16)
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x @ u, short)[0])

        def accumulate(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss, (0, 1))(ws, u, x)), None

        (dws, du), _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, (ws, u)), x)
        return ws - 0.1 * dws, u - 0.1 * du

    program = trace(step, (jnp.zeros((8, 16, 16)), jnp.zeros((4, 8, 16)), jnp.zeros((16, 16))))
    found = stacks(program.graph)
    paths = {leaf.path: v.id in found for leaf, v in zip(program.inputs, program.graph.inputs, strict=True)}
    assert paths == {"ws": True, "x": True, "u": False}
    assert [v.id in found for v in program.graph.returned] == [True, False]
    products = [v for _, op in walk(program.graph) if op.name == "dot_general" for v in op.outputs]
    assert any(v.shape == (8, 16) for v in products)
    assert not any(v.id in found for v in products)
