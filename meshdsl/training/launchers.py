"""Launchers: which variables say how many processes a run has, which of them this one is, and where they meet.

jax detects SLURM, OpenMPI 4, Kubernetes and Cloud TPUs, and is asked for what the variables of the table do not say. Of
launchers that jax does not know, the table has the variables; where none of them has the address of process 0,
``JAX_COORDINATOR_ADDRESS`` gives it, and processes of one machine need none. With that address stated, number and rank
are still those of the launcher.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from jax._src import cloud_tpu_init
from jax._src.clusters import ClusterEnv  # jax has no public name for where its processes meet

from meshdsl.errors import ArgumentError, DeviceError

Environment = Mapping[str, str]
_detect = ClusterEnv.auto_detect_unset_distributed_params

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_PORT = 8476  # on which jax's own clusters meet as well
_SLICES = "MEGASCALE_NUM_SLICES"  # of Cloud TPUs, which one run spans


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
        if self.lists_hosts:
            slices = _number(environment, _SLICES, "a number of slices") if _SLICES in environment else 1
            return (environment[self.count].count(",") + 1) * slices
        return _number(environment, self.count, "a number of processes")


@dataclass(frozen=True)
class Rank:
    """The rank of this process among those of its run.

    Args:
      launcher: name of what announced them.
      variable: that has the number of this process; empty if jax knows it.
      address: ``host:port`` of process 0.
      count: number of processes.
      index: number of this one.
    """

    launcher: str
    variable: str
    address: str
    count: int
    index: int

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The two parts of the address."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


def _number(environment: Environment, variable: str, what: str) -> int:
    text = environment[variable]
    if not text.isdigit():
        raise ArgumentError(f"{variable}={text!r} is not {what}: correct it, or unset it")
    return int(text)


def _of_torch(environment: Environment) -> str:
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return ""
    own_store = "TORCHELASTIC_RUN_ID" in environment  # of torchrun, on that port
    return f"{environment['MASTER_ADDR']}:{_number(environment, 'MASTER_PORT', 'a port') + own_store}"


def _on_one_machine(count: str, count_here: str) -> Callable[[Environment], str]:
    def address(environment: Environment) -> str:
        return f"127.0.0.1:{_PORT}" if environment.get(count_here) == environment[count] else ""

    return address


def _of_openmpi(environment: Environment) -> str:
    if "OMPI_MCA_orte_hnp_uri" in environment:  # of OpenMPI 4, in which jax finds an address and a port
        return ""
    return _on_one_machine("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")(environment)


def _of_worker_set(environment: Environment) -> str:
    return f"{environment['LWS_LEADER_ADDRESS']}:{_PORT}"


_MPICH = "MPICH", "PMI_SIZE", "PMI_RANK"
LAUNCHERS = (  # those of tasks before SLURM, in whose tasks they may run
    Launcher("JAX_NUM_PROCESSES", COUNT, INDEX, ADDRESS, lambda environment: environment[ADDRESS]),
    Launcher("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", _of_torch),
    Launcher("OpenMPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", _of_openmpi),
    Launcher(*_MPICH, "MPI_LOCALRANKID", _on_one_machine("PMI_SIZE", "MPI_LOCALNRANKS")),
    Launcher("SLURM", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    Launcher(*_MPICH, "PMI_RANK"),
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


def stated_rank(environment: Environment = os.environ) -> Rank | None:
    """The rank of this process, as the variables alone have it; None where jax has to find out, or there is none."""
    found = launcher(environment)
    count = found.processes(environment) if found else 0
    address = environment.get(ADDRESS) or (found.address(environment) if found else "")
    variable = _index_variable(environment)
    if not (found and count and address and variable):
        return None
    return Rank(found.name, variable, address, count, _number(environment, variable, "the number of a process"))


def find_rank(timeout: float = 300.0) -> Rank | None:
    """The rank of this process; None if it is alone.

    Args:
      timeout: seconds in which jax finds out what the variables do not say.

    Raises:
      ArgumentError: a variable has a wrong number, or no address.
      DeviceError: several processes are announced, and neither the variables nor jax say where they meet.
    """
    on_tpu = cloud_tpu_init.running_in_cloud_tpu_vm  # jax knows its hosts without variables
    if process_count() == 1 and not (on_tpu and launcher() is None):
        return None
    found = stated_rank() or _ask_jax(timeout)
    if found.count == 1:
        return None
    if found.index >= found.count:
        raise ArgumentError(f"{found.variable}={found.index}: {found.count} processes have the numbers from 0 on")
    if not found.address.rpartition(":")[2].isdigit():
        raise ArgumentError(f"{found.address!r} is not the address of process 0: write host:port")
    return found


def _index_variable(environment: Environment) -> str:
    """The variable that has the number of this process: that of its launcher, or of another one; empty without one."""
    found = launcher(environment)
    ranks = [each.index for each in LAUNCHERS if each.index in environment]
    return found.index if found and found.index in environment else next(iter(ranks), "")


def _ask_jax(timeout: float) -> Rank:
    """The rank of this process, as jax detects it."""
    found = launcher()
    stated = os.environ.get(ADDRESS), process_count() if found and found.count else None
    try:
        address, count, index, _ = _detect(*stated, None, None, None, ceil(timeout))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise DeviceError(f"{_announcement(found)}, and jax cannot find out: {error}; {_remedy(found)}") from error
    if address is None or count is None or index is None:
        raise DeviceError(f"{_announcement(found)}; {_remedy(found)}")
    return Rank(found.name if found else "a Cloud TPU slice", _index_variable(os.environ), address, count, index)


def _announcement(found: Launcher | None) -> str:
    if found is None:
        return "this machine is of a Cloud TPU slice, and nothing says which process this is"
    count = found.processes(os.environ)
    return f"{found.name} announces {count or 'several'} processes, and nothing says where they meet"


def _remedy(found: Launcher | None) -> str:
    if found is None:
        return "TPU_SKIP_MDS_QUERY=1 trains on this machine alone"
    asked = "" if found.count else f", and {COUNT}, or install 'jax[k8s]'"
    return f"set {ADDRESS}=host:port of process 0 for all{asked}"
