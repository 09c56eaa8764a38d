"""What is no argument of a public name: said by name, with what was given, before anything is compiled."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, LayoutError, NotationError, RuleError, TraceError, is_a, nearest
from meshdsl.layouts import Mesh
from tests.api.refusals import ARGS, MESH, message, pinned, step

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def test_an_argument_that_is_no_array():
    assert "batch/x" in message(TraceError, lambda: md.parallelize(step, MESH)(ARGS[0], {"x": "text"}))


def asked(*args, **options):
    lines = message(ArgumentError, lambda: md.parallelize(*args, **options)).splitlines()
    assert lines[0] == "invalid arguments of parallelize(step, ...):"
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
            "layouts: 'data=S(0)' is neither 'as-given' nor a dict of layouts by globs; write {'batch/*': 'data=S(0)'},"
            " or a strategy such as md.fsdp()",
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
        "memory='many' is not a size; write bytes, or text like '60GiB' or '500MB'",
        f"devices[2]: {first} is devices[0] as well; list every device once",
        "donate_argnames='bach': the step has no such argument; did you mean 'batch'?",
    ]


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
        assert message(TraceError, call) == f"step cannot be called with these arguments:\n  {row}\nit takes (w, batch)"


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
        (
            {"kinds": "all-reduce"},
            "kinds: 'all-reduce' is a str, not a list of kinds or a dict of kinds to numbers of runs",
        ),
        ({"bytes": "1MB"}, "bytes: '1MB' is a str, not a number of bytes"),
    ],
)
def test_what_is_no_budget(budget, said):
    plan = md.parallelize(step, MESH).plan(*ARGS)
    text = message(ArgumentError, lambda: plan.assert_at_most(**budget))
    assert text == f"assert_at_most: not a budget:\n  {said}"


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
        "invalid arguments of Program:\n"
        "  step: 'step' is a str, not a function\n"
        "  init: 3 is an int, not a function\n"
        "  args: [1] is a list, not the tuple of the step's arguments\n"
        "  layouts: 'data=B' is a str, neither a dict of layouts by globs nor 'as-given'"
    )


def test_what_is_no_rule():
    assert message(RuleError, lambda: md.rule(3)) == "text: 3 is an int, not text"
    assert message(RuleError, lambda: md.rule("a -> a")(3)) == (
        "3 is an int, not a function; md.rule(text, primitive=name) is for a primitive"
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
        f"memory={memory!r} is not a size; write bytes, or text like '60GiB' or '500MB'"
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
    assert message(md.MeshDSLError, lambda: Mesh(data=4, topology=3)).startswith("no topology 3; known: cpu, ")
    costs = {"flops16": 0, "memory": float("inf"), "overhead": -1, "flops8": -2.0}
    assert message(ArgumentError, lambda: replace(MESH.topology, **costs)) == (
        "the costs of topology cpu have to be finite numbers:\n"
        "  flops16=0 is not a number above 0\n"
        "  memory=inf is not a number above 0\n"
        "  overhead=-1 is not a number >= 0\n"
        "  flops8=-2.0 is not a number >= 0"
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
