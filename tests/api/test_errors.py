"""Bad input, end to end: each a clear error of our own type, before anything is compiled."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import DeviceError, MemoryLimitError, PinError, PlanFileError, TraceError
from meshdsl.layouts import Mesh
from meshdsl.lowering.numerics import LeafError
from tests.api.refusals import ARGS, MESH, message, pinned, step

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({"w": "modle=S(1)"}, "layouts['w']: no axis 'modle' in the mesh; did you mean 'model'?"),
        ({"w": "pipe=S(1)"}, "layouts['w']: no axis 'pipe' in the mesh; known: data, model"),
        ({"w": "data=S(2)"}, "layouts['w']: w float32[6,16]: data=S(2) is out of range; its dims are 0 to 1"),
        ({"bach/**": "data=B"}, "layouts['bach/**']: matches no input; did you mean 'batch/**'?"),
        (
            {"w": "data=S(0)"},
            "layouts['w']: w float32[6,16]: dim 0 of size 6 does not divide over data=4; nearest sizes that work: 4, 8",
        ),
        (
            {"batch/**": "data=S(0)", "batch/x": "model=S(0)", "w": "model=P"},
            "layouts['w']: model=P: an input cannot be partial (P); only S and B cross the boundary of a step",
        ),
        ({"w": "data:S(0)"}, "layouts['w']: an axis name was expected in this layout, as in 'data=S(0) model=P'"),
    ],
)
def test_a_bad_pin(layouts, said):
    assert pinned(layouts)[0] == f"  {said}"


def test_contradictory_pins():
    rows = pinned(
        {"**": "data=S(1)", "batch/x": "data=S(0) model=S(0)", "w": "data=S(1) model=S(1)", "*": "model=S(0)"}
    )
    assert rows == [
        "  layouts['**']: batch/x float32[8,6]: dim 1 of size 6 does not divide over data=4; "
        "nearest sizes that work: 4, 8"
    ]
    both = message(
        PinError,
        lambda: md.parallelize(lambda x: x, MESH, {"**": "data=S(0)", "x": "model=S(0)"})(np.ones(4, np.float32)),
    )
    assert both == (
        "the pins of step do not fit, on mesh data=4,model=2:\n"
        "  layouts: contradictory pins, '**' says data=S(0), 'x' says model=S(0): x float32[4]: "
        "dim 0 of size 4 does not divide over data=4 model=2 (8 blocks); nearest sizes that work: 8\n"
        "arguments: x; '*' is one path component, '**' any number; "
        "uneven='pad' or uneven='replicate' takes pins that do not divide"
    )


def test_a_bad_output_pin():
    assert pinned(None, outputs={"0": "data=P"}) == [
        "  outputs['0']: data=P: an output cannot be partial (P); only S and B cross the boundary of a step",
        "  outputs['0']: matches no output; the result is one array, named by '*'",
    ]


def test_a_bad_constrain():
    def constrained(x):
        return md.constrain(md.constrain(x, "dta=S(0)"), "model=S(1) data=S(1)") * 2

    x = np.ones((8, 6), np.float32)
    text = message(PinError, lambda: md.parallelize(constrained, MESH).plan(x)).splitlines()
    assert [row.split(": ", 1)[1] for row in text[1:-1]] == [
        "no axis 'dta' in the mesh; did you mean 'data'?",
        "a value float32[8,6]: dim 1 of size 6 does not divide over model=2 data=4 (8 blocks); "
        "nearest sizes that work: 8",
    ]
    assert text[1].startswith("  constrain at test_errors.py:")


@pytest.mark.parametrize(
    ("made", "layout", "said"),
    [
        (lambda x: x > 0, "data=P", "data=P: a value of bool has no such reduction; it can be P(max) or P(min)"),
        (lambda x: x + 1j, "model=P(max)", "model=P(max): a value of complex64 has no such reduction; it can be P"),
        (
            lambda x: jax.random.key(0),
            "data=P",
            "data=P: a value of key<fry> has no such reduction; state S or B",
        ),
    ],
)
def test_a_partial_value_that_cannot_be_reduced(made, layout, said):
    step = md.parallelize(lambda x: md.constrain(made(x), layout), MESH)
    row = message(PinError, lambda: step.plan(ARGS[0])).splitlines()[1]
    assert row.split(": ", 1)[1] == said


def test_a_planned_step_inside_a_step():
    inner = md.parallelize(lambda x: x * 2, MESH)

    def outer(x):
        return inner(x) + 1

    assert message(TraceError, lambda: md.parallelize(outer, MESH).plan(ARGS[0])) == (
        f"outer cannot be planned:\n  shard_map at test_errors.py:{outer.__code__.co_firstlineno + 1}: is planned "
        "already, on mesh data=4, model=2; call the step that it was made of, and parallelize the whole"
    )


def test_a_memory_limit_that_nothing_meets():
    text = message(MemoryLimitError, lambda: md.parallelize(step, MESH, memory="100B")(*ARGS))
    assert text.startswith("no plan fits memory=100 B per device; the least found is ")
    assert "w" in text


def test_fewer_devices_than_the_mesh():
    text = message(DeviceError, lambda: md.parallelize(step, Mesh(data=16))(*ARGS))
    assert text == (
        "mesh data=16 needs 16 devices, and there are 8 (cpu)\n"
        "To try it on one CPU: JAX_NUM_CPU_DEVICES=16, or before anything runs "
        "jax.config.update('jax_num_cpu_devices', 16)"
    )


def test_fewer_devices_than_given():
    text = message(DeviceError, lambda: md.parallelize(step, MESH, devices=jax.devices()[:4])(*ARGS))
    assert text == (
        "mesh data=4,model=2 needs 8 devices, and devices= has 4 (cpu)\ngive more of jax.devices(), or a smaller mesh"
    )
    assert "devices= has 0\n" in message(DeviceError, lambda: md.parallelize(step, MESH, devices=[])(*ARGS))


def test_plan_files(tmp_path):
    file = tmp_path / "p.json"
    md.parallelize(step, MESH).plan(*ARGS).save(file)
    plan = md.load_plan(file)
    file.write_text(file.read_text().replace('"version":1', '"version":2'))
    assert message(PlanFileError, lambda: md.load_plan(file)) == (
        f"'{file}' is a plan file of another version:\n"
        "  version: 2 in the file, 1 in this meshdsl\n"
        "plan again and save it"
    )
    other = (np.ones((6, 32), np.float32), {"y": np.ones((8, 6), np.float32)})
    assert message(PlanFileError, lambda: md.parallelize(lambda w, batch: w, MESH, plan=plan)(*other)) == (
        "the plan of step does not match this call of step:\n"
        "  input w: float32[6,16] in the plan, float32[6,32] here\n"
        "  input batch/x: float32[8,6] in the plan, absent here\n"
        "  input batch/y: absent in the plan, float32[8,6] here\n"
        "  output: float32[6,16] in the plan, float32[6,32] here\n"
        "plan again without plan= and save the new plan"
    )
    assert "operations:" in message(PlanFileError, lambda: md.parallelize(lambda w, batch: w, MESH, plan=plan)(*ARGS))


def loaded(plan, mesh=MESH, **options):
    text = message(PlanFileError, lambda: md.parallelize(step, mesh, plan=plan, **options).plan(*ARGS))
    return [line.strip() for line in text.splitlines()[1:-1]]


def test_a_loaded_plan_above_the_memory_limit():
    plan = md.parallelize(step, MESH).plan(*ARGS)
    assert loaded(plan, memory=10) == [f"memory: {plan.memory} B per device in the plan, memory= allows 10 B here"]
    small = replace(MESH.topology, memory=20.0)
    small_mesh = Mesh(topology=small, data=4, model=2)
    assert loaded(plan, small_mesh)[-1] == f"memory: {plan.memory} B per device in the plan, topology cpu has 20 B here"
    assert md.parallelize(step, MESH, plan=plan, memory=plan.memory).plan(*ARGS) is plan


def test_a_loaded_plan_of_another_topology():
    slow = replace(MESH.topology, overhead=1.0)
    plan = md.parallelize(step, Mesh(topology=slow, data=4, model=2)).plan(*ARGS)
    keep = "parallelize over plan.mesh to keep the plan's"
    here = Mesh(topology="cpu", data=4, model=2)
    assert loaded(plan, here) == [f"topology cpu: overhead is 1.0 in the plan, {here.topology.overhead} here; {keep}"]
    assert md.parallelize(step, MESH, plan=plan).plan(*ARGS) is plan  # a mesh that states none has the plan's
    assert loaded(plan, Mesh(topology="dgx-h100", data=4, model=2)) == [
        f"topology: cpu in the plan, dgx-h100 here; {keep}"
    ]
    for mesh in (plan.mesh, "data=4,model=2"):
        assert md.parallelize(step, mesh, plan=plan).plan(*ARGS) is plan


def test_a_check_names_the_only_result():
    assert str(LeafError("", 0.5, 1e-4)) == "the result: relative error 5.00e-01, allowed 1e-04"
