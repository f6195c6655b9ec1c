"""launch/slurm.sh: the job that it submits, and what the job's script does with the status of the run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launchers import PROGRAM, calls, dry_run, fake_tools, launch, tool_directory, words_of
from tiny_runs import REPOSITORY

JOB = ["--nodes=4", "--gpus-per-node=8"]


def test_the_job() -> None:
    options = ["--time=24:00:00", "--partition=a3", "--account=lab", "--sbatch=--qos=high", "--cpus-per-task=26"]
    (find, _, submit), script = dry_run("slurm.sh", *JOB, "--name=drope", "--logs=/shared/logs", *options)
    assert find == ["squeue", "--me", "--noheader", "--name=drope", "--format=%i"]
    assert submit[0] == "sbatch" and {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(submit)
    assert {"--time=24:00:00", "--partition=a3", "--account=lab", "--qos=high", "--requeue"} <= set(submit)
    assert {"--signal=TERM@120", "--open-mode=append", "--output=/shared/logs/drope-%j.log"} <= set(submit)
    (step,) = [line for line in script.splitlines() if line.startswith("srun")]
    # srun does not take the CPUs of a process from the job since SLURM 22.05.
    assert "--cpus-per-task=26" in step.split()


SLURM = """
srun() { echo "the program"; return "${STATUS:-0}"; }
scontrol() {
  case $1 in
    requeue) return "${REFUSED:-0}" ;;
    *) echo "JobId=7 JobState=$(cat "$SANDBOX/state") Reason=None" ;;
  esac
}
squeue() {
  case "$*" in
    *--jobs=7*) echo "${STATE:-RUNNING}" ;;
    *) cat "$SANDBOX/jobs" 2>/dev/null || true ;;
  esac
}
sbatch() { cat > "$SANDBOX/script"; echo COMPLETED > "$SANDBOX/state"; echo "7;cluster"; }
"""


class Node:
    """The first node of a job, whose srun and scontrol are fake."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tools = fake_tools(directory, SLURM, "srun", "scontrol", "squeue", "sbatch", "scancel")

    def run_script(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (self.directory / "calls").unlink(missing_ok=True)
        script = dry_run("slurm.sh", *JOB, f"--logs={self.directory}", "--retries=2", *options)[1]
        environment = os.environ | self.tools | {"SLURM_JOB_ID": "7"} | variables
        return subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, timeout=300)

    def file(self, kind: str) -> str | None:
        path = self.directory / f"pe_lab-7.{kind}"
        return path.read_text().strip() if path.exists() else None

    @property
    def requeued(self) -> bool:
        return ["scontrol", "requeue", "7"] in calls(self.directory)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_srun_gets_the_program_unchanged(node: Node) -> None:
    assert node.run_script().returncode == 0
    (step,) = calls(node.directory)
    assert step == ["srun", "--kill-on-bad-exit=0", "--wait=30", *words_of(PROGRAM)]


@pytest.mark.parametrize("status", [0, 2])
def test_a_run_that_is_complete_or_got_bad_input_is_not_requeued(node: Node, status: int) -> None:
    assert node.run_script(STATUS=str(status)).returncode == status
    assert not node.requeued and node.file("status") == str(status)


def test_a_run_that_was_told_to_stop_is_requeued_without_end(node: Node) -> None:
    for _ in range(4):
        assert node.run_script(STATUS="75").returncode == 75
        assert node.requeued


@pytest.mark.parametrize("status", ["1", "137", "143"])
def test_a_crash_is_requeued_so_often_in_a_row(node: Node, status: str) -> None:
    def crash() -> bool:
        assert node.run_script(STATUS=status).returncode == int(status)
        return node.requeued

    assert [crash(), crash(), crash()] == [True, True, False]
    assert node.file("status") == status
    (node.directory / "pe_lab-7.crashes").write_text("1\n")
    node.run_script(STATUS="75")  # it did run, and saved
    assert [crash(), crash(), crash()] == [True, True, False]


def test_a_crash_after_an_hour_is_the_first(node: Node) -> None:
    (node.directory / "pe_lab-7.crashes").write_text("2\n")
    # bash counts SECONDS from what the program sets.
    node.run_script("--before=SECONDS=4000", STATUS="1")
    assert node.requeued and node.file("crashes") == "1"


def test_a_stopped_job_keeps_its_status(node: Node) -> None:
    """After --stop, SLURM refuses to requeue the job."""
    result = node.run_script(STATUS="75", REFUSED="1")
    assert result.returncode == 75 and node.file("status") == "75" and "--stop forbade it" in result.stdout


