"""The examples for Ray, on one machine: a worker that fails is started again with all others, and they resume."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.training.joining.slurm_cluster import free_port, wait_for
from tests.training.joining.test_launchers import PROGRAM, ROOT, losses_of_one, variables  # noqa: F401
from tests.training.test_command import losses

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: make ray")


@pytest.fixture
def head(variables, tmp_path):  # noqa: F811
    """Variables with which drivers find Ray on the loopback interface; its workers have those of a test."""
    own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "JAX_NUM_CPU_DEVICES": "4"}
    own |= {"TASKS_FAILED": str(tmp_path / "failed"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**variables, **own, "RAY_ADDRESS": f"127.0.0.1:{free_port()}"}
    log = tmp_path / "ray.out"
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as sockets, log.open("w") as out:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
        start += ["--node-ip-address=127.0.0.1", f"--port={environment['RAY_ADDRESS'].rpartition(':')[2]}"]
        start += ["--include-dashboard=false", f"--temp-dir={sockets}", "--object-store-memory=100000000"]
        process = subprocess.Popen(start, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: "Ray runtime started" in log.read_text(), log)
            yield environment
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("example", ["ray_train.py", "ray_actors.py"])
def test_workers_that_fail_once_have_the_losses_of_one_process(example, head, tmp_path, losses_of_one):  # noqa: F811
    options = (
        f"--mesh data=4,model=2 --steps 20 --save-every 5 --workers 2 --gpus 0 --max-failures 1 --folder {tmp_path}"
    )
    command = [sys.executable, str(ROOT / "examples" / "launch" / example), PROGRAM, *options.split()]
    ended = subprocess.run(command, env=head, cwd=ROOT, capture_output=True, text=True, timeout=500)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0 and Path(head["TASKS_FAILED"]).exists(), said
    assert "no evaluation" in said and "resumed after step 15" in said
    np.testing.assert_allclose(losses(tmp_path), losses_of_one[:20], rtol=1e-4)
