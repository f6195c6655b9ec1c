"""SIGKILL at many moments: the same command, repeated, ends in the same bytes."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gauntlet.marked_train import RESTORE, VALIDATION, begins, inside
from gauntlet.outcome import MANIFEST, Row
from gauntlet.world import COMMANDS, Session, World, draw, new_paths

PHASES = ("pretrain", "recalibrate")
# A case is a command that is killed several times, and then left to end. 25 kills a round.
ROUND = (("train", 5), ("prepare", 2), ("train", 5), ("export", 2), ("train", 5), ("surgery", 3), ("evaluate", 3))
ROUNDS_OF_IMPORT = (1, 3)  # in which import is killed and not export
# One kill of each training aims at the border of its phases, the others at these.
AIMS = (
    *("anywhere", "save", "save", "commit", "deletion", "restore", "restore"),
    *("validation", "validation", "start", "first step"),
)


def cases(kills: int) -> list[tuple[str, int]]:
    """(command, number of kills) of each case, with so many kills in all."""
    found: list[tuple[str, int]] = []
    while (left := kills - sum(count for _, count in found)) > 0:
        command, count = ROUND[len(found) % len(ROUND)]
        if command == "export" and len(found) // len(ROUND) in ROUNDS_OF_IMPORT:
            command = "import"
        found.append((command, min(count, left)))
    return found


def aims(rng: random.Random, command: str, count: int) -> list[str]:
    """What the kills of a case aim at."""
    if command != "train":
        return [rng.choice(("anywhere", "writing", "writing")) for _ in range(count)]
    drawn = [rng.choice(AIMS) for _ in range(count)]
    drawn[rng.randrange((count + 1) // 2)] = "border"  # which most runs have before them still
    return drawn


def run_case(world: World, seed: int, number: int, command: str, count: int) -> list[Row]:
    """Kills a command `count` times, lets it end, and compares what it has made."""
    case = f"kill-{number}"
    rng = draw(seed, case)
    what = COMMANDS[command]
    project = world.project(case, what.reads)
    landed: list[tuple[str, str]] = []  # (aim, moment) of each kill
    verdicts: list[tuple[str, str]] = []  # (what happened, verdict) of each kill whose run has ended
    missed = 0

    def judge() -> None:
        """The verdict of the kills since the last one, from the command's repetition."""
        whole = not world.wrong(command, project)  # a whole result may be refused: it is not written again
        ended = world.run(what.argv, project)
        wrong = world.wrong(command, project)
        if ended.wrong:
            verdict = ended.wrong
        elif wrong:
            verdict = f"differs: {wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        elif ended.status and not whole:
            verdict = "refuses its repetition"
        else:
            verdict = "same bytes"
        shown = f"repeated, status {ended.status}" + (f": {ended.last_line[:160]}" if ended.status else "")
        verdicts.extend([(shown, verdict)] * (len(landed) - len(verdicts)))

    for aim in aims(rng, command, count):
        while True:
            before = Before(project)
            session = world.start(what.argv, project)
            aimed = _strike(world, session, project, command, "anywhere" if missed else aim, rng)
            if session.kill():
                break
            # It has ended by itself before the moment came: its result is judged, and it starts over.
            missed += 1
            if (status := session.process.returncode) and world.wrong(command, project):
                landed.append((aim, "none: it ended by itself"))
                verdicts.append((f"status {status}: {session.end().last_line[:160]}", "fails after a kill"))
                return _rows(case, command, landed, verdicts)
            if len(verdicts) < len(landed):
                judge()
            if missed > 8 * count:
                landed.append((aim, "none: it ends too fast"))
                verdicts.append(("", "not killed"))
                return _rows(case, command, landed, verdicts)
            project = world.project(case, what.reads)
        landed.append((aimed, moment(before, project, session, command, world)))
    judge()
    if not any(verdict != "same bytes" for _, verdict in verdicts):
        shutil.rmtree(project)
    return _rows(case, command, landed, verdicts)


