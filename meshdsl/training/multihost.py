"""Several processes that train together, each with its own devices.

Under SLURM, OpenMPI or Kubernetes, or another launcher that sets the three variables below, a process joins the others
through ``jax.distributed``. Where jax cannot find the address of the coordinator (OpenMPI 5, or Kubernetes without its
Python package), the first variable gives it; number and rank are the launcher's. ``start`` launches processes on this
machine and supervises them: the end of one ends all.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import jax

from meshdsl.errors import DeviceError
from meshdsl.layouts.mesh import Mesh

PARENT = "MESHDSL_PARENT"  # process that started this one, and with which it ends
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
STOPPED = 128 + signal.SIGTERM  # exit status of a process that received SIGTERM, saved and ended
_SIZES = {  # variable with the number of processes -> variable that is set only in a process of that launcher
    COUNT: ADDRESS,
    "SLURM_NTASKS": "SLURM_STEP_NODELIST",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
}
_POD = "JOB_COMPLETION_INDEX"  # set in an indexed job of Kubernetes; jax gets its size from the cluster
_RANKS = (INDEX, "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", _POD)


def process_count(environment: Mapping[str, str] = os.environ) -> int:
    """The number of processes that a launcher announces; 1 without a launcher, 0 where jax has to find out."""
    sizes = [int(environment[size]) for size, mark in _SIZES.items() if size in environment and mark in environment]
    return sizes[0] if sizes else 0 if _POD in environment else 1


def join(mesh: Mesh) -> None:
    """Joins the other processes, if there are any, before jax looks for devices.

    On CPU every process makes its share of the mesh's devices. A process that ``start`` made ends with the one that
    made it.

    Raises:
      DeviceError: the processes do not divide the mesh, do not find each other, or are not as many as announced.
    """
    if PARENT in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), name="parent", daemon=True).start()
    count = process_count()
    if count and mesh.size % count:
        raise DeviceError(f"mesh {mesh} has {mesh.size} devices, which {count} processes cannot share equally")
    if count and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", mesh.size // count)
    if count != 1:
        _initialize(count)
        if count and jax.process_count() != count:
            raise DeviceError(f"{count} processes were started, {jax.process_count()} found each other")


def rendezvous(count: int, environment: Mapping[str, str] = os.environ) -> tuple[str, int, int] | tuple[()]:
    """Address of the coordinator, number of processes and rank of this one; empty where jax has to find out."""
    ranks = [int(environment[name]) for name in _RANKS if name in environment]
    return (environment[ADDRESS], count, ranks[0]) if ADDRESS in environment and count and ranks else ()


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent has ended; the checkpoint that it was writing is not completed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(STOPPED)


def _initialize(count: int) -> None:
    try:
        jax.distributed.initialize(*rendezvous(count))
    except (ValueError, RuntimeError) as error:
        announcement = f"{count} processes were announced" if count else "a job of Kubernetes was announced"
        remedy = f"set {ADDRESS}=host:port of process 0 for all" + (
            "" if count else f", and {COUNT}, or install 'jax[k8s]'"
        )
        raise DeviceError(f"{announcement}, but they did not find each other: {error}; {remedy}") from error


def start(command: Sequence[str], count: int, folder: Path) -> int:
    """Runs ``count`` processes of a Python command on this machine; returns 0, or 1 if one failed.

    The output of the first one is shown, that of the others is in ``folder/process-1.log`` and so on. SIGTERM and
    Ctrl-C are forwarded to all; the result is then 128 and the signal, as of one process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{_free_port()}"
    group = [_start(command, address, count, i, folder) for i in range(count)]

    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _end(group, signal.SIGTERM)

    previous = {kind: signal.signal(kind, forward) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = _wait(group, folder)
        return 128 + received[0] if received and status == STOPPED else status
    finally:
        _end(group, signal.SIGKILL)
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def _start(command: Sequence[str], address: str, count: int, index: int, folder: Path) -> subprocess.Popen[bytes]:
    own = {ADDRESS: address, COUNT: str(count), INDEX: str(index), PARENT: str(os.getpid())}
    log = None if index == 0 else (folder / f"process-{index}.log").open("w")
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **own},
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
    )


def _wait(group: Sequence[subprocess.Popen[bytes]], folder: Path) -> int:
    """Waits for all; if one fails, the others, which would wait for it forever, are ended."""
    while any(process.poll() is None for process in group):
        failed = [i for i, process in enumerate(group) if process.poll() not in (None, 0, STOPPED)]
        if failed:
            print(_failure_text(failed[0], group, folder), file=sys.stderr)
            _end(group, signal.SIGKILL)
            return 1
        time.sleep(0.05)
    return max(process.returncode for process in group)


def _failure_text(index: int, group: Sequence[subprocess.Popen[bytes]], folder: Path) -> str:
    text = f"process {index} of {len(group)} ended with status {group[index].returncode}, the others were ended"
    return text if index == 0 else f"{text}\nits output: {folder / f'process-{index}.log'}"


def _end(group: Sequence[subprocess.Popen[bytes]], kind: signal.Signals) -> None:
    for process in group:
        if process.poll() is None:
            process.send_signal(kind)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
