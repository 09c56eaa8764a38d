"""Golden plans: compared, written, and refused with the difference."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEST = """
import jax
import jax.numpy as jnp
import meshdsl as md

def step(w, x):
    return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

def test_communication(golden_plan):
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    sharded = md.parallelize(step, md.Mesh(data=4), {{"x": "data=S(0)", "w": "data={w}"}})
    golden_plan("step.json", sharded.plan(w, x))
"""


@pytest.fixture
def project(tmp_path):
    """A project with one test; ``run`` writes it for a layout of ``w`` and runs it."""

    def run(w, *options):
        (tmp_path / "test_it.py").write_text(TEST.format(w=w))
        command = (sys.executable, "-m", "pytest", "-q", "-p", "meshdsl.pytest_plugin", "-p", "no:cacheprovider")
        return subprocess.run(
            (*command, "--rootdir", str(tmp_path), str(tmp_path), *options), cwd=ROOT, capture_output=True, text=True
        )

    return run


def test_a_plan_is_held_to_its_file(project, tmp_path):
    missing = project("B")
    assert missing.returncode == 1 and "pytest --update-golden writes it" in missing.stdout
    assert project("B", "--update-golden").returncode == 0
    assert (tmp_path / "golden" / "step.json").exists()
    assert project("B").returncode == 0
    changed = project("S(0)")
    assert changed.returncode == 1
    assert "pytest --update-golden accepts it" in changed.stdout and "reduce-scatter" in changed.stdout
