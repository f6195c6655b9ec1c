"""The commands of the gauntlet, undisturbed: what each case starts from, and what it must end in."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gauntlet.outcome import content, differences, steps

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds for one process, after which it counts as hanging
POLL_SECONDS = 0.0003


class Command(NamedTuple):
    """A command line, the files of a project that it reads, and the one that it makes."""

    argv: tuple[str, ...]
    reads: tuple[str, ...]
    makes: str


COMMANDS = {
    "prepare": Command(
        ("pe_lab.prepare", "--source=text:corpus/*.py", "--tokenizer=sentencepiece:train:400", "--out=data",
         "--validation-fraction=0.1"), ("corpus",), "data"),
    "train": Command(("gauntlet.marked_train", "--config=recipe.py", "--workdir=run"), ("recipe.py", "data"), "run"),
    "patient train": Command(
        ("gauntlet.marked_train", "--config=recipe.py", "--workdir=patient", "--config.checkpoint.on_failure=continue"),
        ("recipe.py", "data"), "patient"),
    "export": Command(
        ("pe_lab.convert", "--from=run/pretrain", "--to=hf:exported", "--parity=off"), ("run",), "exported"),
    "import": Command(
        ("pe_lab.convert", "--from=hf:exported", "--to=imported", "--parity=off"), ("exported",), "imported"),
    "surgery": Command(("pe_lab.surgery", "--from=run/pretrain", "--to=child", "--drop"), ("run",), "child"),
    "evaluate": Command(
        ("pe_lab.evaluate", "--from=run", "--suite=perplexity,niah:standard", "--haystack=noise", "--lengths=500",
         "--tokens=4096", "--samples=4", "--variants=as-trained", "--out=eval"), ("run", "data"), "eval"),
}  # fmt: skip
VERIFY = ("pe_lab.verify",)


class Ended(NamedTuple):
    """A process that has ended. `status` is None for one that was still running after `PATIENCE`."""

    status: int | None
    output: str
    seconds: float

    @property
    def wrong(self) -> str:
        """What no command may do, whatever it meets: "hang", "traceback", "0 messages" or ""."""
        if self.status is None:
            return "hang"
        if "Traceback (most recent call last)" in self.output or self.status not in (0, 1, 2, 3, 75):
            return "traceback"
        errors = self.output.count("\nerror: ") + self.output.startswith("error: ")
        if errors != 1 and self.status in (2, 3):
            return f"{errors} messages"
        return ""

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or [""])[-1]


class Session:
    """A running command, whose output goes to the file `log`."""

    def __init__(self, argv: Iterable[str], project: Path, log: Path, environment: dict[str, str]):
        self.log = log
        self.began = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *argv], cwd=project, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_until(self, happened: Callable[[], bool]) -> bool:
        """Polls almost without pause; False if the process ended first."""
        while not happened():
            if not self.running or time.monotonic() - self.began > PATIENCE:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def kill(self) -> bool:
        """Sends SIGKILL; whether that ended the process."""
        self.process.kill()
        return self.process.wait() == -signal.SIGKILL

    def end(self) -> Ended:
        """Waits for the process."""
        try:
            status = self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = None
        return Ended(status, self.output, time.monotonic() - self.began)


@dataclass
class World:
    """A directory with the undisturbed results in `made`, and the cases' projects.

    Attributes:
      seconds: (until its first file, until the end) of each command.
      expected: of each command, `content` of what it makes.
    """

    root: Path
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def made(self) -> Path:
        return self.root / "made"

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}",
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return {**{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}, **own}

    def start(self, argv: Iterable[str], project: Path, **environment: str) -> Session:
        """Starts `python -m ARGV` in a project; its output goes elsewhere, for the project's disk may be full."""
        log = self.root / "logs" / ("-".join(project.relative_to(self.root).parts) + ".log")
        log.parent.mkdir(exist_ok=True)
        return Session(argv, project, log, {**self.environment, **environment})

    def run(self, argv: Iterable[str], project: Path, **environment: str) -> Ended:
        """`start`, and waits."""
        return self.start(argv, project, **environment).end()

    def project(self, name: str, files: Iterable[str], source: Path | None = None) -> Path:
        """A new directory with copies of these files of `made` or another directory."""
        directory = self.root.joinpath("cases", name).resolve()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in files:
            copy(self.made / file if source is None else source / file, directory / file)
        return directory

    def wrong(self, command: str, project: Path) -> list[str]:
        """How what a command has made in a project differs from the undisturbed result."""
        directory = project / COMMANDS[command].makes
        return differences(self.expected[command], content(directory) if directory.exists() else {})

    def open(self, commands: Iterable[str], others: bool, report: Callable[[str], None]) -> None:
        """Makes the undisturbed results of these commands, and with `others` a stopped run and one of other data.

        What an earlier gauntlet has left in the directory is used again.
        """
        kept = self.root / "seconds.json"
        if kept.exists():
            self.seconds = {name: tuple(pair) for name, pair in json.loads(kept.read_text()).items()}
        else:
            shutil.rmtree(self.root, ignore_errors=True)
            corpus = self.made / "corpus"
            corpus.mkdir(parents=True)
            for number, file in enumerate(sorted((REPOSITORY / "pe_lab").rglob("*.py"))):
                shutil.copyfile(file, corpus / f"{number:03}.py")
            shutil.copyfile(Path(__file__).with_name("recipe.py"), self.made / "recipe.py")
        for name in with_sources(commands):
            target = self.made / COMMANDS[name].makes
            if target.exists():
                self.expected[name] = content(target)
                continue
            self._make(name)
            kept.write_text(json.dumps(self.seconds))
            report(f"{name}: {self.seconds[name][1]:.1f} s undisturbed")
        if others and not (self.root / "half").exists():
            self._make_others()
            report("made a run of other data, and one that was stopped half-way")

    def _make(self, name: str) -> None:
        """Runs a command undisturbed, twice: the second time finds all programs compiled."""
        command = COMMANDS[name]
        for again in (False, True):
            project = self.project("undisturbed", command.reads)
            session, target = self.start(command.argv, project), project / command.makes
            session.wait_until(lambda target=target: bool(new_paths(target)))
            first = time.monotonic() - session.began
            ended = session.end()
            if ended.status:
                raise SystemExit(f"{name} failed undisturbed, status {ended.status}:\n{ended.output}")
            if again and (twice := differences(self.expected[name], content(target))):
                raise SystemExit(f"{name} differs between two undisturbed runs: {twice[:5]}")
            self.expected[name] = content(target)
            self.seconds[name] = (first, ended.seconds)
        copy(target, self.made / command.makes)

    def _make_others(self) -> None:
        """`half/run`, killed in its second phase; and `other`, a run of another seed on other data, with all steps."""
        other = self.project("../.other", ("recipe.py", "corpus"))
        for file in sorted((other / "corpus").iterdir())[::2]:
            file.unlink()
        train = COMMANDS["train"].argv
        for argv in (COMMANDS["prepare"].argv, (*train, "--config.seed=1", "--config.checkpoint.keep=100")):
            ended = self.run(argv, other)
            if ended.status:
                raise SystemExit(f"{argv[0]} failed undisturbed, status {ended.status}:\n{ended.output}")
        other.rename(self.root / "other")
        half = self.project("../.half", COMMANDS["train"].reads)
        committed = half / "run/recalibrate/checkpoints"
        session = self.start(train, half)
        session.wait_until(lambda: max(steps(committed), default=0) >= 10)
        if not session.kill() or max(steps(committed)) >= 20:
            raise SystemExit("The run that was to be killed half-way was not.")
        for left in committed.glob("*.*"):
            shutil.rmtree(left)
        half.rename(self.root / "half")


def with_sources(commands: Iterable[str]) -> list[str]:
    """The commands and those that make what they read, in the order in which they run."""
    needed = set(commands)
    for name in reversed(COMMANDS):
        if name in needed:
            needed |= {other for other, command in COMMANDS.items() if command.makes in COMMANDS[name].reads}
    return [name for name in COMMANDS if name in needed]


def new_paths(target: Path) -> list[Path]:
    """What a command has begun to write: its output, or the directory that is to become it."""
    return [path for path in target.parent.iterdir() if target.name in path.name and path.suffix != ".py"]


def copy(source: Path, target: Path) -> None:
    """Copies a file or a directory, which replaces what is there."""
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)


def draw(seed: int, case: str) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f"{seed}/{case}")
