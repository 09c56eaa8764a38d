"""Each example runs as a script, in a small size, and plans on meshes up to 64x8."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshdsl.api import parallelize
from meshdsl.layouts import Mesh
from meshdsl.util.text import bytes_text, percent_text, seconds_text
from tests.sweeps import swept

ROOT = Path(__file__).parent.parent.parent
PLAIN, NAMED = ("mlp", "gpt", "digits"), ("vit", "dlrm", "movies", "moe")
LARGEST = "data=64,model=8"
MESHES = ("data=1,model=1", LARGEST)
PLANNED = [(name, mesh) for name in PLAIN for mesh in MESHES] + [(name, LARGEST) for name in NAMED]
SIZES = "2048, 256, 1024, 8, 6, 64, 32, "  # of the GPT: vocabulary, embed, wide, heads, layers, batch, seq


def test_every_example_is_short_and_tested():
    files = list((ROOT / "examples").glob("*.py"))
    assert sorted(f.stem for f in files) == sorted((*PLAIN, *NAMED, "llama"))
    assert all(len(f.read_text().splitlines()) < 80 for f in files)


def test_mlp_trains():
    printed = _python("examples/mlp.py", "--steps", "41")
    losses = [float(x) for x in re.findall(r"loss (\S+)", printed)]
    assert "plan of step on mesh data=4,model=2" in printed
    assert len(losses) == 3 and losses[2] < losses[0] / 2


@pytest.mark.sweep
def test_digits_are_learned(tmp_path):
    command = ("-m", "meshdsl", "train", "examples/digits.py", "--folder", str(tmp_path), "--mesh", "data=2,model=2")
    printed = _python(*command)
    assert "plan of step on mesh data=2,model=2" in printed
    assert float(re.findall(r"accuracy (\S+)", printed)[-1]) > 0.93


def test_the_demo_in_small(small_gpt, tmp_path):
    command = ("-m", "meshdsl.training.demo", str(small_gpt), "--folder", str(tmp_path / "run"), "--mesh")
    printed = _python(*command, "data=2,model=2")
    for part in ("topology", "plan of step on mesh data=2,model=2", "check", "verify", "unigram entropy", "sample"):
        assert part in printed
    assert {"topology.toml", "plan.json", "curves.png", "metrics.jsonl", "checkpoints"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }


def test_llama_on_64_tpus_has_the_figures_of_the_readme():
    program = runpy.run_path(str(ROOT / "examples" / "llama.py"))["program"]
    plan = parallelize(program.step, Mesh.parse("data=64", "tpu-v5p"), rules=program.rules).plan(*program.args)
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pipe=1,data=64,"))
    shown = [seconds_text(plan.seconds), percent_text(plan.gap), bytes_text(plan.bytes), bytes_text(plan.memory)]
    assert re.split(r"  +", row)[1:] == shown


@swept("name, mesh", PLANNED, left=[(name, LARGEST) for name in ("gpt", "vit", "dlrm", "movies")])
def test_every_example_plans_on_any_mesh(name, mesh, small_gpt):
    program = runpy.run_path(str(small_gpt if name == "gpt" else ROOT / "examples" / f"{name}.py"))["program"]
    plan = parallelize(program.step, Mesh.parse(mesh), program.layouts, rules=program.rules).plan(*program.args)
    assert (len(plan.collectives) == 0) == (mesh == "data=1,model=1")
    assert len(plan.inputs) == len(jax.tree.leaves(program.args))


@pytest.fixture(scope="session")
def small_gpt(tmp_path_factory):
    """The GPT with one narrow layer and 21 steps."""
    source = (ROOT / "examples" / "gpt.py").read_text()
    assert SIZES in source
    file = tmp_path_factory.mktemp("small") / "gpt.py"
    file.write_text(re.sub(SIZES + r"\d+", "2048, 64, 128, 8, 1, 64, 8, 21", source))
    return file


def _python(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return ran.stdout
