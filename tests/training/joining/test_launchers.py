"""Tasks of launchers that are installed train together: OpenMPI, MPICH and SLURM, on the loopback interface alone."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from meshdsl.cli import app
from tests.training.joining import slurm_cluster
from tests.training.joining.slurm_cluster import cluster, output, wait_for
from tests.training.joining.test_multihost import LAUNCHERS
from tests.training.test_command import losses

ROOT = Path(__file__).parents[3]
PROGRAM = str(ROOT / "tests" / "training" / "joining" / "launched.py")
COMMAND = [sys.executable, "-m", "meshdsl", "train", PROGRAM]


def installed(*names):
    """Skips a test where one of these programs is not installed."""
    lacking = [name for name in names if shutil.which(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"{', '.join(lacking)} is not installed")


@pytest.fixture
def variables():
    """Those of this process, without any of a launcher or for devices of a test."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**plain, **as_root, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def losses_of_one(tmp_path_factory):
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("one")
    ended = CliRunner().invoke(app, ["train", PROGRAM, "--folder", str(folder), "--steps", "40"])
    assert ended.exit_code == 0, ended.output
    return losses(folder)


def launch(command, variables):
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=300)


@installed("mpirun.openmpi")
def test_tasks_of_openmpi_train_as_one_process(tmp_path, variables, losses_of_one):
    local = "--oversubscribe --mca oob_tcp_if_include lo --mca btl self,tcp --mca btl_tcp_if_include lo -n 2"
    train = [*COMMAND, "--folder", str(tmp_path), "--steps", "20"]
    ended = launch(["mpirun.openmpi", *local.split(), *train], variables)
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_allclose(losses(tmp_path), losses_of_one[:20], rtol=1e-4)
    assert ended.stdout.count("the whole plan") == 1  # of one run


@installed("mpiexec.mpich")
@pytest.mark.sweep
def test_the_failure_of_a_task_of_mpich_is_one_line_and_ends_all(tmp_path, variables, losses_of_one):
    train = [*COMMAND, "--folder", str(tmp_path), "--steps", "20", "--evaluate-every", "12"]
    ended = launch(["mpiexec.mpich", "-n", "2", *train], {**variables, "TASKS_FAILED": str(tmp_path / "failed")})
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("meshdsl: ")]
    assert len(said) == 1 and said[0].startswith("meshdsl: process 1 (pid ")
    assert said[0].endswith("RuntimeError: no evaluation") and not (tmp_path / "run.lock").exists()
    np.testing.assert_allclose(losses(tmp_path), losses_of_one[:12], rtol=1e-4)


@pytest.mark.skipif("MESHDSL_SLURM" not in os.environ, reason="its daemons need a quiet machine: make slurm")
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"{', '.join(slurm_cluster.missing())} is not installed")
def test_a_job_of_slurm_is_stopped_queued_again_and_resumed(tmp_path, variables, losses_of_one):
    """The file that users copy, for two tasks on one node."""
    text = (ROOT / "examples" / "launch" / "slurm.sbatch").read_text()
    folder = tmp_path / "run"
    for of_example, own in {
        "--nodes=16": "--nodes=1",
        "--ntasks-per-node=1": "--ntasks-per-node=2",
        "#SBATCH --gpus-per-node=8\n": "",
        "meshdsl train train.py": " ".join(COMMAND),
        "--mesh data=16,model=8 --topology dgx-h100": "--steps 40 --save-every 5",
        "/shared/runs/train": str(folder),
    }.items():
        assert of_example in text
        text = text.replace(of_example, own)
    script, said = tmp_path / "job.sbatch", tmp_path / "said.txt"
    script.write_text(text)
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", variables) as environment:
        job = output(["sbatch", "--parsable", f"--output={said}", str(script)], environment, cwd=ROOT).strip()
        wait_for(lambda: any((folder / "checkpoints").glob("[0-9]*")), said)
        output(["scancel", "--signal=TERM", job], environment)  # to all tasks, as --signal does before the end
        state = partial(output, ["scontrol", "show", "job", job], environment)

        def is_over():
            if "Reason=BeginTime" in state():  # queued again, to start in two minutes
                output(["scontrol", "update", f"JobId={job}", "StartTime=now"], environment)
            return "JobState=COMPLETED" in state()

        wait_for(is_over, said)
    assert "stopped after step" in said.read_text() and "resumed after step" in said.read_text()
    np.testing.assert_allclose(losses(folder), losses_of_one, rtol=1e-4)
