"""What a command does when standard output or standard error is closed, or on a full disk: with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY, assert_same_training, finish, start, write_recipe

from pe_lab.checkpoints.locating import steps_in

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
ENVIRONMENT |= {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
# Prints in every way, writes its file at the end, and prints once more, which only Python's own end flushes.
COMMAND = """
import sys, threading
from pathlib import Path
from pe_lab import terminal

@getattr(terminal, sys.argv[1])
def main(argv):
    out, lines = terminal.console(), int(argv[2])
    for number in range(lines):
        print("printed", number)
        out.print("by rich", number)
        print("told", number, file=sys.stderr)
        thread = threading.Thread(target=out.print, args=("by a thread",))
        thread.start()
        thread.join()
    terminal.tell_at_once("at once")
    Path(argv[1]).write_text("made")
    print("last")
    return int(argv[3])

terminal.leave(main())
"""


def run(
    kind: str, made: Path, redirection: str, lines: int = 1000, status: int = 0, options: str = ""
) -> subprocess.CompletedProcess:
    """Runs the command in a shell, whose status is the command's own."""
    command = f'set -o pipefail; "$0" {options} -c "$1" {kind} {made} {lines} {status} {redirection}'
    return subprocess.run(["bash", "-c", command, sys.executable, COMMAND], env=ENVIRONMENT, capture_output=True)


MORE = [pytest.param(one, marks=pytest.mark.slow) for one in ("| head -1", ">&-", "2>&-", ">/dev/full 2>&1", "| :")]


@pytest.mark.parametrize(
    "redirection", [pytest.param("2>&1 | head -1", marks=pytest.mark.slow), ">&- 2>&-", ">/dev/full", *MORE]
)
def test_a_command_that_makes_files_works_on(tmp_path, redirection):
    """1 s each."""
    found = run("works_on", tmp_path / "made", redirection)
    assert (tmp_path / "made").read_text() == "made"
    assert found.returncode == 0 and b"Traceback" not in found.stderr and b"Exception ignored" not in found.stderr
    told = found.stderr.count(b"standard output: No space left on device. What is printed is lost; the work goes on.")
    assert told == (redirection == ">/dev/full")
    if "head" in redirection:
        assert run("works_on", tmp_path / "made", redirection, options="-u").returncode == 0


@pytest.mark.parametrize("redirection", ["2>&1 | head -1", *MORE[:2]])
def test_the_status_is_that_of_the_work(tmp_path, redirection):
    assert run("works_on", tmp_path / "made", redirection, status=75).returncode == 75


def test_a_command_that_makes_no_files_ends_quietly_with_its_output(tmp_path):
    found = run("command", tmp_path / "made", "| head -1")
    assert found.stdout == b"printed 0\n" and found.returncode == 0 and not (tmp_path / "made").exists()
    assert b"Traceback" not in found.stderr and b"Exception ignored" not in found.stderr
    assert run("command", tmp_path / "made", "| :", lines=0, status=2).returncode == 2  # met by the flush at the end


@pytest.mark.parametrize("lines", [0, 5000])
def test_an_output_that_does_not_fit_is_an_error_where_it_is_all_there_is(tmp_path, lines):
    found = run("command", tmp_path / "made", ">/dev/full", lines)
    assert found.returncode == 2 and b"standard output" in found.stderr and b"No space left on device" in found.stderr
    assert b"Traceback" not in found.stderr and b"Exception ignored" not in found.stderr


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path):
    """What is printed past Python, as C libraries do, would be written into it."""
    code = "import pe_lab.output as o; o.open_standard_streams(); import os; f = open('file', 'w'); os.write(2, b'x')"
    shell = ["bash", "-c", '"$0" -c "$1" >&- 2>&- <&-', sys.executable, code]
    assert subprocess.run(shell, cwd=tmp_path, env=ENVIRONMENT).returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_a_list_of_commands_may_be_cut_off():
    """2 s."""
    command = 'set -o pipefail; "$0" -m pe_lab --help | head -1'
    found = subprocess.run(["bash", "-c", command, sys.executable], env=ENVIRONMENT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "") and found.stdout.startswith("pe_lab COMMAND")


@pytest.mark.slow
def test_training_goes_on_when_its_output_is_closed_and_still_saves_at_a_signal(tmp_path):
    """Four short runs: 60 s."""
    recipe = write_recipe(tmp_path / "recipe")
    command = f'"$0" -m pe_lab.train --config={recipe} --workdir='
    for name, redirection in (("piped", "2>&1 | head -1"), ("closed", ">&- 2>&-"), ("full", ">/dev/full")):
        shell = ["bash", "-c", f"set -o pipefail; {command}{name} {redirection}", sys.executable]
        found = subprocess.run(shell, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
        assert found.returncode == 0 and "Traceback" not in found.stderr, (name, found.stderr)
    argv = ["pe_lab.train", f"--config={recipe}", "--workdir=stopped"]
    process = start([*argv, "--config.checkpoint.every_steps=1000", "--config.phases.0.steps=100000"], tmp_path)
    process.stdout.close()  # the line that says so is not written either
    log = tmp_path / "stopped/pretrain/metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == os.EX_TEMPFAIL and steps_in(tmp_path / "stopped/pretrain/checkpoints")[-1] >= 3
    finish([start([*argv[:2], "--workdir=whole"], tmp_path)])
    for name in ("piped", "closed", "full"):
        assert_same_training(tmp_path / "whole", tmp_path / name)
