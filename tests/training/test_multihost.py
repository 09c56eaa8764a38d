"""Processes of other launchers join: those that jax knows, and those that it does not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.errors import ArgumentError, DeviceError
from meshdsl.training.launchers import Rank, find_rank, process_count, stated_rank

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("JAX_", "SLURM_", "OMPI_", "PMI_", "LWS_", "TPU_", "WORLD_", "RANK", "JOB_COMPLETION", "KUBERNETES_")


AT = {"JAX_COORDINATOR_ADDRESS": "a:1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1"}
TORCH = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.default"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[1-2]"}
TPU = {"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize(("environment", "count", "found"), [
    ({}, 1, None),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "SLURM_PROCID": "0"}, 2, ("a:1", 2, 1)),
    (SLURM, 4, None),  # jax finds out
    ({**AT, **SLURM}, 4, ("a:1", 4, 3)),
    (OMPI, 2, None),
    ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, ("127.0.0.1:8476", 2, 1)),  # version 5, on one machine
    ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "3.0;tcp://h0:1"}, 2, None),  # version 4
    ({**AT, **SLURM, **OMPI}, 2, ("a:1", 2, 1)),  # mpirun in an allocation of SLURM
    ({**SLURM, **PMI, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, 2, ("127.0.0.1:8476", 2, 1)),
    ({**AT, **OMPI}, 2, ("a:1", 2, 1)),
    (PMI, 2, None),
    ({**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 2, ("127.0.0.1:8476", 2, 1)),
    ({**AT, **PMI}, 2, ("a:1", 2, 1)),
    ({**SLURM, **PMI}, 4, None),  # srun sets both
    (TORCH, 4, ("n1:29500", 4, 3)),
    ({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "7"}, 4, ("n1:29501", 4, 3)),  # as a task of SLURM; its own store
    (LWS, 2, ("set-0.set.default:8476", 2, 1)),
    (TPU, 4, None),
    ({**TPU, "MEGASCALE_NUM_SLICES": "2"}, 8, None),
    ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 1, None),
    ({"JOB_COMPLETION_INDEX": "0"}, 0, None),
    ({**AT, "JOB_COMPLETION_INDEX": "0"}, 0, None),
    ({**AT, "JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2"}, 2, ("a:1", 2, 1)),
    ({"WORLD_SIZE": "4"}, 1, None),  # no process of torchrun
])  # fmt: skip
def test_number_rank_and_address_are_the_launchers(environment, count, found):
    stated = stated_rank(environment)
    assert process_count(environment) == count
    assert (stated and (stated.address, stated.count, stated.index)) == found


@pytest.fixture
def environment(monkeypatch):
    """Sets variables of a launcher, and no others."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, None),
    ({**AT, "JAX_NUM_PROCESSES": "1"}, None),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, ("a:1", 2, 1, "JAX_PROCESS_ID")),
    ({**SLURM, "SLURM_JOB_ID": "5", "SLURM_LOCALID": "1"}, ("n1:61445", 4, 3, "SLURM_PROCID")),
    ({**OMPI, "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1,10.0.0.2:7", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
     ("10.0.0.1:61442", 2, 1, "OMPI_COMM_WORLD_RANK")),
])  # fmt: skip
def test_jax_says_what_the_variables_do_not(environment, variables, expected):
    environment(variables)
    found = find_rank()
    assert (found and (found.address, found.count, found.index, found.variable)) == expected


@pytest.mark.parametrize(("variables", "message"), [
    ({**AT, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' is not a number of processes: correct it, or unset"),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' is not the number of a process"),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: 2 processes have the numbers from 0"),
    ({"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "'a' is not the address of pr"),
    (PMI, "MPICH announces 2 processes, and nothing says where they meet; set JAX_COORDINATOR_ADDRESS=host:port of"),
    (SLURM, "SLURM announces 4 processes, and nothing says where they meet; set JAX_COORDINATOR_ADDRESS"),
    ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes announces several processes, .* JAX_NUM_PROCESSES, or install 'jax"),
])  # fmt: skip
def test_processes_that_are_announced_and_cannot_join(environment, variables, message):
    environment(variables)
    with pytest.raises((ArgumentError, DeviceError), match=message):
        find_rank()


def test_hosts_of_a_tpu_slice_join_without_variables(environment, monkeypatch):
    environment({})
    monkeypatch.setattr("jax._src.cloud_tpu_init.running_in_cloud_tpu_vm", True)
    detected = ["h0:8482", 4, 2, None]
    monkeypatch.setattr("meshdsl.training.launchers._detect", lambda *_: detected)
    assert find_rank() == Rank("a Cloud TPU slice", "", "h0:8482", 4, 2)
    detected[1:3] = 1, 0  # a slice of one host
    assert find_rank() is None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_processes_with_different_programs_end_before_anything_is_saved(tmp_path):
    """They are those of a launcher that jax does not know."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    plain |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables}
    train = [sys.executable, "-m", "meshdsl", "train", str(ROOT / "tests/training/tiny.py"), "--folder", str(tmp_path)]
    own = [{"RANK": str(rank), "TINY_RATE": f"0.{rank + 1}"} for rank in range(2)]
    launched = [subprocess.Popen(train, env=plain | each, stderr=subprocess.PIPE, text=True) for each in own]
    said = [each.communicate(timeout=300)[1] for each in launched]
    assert [each.returncode for each in launched] == [2, 2], said
    (line,) = [line for line in "".join(said).splitlines() if line.startswith("meshdsl: ")]
    assert line.startswith("meshdsl: the processes do not train the same: step: step ")
    assert " in process 1, step " in line and line in said[0]
    assert not {"plan.json", "checkpoints", "metrics.jsonl", "run.lock"} & {file.name for file in tmp_path.iterdir()}
