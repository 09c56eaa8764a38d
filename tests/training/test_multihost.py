"""Processes of other launchers join: those that jax knows, and those that it does not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from meshdsl.training.multihost import rendezvous

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
LAUNCHERS = ("JAX_", "SLURM_", "OMPI_", "JOB_COMPLETION", "KUBERNETES_")


def process(**environment):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    plain |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", JOIN], env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_number_and_rank_are_the_launchers():
    at = {"JAX_COORDINATOR_ADDRESS": "a:1"}
    assert rendezvous(2, {**at, "JAX_PROCESS_ID": "1", "SLURM_PROCID": "0"}) == ("a:1", 2, 1)
    assert rendezvous(4, {**at, "SLURM_PROCID": "3"}) == ("a:1", 4, 3)
    assert rendezvous(2, {**at, "OMPI_COMM_WORLD_RANK": "1"}) == ("a:1", 2, 1)
    assert rendezvous(2, {**at, "JOB_COMPLETION_INDEX": "0"}) == ("a:1", 2, 0)
    assert rendezvous(2, {"OMPI_COMM_WORLD_RANK": "1"}) == ()  # jax finds out
    assert rendezvous(0, {**at, "JOB_COMPLETION_INDEX": "0"}) == ()


def test_two_processes_of_a_launcher_that_jax_does_not_know():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    launched = [
        process(JAX_COORDINATOR_ADDRESS=address, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=str(rank))
        for rank in range(2)
    ]
    said = [each.communicate(timeout=120) for each in launched]
    assert [out.split() for out, _ in said] == [["0", "2", "4", "2"], ["1", "2", "4", "2"]], said


def test_they_do_not_find_each_other():
    _, said = process(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0").communicate(timeout=120)
    assert said.startswith("DeviceError: 2 processes were announced, but they did not find each other: ")
    assert said.rstrip().endswith("set JAX_COORDINATOR_ADDRESS=host:port of process 0 for all")
    _, said = process(JOB_COMPLETION_INDEX="0").communicate(timeout=120)
    assert "a job of Kubernetes was announced" in said and "'jax[k8s]'" in said
