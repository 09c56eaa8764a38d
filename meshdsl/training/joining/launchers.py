"""Launchers: which variables say how many processes a run has, which of them this one is, and where they meet.

The table has the variables of each. Where none of them has the address of process 0, ``JAX_COORDINATOR_ADDRESS`` gives
it, and processes of one machine need none. With that address stated, number and rank are still those of the launcher.
Addresses under SLURM and OpenMPI 4 are those of jax's own cluster detection, which takes a port from the number of the
job. Jobs of Kubernetes and Cloud TPUs without variables are left to that detection altogether. Processes that
``meshdsl.training.supervision`` starts are told the three variables of jax, and its own number in ``PARENT``.
"""

import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from meshdsl.errors import ArgumentError, DeviceError

Environment = Mapping[str, str]
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"  # GPUs of this machine that a process uses
PARENT = "MESHDSL_PARENT"  # process that started this one, and with which it ends
STACKS = signal.SIGUSR1  # on which a process writes the stacks of its threads
_PORT = 8476  # on which jax's own clusters meet as well
_PORTS = range(0xF000, 0x10000)  # of which a job takes one by its number, as in jax
_SLICES, _SLICE, _FIRST_SLICE = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"
_TPUS = {f"0x00{device}" for device in ("27", "56", "5e", "62", "63", "6f", "76")}  # on the PCI bus, by Google


@dataclass(frozen=True)
class Launcher:
    """One launcher.

    Args:
      name: of it, for messages.
      count: variable with the number of processes, or with their hosts. Empty: jax finds out.
      index: variable with the number of this one.
      mark: variable that is set only in a process that it has launched.
      address: of process 0, as far as the variables say.
      lists_hosts: whether ``count`` lists hosts.
    """

    name: str
    count: str
    index: str
    mark: str
    address: Callable[[Environment], str] = lambda environment: ""
    lists_hosts: bool = False

    def processes(self, environment: Environment) -> int:
        """The number of processes that it announces; 0 where jax has to find out."""
        if not self.count:
            return 0
        if self.lists_hosts:
            slices = _number(environment, _SLICES, "a number of slices", 1) if _SLICES in environment else 1
            return (environment[self.count].count(",") + 1) * slices
        return _number(environment, self.count, "a number of processes", 1)


