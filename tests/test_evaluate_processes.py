"""Real processes that evaluate, analyze and generate as one, over loopback: the files are those of one process.

About 120 seconds of one worker. `seconds` of sample and result records, and seconds, memory and machine of an analysis,
are of the clock and of the machine; everything else is compared byte for byte.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402
from tiny_runs import finish, start_together  # noqa: E402

from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer  # noqa: E402

pytestmark = pytest.mark.slow
PATIENCE = 300
HEARTBEAT = 10
OF_THE_CLOCK = ("seconds", "peak_memory_gib", "machine")
EVALUATE = ["pe_lab.evaluate", "--from=tiny", "--suite=perplexity,needles,beta", "--lengths=1x,16x", "--tokens=1024",
            "--windows=64", "--fit-tokens=512", "--out=measured"]  # fmt: skip
NIAH = ["pe_lab.evaluate", "--from=tiny/pretrain", "--suite=niah:standard,multi_value", "--haystack=noise",
        "--lengths=900,1000", "--samples=20", "--methods=as-trained,yarn", "--out=niah"]  # fmt: skip
LAYERS = ["pe_lab.analyze", "layers", "--from=tiny/pretrain", "--lengths=1x", "--sequences=16", "--by=head",
          "--greedy", "--format=svg", "--out=layers"]  # fmt: skip
USE = ["pe_lab.analyze", "frequency_use", "--from=tiny", "--methods=as-trained", "--positional=rope:base=500",
       "--length=64x", "--sequences=5", "--text=text/*.txt", "--format=svg", "--out=use"]  # fmt: skip
GENERATE = ["pe_lab.generate", "--from=tiny", "--prompts=prompts.txt", "--batch=3", "--max-new-tokens=12",
            "--temperature=1"]  # fmt: skip
COMMANDS = [EVALUATE, NIAH, LAYERS, USE, GENERATE]
LONG = ["pe_lab.evaluate", "--together", "--from=tiny/pretrain", "--suite=needles", "--methods=as-trained",
        "--lengths=1x,256x", "--windows=4", "--out=long"]  # fmt: skip
ANSWERS = [*NIAH, "--together", "--samples=2", "--methods=as-trained", "--suite=niah:standard"]
TOGETHER = [LONG, ANSWERS, [*GENERATE, "--together"]]
# Several commands in one process, which imports and compiles once. Their files are in one directory.
DRIVER = """
import importlib, json, sys
for module, *argv in json.loads(sys.argv[2]):
    argv = [one.replace("--out=", f"--out={sys.argv[1]}/") for one in argv]
    if status := importlib.import_module(module).main(argv):
        sys.exit(status)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run, a text, prompts, and a cache of compiled programs."""
    root = tmp_path_factory.mktemp("processes")
    run = tiny.save_run(root / "tiny", tiny.corpus(root / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), run / "tokenizer")
    (root / "several_commands.py").write_text(DRIVER)
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("".join(f"the key of {n} is {n * 37 % 101} and gone. " for n in range(600)))
    (root / "prompts.txt").write_text("".join(f"the key of night is {n} and\n" for n in range(20)))
    return root


def begin(
    directory: Path, argv: Sequence[str], count: int, last: Path | None = None, **environment: str
) -> list[subprocess.Popen]:
    """Starts the processes of one command; `last` is the working directory of the last one."""
    more = environment | {
        "HEARTBEAT_SECONDS": str(HEARTBEAT),
        "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return start_together(argv, [*[directory] * (count - 1), last or directory], **more)


def without_clock(value):
    """A JSON value without what the clock and the machine have written."""
    if isinstance(value, dict):
        return {name: without_clock(item) for name, item in value.items() if name not in OF_THE_CLOCK}
    return [without_clock(item) for item in value] if isinstance(value, list) else value


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file under a directory."""
    found = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".jsonl":
            data = "".join(json.dumps(without_clock(json.loads(line))) + "\n" for line in data.splitlines()).encode()
        elif path.name == "analysis.json":
            about = without_clock(json.loads(data))
            about["about"].pop("command")  # names the directory
            data = json.dumps(about).encode()
        found[str(path.relative_to(directory))] = data
    return found


def assert_same_files(one: Path, other: Path, least: int) -> None:
    wanted, found = contents(one), contents(other)
    assert list(found) == list(wanted) and len(wanted) >= least
    assert [name for name in wanted if found[name] != wanted[name]] == []


