"""Launchers: which variables say how many processes a run has, which of them this one is, and where they meet.

jax finds the others itself under SLURM, OpenMPI 4, Kubernetes and on Cloud TPUs. Of launchers that jax does not know,
the table has the variables; where none of them has the address of process 0, ``JAX_COORDINATOR_ADDRESS`` gives it, and
processes of one machine need none. With that address stated, number and rank are still those of the launcher.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshdsl.errors import ArgumentError

Environment = Mapping[str, str]

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_PORT = 8476  # on which jax's own clusters meet as well


@dataclass(frozen=True)
class Launcher:
    """One launcher.

    Args:
      name: of it, for messages.
      count: variable with the number of processes, or with their hosts. Empty: jax asks.
      index: variable with the number of this one.
      mark: variable that is set only in a process that it has launched.
      address: of process 0, as far as the variables say; empty where jax finds it, or nobody does.
      lists_hosts: whether ``count`` lists hosts.
    """

    name: str
    count: str
    index: str
    mark: str
    address: Callable[[Environment], str] = lambda environment: ""
    lists_hosts: bool = False

    def processes(self, environment: Environment) -> int:
        """The number of processes that it announces; 0 where jax has to ask."""
        if not self.count:
            return 0
        text = environment[self.count]
        if self.lists_hosts:
            return text.count(",") + 1
        if not text.isdigit():
            raise ArgumentError(f"{self.count}={text!r} is not a number of processes: correct it, or unset it")
        return int(text)


def _of_torch(environment: Environment) -> str:
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return ""
    own_store = "TORCHELASTIC_RUN_ID" in environment  # of torchrun, on that port
    return f"{environment['MASTER_ADDR']}:{int(environment['MASTER_PORT']) + own_store}"


def _of_mpich(environment: Environment) -> str:
    local = environment.get("MPI_LOCALNRANKS") == environment["PMI_SIZE"]
    return f"127.0.0.1:{_PORT}" if local else ""


def _of_worker_set(environment: Environment) -> str:
    return f"{environment['LWS_LEADER_ADDRESS']}:{_PORT}"


LAUNCHERS = (
    Launcher("JAX_NUM_PROCESSES", COUNT, INDEX, ADDRESS, lambda environment: environment[ADDRESS]),
    Launcher("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", _of_torch),  # also as a task of SLURM
    Launcher("SLURM", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    Launcher("OpenMPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK"),
    Launcher("MPICH", "PMI_SIZE", "PMI_RANK", "PMI_RANK", _of_mpich),
    Launcher("a launcher of torch", "WORLD_SIZE", "RANK", "RANK", _of_torch),
    Launcher("a LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", _of_worker_set),
    Launcher("a Cloud TPU slice", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TPU_WORKER_ID", lists_hosts=True),
    Launcher("a job of Kubernetes", "", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
)


def launcher(environment: Environment = os.environ) -> Launcher | None:
    """The launcher of this process; None without one."""
    of = (each for each in LAUNCHERS if {each.mark, each.count or each.mark} <= environment.keys())
    return next(of, None)


def process_count(environment: Environment = os.environ) -> int:
    """The number of processes that a launcher announces; 1 without a launcher, 0 where jax has to find out."""
    found = launcher(environment)
    return found.processes(environment) if found else 1


def rendezvous(environment: Environment = os.environ) -> tuple[str, int, int] | tuple[()]:
    """Address of process 0, number of processes and number of this one; empty where jax has to find out."""
    found = launcher(environment)
    count = found.processes(environment) if found else 0
    address = environment.get(ADDRESS) or (found.address(environment) if found else "")
    ranks = [each.index for each in LAUNCHERS if each.index in environment]
    if not (found and count and address and ranks):
        return ()
    index = found.index if found.index in environment else ranks[0]
    return address, count, int(environment[index])
