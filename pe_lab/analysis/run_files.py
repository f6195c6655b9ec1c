"""Reading run directories: what a run, its phases and its evaluation wrote, forgiving of what is not there
yet.

Nothing here raises for a file that is missing or half written: a run may still be going. What could not be
read is a sentence in `Run.problems`, for the reader of the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pe_lab.errors import UserError

Row = dict[str, Any]


def number(row: Row, key: str) -> float | None:
    """`row[key]` as a finite float, or None (absent, null, text, NaN, infinite)."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Phase:
    """One stretch of training: `phase.json` and the rows it logged."""

    name: str
    directory: Path
    info: Row
    metrics: list[Row] = field(default_factory=list)
    speed: list[Row] = field(default_factory=list)

    @property
    def length(self) -> int | None:
        """Window length in tokens."""
        value = number(self.info, "sequence_length")
        return int(value) if value else None

    @property
    def running(self) -> bool:
        """Whether the phase has not said that it is complete."""
        return self.info.get("status") != "complete"

    @property
    def steps_done(self) -> int:
        """The last step that was logged."""
        return max((int(step) for row in self.metrics if (step := number(row, "step")) is not None), default=0)

    @property
    def tokens(self) -> float:
        """Training tokens read so far."""
        logged = max((t for row in self.metrics if (t := number(row, "tokens")) is not None), default=0.0)
        return logged or self.steps_done * (number(self.info, "tokens_per_step") or 0.0)

    @property
    def encodings(self) -> list[Row]:
        """The positional encoding of each range of layers."""
        return [row for row in as_list(self.info.get("positional")) if isinstance(row, dict)]

    @property
    def mixture(self) -> list[tuple[str, float]]:
        """(source, share of the windows), shares adding to 1."""
        rows = [row for row in as_list(self.info.get("mixture")) if isinstance(row, dict)]
        weights = [(str(row.get("source", "?")), number(row, "weight") or 0.0) for row in rows]
        total = sum(weight for _, weight in weights)
        return [(source, weight / total) for source, weight in weights] if total > 0 else []

    def series(self, key: str) -> list[tuple[float, float]]:
        """(tokens, value) for each logged row that has `key`."""
        each = number(self.info, "tokens_per_step") or 1.0
        points = []
        for row in self.metrics:
            value, tokens, step = number(row, key), number(row, "tokens"), number(row, "step")
            if value is not None and (tokens is not None or step is not None):
                points.append((tokens if tokens is not None else step * each, value))
        return points


@dataclass(frozen=True)
class Run:
    """One run directory, read."""

    name: str
    directory: Path
    info: Row
    phases: list[Phase]
    evaluation: dict[str, list[Row]]
    problems: list[str]

    @property
    def config(self) -> Row:
        """The resolved config, or {}."""
        return as_dict(self.info.get("config"))

    @property
    def training_length(self) -> int | None:
        """Window length of the first phase, in tokens."""
        return next((phase.length for phase in self.phases if phase.length), None)

    def phase(self, name: object) -> Phase | None:
        """The phase called `name`."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def tokens_until(self, name: object) -> float | None:
        """Training tokens read up to the end of phase `name`, earlier phases of this run included."""
        total = 0.0
        for phase in self.phases:
            total += phase.tokens
            if phase.name == name:
                return total
        return None


def as_list(value: object) -> list:
    """`value` if it is a list, else []."""
    return value if isinstance(value, list) else []


def as_dict(value: object) -> dict:
    """`value` if it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}


def read_run(directory: Path) -> Run:
    """Reads `directory`. Raises `UserError` if it does not exist or holds nothing that a run writes."""
    if not directory.exists():
        raise UserError(f"{directory} does not exist. Give the directory of a run (what --workdir was in training).")
    if not directory.is_dir():
        raise UserError(f"{directory} is a file, not a run directory. Give the directory that holds run.json.")
    problems: list[str] = []
    phase_files = sorted(directory.glob("*/phase.json"))
    if (directory / "phase.json").exists():  # a child made by surgery is its own phase
        phase_files.insert(0, directory / "phase.json")
    evaluation_files = sorted((directory / "evaluation").glob("*.jsonl"))
    if not (directory / "run.json").exists() and not phase_files and not evaluation_files:
        raise UserError(
            f"{directory} is not a run directory: it has no run.json, no PHASE/phase.json and no "
            f"evaluation/*.jsonl. "
            "Give a directory that pe_lab.train, pe_lab.surgery or pe_lab.evaluate wrote."
        )
    info = read_json(directory / "run.json", directory, problems)
    phases = [read_phase(path, directory, problems) for path in phase_files]
    phases.sort(key=lambda phase: (number(phase.info, "index") or 0.0, phase.name))
    evaluation = {}
    for path in evaluation_files:
        rows = read_rows(path, directory, problems)
        for row in rows:
            evaluation.setdefault(str(row.get("suite") or path.stem), []).append(row)
    name = str(info.get("name") or directory.resolve().name)
    return Run(name, directory, info, phases, evaluation, problems)


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Reads every directory, once each; runs of one name are told apart by their directory."""
    distinct = list(dict.fromkeys(path.resolve() for path in directories))
    given = {path.resolve(): path for path in reversed(directories)}
    runs = [read_run(given[path]) for path in distinct]
    names = [run.name for run in runs]
    return [replace(run, name=run.directory.resolve().name) if names.count(run.name) > 1 else run for run in runs]


def read_phase(path: Path, root: Path, problems: list[str]) -> Phase:
    """The phase whose `phase.json` is `path`."""
    directory = path.parent
    info = read_json(path, root, problems)
    trained = number(info, "steps") or (directory / "metrics.jsonl").exists()  # surgery makes phases of no steps
    metrics = read_rows(directory / "metrics.jsonl", root, problems) if trained else []
    speed = read_rows(directory / "speed.jsonl", root, []) if (directory / "speed.jsonl").exists() else []
    return Phase(str(info.get("phase") or directory.resolve().name), directory, info, metrics, speed)


def read_json(path: Path, root: Path, problems: list[str]) -> Row:
    """The mapping in `path`; {} and a problem if it cannot be read."""
    name = path.relative_to(root)
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        problems.append(f"{name} is missing.")
        return {}
    except (OSError, ValueError):
        problems.append(f"{name} could not be read: it is not complete JSON (is it being written?).")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{name} could not be used: it is not a mapping.")
    return as_dict(value)


def read_rows(path: Path, root: Path, problems: list[str]) -> list[Row]:
    """The rows of a JSON-lines file; a line that cannot be read is left out and reported."""
    name = path.relative_to(root)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        problems.append(f"{name} is missing.")
        return []
    rows, broken = [], []
    for index, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken.append(index)
    if broken == [len(lines)]:
        problems.append(f"The last line of {name} was cut off (still being written?) and is left out.")
    elif broken:
        problems.append(f"{name}: {len(broken)} line(s) could not be read and are left out (first: line {broken[0]}).")
    return rows
