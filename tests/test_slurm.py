"""launch/slurm.sh on a real SLURM: a run that is preempted and killed ends with the bytes of one that was not.

About 300 s beside other work on two cores. The cluster is Debian's SLURM on loopback: one node, two processes, gloo.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster
from tiny_runs import REPOSITORY, assert_same_training, records, write_recipe

pytestmark = pytest.mark.slow
PATIENCE = 600
STEPS = 300
SCRIPT = REPOSITORY / "launch" / "slurm.sh"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster() as environment:
        environment.pop("XLA_FLAGS", None)
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "POLL_SECONDS": "0.2"}
        # Sessions compile the same programs.
        kept = tmp_path_factory.mktemp("compilations")
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(kept), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        yield environment


class Launcher:
    """launch/slurm.sh with a directory of runs and logs."""

    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        self.environment, self.directory = environment, directory
        self.recipe = write_recipe(directory / "recipe")

    def arguments(self, name: str, *options: str) -> list[str]:
        return [
            *(f"--name={name}", "--tasks-per-node=2", f"--logs={self.directory}", *options, "--"),
            *("python", "-m", "pe_lab.train", f"--config={self.recipe}"),
            *(f"--workdir={self.directory / name}", f"--config.phases.0.steps={STEPS}"),
            *("--config.checkpoint.every_steps=100", "--config.log.validate_every_steps=100"),
        ]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=300, check=True
        ).stdout

    def job(self, name: str) -> str:
        return self.ask("squeue", "--noheader", f"--name={name}", "--format=%i").strip()

    def log(self, name: str) -> str:
        return "\n".join(log.read_text() for log in sorted(self.directory.glob(f"{name}-*.log")))

    def wait_until(self, happened: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.01)

    def wait_for_step(self, name: str, step: int) -> None:
        metrics = self.directory / name / "pretrain" / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > step, name)
        assert max(row["step"] for row in records(metrics)) < STEPS, "too late to interrupt it"


@pytest.fixture
def launcher(cluster: dict[str, str], tmp_path: Path) -> Launcher:
    return Launcher(cluster, tmp_path)


def processes_of(workdir: Path) -> list[int]:
    """The process ids of the training processes of a run, in the order of their ranks."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            variables = dict(v.partition(b"=")[::2] for v in (directory / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if f"--workdir={workdir}".encode() in words and b"python" in words[0] and b"SLURM_PROCID" in variables:
            found.append((int(variables[b"SLURM_PROCID"]), int(directory.name)))
    return [pid for _, pid in sorted(found)]


def test_a_run_preempted_and_killed_ends_with_the_same_bytes(launcher: Launcher) -> None:
    whole = launcher.run(*launcher.arguments("whole"))
    assert whole.returncode == 0, whole.stderr + launcher.log("whole")
    assert "the run ended with status 0" in launcher.log("whole") and "data': 2" in launcher.log("whole")

    submitted = launcher.run(*launcher.arguments("cut", "--detach"))
    assert submitted.returncode == 0, submitted.stderr
    job, run = launcher.job("cut"), launcher.directory / "cut"

    # 1. A preemption: SLURM ends the job with SIGTERM and starts it again.
    launcher.wait_for_step("cut", 40)
    launcher.ask("scontrol", "requeue", job)
    launcher.wait_until(lambda: "the run ended with status 75" in launcher.log("cut"), "cut")
    assert "saved; run it again to continue" in launcher.log("cut")

    # 2. A crash: one of the two processes is killed, and srun ends the other one.
    launcher.wait_for_step("cut", 140)  # after the checkpoint of step 100
    assert launcher.job("cut") == job
    os.kill(processes_of(run)[1], signal.SIGKILL)
    launcher.wait_until(lambda: launcher.log("cut").count("the run ended with status") == 2, "cut")

    followed = launcher.run("--name=cut", f"--logs={launcher.directory}", "--attach")
    assert followed.returncode == 0, followed.stderr + launcher.log("cut")
    assert "tiny: complete" in followed.stdout and "the run ended with status 0" in followed.stderr
    assert_same_training(launcher.directory / "whole", run)


