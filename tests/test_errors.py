"""Bad input, end to end: each a clear error of our own type, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import DeviceError, MemoryLimitError, NotationError, PinError, PlanFileError, TraceError, nearest
from meshdsl.layouts import Mesh

MESH = Mesh(data=4, model=2)


def step(w, batch):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(batch["x"] @ w) ** 2))(w)


ARGS = (np.ones((6, 16), np.float32), {"x": np.ones((8, 6), np.float32)})


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """No test of this file may reach the compiler."""

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)


def message(kind, make):
    with pytest.raises(kind) as caught:
        make()
    assert isinstance(caught.value, md.MeshDSLError)
    return str(caught.value)


def pinned(layouts, **options):
    return message(PinError, lambda: md.parallelize(step, MESH, layouts, **options)(*ARGS)).splitlines()[1:-1]


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
        "arguments: x; '*' is one path component, '**' any number"
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


def test_a_memory_limit_that_nothing_meets():
    text = message(MemoryLimitError, lambda: md.parallelize(step, MESH, memory="100B")(*ARGS))
    assert text.startswith("no plan fits memory=100 B per device; the least found is ")
    assert "w" in text


def test_fewer_devices_than_the_mesh():
    text = message(DeviceError, lambda: md.parallelize(step, Mesh(data=16))(*ARGS))
    assert text == (
        "mesh data=16 needs 16 devices, and there are 8 (cpu)\n"
        "To try it on one CPU, set this before anything runs: jax.config.update('jax_num_cpu_devices', 16)"
    )


def test_fewer_devices_than_given():
    text = message(DeviceError, lambda: md.parallelize(step, MESH, devices=jax.devices()[:4])(*ARGS))
    assert text.startswith("mesh data=4,model=2 needs 8 devices, and there are 4 (cpu)")


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
        "the plan of step was made for something else than this call of step:\n"
        "  input w: float32[6,16] in the plan, float32[6,32] here\n"
        "  input batch/x: float32[8,6] in the plan, absent here\n"
        "  input batch/y: absent in the plan, float32[8,6] here\n"
        "  output: float32[6,16] in the plan, float32[6,32] here\n"
        "plan again without plan=, and save that"
    )
    assert "operations:" in message(PlanFileError, lambda: md.parallelize(lambda w, batch: w, MESH, plan=plan)(*ARGS))


def test_an_argument_that_is_no_array():
    assert "batch/x" in message(TraceError, lambda: md.parallelize(step, MESH)(ARGS[0], {"x": "text"}))


def test_a_mesh_that_cannot_be_read():
    assert message(NotationError, lambda: md.parallelize(step, "data=4,model")) == (
        "'=' was expected after axis 'model', as in 'data=4,model=2'\n  data=4,model\n              ^"
    )


def test_nearest():
    assert nearest("modle", ["data", "model"]) == "; did you mean 'model'?"
    assert nearest("zzz", ["data", "model"]) == "; known: data, model"
    assert nearest("zzz", []) == ""


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), "0GiB", "60 gb", [1]])
def test_a_memory_limit_that_is_no_size(memory):
    text = message(md.MeshDSLError, lambda: md.parallelize(step, MESH, memory=memory))
    assert text == f"memory={memory!r} is no size; write bytes, or text like '60GiB' or '500MB'"


@pytest.mark.parametrize("layout", [None, 3])
def test_what_is_no_layout(layout):
    said = f"{layout!r} is no layout; write text such as 'data=S(0) model=B', or a Layout"
    assert pinned({"w": layout}) == [f"  layouts['w']: {said}"]
    assert message(NotationError, lambda: md.constrain(ARGS[0], layout)) == said


def test_what_is_no_placement():
    for dim in (-1, 1.5, None):
        said = f"S({dim!r}): a dim is a whole number from 0 on, or a name"
        assert message(NotationError, lambda dim=dim: md.S(dim)) == said
    assert md.S(np.int64(17)) is md.S(17)
    said = "data='S(0)' is no placement; write S(dim), B, P, P('max') or P('min')"
    assert message(NotationError, lambda: md.Layout(data="S(0)")) == said
