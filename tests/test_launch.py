"""launch/tpu_slice.sh: the commands of a dry run, and the same commands run with a fake gcloud."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "launch" / "tpu_slice.sh"
SLICE = ["--name=rope", "--zone=us-west4-a", "--project=lab", "--type=v5litepod-256"]
PROGRAM = [
    "python",
    "-m",
    "pe_lab.train",
    "--config=configs/drope_16b.py",
    "--workdir=/mnt/runs/it's a run",
]

# Writes its arguments to $SANDBOX/calls, one line a call; answers `describe` from files that `create` makes.
FAKE_GCLOUD = """#!{python} -IS
import os, pathlib, shlex, sys
argv = sys.argv[1:]
sandbox = pathlib.Path(os.environ["SANDBOX"])
with open(sandbox / "calls", "a") as file:
    file.write(shlex.join(["gcloud", *argv]) + "\\n")
kind, action = argv[2], argv[3]
command = next((a for a in argv if a.startswith("--command=")), "")
if action == "create":
    (sandbox / kind).write_text("READY" if kind == "tpu-vm" else "ACTIVE")
elif action == "describe":
    if os.environ.get("DENIED"):
        sys.exit("ERROR: PERMISSION_DENIED")
    if not (sandbox / kind).exists():
        sys.exit("ERROR: NOT_FOUND: no such resource")
    print((sandbox / kind).read_text())
elif "IDLE" in command:
    print(os.environ.get("HOSTS", "IDLE IDLE").replace(" ", "\\n"))
elif command.startswith("--command=cat"):
    answers = sandbox / "statuses"
    left = answers.read_text().split() if answers.exists() else ["0"]
    if left[1:]:
        answers.write_text(" ".join(left[1:]))
    print(left[0] if left[0] != "-" else "")
