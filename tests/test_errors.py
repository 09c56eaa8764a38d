"""Bad input, end to end: each a clear error of our own type, before anything is compiled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import (
    ArgumentError,
    DeviceError,
    LayoutError,
    MemoryLimitError,
    NotationError,
    PinError,
    PlanFileError,
    RuleError,
    TraceError,
    is_a,
    nearest,
)
from meshdsl.layouts import Mesh
from meshdsl.lowering.check import LeafError

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
        "To try it on one CPU, set this before anything runs: jax.config.update('jax_num_cpu_devices', 16)"
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
        "the plan of step was made for something else than this call of step:\n"
        "  input w: float32[6,16] in the plan, float32[6,32] here\n"
        "  input batch/x: float32[8,6] in the plan, absent here\n"
        "  input batch/y: absent in the plan, float32[8,6] here\n"
        "  output: float32[6,16] in the plan, float32[6,32] here\n"
        "plan again without plan=, and save that"
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
    assert loaded(plan) == [f"topology cpu: overhead is 1.0 in the plan, {MESH.topology.overhead} here; {keep}"]
    assert loaded(plan, Mesh(topology="dgx-h100", data=4, model=2)) == [
        f"topology: cpu in the plan, dgx-h100 here; {keep}"
    ]
    for mesh in (plan.mesh, "data=4,model=2"):
        assert md.parallelize(step, mesh, plan=plan).plan(*ARGS) is plan


def test_a_check_names_the_only_result():
    assert str(LeafError("", 0.5, 1e-4)) == "the result: relative error 5.00e-01, allowed 1e-04"


def test_an_argument_that_is_no_array():
    assert "batch/x" in message(TraceError, lambda: md.parallelize(step, MESH)(ARGS[0], {"x": "text"}))


def asked(*args, **options):
    lines = message(ArgumentError, lambda: md.parallelize(*args, **options)).splitlines()
    assert lines[0] == "arguments of parallelize(step, ...) that do not fit:"
    return [line.removeprefix("  ") for line in lines[1:]]


def test_a_mesh_that_cannot_be_read():
    assert asked(step, "data=4,model") == [
        "mesh: '=' was expected after axis 'model', as in 'data=4,model=2'",
        "  data=4,model",
        "              ^",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": {"data": 4}}, "mesh: {'data': 4} is a dict, not a mesh; md.Mesh(**{'data': 4}) makes one"),
        ({"mesh": 8}, "mesh: 8 is an int, not a mesh; write 'data=4,model=2' or md.Mesh(data=4, model=2)"),
        ({"plan": "p.json"}, "plan: 'p.json' is a str, not a plan; md.load_plan('p.json') reads a file"),
        ({"plan": 3}, "plan: 3 is an int, not a plan; sharded.plan(*args) and md.load_plan(file) give one"),
        (
            {"layouts": "data=S(0)"},
            "layouts: 'data=S(0)' is a str, not a dict of layouts by globs; write {'batch/*': 'data=S(0)'}",
        ),
        (
            {"outputs": ["data=B"]},
            "outputs: ['data=B'] is a list, not a dict of layouts by globs; write {'batch/*': 'data=S(0)'}",
        ),
        ({"layouts": {None: "data=B"}}, "layouts: None is a NoneType, not a glob; write text such as 'batch/*'"),
        ({"donate_argnums": "0"}, "donate_argnums: '0' is a str, not the number of an argument"),
        ({"donate_argnums": True}, "donate_argnums: True is a bool, not the number of an argument"),
        ({"static_argnames": ("w", 1)}, "static_argnames: 1 is an int, not the name of an argument"),
        ({"static_argnums": 5}, "static_argnums=5: the step takes 2 positional arguments"),
        ({"devices": 8}, "devices: 8 is an int, not a list of devices; jax.devices() is one"),
        ({"devices": ["cpu"]}, "devices[0]: 'cpu' is a str, not a device; jax.devices() lists them"),
    ],
)
def test_what_is_no_argument_of_parallelize(options, said):
    assert asked(step, **{"mesh": MESH, **options}) == [said]


def test_all_faults_of_a_call_at_once():
    first, second = jax.devices()[:2]
    said = asked(step, "dta", {3: None}, memory="many", donate_argnames="bach", devices=[first, second, first])
    assert said == [
        "mesh: '=' was expected after axis 'dta', as in 'data=4,model=2'",
        "  dta",
        "     ^",
        "layouts: 3 is an int, not a glob; write text such as 'batch/*'",
        "memory='many' is no size; write bytes, or text like '60GiB' or '500MB'",
        f"devices[2]: {first} is devices[0] as well; every device serves once",
        "donate_argnames='bach': the step has no such argument; did you mean 'batch'?",
    ]


def test_a_mesh_of_jax():
    (row,) = asked(step, jax.make_mesh((4, 2), ("data", "model")))
    assert row.endswith(" is a jax.Mesh, not a mesh; md.Mesh(**{'data': 4, 'model': 2}) makes one")


def test_a_step_that_is_no_function():
    text = message(ArgumentError, lambda: md.parallelize(MESH, step))
    assert text == "step: Mesh(data=4, model=2) is a Mesh, not a function; parallelize(step, mesh) takes the step first"


def test_a_call_of_another_signature():
    sharded = md.parallelize(step, MESH)
    said = {
        "missing a required argument: 'batch'": lambda: sharded.plan(ARGS[0]),
        "too many positional arguments": lambda: sharded(*ARGS, 3),
        "missing a required argument: 'batch'\n  bach: no such argument; did you mean 'batch'?": lambda: sharded.verify(
            ARGS[0], bach=ARGS[1]
        ),
    }
    for row, call in said.items():
        assert message(TraceError, call) == f"step cannot be called so:\n  {row}\nit takes (w, batch)"


def test_shapes_cannot_run():
    sharded, shapes = md.parallelize(step, MESH), jax.eval_shape(lambda: ARGS)
    assert sharded.plan(*shapes) is sharded.plan(*ARGS)
    for call in (sharded, sharded.check):
        assert message(TraceError, lambda call=call: call(*shapes)) == (
            "step cannot run on shapes:\n  w: float32[6, 16] without values\n  batch/x: float32[8, 6] without values\n"
            "plan, lower and verify take shapes"
        )


@pytest.mark.parametrize("tolerance", ["1e-3", -1, True])
def test_what_is_no_tolerance(tolerance):
    text = message(ArgumentError, lambda: md.parallelize(step, MESH).check(*ARGS, tolerance=tolerance))
    assert text == f"tolerance: {is_a(tolerance)}, not a relative error from 0 on"


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"kinds": ("all_reduce",)}, "kinds: no collective 'all_reduce'; did you mean 'all-reduce'?"),
        ({"kinds": {"all-reduce": "1"}}, "kinds['all-reduce']: '1' is a str, not a number of runs"),
        ({"kinds": {"all-reduce": -1}}, "kinds['all-reduce']: -1 is an int, not a number of runs"),
        ({"kinds": "all-reduce"}, "kinds: 'all-reduce' is a str, not a list of kinds or a dict of kinds to runs"),
        ({"bytes": "1MB"}, "bytes: '1MB' is a str, not a number of bytes"),
    ],
)
def test_what_is_no_budget(budget, said):
    plan = md.parallelize(step, MESH).plan(*ARGS)
    text = message(ArgumentError, lambda: plan.assert_at_most(**budget))
    assert text == f"assert_at_most cannot compare a plan with this:\n  {said}"


def test_what_a_plan_is_not_asked():
    plan = md.parallelize(step, MESH).plan(*ARGS)
    assert message(ArgumentError, lambda: plan.diff("p.json")) == (
        "diff: 'p.json' is a str, not a plan; md.load_plan(file) reads one"
    )
    assert message(LayoutError, lambda: plan.layout(None)) == "no input None in the plan; known: w, batch/x"


def test_a_path_that_a_plan_does_not_have():
    plan = md.parallelize(lambda p: p["a"]["w1"].T @ p["a"]["w2"], MESH).plan({"a": {"w1": ARGS[0], "w2": ARGS[0]}})
    for path, meant in {"w1": "p/a/w1", "**/w2": "p/a/w2", "a/w1": "p/a/w1", "p": "p/a/w1", "p/b/w2": "p/a/w2"}.items():
        text = message(LayoutError, lambda path=path: plan.layout(path))
        assert text == f"no input {path!r} in the plan; did you mean {meant!r}?"
    assert message(LayoutError, lambda: plan.output_layout("*")) == (
        "no output '*' in the plan; the result is one array, and its path is ''"
    )
    assert str(plan.output_layout(""))


def test_what_is_no_program():
    assert message(ArgumentError, lambda: md.Program("step", [1], layouts="data=B", init=3)) == (
        "arguments of Program that do not fit:\n"
        "  step: 'step' is a str, not a function\n"
        "  init: 3 is an int, not a function\n"
        "  args: [1] is a list, not the tuple of the step's arguments\n"
        "  layouts: 'data=B' is a str, not a dict of layouts by globs"
    )


def test_what_is_no_rule():
    assert message(RuleError, lambda: md.rule(3)) == "text: 3 is an int, not text"
    assert message(RuleError, lambda: md.rule("a -> a")(3)) == (
        "3 is an int, not a function; md.rule(text, primitive=name) rules a primitive"
    )


def test_a_name_that_meshdsl_does_not_have():
    with pytest.raises(AttributeError, match=r"meshdsl has no 'parallelise'; did you mean 'parallelize'\?"):
        md.parallelise


def test_nearest():
    assert nearest("modle", ["data", "model"]) == "; did you mean 'model'?"
    assert nearest("zzz", ["data", "model"]) == "; known: data, model"
    assert nearest("zzz", []) == ""
    assert nearest(3, ["data"]) == "; known: data"


def test_what_was_given_instead():
    assert is_a("p.json") == "'p.json' is a str"
    assert is_a(3) == "3 is an int"
    assert is_a(jax.make_mesh((8,), ("x",))).endswith(" is a jax.Mesh")


@pytest.mark.parametrize("memory", [0, -1.0, float("nan"), "0GiB", "60 gb", [1], True])
def test_a_memory_limit_that_is_no_size(memory):
    assert asked(step, MESH, memory=memory) == [
        f"memory={memory!r} is no size; write bytes, or text like '60GiB' or '500MB'"
    ]


@pytest.mark.parametrize("layout", [None, 3])
def test_what_is_no_layout(layout):
    said = f"{layout!r} is no layout; write text such as 'data=S(0) model=B', or a Layout"
    assert pinned({"w": layout}) == [f"  layouts['w']: {said}"]
    assert message(NotationError, lambda: md.constrain(ARGS[0], layout)) == said


def test_what_constrain_cannot_take():
    assert message(ArgumentError, lambda: md.constrain({"x": ARGS[0], "name": "loss"}, "data=B")) == (
        "constrain takes arrays:\n  name: 'loss' is a str, not an array"
    )


def test_what_is_no_text():
    said = "3 is an int, not the text of a {}, such as {!r}"
    assert message(NotationError, lambda: Mesh.parse(3)) == said.format("mesh", "data=4,model=2")
    assert message(NotationError, lambda: md.Layout.parse(3)) == said.format("layout", "data=S(0) model=P")
    assert message(NotationError, lambda: md.Layout.parse("data=S(²)")).startswith("S needs the dim it splits")


def test_what_is_no_axis_name():
    said = "'a b' is no axis name; write letters, digits and _"
    for kind, value in ((md.Layout, md.B), (Mesh, 4)):
        assert message(NotationError, lambda kind=kind, value=value: kind(**{"a b": value})) == said
    assert message(NotationError, lambda: Mesh.parse("data=4,topology=2")) == (
        "an axis cannot be called 'topology', as in 'data=4,topology=2'; Mesh(topology=...) is its costs"
    )


def test_what_is_no_topology():
    assert message(md.MeshDSLError, lambda: md.topology("dgx-h10")) == "no topology 'dgx-h10'; did you mean 'dgx-h100'?"
    assert message(md.MeshDSLError, lambda: Mesh(data=4, topology=3)) == "no topology 3; known: cpu, dgx-h100"
    assert message(ArgumentError, lambda: replace(MESH.topology, flops16=0, memory=float("inf"), overhead=-1)) == (
        "what topology cpu costs has to be finite numbers:\n"
        "  flops16=0 is no number above 0\n"
        "  memory=inf is no number above 0\n"
        "  overhead=-1 is no number from 0 on"
    )
    assert message(ArgumentError, lambda: replace(MESH.topology, links=())) == (
        "topology cpu has no links; give at least one, the innermost first"
    )


def test_what_is_no_placement():
    for dim in (-1, 1.5, None, "", "a b", True, [0]):
        said = f"S({dim!r}): a dim is a whole number from 0 on, or a name"
        assert message(NotationError, lambda dim=dim: md.S(dim)) == said
    assert md.S(np.int64(17)) is md.S(17)
    said = "data='S(0)' is no placement; write S(dim), B, P, P('max') or P('min')"
    assert message(NotationError, lambda: md.Layout(data="S(0)")) == said