# A run without JAX: it counts its steps in a file, saves them after a SIGTERM, and fails as it is told to.
PROGRAM = """
import pathlib, signal, sys, time

def stop(*_):
    print("saved", flush=True)
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
steps = pathlib.Path(sys.argv[1])
if sys.argv[2:] == ["bad"]:
    sys.exit(2)
while not steps.exists() or len(steps.read_text()) < 100:
    with open(steps, "a") as file:
        file.write(".")
    print("step", flush=True)
    if sys.argv[2:] == ["crash"]:
        sys.exit(1)
    time.sleep(1.5 if sys.argv[2:] == ["slow"] else 0.05)
"""


@pytest.fixture(scope="module")
def counter(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """A launcher with a module `counter`, which is cheap to start."""
    directory = tmp_path_factory.mktemp("counter")
    (directory / "counter.py").write_text(PROGRAM)
    return Launcher(cluster | {"PYTHONPATH": str(directory)}, directory)


def count(counter: Launcher, name: str, *how: str) -> list[str]:
    """The options and the command of a run of the counter."""
    steps = str(counter.directory / f"{name}.steps")
    return [f"--name={name}", f"--logs={counter.directory}", "--", "python", "-m", "counter", steps, *how]


def steps(counter: Launcher, name: str) -> int:
    file = counter.directory / f"{name}.steps"
    return len(file.read_text()) if file.exists() else 0


def test_the_time_limit_stops_and_requeues(counter: Launcher) -> None:
    # SLURM's shortest limit is a minute, and it looks at its limits every half minute: the signal comes early.
    submitted = counter.run("--time=1", "--signal-seconds=55", "--detach", *count(counter, "long", "slow"))
    assert submitted.returncode == 0, submitted.stderr
    job = counter.job("long")
    counter.wait_until(lambda: "== requeue" in counter.log("long"), "long")
    assert "saved" in counter.log("long") and "status 75" in counter.log("long")
    before = steps(counter, "long")
    counter.wait_until(lambda: steps(counter, "long") > before, "long")  # it runs again
    assert counter.job("long") == job
    assert counter.run("--name=long", f"--logs={counter.directory}", "--stop").returncode == 0
    counter.wait_until(lambda: counter.job("long") == "", "long")


def test_stop_saves_and_the_same_command_continues(counter: Launcher) -> None:
    submitted = counter.run("--detach", *count(counter, "stopped"))
    assert submitted.returncode == 0, submitted.stderr
    job = counter.job("stopped")
    refused = counter.run(*count(counter, "stopped"))
    assert refused.returncode == 2 and f"job {job} is named stopped" in refused.stderr
    counter.wait_until(lambda: steps(counter, "stopped") > 5, "stopped")
    assert counter.run("--name=stopped", f"--logs={counter.directory}", "--stop").returncode == 0
    followed = counter.run("--name=stopped", f"--logs={counter.directory}", f"--job={job}", "--attach")
    assert followed.returncode == 75, followed.stderr + counter.log("stopped")
    assert "saved" in followed.stdout and "--stop forbade it" in counter.log("stopped") and counter.job("stopped") == ""
    assert steps(counter, "stopped") < 100
    again = counter.run(*count(counter, "stopped"))
    assert again.returncode == 0 and steps(counter, "stopped") == 100
    absent = counter.run("--name=stopped", "--stop")
    assert absent.returncode == 2 and "no job named stopped" in absent.stderr


def test_a_cancelled_job_stays_cancelled(counter: Launcher) -> None:
    submitted = counter.run("--detach", *count(counter, "cancelled"))
    assert submitted.returncode == 0, submitted.stderr
    job = counter.job("cancelled")
    counter.wait_until(lambda: steps(counter, "cancelled") > 5, "cancelled")
    counter.ask("scancel", job)  # SIGTERM to the run and to the job's script, later SIGKILL
    counter.wait_until(lambda: counter.job("cancelled") == "", "cancelled")
    followed = counter.run("--name=cancelled", f"--logs={counter.directory}", f"--job={job}", "--attach")
    assert "saved" in followed.stdout and followed.returncode in (1, 75), followed.stderr
    assert "JobState=CANCELLED" in counter.ask("scontrol", "show", "job", job)


def test_a_crash_is_retried_so_often_and_bad_input_never(counter: Launcher) -> None:
    crashed = counter.run("--retries=2", *count(counter, "crashed", "crash"))
    assert crashed.returncode == 1, crashed.stderr + counter.log("crashed")
    assert counter.log("crashed").count("== requeue\n") == 2 and steps(counter, "crashed") == 3
    bad = counter.run(*count(counter, "bad", "bad"))
    assert bad.returncode == 2 and "requeue" not in counter.log("bad") and counter.job("bad") == ""
