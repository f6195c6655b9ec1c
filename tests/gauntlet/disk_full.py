"""A full disk: one message, nothing half-written, and with space the same command ends in the same bytes.

A training that is to go on (`checkpoint.on_failure="continue"`) gets its space back while it runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gauntlet.kills import moments
from gauntlet.outcome import UNFINISHED, Row, damaged, steps
from gauntlet.recipe import get_config
from gauntlet.world import COMMANDS, Session, World, draw, new_paths

ROUND = (
    *("train", "prepare", "train", "export", "patient train"),
    *("surgery", "train", "evaluate", "patient train", "import"),
)
AIMS = {
    "train": ("save", "border", "commit", "validation", "first step", "before the start"),
    "patient train": ("save", "commit", "validation", "save"),
}
FULL_SECONDS = (0.05, 2.0)  # until a training that is to go on has space again
LAST_STEPS = {phase["name"]: phase["steps"] for phase in get_config().phases}
DISK_BYTES = 16 * 2**20


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of `DISK_BYTES` in memory, mounted on a directory. Takes the right to mount."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


class Filler:
    """A file that takes all space that there is, also what becomes free, until it is removed."""

    def __init__(self, directory: Path):
        self.path, self._ended = directory / "filler", threading.Event()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        self._fill()
        self._thread = threading.Thread(target=self._keep_full, daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(self._file, bytes(size))

    def _keep_full(self) -> None:
        while not self._ended.wait(0.001):
            self._fill()

    def remove(self) -> None:
        """Makes space."""
        self._ended.set()
        self._thread.join()
        os.close(self._file)
        self.path.unlink()


def run_case(world: World, seed: int, number: int) -> Row:
    """Fills the disk at a moment of a command, makes space when that has ended, and repeats the command."""
    case = f"disk-{number}"
    rng = draw(seed, case)
    directory = world.root / "cases" / case
    with small_disk(directory / "disk"):
        row = _on_disk(world, case, rng, number, directory / "disk")
    shutil.rmtree(directory)
    return row


def _on_disk(world: World, case: str, rng: random.Random, number: int, disk: Path) -> Row:
    name = ROUND[number % len(ROUND)]
    command, patient = COMMANDS[name], name == "patient train"
    aims = AIMS.get(name, ("writing", "before the start"))
    aim = aims[(number // len(ROUND) * ROUND.count(name) + ROUND[: number % len(ROUND)].count(name)) % len(aims)]
    what = f"disk full in {name}"
    for _ in range(6):
        project = world.project(f"{case}/disk/project", command.reads)
        filler = Filler(disk) if aim == "before the start" else None
        session = world.start(command.argv, project)
        if filler is None:
            _wait(world, session, project, name, aim, rng)
            before = {p: steps(p) for p in project.glob(f"{command.makes}/*/checkpoints")}
            filler = Filler(disk)
        else:
            before = {}
        if patient:
            at = time.monotonic() + rng.uniform(*FULL_SECONDS)
            session.wait_until(lambda at=at: time.monotonic() >= at)
            filler.remove()
        ended = session.end()
        if not patient:
            filler.remove()
        if ended.status != 0 or "Training goes on." in ended.output:
            break
        aim = "save" if "train" in name else "before the start"  # it came too late: all had been written
    else:
        return Row(case, what, aim, "the command ends before the disk is full", "not tried")
    told = f"status {ended.status}: {ended.last_line[:200]}"
    if patient:
        told = f"{ended.output.count('Training goes on.')} saves failed, {told}"
    if ended.wrong:
        return Row(case, what, aim, told, ended.wrong)
    if patient and ended.status != 0 and not _ends_a_phase(ended.last_line):
        return Row(case, what, aim, told, "does not go on")
    if not patient and ended.status not in (2, 3):
        return Row(case, what, aim, told, f"status {ended.status}")
    for checkpoints, had in before.items():
        whole = [step for step in steps(checkpoints) if not damaged(checkpoints / str(step))]
        if had and max(whole, default=-1) < had[-1]:
            return Row(case, what, aim, f"{told}; whole steps {whole}, there were {had}", "a step is lost")
    if name not in (*AIMS, "evaluate", "prepare"):  # which go on where they stopped
        left = [path.name for path in new_paths(project / command.makes) if path.exists()]
        if left:
            return Row(case, what, aim, f"{told}; left: {left}", "half-written")
    left = [str(path.relative_to(project)) for path in project.rglob("*") if UNFINISHED.search(path.name)]
    again = world.run(command.argv, project)
    wrong = world.wrong(name, project)
    if again.wrong or again.status or wrong:
        shown = f"{told}; with space status {again.status}: {again.last_line[:200]} {wrong[:1]}; had left {left[:2]}"
        return Row(case, what, aim, shown, again.wrong or "not repeated")
    return Row(case, what, aim, told, "same bytes")


def _ends_a_phase(message: str) -> bool:
    """Whether a message is of the first or the last checkpoint of a phase, without which no training goes on."""
    found = re.search(r"Checkpoint (\d+) of '.*/(\w+)/checkpoints'", message)
    return found is not None and int(found[1]) in (0, LAST_STEPS[found[2]])


def _wait(world: World, session: Session, project: Path, name: str, aim: str, rng: random.Random) -> None:
    """Waits for the moment of an aim, or until the process has ended."""
    if aim == "writing":
        session.wait_until(lambda: bool(new_paths(project / COMMANDS[name].makes)))
        return
    happened, _ = moments(session, project / COMMANDS[name].makes, rng)[aim]
    session.wait_until(happened)