def silent(out: str) -> bool:
    """Whether a process has printed nothing of its own."""
    return all(line.startswith("[Gloo]") or not line.strip() for line in out.splitlines())


@pytest.fixture(scope="module")
def run(directory):
    """Runs COMMANDS in so many processes, once; what the processes printed. The files are in the directory `COUNT`."""
    known: dict[int, list[str]] = {}

    def run(count: int) -> list[str]:
        if count not in known:
            argv = [*COMMANDS, COMMANDS[0]] if count == 2 else COMMANDS
            known[count] = finish(begin(directory, ["several_commands", str(count), json.dumps(argv)], count))
        return known[count]

    return run


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_write_and_print_what_one_does(directory, run, count):
    (one,), several = run(1), run(count)
    assert_same_files(directory / "1", directory / str(count), least=100)
    assert several[0].strip() and all(silent(out) for out in several[1:]), several[1:]
    lines, others = ([line for line in out.splitlines() if line.startswith("{")] for out in (one, several[0]))
    assert lines == others and len(lines) == 20  # generated
    counts = [next(line for line in out.splitlines() if "new tokens" in line) for out in (one, several[0])]
    assert counts[0].split(",")[0] == counts[1].split(",")[0]  # the tokens of all processes
    if count == 2:  # the first command again
        assert "of them were measured before" in several[0]


def test_together_two_processes_do_what_one_with_two_devices_does(directory):
    """Sequences and KV caches are sharded over both: sums of two parts do not depend on their order."""
    flags = "--xla_force_host_platform_device_count=2"
    two = begin(directory, ["several_commands", "together2", json.dumps(TOGETHER)], 2)
    one = begin(directory, ["several_commands", "together1", json.dumps(TOGETHER)], 1, XLA_FLAGS=flags)
    outs = finish([*two, *one])
    assert silent(outs[1])
    assert_same_files(directory / "together1", directory / "together2", 3)
    lines = [[line for line in out.splitlines() if line.startswith("{")] for out in (outs[0], outs[2])]
    assert lines[0] == lines[1] and len(lines[0]) == 20


@pytest.mark.parametrize(("killed", "by"), [(0, signal.SIGTERM), (1, signal.SIGKILL)])
def test_a_killed_process_ends_the_others_and_the_command_goes_on(directory, run, killed, by):
    run(1)
    out = directory / f"killed{killed}"
    processes = begin(directory, [*NIAH, f"--out={out}"], 2)
    samples, deadline = out / "samples" / "niah.jsonl", time.monotonic() + PATIENCE
    while not (samples.exists() and samples.read_bytes().count(b"\n") >= 10):
        assert all(p.poll() is None for p in processes), [p.communicate()[0][-3000:] for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    processes[killed].send_signal(by)
    begun = time.monotonic()
    assert processes[killed].wait(timeout=PATIENCE) == -by
    other = processes[1 - killed]
    try:
        printed = other.communicate(timeout=HEARTBEAT + PATIENCE)[0]
    finally:
        other.kill()
    assert other.returncode not in (0, None), printed[-3000:]
    print(f"process {1 - killed} ended {time.monotonic() - begun:.1f} s after process {killed} was killed")
    assert samples.read_bytes().count(b"\n") < 160
    if killed:
        assert "were answered before" in finish(begin(directory, [*NIAH, f"--out={out}"], 2))[0]
        assert_same_files(directory / "1" / "niah", out, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*NIAH, "--lengths=1x"], "the shortest take"),
        (["pe_lab.generate", "--from=tiny", "--prompts=nowhere.txt"], "cannot be read as text"),
    ],
)
def test_bad_input_is_one_message_and_status_2_everywhere(directory, argv, message):
    for out in finish(begin(directory, argv, 2), status=2):
        errors = [line for line in out.splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and message in errors[0] and "Traceback" not in out, out
    assert not (directory / "niah").exists()


def test_an_error_of_one_process_ends_the_others(directory):
    """A file that one host alone lacks."""
    (directory / "elsewhere").mkdir()
    (directory / "elsewhere" / "tiny").symlink_to(directory / "tiny")
    first, last = finish(begin(directory, [*USE, "--out=lacking"], 2, directory / "elsewhere"), status=2)
    (message,) = (line for line in last.splitlines() if line.startswith("error: "))
    assert "text/*.txt" in message and message.replace("error: ", "error: Process 1 of 2: ") in first