"""


# idle?, archive, copy, unpack, install, start, follow, status
AFTER_CREATION = ["ssh all", "archive", "scp", "ssh all", "ssh all", "ssh all", "ssh 0", "ssh 0"]


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("NAME", "ZONE", "PROJECT", "TYPE", "RUNTIME")}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)


def dry_run(*options: str, program: list[str] = PROGRAM) -> list[list[str]]:
    """The commands that a dry run prints, each split into words."""
    result = launch(*SLICE, *options, "--dry-run", *(["--", *program] if program else []))
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines() if not line.startswith("#")]


def on_hosts(command: list[str]) -> tuple[str, str]:
    """The workers and the command of a `gcloud ... ssh`."""
    values = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--"))
    return values["worker"], values["command"]


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A directory with a gcloud that records its calls, and a git that archives nothing."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "gcloud").write_text(FAKE_GCLOUD.format(python=sys.executable))
    (binaries / "git").write_text(
        '#!/bin/sh\n[ "$1" = status ] && exit\nprintf "git" >> "$SANDBOX/calls"\n'
        'for word; do printf " %s" "$word" >> "$SANDBOX/calls"; done\necho >> "$SANDBOX/calls"\n'
    )
    for binary in binaries.iterdir():
        binary.chmod(0o755)
    return tmp_path


def launch_for_real(sandbox: Path, *options: str, program: list[str] = PROGRAM, **variables: str):
    variables |= {"PATH": f"{sandbox / 'bin'}:{os.environ['PATH']}", "SANDBOX": str(sandbox), "POLL_SECONDS": "0"}
    result = launch(*SLICE, *options, *(["--", *program] if program else []), **variables)
    calls = sandbox / "calls"
    return result, [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def actions(commands: list[list[str]]) -> list[str]:
    """A short name for each command: `create`, `ssh all`, ..."""
    return [c[4] + (f" {on_hosts(c)[0]}" if c[4] == "ssh" else "") if c[0] == "gcloud" else "archive" for c in commands]


def test_the_steps_come_in_order() -> None:
    commands = dry_run()
    assert actions(commands) == ["describe", "create", *AFTER_CREATION]
    idle, unpack, install, start = (on_hosts(c)[1] for c in commands if c[-2:-1] == ["--worker=all"])
    assert "IDLE" in idle
    assert "tar xzf" in unpack and "! -name .venv" in unpack
    assert "EXTRA=tpu" in install and "launch/venv.sh" in install
    assert "pe_lab.train" in start


def test_the_command_of_before_runs_on_every_host_before_the_program(sandbox: Path) -> None:
    mount = "mountpoint -q /mnt/runs || sudo mount -t nfs '10.0.0.2:/share' /mnt/runs"
    commands = dry_run(f"--before={mount}")
    sent = [on_hosts(c) for c in commands if c[4:5] == ["ssh"]]
    (place,) = [i for i, (_, command) in enumerate(sent) if command == mount]
    assert sent[place][0] == "all"
    assert "launch/venv.sh" in sent[place - 1][1] and "setsid" in sent[place + 1][1]
    result, calls = launch_for_real(sandbox, f"--before={mount}")
    assert result.returncode == 0 and calls == commands


def test_every_command_names_project_and_zone() -> None:
    for command in dry_run("--queued", "--spot"):
        if command[0] == "gcloud":
            assert {"--project=lab", "--zone=us-west4-a"} <= set(command)


def test_all_hosts_run_one_command_with_its_arguments_unchanged() -> None:
    starts = [on_hosts(c) for c in dry_run() if any("setsid" in word for word in c)]
    assert [worker for worker, _ in starts] == ["all"]
    words = shlex.split(starts[0][1])
    inner = words[words.index("-c") + 1]
    run = inner.split("; ")[1].split(" >> run.log")[0]
    assert shlex.split(run) == [".venv/bin/python", *PROGRAM[1:]]


def test_spot_and_queued_are_passed_to_gcloud() -> None:
    (create,) = [c for c in dry_run("--spot") if c[4] == "create"]
    assert create[3] == "tpu-vm" and "--spot" in create and "--version=v2-alpha-tpuv5-lite" in create
    (create,) = [c for c in dry_run("--queued") if c[4] == "create"]
    assert create[3] == "queued-resources" and "--node-id=rope" in create and "--spot" not in create
    assert "--runtime-version=v2-alpha-tpuv5-lite" in create


def test_several_slices_are_one_queued_resource_with_all_hosts_in_it() -> None:
    commands = dry_run("--slices=4", "--spot")
    assert actions(commands) == ["describe", "create", "describe", *AFTER_CREATION]
    # `gcloud compute tpus queued-resources create|ssh|scp --help` of gcloud 528 has these flags.
    assert {c[3] for c in commands if c[0] == "gcloud"} == {"queued-resources"}
    create = commands[1]
    assert {"--node-count=4", "--node-prefix=rope", "--spot"} <= set(create) and "--node-id=rope" not in create
    for command in commands:
        if command[4:5] == ["ssh"]:
            options = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--"))
            assert options["node"] == options["worker"]
        if command[4:5] == ["scp"]:
            assert {"--node=all", "--worker=all"} <= set(command)
    (ask,) = [c for c in dry_run("--slices=4", "--stop", program=[])]
    assert ask[3] == "queued-resources" and "--node=all" in ask


@pytest.mark.parametrize("options", [[], ["--spot"], ["--queued"], ["--slices=2"]])
def test_the_real_path_issues_the_commands_of_the_dry_run(sandbox: Path, options: list[str]) -> None:
    result, calls = launch_for_real(sandbox, *options)
    assert result.returncode == 0, result.stderr
    assert calls == dry_run(*options)


@pytest.mark.parametrize("options", [[], ["--queued"]])
def test_an_existing_slice_is_reused(sandbox: Path, options: list[str]) -> None:
    first, _ = launch_for_real(sandbox, *options)
    (sandbox / "tpu-vm").write_text("READY")
    (sandbox / "calls").unlink()
    second, calls = launch_for_real(sandbox, *options)
    assert first.returncode == second.returncode == 0
    assert "create" not in actions(calls)
    assert actions(calls) == ["describe", *AFTER_CREATION]


def test_a_queued_resource_is_not_requested_twice(sandbox: Path) -> None:
    (sandbox / "queued-resources").write_text("ACTIVE")
    result, calls = launch_for_real(sandbox, "--queued")
    assert result.returncode == 0 and "create" not in actions(calls)


def test_a_run_in_progress_is_left_alone(sandbox: Path) -> None:
    result, calls = launch_for_real(sandbox, HOSTS="IDLE BUSY")
    assert result.returncode == 2 and "--attach" in result.stderr
    assert "scp" not in actions(calls)


def test_a_preempted_slice_is_refused_before_anything_is_copied(sandbox: Path) -> None:
    (sandbox / "tpu-vm").write_text("PREEMPTED")
    result, calls = launch_for_real(sandbox)
    assert result.returncode == 1 and "PREEMPTED" in result.stderr and "--delete" in result.stderr
    assert actions(calls) == ["describe"]


def test_no_slice_is_created_when_gcloud_fails(sandbox: Path) -> None:
    result, calls = launch_for_real(sandbox, DENIED="1")
    assert result.returncode == 1 and "PERMISSION_DENIED" in result.stderr
    assert actions(calls) == ["describe"]


def test_a_lost_connection_is_followed_again_and_the_runs_status_is_returned(sandbox: Path) -> None:
    (sandbox / "statuses").write_text("- - 3")
    result, calls = launch_for_real(sandbox)
    assert result.returncode == 3
    assert actions(calls)[-6:] == ["ssh 0"] * 6 and actions(calls).count("ssh all") == 4
    assert result.stderr.count("connection lost") == 2


def test_attach_only_follows(sandbox: Path) -> None:
    result, calls = launch_for_real(sandbox, "--attach", program=[])
    assert result.returncode == 0 and actions(calls) == ["ssh 0", "ssh 0"]


def test_delete_takes_the_queued_resource_with_it(sandbox: Path) -> None:
    _, calls = launch_for_real(sandbox, "--delete", program=[])
    assert actions(calls) == ["delete"] and calls[0][3] == "tpu-vm"
    _, calls = launch_for_real(sandbox, "--queued", "--delete", program=[])
    assert calls[1][3] == "queued-resources" and "--force" in calls[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([a for a in SLICE if "--name" not in a], "--name"),
        ([a for a in SLICE if "--zone" not in a], "--zone"),
        ([a for a in SLICE if "--project" not in a], "--project"),
        ([a for a in SLICE if "--type" not in a], "--type"),
        (["--type=v99-8", *SLICE[:3]], "--runtime"),
        ([*SLICE, "--sopt"], "--sopt"),
        ([*SLICE, "--slices=0"], "--slices"),
        ([*SLICE, "--attach", "--delete"], "choose one"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments: list[str], message: str) -> None:
    result = launch(*arguments, "--dry-run", "--", *PROGRAM)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr


@pytest.mark.parametrize("program", [[], ["--"], ["--", "pe_lab.train"]])
def test_a_missing_command_is_status_2(program: list[str]) -> None:
    result = launch(*SLICE, "--dry-run", *program)
    assert result.returncode == 2 and "python -m pe_lab.train" in result.stderr


def test_without_gcloud_only_a_dry_run_works(tmp_path: Path) -> None:
    for tool in ("bash", "sed", "dirname"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    result = launch(*SLICE, "--", *PROGRAM, PATH=str(tmp_path))
    assert result.returncode == 2 and "gcloud" in result.stderr
    assert launch(*SLICE, "--dry-run", "--", *PROGRAM, PATH=str(tmp_path)).returncode == 0


def test_the_slice_can_be_named_by_the_environment() -> None:
    options = dict(NAME="rope", ZONE="us-west4-a", PROJECT="lab", TYPE="v5litepod-256")
    assert launch("--dry-run", "--", *PROGRAM, **options).stdout == launch(*SLICE, "--dry-run", "--", *PROGRAM).stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="runs the commands of a TPU host, which is Linux")
def test_a_run_survives_its_shell_and_saves_when_stopped(tmp_path: Path) -> None:
    """Runs the commands of the hosts here, in a temporary home: start, busy, follow, stop, status."""
    home = tmp_path / "pe_lab"
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (home / "program.py").write_text(
        "import signal, sys, time\n"
        "def leave(*_):\n    print('saved', flush=True)\n    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print(sys.argv[1:], flush=True)\ntime.sleep(50)\n"
    )
    arguments = ["it's a run", "$HOME", "--x=1"]
    sent = [on_hosts(c)[1] for c in dry_run(program=["python", "-m", "program", *arguments]) if c[4:5] == ["ssh"]]
    busy, _, _, start, follow, status = sent
    ((_, stop),) = [on_hosts(c) for c in dry_run("--stop", program=[])]

    def host(command: str) -> str:
        environment = os.environ | {"HOME": str(tmp_path)}
        return subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300
        ).stdout.strip()

    assert host(busy) == "IDLE"
    host(start)
    deadline = time.monotonic() + 300
    while not ((home / "run.log").exists() and (home / "run.log").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert host(busy) == "BUSY" and host(status) == ""
    host(stop)
    assert host(follow).splitlines() == [repr(arguments), "saved"]
    assert host(status) == "7" and host(busy) == "IDLE"
