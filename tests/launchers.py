"""What the tests of launch/*.sh share: a command, a script that is run, fake tools, schemas of manifests."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
from tiny_runs import REPOSITORY

PROGRAM = ["python", "-m", "pe_lab.train", "--config=configs/drope_16b.py", """--workdir=/mnt/runs/it's a \\"run\""""]
VARIABLES = ("NAME", "ZONE", "PROJECT", "TYPE", "RUNTIME", "IMAGE")


def launch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs launch/SCRIPT."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | variables
    command = ["bash", str(REPOSITORY / "launch" / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def dry_run(script: str, *options: str, program: list[str] | None = PROGRAM) -> tuple[list[list[str]], str]:
    """The commands of a dry run, each split into words, and the document that one of them gets."""
    result = launch(script, *options, "--dry-run", *(["--", *program] if program else []))
    assert result.returncode == 0, result.stderr
    commands, document, lines = [], "", iter(result.stdout.splitlines())
    for line in lines:
        if line.endswith(" <<'END'"):
            document = "\n".join(iter(lines.__next__, "END")) + "\n"
            line = line.removesuffix(" <<'END'")
        if not line.startswith("#"):
            commands.append(shlex.split(line))
    return commands, document


# Writes its name and arguments to $SANDBOX/calls, and its input to $SANDBOX/NAME.input. Its answers are the shell
# functions of $SANDBOX/answers.
FAKE = """#!/bin/bash
name=${0##*/}
{ printf '%q ' "$name" "$@"; echo; } >> "$SANDBOX/calls"
. "$SANDBOX/answers"
if declare -F "$name" > /dev/null; then "$name" "$@"; fi
"""


def fake_tools(sandbox: Path, answers: str, *names: str) -> dict[str, str]:
    """The variables of an environment in which these commands answer by functions of `answers`."""
    binaries = sandbox / "bin"
    binaries.mkdir(exist_ok=True)
    (sandbox / "answers").write_text(answers)
    for name in names:
        (binaries / name).write_text(FAKE)
        (binaries / name).chmod(0o755)
    return {"PATH": f"{binaries}:{os.environ['PATH']}", "SANDBOX": str(sandbox), "POLL_SECONDS": "0.05"}


def calls(sandbox: Path) -> list[list[str]]:
    """The calls of the fake tools, in their order."""
    file = sandbox / "calls"
    return [shlex.split(line) for line in file.read_text().splitlines()] if file.exists() else []


def tool_directory(tmp_path: Path) -> str:
    """A PATH on which bash's helpers are, and no launcher's tool."""
    for name in ("bash", "sed", "dirname", "cat", "date", "mktemp", "rm", "tail", "mkdir"):
        (tmp_path / name).symlink_to(Path("/bin") / name if (Path("/bin") / name).exists() else Path("/usr/bin") / name)
    return str(tmp_path)


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """A schema of tests/data/launch_schemas.json, of a JobSet or of a SkyPilot task."""
    return json.loads((Path(__file__).parent / "data" / "launch_schemas.json").read_text())[name]


def validate(document: Any, name: str) -> None:
    """Raises jsonschema's error unless the document fits, with no unknown field."""
    jsonschema.Draft202012Validator(schema(name)).validate(document)


def words_of(program: list[str]) -> list[str]:
    """The command as a host runs it, with the interpreter of .venv."""
    return [".venv/bin/python", *program[1:]]
