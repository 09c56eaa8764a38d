"""Processes of other launchers join: those that jax knows, and those that it does not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.errors import ArgumentError, DeviceError
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.joining.launchers import find_rank
from meshdsl.training.joining.multihost import joined

ROOT = Path(__file__).parents[3]
LAUNCHERS = ("JAX_", "SLURM_", "OMPI_", "PMI_", "LWS_", "TPU_", "WORLD_", "RANK", "JOB_COMPLETION", "KUBERNETES_")


AT = {"JAX_COORDINATOR_ADDRESS": "a:1"}
OMPI_INDEX = "OMPI_COMM_WORLD_RANK"
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1"}
TORCH = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.default"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[1-2]"}
TPU = {"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize(("environment", "found"), [
    ({}, None),
    ({**AT, "JAX_NUM_PROCESSES": "1"}, None),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "SLURM_PROCID": "0"}, ("a:1", 2, 1, "JAX_PROCESS_ID")),
    ({**SLURM, "SLURM_JOB_ID": "5"}, ("n1:61445", 4, 3, "SLURM_PROCID")),
    ({**SLURM, "SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "gpu-x07,gpu-y1"}, ("gpu-x07:61445", 4, 3, "SLURM_PROCID")),
    ({**SLURM, "SLURM_JOB_ID": "4101", "SLURM_STEP_NODELIST": "n[004-7,9],m"}, ("n004:61445", 4, 3, "SLURM_PROCID")),
    ({**AT, **SLURM}, ("a:1", 4, 3, "SLURM_PROCID")),
    ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("127.0.0.1:8476", 2, 1, OMPI_INDEX)),  # version 5, on one machine
    ({**OMPI, "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1,10.0.0.2:7"}, ("10.0.0.1:61442", 2, 1, OMPI_INDEX)),
    ({**OMPI, "OMPI_MCA_orte_hnp_uri": "8192.0;tcp6://[fe80::1,2620::2]:4"}, ("[fe80::1]:61442", 2, 1, OMPI_INDEX)),
    ({**AT, **SLURM, **OMPI}, ("a:1", 2, 1, OMPI_INDEX)),  # mpirun in an allocation of SLURM
    ({**SLURM, **PMI, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, ("127.0.0.1:8476", 2, 1, "PMI_RANK")),
    ({**AT, **OMPI}, ("a:1", 2, 1, OMPI_INDEX)),
    ({**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, ("127.0.0.1:8476", 2, 1, "PMI_RANK")),
    ({**AT, **PMI}, ("a:1", 2, 1, "PMI_RANK")),
    ({**SLURM, **PMI, "SLURM_JOB_ID": "5"}, ("n1:61445", 4, 3, "SLURM_PROCID")),  # srun sets both
    (TORCH, ("n1:29500", 4, 3, "RANK")),
    ({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "7"}, ("n1:29501", 4, 3, "RANK")),  # as a task of SLURM; its own store
    (LWS, ("set-0.set.default:8476", 2, 1, "LWS_WORKER_INDEX")),
    (TPU, ("h0:8476", 4, 2, "TPU_WORKER_ID")),
    ({**TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "m:80"},
     ("m:8476", 8, 6, "TPU_WORKER_ID")),
    ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    ({"JOB_COMPLETION_INDEX": "0"}, ("", 0, 0, "")),  # jax finds out
    ({**AT, "JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2"}, ("a:1", 2, 1, "JOB_COMPLETION_INDEX")),
    ({"WORLD_SIZE": "4"}, None),  # no process of torchrun
    ({"JAX_NUM_PROCESSES": "2", **SLURM, "SLURM_JOB_ID": "5"}, ("n1:61445", 4, 3, "SLURM_PROCID")),
    ({"JAX_NUM_PROCESSES": "1"}, None),
    ({**AT, "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "RANK": "1"}, ("a:1", 2, 1, "RANK")),
])  # fmt: skip
def test_number_rank_and_address_are_the_launchers(environment, found):
    rank = find_rank(environment)
    assert (rank and (rank.address, rank.count, rank.index, rank.variable)) == found


@pytest.mark.parametrize(("variables", "message"), [
    ({**AT, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' is not a number of processes: correct it, or unset"),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' is not the number of a process"),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: 2 processes have the numbers from 0"),
    ({"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "'a' is not the address of pr"),
    (PMI, "MPICH announces 2 processes, and nothing says where they meet; set JAX_COORDINATOR_ADDRESS=host:port of"),
    (OMPI, "OpenMPI announces 2 processes, and nothing says where they meet; set JAX_COORDINATOR_ADDRESS"),
    (SLURM, "SLURM announces 4 processes, and nothing says where they meet; set JAX_COORDINATOR_ADDRESS"),
    ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES announces 2 processes, and nothing says wh"),
    ({**AT, "JAX_NUM_PROCESSES": "2"}, "and nothing says which one this is; set JAX_PROCESS_ID to its number, from "),
    ({**AT, "JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES='0' is not a number of processes: correct it, or unset it"),
    ({**AT, "JAX_NUM_PROCESSES": "\u00b2"}, "JAX_NUM_PROCESSES='\u00b2' is not a number of processes"),
    ({name: value for name, value in TORCH.items() if name != "RANK"}, "this is; set RANK to its number, from 0 to 3"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "x"}, "MASTER_PORT='x' is not a port"),
    ({"WORLD_SIZE": "4", "RANK": "3"}, "a launcher of torch announces 4 processes, and nothing says where they meet"),
])  # fmt: skip
def test_processes_that_are_announced_and_cannot_join(variables, message):
    with pytest.raises((ArgumentError, DeviceError), match=message):
        find_rank(variables)


@pytest.mark.parametrize("name", ["SLURM", "OpenMPI"])
def test_addresses_are_those_that_jax_detects(name, monkeypatch):
    """Its own classes are private; the tests may read them."""
    from jax._src.clusters.ompi_cluster import OmpiCluster
    from jax._src.clusters.slurm_cluster import SlurmCluster

    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    variables = {"SLURM": {**SLURM, "SLURM_JOB_ID": "123456"}, "OpenMPI": {**OMPI, **uri}}[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    detected = {"SLURM": SlurmCluster, "OpenMPI": OmpiCluster}[name].get_coordinator_address(10, None)
    assert find_rank(variables).address == detected


def test_what_jax_cannot_find_out_is_one_error(monkeypatch):
    """A job of Kubernetes, without its client or outside of a cluster."""
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    rank = find_rank({"JOB_COMPLETION_INDEX": "0"})
    message = r"a job of Kubernetes, and jax cannot find out .*\n.*install 'jax\[k8s\]'"
    with pytest.raises(DeviceError, match=message), joined(Mesh(data=2), rank, {}, lambda _: ("", 0), timeout=2):
        pass


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
