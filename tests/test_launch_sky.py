"""launch/sky.sh: its tasks fit SkyPilot's own schema, and tell JAX of the other nodes."""

from __future__ import annotations

import copy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launchers import PROGRAM, calls, dry_run, fake_tools, launch, tool_directory, validate

JOB = ["--name=drope", "--type=H100:8"]
VARIANTS = [
    [],
    ["--nodes=4", "--spot", "--infra=gcp/us-central1", "--volume=runs:/mnt/runs", "--volume=data:/mnt/data"],
    ["--before=sudo mount 10.0.0.2:/share /mnt/runs", "--restarts=0"],
    ["--type=tpu-v5litepod-16:1", "--spot"],
]


def task(*options: str) -> dict[str, Any]:
    return yaml.safe_load(dry_run("sky.sh", *JOB, *options)[1])


@pytest.mark.parametrize("options", VARIANTS, ids=" ".join)
def test_every_task_fits_the_schema(options: list[str]) -> None:
    validate(task(*options), "sky_task")


@pytest.mark.parametrize("path", [(), ("resources",), ("resources", "job_recovery")])
def test_a_misspelt_field_fails(path: tuple[str, ...]) -> None:
    document = copy.deepcopy(task("--spot"))
    place = document
    for key in path:
        place = place[key]
    place["use_sopt"] = True
    with pytest.raises(jsonschema.ValidationError):
        validate(document, "sky_task")


def test_the_task() -> None:
    document = task("--nodes=4", "--spot", "--infra=gcp/us-central1", "--volume=runs:/mnt/runs")
    assert document["num_nodes"] == 4 and document["volumes"] == {"/mnt/runs": "runs"}
    resources = document["resources"]
    assert resources["accelerators"] == "H100:8" and resources["use_spot"] is True
    assert resources["infra"] == "gcp/us-central1"
    # A run that saved after SIGTERM has not crashed.
    assert resources["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert "EXTRA=gpu sh launch/venv.sh" in document["setup"]
    document = task("--type=tpu-v5litepod-16:1")
    assert "EXTRA=tpu sh launch/venv.sh" in document["setup"]
    assert document["resources"]["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv5-lite"}  # as tpu_slice.sh


NODE = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "2"}


def run_on_a_node(document: dict[str, Any], directory: Path) -> list[str]:
    """Runs the task's commands in a directory whose Python prints what it gets."""
    python = directory / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$COORDINATOR_ADDRESS $PROCESS_COUNT $PROCESS_INDEX" "$0" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", **NODE}
    done = subprocess.run(
        ["bash", "-c", document["run"]], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_node_runs_the_program_and_knows_the_others(tmp_path: Path) -> None:
    lines = run_on_a_node(task("--nodes=3", f"--before=touch {tmp_path / 'mounted'}"), tmp_path)
    assert lines[0] == "10.0.0.5:12345 3 2" and lines[1].endswith("/.venv/bin/python") and lines[2:] == PROGRAM[1:]
    assert (tmp_path / "mounted").exists()


@pytest.mark.parametrize("options", [["--nodes=1"], ["--nodes=2", "--type=tpu-v5litepod-16:1"]], ids=" ".join)
def test_one_node_and_tpus_need_no_addresses(tmp_path: Path, options: list[str]) -> None:
    assert run_on_a_node(task(*options), tmp_path)[0].strip() == ""


def test_before_ends_the_run_if_it_fails(tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", task("--before=false")["run"]], cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 1


SKY = """sky() { if [ "$2" = launch ]; then cat "${@: -1}" > "$SANDBOX/task"; fi; return "${STATUS:-0}"; }"""


def test_the_real_path_submits_the_task_of_the_dry_run(tmp_path: Path) -> None:
    tools = fake_tools(tmp_path, SKY, "sky")
    result = launch("sky.sh", *JOB, "--spot", "--", *PROGRAM, **tools)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "task").read_text() == dry_run("sky.sh", *JOB, "--spot")[1]
    submit, logs = calls(tmp_path)
    assert submit[:-1] == ["sky", "jobs", "launch", "--yes", "--name=drope", "--detach-run"]
    assert logs == ["sky", "jobs", "logs", "--name=drope", "--follow"]
    assert not Path(submit[-1]).exists()


def test_the_exit_status_is_that_of_the_job(tmp_path: Path) -> None:
    tools = fake_tools(tmp_path, SKY, "sky")
    assert launch("sky.sh", "--name=drope", "--attach", **tools, STATUS="100").returncode == 100


def test_stop() -> None:
    assert dry_run("sky.sh", "--name=drope", "--stop", program=None)[0] == [
        shlex.split("sky jobs cancel --yes --name=drope")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (JOB[1:], "--name"),
        (JOB[:1], "--type"),
        ([*JOB, "--type=H100"], "H100:8"),
        ([*JOB, "--nodes=0"], "--nodes"),
        ([*JOB, "--volume=runs"], "runs:/mnt/runs"),
        ([*JOB, "--infra=a\nb"], "control character"),
        ([*JOB, "--sopt"], "--sopt"),
        ([*JOB, "--attach", "--stop"], "choose one"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments: list[str], message: str) -> None:
    result = launch("sky.sh", *arguments, "--dry-run", "--", *PROGRAM)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_without_sky_only_a_dry_run_works(tmp_path: Path) -> None:
    path = tool_directory(tmp_path)
    result = launch("sky.sh", *JOB, "--", *PROGRAM, PATH=path)
    assert result.returncode == 2 and "SkyPilot" in result.stderr
    assert launch("sky.sh", *JOB, "--dry-run", "--", *PROGRAM, PATH=path).returncode == 0