def test_a_job_that_slurm_ends_is_not_requeued(node: Node) -> None:
    """After scancel, `scontrol requeue` would revive the job; after a preemption SLURM requeues it by itself."""
    result = node.run_script(STATUS="75", STATE="COMPLETING")
    assert result.returncode == 75 and not node.requeued and "the job is COMPLETING" in result.stdout


def test_a_session_forgets_the_status_of_the_one_before(node: Node) -> None:
    (node.directory / "pe_lab-7.status").write_text("75\n")
    assert node.run_script(f"--before=test ! -e {node.directory}/pe_lab-7.status").returncode == 0


def test_the_command_of_before_runs_first_and_its_failure_is_a_crash(node: Node) -> None:
    result = node.run_script("--before=export MODULE=cuda; echo first")
    assert result.stdout.splitlines()[:2] == ["first", "the program"]
    assert node.run_script("--before=false").returncode == 1
    assert node.requeued and "srun" not in [c[0] for c in calls(node.directory)]


def test_a_job_is_submitted_and_followed(node: Node) -> None:
    (node.directory / "pe_lab-7.log").write_text("a line of the log\n")
    (node.directory / "pe_lab-7.status").write_text("0\n")
    result = launch("slurm.sh", *JOB, f"--logs={node.directory}", "--", *PROGRAM, **node.tools)
    assert result.returncode == 0, result.stderr
    assert "a line of the log" in result.stdout and "ended with status 0" in result.stderr
    commands, script = dry_run("slurm.sh", *JOB, f"--logs={node.directory}")
    assert (node.directory / "script").read_text() == script
    assert calls(node.directory)[:2] == [commands[0], commands[2]]


def test_a_job_that_slurm_ended_has_no_status(node: Node) -> None:
    (node.directory / "state").write_text("CANCELLED")
    result = launch("slurm.sh", "--job=7", f"--logs={node.directory}", "--attach", **node.tools)
    assert result.returncode == 1 and "job 7 is CANCELLED" in result.stderr


@pytest.mark.parametrize(("state", "stopped"), [("RUNNING", True), ("PENDING", False)])
def test_stop(node: Node, state: str, stopped: bool) -> None:
    (node.directory / "state").write_text(state)
    (node.directory / "jobs").write_text("7\n")
    assert launch("slurm.sh", "--stop", **node.tools).returncode == 0
    ended = calls(node.directory)[2:]
    told = [["scontrol", "update", "JobId=7", "Requeue=0"], ["scancel", "--signal=TERM", "7"]]
    assert ended == (told if stopped else [["scancel", "7"]])
    words = [["squeue", "--me", "--noheader", "--name=pe_lab", "--format=%i"], ["scancel", "ID"]]
    told = [["scontrol", "update", "JobId=ID", "Requeue=0"], ["scancel", "--signal=TERM", "ID"]]
    assert dry_run("slurm.sh", "--stop", program=None)[0] == words + told


def test_one_job_of_a_name_at_a_time(node: Node) -> None:
    (node.directory / "jobs").write_text("7\n")
    result = launch("slurm.sh", *JOB, "--", *PROGRAM, **node.tools)
    assert result.returncode == 2 and "--attach" in result.stderr and len(calls(node.directory)) == 1
    (node.directory / "jobs").write_text("7\n8\n")
    result = launch("slurm.sh", "--stop", **node.tools)
    assert result.returncode == 2 and "2 jobs" in result.stderr and "--job=ID" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes=0"], "--nodes"),
        (["--nodes=two"], "--nodes"),
        (["--name=a/b"], "file name"),
        (["--signal-seconds=70000"], "65535"),
        (["--retries=-1"], "--retries"),
        (["--logs=/tmp/%u"], "%"),
        (["--job=7"], "--job"),
        (["--sopt"], "--sopt"),
        (["--attach", "--stop"], "choose one"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments: list[str], message: str) -> None:
    result = launch("slurm.sh", *arguments, "--dry-run", "--", *PROGRAM)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_without_slurm_only_a_dry_run_works(tmp_path: Path) -> None:
    path = tool_directory(tmp_path)
    result = launch("slurm.sh", *JOB, "--", *PROGRAM, PATH=path)
    assert result.returncode == 2 and "SLURM" in result.stderr
    assert launch("slurm.sh", *JOB, "--dry-run", "--", *PROGRAM, PATH=path).returncode == 0


def test_logs_lie_in_the_checkout_by_default() -> None:
    (_, directory, _), script = dry_run("slurm.sh", *JOB)
    assert directory == ["mkdir", "-p", str(REPOSITORY / "runs" / "slurm")]
    assert f"cd {REPOSITORY}" in script
