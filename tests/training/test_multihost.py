"""Processes of other launchers join: those that jax knows, and those that it does not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.errors import ArgumentError
from meshdsl.training.launchers import process_count, rendezvous

ROOT = Path(__file__).parents[2]
JOIN = """
import sys
import jax
import meshdsl as md
from meshdsl.training.multihost import join
try:
    join(md.Mesh(data=4))
except md.MeshDSLError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(jax.process_index(), jax.process_count(), jax.device_count(), len(jax.local_devices()))
"""
LAUNCHERS = ("JAX_", "SLURM_", "OMPI_", "PMI_", "LWS_", "TPU_", "WORLD_", "RANK", "JOB_COMPLETION", "KUBERNETES_")


def process(**environment):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    plain |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", JOIN], env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


AT = {"JAX_COORDINATOR_ADDRESS": "a:1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1"}
TORCH = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.default"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(("environment", "count", "found"), [
    ({}, 1, ()),
    ({**AT, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "SLURM_PROCID": "0"}, 2, ("a:1", 2, 1)),
    (SLURM, 4, ()),  # jax finds out
    ({**AT, **SLURM}, 4, ("a:1", 4, 3)),
    (OMPI, 2, ()),
    ({**AT, **OMPI}, 2, ("a:1", 2, 1)),
    (PMI, 2, ()),
    ({**PMI, "MPI_LOCALNRANKS": "2"}, 2, ("127.0.0.1:8476", 2, 1)),
    ({**AT, **PMI}, 2, ("a:1", 2, 1)),
    ({**SLURM, **PMI}, 4, ()),  # srun sets both
    (TORCH, 4, ("n1:29500", 4, 3)),
    ({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "7"}, 4, ("n1:29501", 4, 3)),  # as a task of SLURM; its own store
    (LWS, 2, ("set-0.set.default:8476", 2, 1)),
    ({"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3", "TPU_WORKER_ID": "2"}, 4, ()),
    ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 1, ()),
    ({"JOB_COMPLETION_INDEX": "0"}, 0, ()),
    ({**AT, "JOB_COMPLETION_INDEX": "0"}, 0, ()),
    ({**AT, "JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2"}, 2, ("a:1", 2, 1)),
    ({"WORLD_SIZE": "4"}, 1, ()),  # no process of torchrun
])  # fmt: skip
def test_number_rank_and_address_are_the_launchers(environment, count, found):
    assert process_count(environment) == count and rendezvous(environment) == found


def test_a_number_of_processes_that_is_none():
    message = "JAX_NUM_PROCESSES='two' is not a number of processes: correct it, or unset it"
    with pytest.raises(ArgumentError, match=message):
        process_count({**AT, "JAX_NUM_PROCESSES": "two"})


@pytest.mark.parametrize("kind", ["OpenMPI 5", "torch"])
def test_two_processes_of_a_launcher_that_jax_does_not_know(kind):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "OpenMPI 5": lambda i: {**OMPI, "OMPI_COMM_WORLD_RANK": i, "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"},
        "torch": lambda i: {"WORLD_SIZE": "2", "RANK": i, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    launched = [process(**variables[kind](str(rank))) for rank in range(2)]
    said = [each.communicate(timeout=120) for each in launched]
    assert [out.split() for out, _ in said] == [["0", "2", "4", "2"], ["1", "2", "4", "2"]], said


def test_they_do_not_find_each_other():
    _, said = process(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0").communicate(timeout=120)
    assert said.startswith("DeviceError: 2 processes were announced by OpenMPI, but they did not find each other: ")
    assert said.rstrip().endswith("set JAX_COORDINATOR_ADDRESS=host:port of process 0 for all")
    _, said = process(JOB_COMPLETION_INDEX="0").communicate(timeout=120)
    assert "a job of Kubernetes was announced" in said and "'jax[k8s]'" in said
