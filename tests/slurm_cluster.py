"""A real SLURM cluster of one node on loopback, with all its files in a temporary directory."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel", "setpriv")
PATIENCE = 300
# The user's directories come first; Debian's daemons are in /usr/sbin, which is not on every user's PATH.
SEARCHED = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"

# Processes are tracked by their parents: a container may have no cgroups for SLURM. A job that is requeued may start
# again when its credential has expired (cred_expire), by default after two minutes.
CONFIGURATION = """
ClusterName=loopback
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=30
ReturnToService=2
MailProg=/bin/true
NodeName=localhost CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Starts munged, slurmctld and slurmd; gives the environment for SLURM's commands; ends the daemons.

    Where SLURM is not installed the test fails in CI, and is skipped elsewhere.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]:
        reason = f"SLURM is not installed ({', '.join(missing)}). Debian: apt-get install -y slurm-wlm munge"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket may have 107 characters
    controller_port, node_port = _free_ports(2)
    directory.chmod(0o755)  # munged refuses a socket that others cannot reach
    (directory / "state").mkdir()
    (directory / "spool").mkdir()
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    settings = dict(user=getpass.getuser(), controller_port=controller_port, node_port=node_port, directory=directory)
    (directory / "slurm.conf").write_text(CONFIGURATION.format(**settings))
    environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": SEARCHED}
    munge_files = [
        f"--{option}={directory / name}"
        for option, name in {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }.items()
    ]
    commands = [
        ["munged", "--foreground", "--force", *munge_files],  # --force: root may run it, and the key is ours
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "localhost"],
    ]
    daemons: list[subprocess.Popen] = []

    def wait_for(ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
                logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in directory.glob("*.out"))
                raise RuntimeError(f"{what} did not start.\n{logs}")
            time.sleep(0.1)

    def idle() -> bool:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        return answer.stdout.strip() == "idle"

    try:
        for command in commands:
            with open(directory / f"{command[0]}.out", "wb") as out:
                daemons.append(
                    subprocess.Popen(
                        # They get a SIGTERM when this process ends, even if it is killed.
                        ["setpriv", "--pdeathsig=TERM", *command],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
            if command[0] == "munged":
                wait_for((directory / "munge.socket").exists, "munged")
        wait_for(idle, "SLURM")
        yield environment
    finally:
        if len(daemons) == len(commands):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}"],
                    env=environment,
                    capture_output=True,
                    timeout=20,
                )
                time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(directory, ignore_errors=True)
