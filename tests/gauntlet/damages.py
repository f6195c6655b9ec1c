"""Damage to every kind of file of a project: mended, refused or harmless, and never trained on."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gauntlet.outcome import CHECKPOINT, Row, steps
from gauntlet.world import COMMANDS, VERIFY, Ended, World, copy, draw

FILE_KINDS = ("truncate", "flip", "zero", "delete", "swap with another run's")
STEP_KINDS = (*FILE_KINDS, "swap with another step's")
DIRECTORY_KINDS = ("delete", "swap with another run's", "swap with another step's")
SAID = re.compile(r"damaged|cannot be read|no manifest|is missing|set aside|differ|written anew", re.IGNORECASE)


class Target(NamedTuple):
    """A kind of file.

    Attributes:
      name: for the table.
      base: `half`, a run that was killed in its second phase, or `made`, a complete one.
      pattern: a glob under the project, in which {last} and {earlier} are steps of a phase.
      kinds: of damage.
      command: which reads it.
      verified: whether `pe_lab.verify` answers for it.
    """

    name: str
    base: str
    pattern: str
    kinds: tuple[str, ...] = FILE_KINDS
    command: str = "train"
    verified: bool = True


_LAST, _EARLIER = "run/recalibrate/checkpoints/{last}", "run/recalibrate/checkpoints/{earlier}"
TARGETS = (
    Target("parameters", "half", f"{_LAST}/params/**/d/*", STEP_KINDS),
    Target("prepared shard", "half", "data/*.safetensors"),
    Target("optimizer state", "half", f"{_LAST}/optimizer/**/d/*", STEP_KINDS),
    Target("a step's directory", "half", _LAST, DIRECTORY_KINDS, verified=False),
    Target("OCDBT manifest", "half", f"{_LAST}/*/**/manifest.ocdbt", STEP_KINDS),
    Target("manifest.json", "half", f"{_LAST}/manifest.json", STEP_KINDS),
    Target("metrics.jsonl", "half", "run/*/metrics.jsonl", verified=False),
    Target("metadata", "half", f"{_LAST}/metadata/metadata", STEP_KINDS),
    Target("_CHECKPOINT_METADATA", "half", f"{_LAST}/_CHECKPOINT_METADATA", STEP_KINDS),
    Target("other files of Orbax", "half", f"{_LAST}/*/[_ac]*", STEP_KINDS),
    Target("run.json", "half", "run/run.json", verified=False),
    Target("metadata.json of data", "half", "data/metadata.json"),
    Target("an earlier step", "half", f"{_EARLIER}/**/*", STEP_KINDS),
    Target("tokenizer of the run", "half", "run/tokenizer/*.model"),
    Target("last step of phase 1", "half", "run/pretrain/checkpoints/30/params/**/d/*", STEP_KINDS),
    Target("evaluation records", "made", "eval/**/*.jsonl", command="evaluate", verified=False),
    Target("phase.json", "half", "run/*/phase.json", verified=False),
    Target("last step, complete run", "made", "run/recalibrate/checkpoints/20/params/**/d/*", STEP_KINDS),
    Target("tokenizer of data", "half", "data/tokenizer/*.model"),
    Target("speed.jsonl", "half", "run/*/speed.jsonl", verified=False),
    Target("TensorBoard", "half", "run/*/tensorboard/*", verified=False),
)


def chosen(seed: int, number: int) -> tuple[Target, str]:
    """The target and the kind of damage of a case: over many cases, each kind of each target in turn."""
    turn, index = divmod(number, len(TARGETS))
    target = TARGETS[index]
    kinds = random.Random(f"{seed}/kinds/{target.name}").sample(target.kinds, len(target.kinds))
    return target, kinds[turn % len(kinds)]


def run_case(world: World, seed: int, number: int) -> Row:
    """Damages one file of a project, asks `pe_lab.verify`, and runs the command that reads the file."""
    case = f"damage-{number}"
    rng, (target, kind) = draw(seed, case), chosen(seed, number)
    command = COMMANDS[target.command]
    source = world.made if target.base == "made" else world.root / "half"
    project = world.project(case, ["run", "data", "recipe.py"], source)
    if target.command == "evaluate":
        copy(world.made / "eval", project / "eval")
    path = _file(project, target, rng)
    _damage(world, project, path, kind, rng)
    where = str(path.relative_to(project))
    found = world.run((*VERIFY, "run", "data"), project) if target.verified else None
    before = _progress(project)
    ended = world.run(command.argv, project)
    happened, verdict = _verdict(world, project, target, path, source, before, ended)
    if found is not None:
        happened = f"verify: {found.last_line}; {happened}"
        if found.wrong or found.status != 1:
            verdict = found.wrong or "not verified"
        elif verdict == "undetected":
            verdict = "detected"
    elif verdict == "undetected":
        told = world.run(("pe_lab.report", "run"), project)
        said = next((line for line in told.output.splitlines() if SAID.search(line)), "")
        happened, verdict = f"{happened}; report: {said[:200]}", told.wrong or ("detected" if said else verdict)
    row = Row(case, f"{kind}: {target.name}", where, happened, verdict)
    if row.green:
        shutil.rmtree(project)
    return row


def _verdict(
    world: World, project: Path, target: Target, path: Path, source: Path, before: set[tuple[Path, int]], ended: Ended
) -> tuple[str, str]:
    """(what happened, the verdict) of a command after a damage."""
    status = f"status {ended.status}"
    said = next((line for line in ended.output.splitlines() if SAID.search(line)), "")
    if ended.wrong:
        return f"{status}: {ended.last_line[:200]}", ended.wrong
    if ended.status:
        if _progress(project) - before:
            return f"{status}: {ended.last_line[:200]}", "trained on"
        if (source / path.relative_to(project)).exists():
            copy(source / path.relative_to(project), path)
        again = world.run(COMMANDS[target.command].argv, project)
        wrong = world.wrong(target.command, project)
        if again.status or wrong:
            return f"{status}, and after the repair {again.status}: {again.last_line[:200]} {wrong[:1]}", "lost"
        return f"{status}: {ended.last_line[:200]}", "refused"
    wrong = world.wrong(target.command, project)
    if any(CHECKPOINT.match(name) for name in wrong):
        return f"{status}, differs: {wrong[0]}; {said[:200]}", "trained on"
    if wrong:  # a record of a log may be lost, if that is said
        named = next((line for line in ended.output.splitlines() if path.name in line and SAID.search(line)), "")
        return f"{status}, differs: {wrong[0]}; {named[:200]}", "detected" if named else "undetected"
    return f"{status}; {said[:200]}".rstrip("; "), "mended" if said else "harmless"


def _progress(project: Path) -> set[tuple[Path, int]]:
    """What a training adds to: the committed steps, and the lines of the logs by their numbers."""
    phases = (project / "run").glob("*/checkpoints")
    logs = {log: log.read_bytes().count(b"\n") for log in (project / "run").glob("*/metrics.jsonl")}
    done = {(phase, step) for phase in phases for step in steps(phase)}
    return done | {(log, number) for log, count in logs.items() for number in range(count)}


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def _file(project: Path, target: Target, rng: random.Random) -> Path:
    """The file, or the directory, that a case damages."""
    last, earlier = steps(project / "run/recalibrate/checkpoints")[:-3:-1]
    pattern = target.pattern.format(last=last, earlier=earlier)
    found = sorted(p for p in project.glob(pattern) if target.kinds == DIRECTORY_KINDS or p.is_file())
    return rng.choice([p for p in found if p.is_dir() or p.stat().st_size] or found)


def _damage(world: World, project: Path, path: Path, kind: str, rng: random.Random) -> None:
    """Damages a file or a directory. Its content is another one afterwards."""
    before = b"" if path.is_dir() else path.read_bytes()
    if kind == "delete":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    if kind.startswith("swap"):
        copy(next(_counterparts(world, project, path, kind, before)), path)
        return
    content = bytearray(before)
    if kind == "truncate":
        del content[rng.randrange(len(content)) :]
    while content == before:
        at = rng.randrange(len(content))
        if kind == "flip":
            content[at] ^= 1 << rng.randrange(8)
        else:
            end = min(len(content), at + rng.randint(1, max(16, len(content) // 4)))
            content[at:end] = bytes(end - at)
    path.write_bytes(content)


def _counterparts(world: World, project: Path, path: Path, kind: str, before: bytes) -> Iterator[Path]:
    """Other files, or directories, of the same role. Names of data files are random: those of like size first."""
    name = path.relative_to(project)
    roots = [world.root / "other"]
    if kind == "swap with another step's":
        roots = [project]
        match = CHECKPOINT.match(str(name))
        others = [step for step in steps(project / match[1]) if step != int(match[2])]
        name = Path(match[1]) / str(others[-1]) / str(name)[match.end() :]
    for root in roots:
        places = [root / name, *sorted((root / name).parent.glob("*"))]
        if (root / name).parent.name == "d":
            places.sort(key=lambda p: abs(p.stat().st_size - len(before)) if p.is_file() else 10**9)
        for place in places:
            if place.is_dir() and path.is_dir() or place.is_file() and place.read_bytes() != before:
                yield place
