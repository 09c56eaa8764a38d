"""What mypy sees of the package as it is installed: a user's script under --strict, against the built wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest

import meshdsl as md
from meshdsl.util.stubs import stub_names

ROOT = Path(__file__).parent.parent
SOURCES = ("meshdsl", "layouts", "lowering", "models", "pyproject.toml", "README.md", "LICENSE")

GOOD = '''
from collections.abc import Callable
from typing import assert_type

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl import nd
from meshdsl.calibrate import calibrate

Params = dict[str, jax.Array]


def step(params: Params, x: jax.Array, *, rate: float = 0.1) -> tuple[Params, jax.Array]:
    """A training step."""
    hidden = md.stage(md.constrain(x @ params["w"], "data=S(0)"))
    return {"w": params["w"] - rate * hidden.sum()}, attention(x, x).mean()


@md.rule("b s, b s -> b s")
def attention(q: jax.Array, k: jax.Array) -> jax.Array:
    """A function with a rule."""
    return q * k


def loss(x: jax.Array) -> jax.Array:
    """Functions on tensors with named dims, by both names."""
    named = md.named(x, "batch embed")
    return nd.sum(md.softmax(md.relu(named), over="embed"), over="batch").array  # type: ignore[no-any-return]


topology: md.Topology = md.topology("cpu")
mesh = md.Mesh(data=4, model=2, topology=topology)
layout = md.Layout(data=md.S(0), model=md.B)
partial = md.Layout(model=md.P)
rules = md.Rules("batch:data")
pipeline = md.Pipeline(microbatches=8)
schedule: md.Schedule = md.make_schedule("1f1b", ranks=2, microbatches=8)

sharded = md.parallelize(step, mesh, {"x": layout}, rules=rules, memory="60GiB", pipeline=pipeline)
keeps: Callable[[Params, jax.Array], tuple[Params, jax.Array]] = sharded
params: Params = {"w": jnp.zeros((8, 8))}
x = jnp.zeros((8, 8))
made, mean = sharded(params, x, rate=0.2)
assert_type(made, Params)
assert_type(mean, jax.Array)

shapes = jax.eval_shape(lambda: params)
plan: md.Plan = sharded.plan(shapes, x)
assert_type(plan.seconds, float)
verified: md.VerifyReport = sharded.verify(params, x)
checked: md.CheckReport = sharded.check(params, x, tolerance=1e-3)
lowered: jax.stages.Lowered = sharded.lower(shapes, x)
explained: md.Explanation = sharded.explain("x", params, x)
other, _ = sharded.with_pins({"x": None})(params, x)
assert_type(other, Params)
assert_type(attention(x, x), jax.Array)
assert_type(nd.remat(loss, "dots")(x), jax.Array)

found: md.Search = md.search(md.Program(step, (params, x)), devices=8)
with md.watch(mesh) as watched:
    sharded(params, x)
assert_type(watched, md.Watch)
watched.assert_at_most(bytes=2**20)
assert_type(md.calibrate(mesh), md.Topology)
assert_type(calibrate(mesh), md.Topology)
assert_type(md.load_plan("plan.json"), md.Plan)
assert_type(md.__version__, str)

try:
    sharded.plan(params, x)
except (md.PinError, md.MemoryLimitError, md.ArgumentError, md.TraceError, md.PipelineError) as error:
    print(error)
except md.MeshDSLError as error:
    print(error)
'''

# line of a bad script -> what mypy says of it
BAD = {
    "md.paralelize(step, mesh)": 'maybe "parallelize"?',
    "md.nd.softmaxx(3, over='x')": 'maybe "softmax"?',
    "from meshdsl import MeshErorr": "attr-defined",
    "sharded('text')": 'incompatible type "str"; expected "Array"',
    "sharded()": "Missing positional argument",
    "text: str = sharded(jnp.zeros(3))": "assignment",
    "md.parallelize(step, mesh, memory=[1])": "arg-type",
    "md.parallelize(step, mesh, memry='60GiB')": "call-arg",
    "md.Mesh(data='four')": "arg-type",
}
BEFORE_BAD = """
import jax
import jax.numpy as jnp

import meshdsl as md


def step(x: jax.Array) -> jax.Array:
    return x


mesh = md.Mesh(data=4)
sharded = md.parallelize(step, mesh)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A Python with the wheel, and the packages of the one that runs the tests."""
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:  # a copy: building leaves folders behind
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / "src" / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, folder / "src", cwd=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    return folder / "venv" / "bin" / "python"


def run(*command, cwd, check=True):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sweep
def test_mypy_strict_sees_every_public_name(installed, tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BEFORE_BAD + "\n".join(BAD))
    assert len(set(re.findall(r"\b(?:md|nd)\.(\w+)", GOOD))) >= 30
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", installed)
    said = run(*mypy, "good.py", "bad.py", cwd=tmp_path, check=False)
    errors = [line for line in said.splitlines() if ": error: " in line]
    first = len(BEFORE_BAD.splitlines()) + 1
    assert [line for line in errors if not line.startswith("bad.py")] == []
    for number, (line, expected) in enumerate(BAD.items(), first):
        assert [error for error in errors if error.startswith(f"bad.py:{number}:") and expected in error], (line, said)
    assert {int(error.split(":")[1]) for error in errors} == set(range(first, first + len(BAD)))


def test_the_wheel_runs_as_it_is_installed(installed, tmp_path):
    code = "import meshdsl as md; print(md.__version__, md.topology('cpu').name, 'site-packages' in md.__file__)"
    assert run(installed, "-c", code, cwd=tmp_path).split() == [md.__version__, "cpu", "True"]


def test_every_name_of_the_stubs_can_be_imported():
    for module in (md, md.nd):
        stub = Path(module.__file__).with_suffix(".pyi")
        names = set(stub_names(stub)) - {"*"}
        assert names == set(dir(module)) == set(module.__all__)
        assert {name for name in names if not hasattr(module, name)} == set()


def test_the_product_comes_first():
    assert {"parallelize", "Plan", "Mesh", "search", "calibrate", "MemoryLimitError", "nd"} <= set(dir(md))
    assert not {"softmax", "dims", "sum"} & set(dir(md))
    assert md.softmax is md.nd.softmax and md.dims is md.nd.dims and md.stack is md.nd.stack


def test_every_error_is_public():
    from meshdsl import errors

    classes = {name for name, x in vars(errors).items() if isinstance(x, type) and issubclass(x, errors.MeshDSLError)}
    assert classes <= set(dir(md))


@pytest.mark.parametrize("first", ["md.calibrate", "from meshdsl.calibrate import calibrate", "import meshdsl.nd"])
def test_calibrate_can_be_called_whatever_was_imported_before(first):
    code = f"""
import inspect, meshdsl as md
{first}
from meshdsl.calibrate import calibrate, fit_link
assert callable(md.calibrate) and inspect.signature(md.calibrate) == inspect.signature(calibrate)
assert md.calibrate.calibrate is calibrate
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_calibrate_measures_by_its_public_name():
    mesh = md.Mesh(data=1)
    assert md.calibrate(mesh, jax.devices()[:1]).source.startswith("measured on 1 x")


def test_a_sharded_step_keeps_its_name_and_documentation():
    def step(x):
        """A step."""
        return x

    sharded = md.parallelize(step, "data=1")
    assert (sharded.__name__, sharded.__doc__) == ("step", "A step.")
