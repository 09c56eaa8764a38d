"""Several processes that train together, each with its own devices.

``joined`` finds the others: those that ``meshdsl.training.supervision`` started on this machine, or those of the
launchers of ``launchers``. They meet (``rendezvous``), jax joins them, and while the run goes on the failure of one
ends all.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil

import jax

from meshdsl.errors import DeviceError
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.joining.launchers import ADDRESS, COUNT, DEVICES, INDEX, PARENT, STACKS, Rank
from meshdsl.training.joining.rendezvous import OF_JAX, OWN, meet, wait_for_coordinator
from meshdsl.training.saving.checkpoint import versions
from meshdsl.util.exit_status import STOPPED

JOIN_TIMEOUT = 300.0  # seconds, as of jax


@contextmanager
def joined(
    mesh: Mesh,
    rank: Rank | None,
    options: Mapping[str, str],
    explain: Callable[[BaseException], tuple[str, int]],
    timeout: float = JOIN_TIMEOUT,
) -> Iterator[None]:
    """Joins the other processes, if there are any, before jax looks for devices; an error in one of them ends all.

    On CPU every process makes its share of the mesh's devices. A process that a supervisor started ends with it.

    Args:
      mesh: of all processes.
      rank: of this process; None if it is alone.
      options: that have to be the same for all, by name.
      explain: the message and the exit status of an error.
      timeout: seconds in which the others have to come.

    Raises:
      DeviceError: the processes do not divide the mesh, do not find each other, or are not as many as announced.
      SystemExit: so it is, and process 0 says why.
    """
    if is_supervised():
        faulthandler.register(STACKS, all_threads=True)
        end_with_supervisor()
    if rank is None:
        _share(mesh, 1)
        if is_supervised() and DEVICES in os.environ:  # of several, until there were fewer
            for kind in ("cuda", "rocm"):  # as jax does for several
                jax.config.update(f"jax_{kind}_visible_devices", os.environ[DEVICES])
        yield
        return
    if not rank.address:
        _detect(mesh, rank, timeout)
        yield
        return
    peers = meet(rank, {**options, **versions()}, timeout, is_supervised())
    try:
        _share(mesh, rank.count)
        _initialize(mesh, rank, timeout)
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # jax would wait for the others before the end
        peers.fail(*explain(error), OF_JAX if isinstance(error, jax.errors.JaxRuntimeError) else OWN)
    peers.leave()


def is_supervised() -> bool:
    """Whether a supervisor started this process."""
    return PARENT in os.environ


def end_with_supervisor() -> None:
    """Ends this process soon after its supervisor has ended."""
    threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), name="parent", daemon=True).start()


def _share(mesh: Mesh, count: int) -> None:
    if mesh.size % count:
        raise DeviceError(f"mesh {mesh} has {mesh.size} devices, which {count} processes cannot share equally")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", mesh.size // count)


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent has ended; the checkpoint that it was writing is not completed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(STOPPED)


def _detect(mesh: Mesh, rank: Rank, timeout: float) -> None:
    """Joins with jax, which finds out who the others are."""
    try:
        jax.distributed.initialize(initialization_timeout=ceil(timeout))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        remedy = "install 'jax[k8s]'" if "Kubernetes" in rank.launcher else "TPU_SKIP_MDS_QUERY=1 trains here alone"
        raise DeviceError(
            f"this process belongs to {rank.launcher}, and jax cannot find out who the others are: {error}\n"
            f"set {ADDRESS}=host:port of process 0, {COUNT} and {INDEX}, or {remedy}"
        ) from error
    _share(mesh, jax.process_count())


def _initialize(mesh: Mesh, rank: Rank, timeout: float) -> None:
    """Joins with jax. Of launchers that it knows, it takes one GPU per task, which is right for one device each."""
    detection = None if mesh.size == rank.count else "deactivate"
    if rank.index:
        wait_for_coordinator(rank, timeout)
    at = rank.address, rank.count, rank.index
    jax.distributed.initialize(*at, cluster_detection_method=detection, initialization_timeout=ceil(timeout))
    if jax.process_count() != rank.count:
        raise DeviceError(f"{rank.count} processes were started, {jax.process_count()} found each other")
