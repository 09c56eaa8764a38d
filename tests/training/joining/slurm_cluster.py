"""A SLURM cluster of one node on the loopback address, with everything that it writes in a temporary folder."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=10
SchedulerParameters=bf_interval=1
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes=localhost Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> list[str]:
    """Those of its programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATHS) is None]


@contextmanager
def cluster(folder: Path, variables):
    """Starts it; variables with which commands find it."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    ports = {"controller": free_port(), "daemon": free_port()}
    config = folder / "slurm.conf"
    facts = {"folder": folder, "user": getpass.getuser(), "host": socket.gethostname(), "cpus": os.cpu_count()}
    config.write_text(CONFIG.format(**facts, **ports))
    (folder / "cgroup.conf").write_text("")
    environment = {**variables, "SLURM_CONF": str(config), "PATH": PATHS}
    files = {name: folder / f"munge.{name}" for name in ("key", "socket", "pid", "log", "seed")}
    options = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    munge = ["munged", "--foreground", "--force", *(f"--{options[name]}={file}" for name, file in files.items())]
    with ExitStack() as stack:
        for command in (munge, ["slurmctld", "-D", "-i", "-f", config], ["slurmd", "-D", "-f", config]):
            log = stack.enter_context((folder / f"{command[0]}.out").open("w"))
            stack.enter_context(_daemon(command, environment, log))
            if command[0] == "munged":
                wait_for(files["socket"].exists, folder / "munged.out")
        wait_for(lambda: "idle" in output(["sinfo", "-h", "-o", "%T"], environment), folder / "slurmd.out")
        yield environment


@contextmanager
def _daemon(command, environment, log):
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def output(command, environment, cwd=None) -> str:
    """What a command prints."""
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True).stdout


def wait_for(condition, log: Path, seconds: float = 500.0) -> None:
    """Waits until something holds; the log is shown if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.exists() and log.read_text()
        time.sleep(0.5)


def free_port() -> int:
    """A port of the loopback address that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