@dataclass(frozen=True)
class Rank:
    """The rank of this process among those of its run.

    Args:
      launcher: name of what announced them.
      variable: that has the number of this process; empty without one.
      address: ``host:port`` of process 0; empty where jax has to find out, which joins without a rendezvous.
      count: number of processes; 0 where jax has to find out.
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


def _number(environment: Environment, variable: str, what: str, least: int = 0) -> int:
    text = environment[variable]
    if not text.isdecimal() or int(text) < least:
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
    uri = environment.get("OMPI_MCA_orte_hnp_uri")  # of OpenMPI 4: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
    if uri is None:
        return _on_one_machine("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")(environment)
    found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    if found is None:
        return ""
    host = found[2] or f"[{found[3]}]"
    return f"{host}:{_PORTS[int(found[1]) // len(_PORTS) % len(_PORTS)]}"


def _of_slurm(environment: Environment) -> str:
    nodes = re.match(r"([^\[,]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])  # n[01-03,7],m2
    if nodes is None or "SLURM_JOB_ID" not in environment:
        return ""
    job = _number(environment, "SLURM_JOB_ID", "the number of a job")
    return f"{nodes[1]}{nodes[2] or ''}:{_PORTS[job % len(_PORTS)]}"


def _of_tpu(environment: Environment) -> str:
    first = environment.get(_FIRST_SLICE, environment["TPU_WORKER_HOSTNAMES"].split(",")[0])
    return f"{first.rpartition(':')[0] or first}:{_PORT}"


def _of_worker_set(environment: Environment) -> str:
    return f"{environment['LWS_LEADER_ADDRESS']}:{_PORT}"


_TPU = "a Cloud TPU slice"
_JAX = "JAX_NUM_PROCESSES", COUNT, INDEX
_MPICH = "MPICH", "PMI_SIZE", "PMI_RANK"
_TORCH = "a launcher of torch", "WORLD_SIZE", "RANK"
LAUNCHERS = (  # those of tasks before SLURM, in whose tasks they may run; last what lacks an address or a number
    Launcher(*_JAX, ADDRESS, lambda environment: environment[ADDRESS]),
    Launcher("torchrun", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", _of_torch),
    Launcher("OpenMPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", _of_openmpi),
    Launcher(*_MPICH, "MPI_LOCALRANKID", _on_one_machine("PMI_SIZE", "MPI_LOCALNRANKS")),
    Launcher("SLURM", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", _of_slurm),
    Launcher(*_MPICH, "PMI_RANK"),
    Launcher(*_TORCH, "RANK", _of_torch),
    Launcher("a LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", _of_worker_set),
    Launcher(_TPU, "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TPU_WORKER_ID", _of_tpu, lists_hosts=True),
    Launcher("a job of Kubernetes", "", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
    Launcher(*_JAX, COUNT),
    Launcher(*_TORCH, "MASTER_ADDR", _of_torch),
)


def launcher(environment: Environment = os.environ) -> Launcher | None:
    """The launcher of this process; None without one."""
    of = (each for each in LAUNCHERS if {each.mark, each.count or each.mark} <= environment.keys())
    return next(of, None)


def find_rank(environment: Environment = os.environ) -> Rank | None:
    """The rank of this process; None if it is alone.

    Raises:
      ArgumentError: a variable has a wrong number, or no address.
      DeviceError: several processes are announced, and nothing says where they meet, or which one this is.
    """
    found = launcher(environment)
    if found is None:
        return Rank(_TPU, "", "", 0, 0) if _is_tpu_vm(environment) else None
    count = found.processes(environment)
    if count == 1:
        return None
    if count == 0:
        return Rank(found.name, "", "", 0, 0)
    address = environment.get(ADDRESS) or found.address(environment)
    variable = _index_variable(environment)
    if not address:
        raise DeviceError(
            f"{found.name} announces {count} processes, and nothing says where they meet; "
            f"set {ADDRESS}=host:port of process 0 for all"
        )
    if not variable:
        raise DeviceError(
            f"{found.name} announces {count} processes, and nothing says which one this is; "
            f"set {found.index} to its number, from 0 to {count - 1}"
        )
    index = _number(environment, variable, "the number of a process")
    if found.lists_hosts and _SLICE in environment:
        hosts = environment[found.count].count(",") + 1
        index += hosts * _number(environment, _SLICE, "the number of a slice")
    if index >= count:
        raise ArgumentError(f"{variable}={index}: {count} processes have the numbers from 0 on")
    if not address.rpartition(":")[2].isdecimal():
        raise ArgumentError(f"{address!r} is not the address of process 0: write host:port")
    return Rank(found.name, variable, address, count, index)


def _index_variable(environment: Environment) -> str:
    """The variable that has the number of this process: that of its launcher, or of another one; empty without one."""
    found = launcher(environment)
    ranks = [each.index for each in LAUNCHERS if each.index in environment]
    return found.index if found and found.index in environment else next(iter(ranks), "")


def _is_tpu_vm(environment: Environment) -> bool:
    """Whether this machine has TPUs and asks its cloud for its slice, as jax does without ``TPU_SKIP_MDS_QUERY``."""
    if "TPU_SKIP_MDS_QUERY" in environment or find_spec("libtpu") is None:
        return False
    for file in Path("/sys/bus/pci/devices").glob("*/device"):
        with suppress(OSError):
            if file.read_text().strip() in _TPUS and (file.parent / "vendor").read_text().strip() == "0x1ae0":
                return True
    return False