def _rows(case: str, command: str, landed: list[tuple[str, str]], verdicts: list[tuple[str, str]]) -> list[Row]:
    return [
        Row(f"{case}", f"{command} killed ({aim})", moment, happened, verdict)
        for (aim, moment), (happened, verdict) in zip(landed, verdicts, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Moments


def _strike(world: World, session: Session, project: Path, command: str, aim: str, rng: random.Random) -> str:
    """Waits for the moment of an aim, or until the process has ended; returns the aim."""
    first, total = world.seconds[command]
    if aim == "border" and (project / "run" / PHASES[1]).exists():
        aim = "anywhere"  # the border is behind it
    if aim == "anywhere":
        at = session.began + rng.uniform(0.0, total)
        session.wait_until(lambda: time.monotonic() >= at)
    elif aim == "start":
        at = session.began + rng.uniform(0.0, first)
        session.wait_until(lambda: time.monotonic() >= at)
    elif aim == "writing":
        target, known = project / COMMANDS[command].makes, set(new_paths(project / COMMANDS[command].makes))
        session.wait_until(lambda: bool(set(new_paths(target)) - known) or target.exists())
        _pause(session, rng.uniform(0.0, total - first))
    else:
        happened, pause = moments(session, project / "run", rng)[aim]
        if session.wait_until(happened):
            _pause(session, pause)
    return aim


def _pause(session: Session, seconds: float) -> None:
    at = time.monotonic() + seconds
    session.wait_until(lambda: time.monotonic() >= at)


def moments(session: Session, run: Path, rng: random.Random) -> dict[str, tuple[Callable[[], bool], float]]:
    """(has it come?, seconds until the kill) of each aim in a training."""
    old, seen, wanted = set(_under_way(run)), set(), rng.randint(1, 4)
    border, deletions = run / PHASES[1], set(_deletions(run))
    later = rng.randint(1, 3)

    def new_saves() -> int:
        seen.update(set(_under_way(run)) - old)
        return len({name for name, _ in seen})

    def writes_manifest() -> bool:
        new_saves()
        return any((run / name / MANIFEST).exists() for name, _ in _under_way(run))

    return {
        "save": (lambda: new_saves() >= wanted, rng.choice((0.0, rng.uniform(0.0, 0.04)))),
        "commit": (lambda: new_saves() >= wanted and writes_manifest(), 0.0),
        "deletion": (lambda: bool(set(_deletions(run)) - deletions), 0.0),
        "restore": (lambda: inside(session.output, RESTORE), rng.uniform(0.0, 0.03)),
        "first step": (lambda: "attention: " in session.output, rng.uniform(0.0, 0.4)),
        "validation": (lambda: begins(session.output, VALIDATION) >= later, rng.uniform(0.0, 0.003)),
        "border": (border.exists, rng.choice((0.0, rng.uniform(0.0, 0.3)))),
    }


def _under_way(run: Path) -> Iterator[tuple[str, int]]:
    """(name, inode) of the directories of unfinished saves."""
    yield from _inodes(run, "*/checkpoints/*.saving*")


def _deletions(run: Path) -> Iterator[tuple[str, int]]:
    """(name, inode) of the directories of unfinished deletions."""
    yield from _inodes(run, "*/checkpoints/*.deleting")


def _inodes(run: Path, pattern: str) -> Iterator[tuple[str, int]]:
    for path in run.glob(pattern):
        try:
            yield str(path.relative_to(run)), path.stat().st_ino
        except OSError:  # renamed or removed meanwhile
            continue


def _logs(run: Path) -> list[Path]:
    return [run / phase / "metrics.jsonl" for phase in PHASES if (run / phase / "metrics.jsonl").exists()]


def _records(log: Path) -> list[dict]:
    found = []
    for line in log.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # a line that is being written
            break
    return found


class Before:
    """The files of a project before a session, which tell afterwards where its kill landed."""

    def __init__(self, project: Path):
        run = project / "run"
        self.under_way, self.deletions = set(_under_way(run)), set(_deletions(run))
        self.logs = {log: log.stat().st_ino for log in _logs(run)}
        self.phases = {phase for phase in PHASES if (run / phase).exists()}


DONE = "after its last write"


def moment(before: Before, project: Path, session: Session, command: str, world: World) -> str:
    """Where a kill has landed, as the files and the output tell."""
    run, out, target = project / "run", session.output, project / COMMANDS[command].makes
    if command != "train":
        if not new_paths(target):
            return "start-up"
        return "inside its writing" if world.wrong(command, project) else DONE
    if "parameters, " not in out:
        return "start-up"
    if inside(out, RESTORE):
        return "inside a restore"
    if inside(out, VALIDATION):
        return "during validation"
    saving = [name for name, inode in _under_way(run) if (name, inode) not in before.under_way]
    if saving:
        return "inside a commit" if (run / saving[0] / MANIFEST).exists() else "inside a save"
    if set(_deletions(run)) - before.deletions:
        return "inside a deletion"
    phase = next((phase for phase in reversed(PHASES) if (run / phase).exists()), PHASES[0])
    log = run / phase / "metrics.jsonl"
    if phase == PHASES[1] and PHASES[1] not in before.phases and (not log.exists() or not _records(log)):
        return "at a phase border"
    if not log.exists() or before.logs.get(log) == log.stat().st_ino or f"{phase}: complete" in out:
        finished = not world.wrong(command, project)
        return DONE if finished else "before the first step"
    return "between steps"
