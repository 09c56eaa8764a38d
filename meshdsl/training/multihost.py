"""Several processes that train together, each with its own devices.

Under SLURM, OpenMPI or Kubernetes, or where another launcher sets the three variables below, a process joins the
others through ``jax.distributed``. Where jax does not find out by itself at which address they meet (OpenMPI 5, or
Kubernetes without its Python package), the first variable says it: number and rank are the launcher's. ``start``
begins some on this machine and looks after them: the end of one ends all.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import jax

from meshdsl.errors import DeviceError
from meshdsl.layouts.mesh import Mesh

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
STOPPED = 128 + signal.SIGTERM  # the status of a process that was told to stop, saved and ended
_SIZES = {  # what says how many processes there are -> what is set only in a process that a launcher started
    COUNT: ADDRESS,
    "SLURM_NTASKS": "SLURM_STEP_NODELIST",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
}
_POD = "JOB_COMPLETION_INDEX"  # of an indexed job of Kubernetes, whose size jax asks the cluster for
_RANKS = (INDEX, "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", _POD)


def announced(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes a launcher says there are; 1 where none says anything, 0 where jax has to find out."""
    sizes = [int(environment[size]) for size, mark in _SIZES.items() if size in environment and mark in environment]
    return sizes[0] if sizes else 0 if _POD in environment else 1


def join(mesh: Mesh) -> None:
    """Join the other processes, if there are any, before jax looks for devices.

    On CPU every process makes its part of the mesh's devices.

    Raises DeviceError if the processes do not divide the mesh, do not find each other, or are others than announced.
    """
    count = announced()
    if count and mesh.size % count:
        raise DeviceError(f"mesh {mesh} has {mesh.size} devices, which {count} processes cannot share equally")
    if count and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", mesh.size // count)
    if count != 1:
        _meet(count)
        if count and jax.process_count() != count:
            raise DeviceError(f"{count} processes were started, {jax.process_count()} found each other")


def meeting(count: int, environment: Mapping[str, str] = os.environ) -> tuple[str, int, int] | tuple[()]:
    """Where the processes meet, how many they are and which this one is; empty where jax has to find out."""
    ranks = [int(environment[name]) for name in _RANKS if name in environment]
    return (environment[ADDRESS], count, ranks[0]) if ADDRESS in environment and count and ranks else ()


def _meet(count: int) -> None:
    try:
        jax.distributed.initialize(*meeting(count))
    except (ValueError, RuntimeError) as error:
        said = f"{count} processes were announced" if count else "a job of Kubernetes was announced"
        remedy = f"set {ADDRESS}=host:port of process 0 for all" + (
            "" if count else f", and {COUNT}, or install 'jax[k8s]'"
        )
        raise DeviceError(f"{said}, but they did not find each other: {error}; {remedy}") from error


def start(command: Sequence[str], count: int, folder: Path) -> int:
    """Run ``count`` processes of a Python command on this machine; 0, ``STOPPED``, or 1 if one failed.

    The first one's output is shown, that of the others is in ``folder/process-1.log`` and so on. SIGTERM and Ctrl-C
    are passed on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{_free_port()}"
    group = [_start(command, address, count, i, folder) for i in range(count)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        _end(group, signal.SIGTERM)

    before = {kind: signal.signal(kind, pass_on) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(group, folder)
    finally:
        _end(group, signal.SIGKILL)
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _start(command: Sequence[str], address: str, count: int, index: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, ADDRESS: address, COUNT: str(count), INDEX: str(index)}
    log = None if index == 0 else (folder / f"process-{index}.log").open("w")
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
    )


def _wait(group: Sequence[subprocess.Popen[bytes]], folder: Path) -> int:
    """Wait for all; when one fails the others, which would wait for it for ever, are ended."""
    while any(process.poll() is None for process in group):
        failed = [i for i, process in enumerate(group) if process.poll() not in (None, 0, STOPPED)]
        if failed:
            print(_died(failed[0], group, folder), file=sys.stderr)
            _end(group, signal.SIGKILL)
            return 1
        time.sleep(0.05)
    return max(process.returncode for process in group)


def _died(index: int, group: Sequence[subprocess.Popen[bytes]], folder: Path) -> str:
    what = f"process {index} of {len(group)} ended with status {group[index].returncode}, the others were ended"
    return what if index == 0 else f"{what}\nits output: {folder / f'process-{index}.log'}"


def _end(group: Sequence[subprocess.Popen[bytes]], kind: signal.Signals) -> None:
    for process in group:
        if process.poll() is None:
            process.send_signal(kind)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
