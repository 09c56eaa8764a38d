"""Several processes that train together, each with its own devices.

``join`` finds the others: those that ``meshdsl.training.supervisor`` started on this machine, or those of the launchers
of ``meshdsl.training.launchers``.
"""

import faulthandler
import os
import threading
import time

import jax

from meshdsl.errors import DeviceError
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.launchers import ADDRESS, COUNT, launcher, process_count, rendezvous
from meshdsl.training.supervisor import DEVICES, PARENT, STACKS
from meshdsl.util.exit_status import STOPPED


def join(mesh: Mesh) -> None:
    """Joins the other processes, if there are any, before jax looks for devices.

    On CPU every process makes its share of the mesh's devices. A process that a supervisor started ends with it.

    Raises:
      DeviceError: the processes do not divide the mesh, do not find each other, or are not as many as announced.
    """
    if is_supervised():
        faulthandler.register(STACKS, all_threads=True)
        end_with_supervisor()
    count = process_count()
    if count and mesh.size % count:
        raise DeviceError(f"mesh {mesh} has {mesh.size} devices, which {count} processes cannot share equally")
    if count and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", mesh.size // count)
    if count == 1 and is_supervised() and DEVICES in os.environ:  # of several, until there were fewer
        for kind in ("cuda", "rocm"):  # as jax does for several
            jax.config.update(f"jax_{kind}_visible_devices", os.environ[DEVICES])
    if count != 1:
        _initialize(count)
        if count and jax.process_count() != count:
            raise DeviceError(f"{count} processes were started, {jax.process_count()} found each other")


def is_supervised() -> bool:
    """Whether a supervisor started this process."""
    return PARENT in os.environ


def end_with_supervisor() -> None:
    """Ends this process soon after its supervisor has ended."""
    threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), name="parent", daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent has ended; the checkpoint that it was writing is not completed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(STOPPED)


def _initialize(count: int) -> None:
    try:
        jax.distributed.initialize(*rendezvous())
    except (ValueError, RuntimeError) as error:
        found = launcher()
        name = found.name if found else "nobody"
        announcement = f"{count} processes were announced by {name}" if count else f"{name} was announced"
        remedy = f"set {ADDRESS}=host:port of process 0 for all" + (
            "" if count else f", and {COUNT}, or install 'jax[k8s]'"
        )
        raise DeviceError(f"{announcement}, but they did not find each other: {error}; {remedy}") from error
