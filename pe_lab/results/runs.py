"""Reads run directories: the files that training and evaluation wrote about a run and its phases.

A run may still be going. A missing or damaged file raises no error: it becomes a sentence in `RunFiles.problems`, which
the report shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from pe_lab.errors import DataError
from pe_lab.results.formatting import shortened
from pe_lab.results.records import UNFINISHED, Record, as_dict, mappings, number
from pe_lab.results.variants import EXTERNAL
from pe_lab.storage import AnyPath, absolute, children, is_file, json_object, json_objects, log_exists, read_log
from pe_lab.storage.manifest import MANIFEST

LARGEST = 2**53  # steps or tokens of a run; floats are exact up to here

if TYPE_CHECKING:
    from pe_lab.results.findings import Written


@dataclass(frozen=True)
class PhaseFiles:
    """One phase of training: `phase.json`, the records that it logged, and the steps of its checkpoints."""

    name: str
    info: Record
    metrics: list[Record] = field(default_factory=list)
    speed: list[Record] = field(default_factory=list)
    saved: tuple[int, ...] = ()  # steps of the checkpoints that are here, of a phase that is not complete

    @property
    def length(self) -> int | None:
        """Sequence length of training, in tokens."""
        value = number(self.info, "sequence_length")
        return int(value) if value else None

    @property
    def running(self) -> bool:
        """Whether `phase.json` does not name the phase complete."""
        return self.info.get("status") != "complete"

    @functools.cached_property
    def steps_done(self) -> int:
        """The last step that was logged."""
        return max((int(step) for record in self.metrics if (step := number(record, "step")) is not None), default=0)

    @functools.cached_property
    def tokens(self) -> float:
        """Training tokens read so far."""
        logged = max((t for record in self.metrics if (t := number(record, "tokens")) is not None), default=0.0)
        return logged or self.steps_done * (number(self.info, "tokens_per_step") or 0.0)

    @property
    def encodings(self) -> list[Record]:
        """The positional encoding of each range of layers."""
        return mappings(self.info.get("positional"))

    @property
    def lineage(self) -> list[Record]:
        """The checkpoints that the phase descends from, oldest first."""
        return mappings(self.info.get("lineage"))

    @property
    def mixture(self) -> list[tuple[str, float]]:
        """(source, share of the sequences); the shares add up to 1."""
        records = mappings(self.info.get("mixture"))
        weights = [(str(record.get("source", "?")), number(record, "weight") or 0.0) for record in records]
        total = sum(weight for _, weight in weights)
        return [(source, weight / total) for source, weight in weights] if total > 0 else []

    @property
    def events(self) -> list[Record]:
        """The steps that were warned of, skipped or rewound, in the order in which they happened."""
        return [record for record in self.metrics if record.get("event", "epoch") != "epoch"]

    def tokens_at(self, step: float) -> float | None:
        """Tokens read up to a step: as logged at it or last before it, else by the tokens of a step; None: unknown.

        The tokens of a step may change within a phase, so that logged ones count first.
        """
        each, (steps, tokens) = number(self.info, "tokens_per_step"), self._tokens_by_step
        before = int(np.searchsorted(steps, step, side="right")) - 1
        if before < 0:
            return None if each is None else step * each
        return float(tokens[before] + (step - steps[before]) * (each or 0.0))

    @functools.cached_property
    def _tokens_by_step(self) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """The steps of the records that have tokens too, in order, and those tokens; of one step the last is last."""
        logged = [(number(record, "step"), number(record, "tokens")) for record in self.metrics]
        found = np.array([pair for pair in logged if None not in pair], np.float64).reshape(-1, 2)
        steps, tokens = found[np.argsort(found[:, 0], kind="stable")].T
        return steps, tokens

    def series(self, key: str) -> list[tuple[float, float]]:
        """(tokens, value) of each logged record that has `key`."""
        each = number(self.info, "tokens_per_step") or 1.0
        points = []
        for record in self.metrics:
            value, tokens, step = number(record, key), number(record, "tokens"), number(record, "step")
            if value is not None and (tokens is not None or step is not None):
                points.append((tokens if tokens is not None else step * each, value))
        return points


@dataclass(frozen=True)
class RunFiles:
    """One run directory.

    `source` names the external checkpoint that it was imported from, or is empty. `analyses` are those of
    `analysis/NAME`, by NAME. `members` are the runs of a group, which is read as one run (`results.groups`). `plans`
    has the measurements of each evaluation that has begun and not ended.
    """

    name: str
    directory: AnyPath
    info: Record
    phases: list[PhaseFiles]
    evaluation: dict[str, list[Record]]
    problems: list[str]
    source: str = ""
    analyses: Mapping[str, Written] = field(default_factory=dict)
    ledger: list[Record] = field(default_factory=list)  # ledger.jsonl
    members: tuple[RunFiles, ...] = ()
    plans: list[list[Record]] = field(default_factory=list)  # evaluation/unfinished/*.json

    @property
    def config(self) -> Record:
        """The resolved config, or {}."""
        return as_dict(self.info.get("config"))

    @property
    def training_length(self) -> int | None:
        """Sequence length of the first phase, in tokens."""
        return next((phase.length for phase in self.phases if phase.length), None)

    def phase(self, name: object) -> PhaseFiles | None:
        """The phase of this name."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def tokens_until(self, name: object) -> float | None:
        """Training tokens up to the end of phase `name`, those of earlier phases of this run included."""
        total = 0.0
        for phase in self.phases:
            total += phase.tokens
            if phase.name == name:
                return total
        return None


class NoRun(DataError):
    """A path exists and is not the directory of a run."""


def read_run(directory: AnyPath) -> RunFiles:
    """The run of a directory.

    Raises:
      DataError: the directory does not exist.
      NoRun: it holds no file of a run.
    """
    if not directory.exists():
        raise DataError(f"{directory} does not exist. Give the directory of a run (--workdir of its training).")
    if not directory.is_dir():
        raise NoRun(f"{directory} is a file, not a run directory. Give the directory that holds run.json.")
    problems: list[str] = []
    own_phase, run_file = directory / "phase.json", directory / "run.json"
    inside = _directories(directory)
    phase_files = sorted(p / "phase.json" for p in inside if (p / "phase.json").is_file())
    evaluated = list((directory / "evaluation").iterdir()) if directory / "evaluation" in inside else []
    evaluation_files = sorted(p for p in evaluated if p.suffix == ".jsonl")
    plan_files = sorted(p for folder in evaluated if folder.name == UNFINISHED for p in folder.iterdir())
    analyses = _directories(directory / "analysis") if directory / "analysis" in inside else []
    analysis_files = sorted(p / "analysis.json" for p in analyses if (p / "analysis.json").is_file())
    if not any((run_file.exists(), own_phase.exists(), phase_files, evaluation_files, analysis_files)):
        raise NoRun(
            f"{directory} is not a run directory: it has no run.json, no PHASE/phase.json, no evaluation/*.jsonl and "
            "no analysis/*/analysis.json. Give a directory that pe_lab.train, pe_lab.surgery, pe_lab.evaluate or "
            "pe_lab.analyze wrote."
        )
    # Surgery and conversion write one phase and no run.json; an external checkpoint has neither, but a source.json.
    info = _read_json(run_file, directory, problems) if run_file.exists() or phase_files else {}
    if own_phase.exists():
        phase_files.insert(0, own_phase)
    phases = [_read_phase(path, directory, problems) for path in phase_files]
    phases.sort(key=lambda phase: (number(phase.info, "index") or 0.0, phase.name))
    evaluation: dict[str, list[Record]] = {}
    for path in evaluation_files:
        for record in _read_records(path, directory, problems):
            evaluation.setdefault(str(record.get("suite") or path.stem), []).append(record)
    source = ""
    if (directory / "source.json").exists():
        source = str(_read_json(directory / "source.json", directory, problems).get("source") or "")
    name = str(info.get("name") or absolute(directory).name)
    analyses = _read_analyses(analysis_files, problems)
    ledger = _read_records(directory / "ledger.jsonl", directory, [])  # of runs without it, nothing is missing
    source = source or _imported_from(phases)
    plans = [mappings(_read_json(p, directory, problems).get("planned")) for p in plan_files if p.suffix == ".json"]
    return RunFiles(name, directory, info, phases, evaluation, problems, source, analyses, ledger, plans=plans)


def _directories(directory: AnyPath) -> list[AnyPath]:
    """The directories in a directory. On a store `glob` would list all that is below them."""
    return [path for path in directory.iterdir() if path.is_dir()]


def read_runs(directories: Sequence[AnyPath], show: Callable[[str], None] | None = None) -> list[RunFiles]:
    """The runs of all directories, each once; runs of equal names get the names of their directories.

    With `show`, paths that hold no run are left out, which `show` tells in a line each, if others hold one.

    Raises:
      DataError: a directory does not exist.
      NoRun: one holds no file of a run, or none does.
    """
    given: dict[AnyPath, AnyPath] = {}
    for path in directories:
        given.setdefault(absolute(path), path)
    runs, left_out = [], list[NoRun]()
    for path in given.values():
        try:
            runs.append(read_run(path))
        except NoRun as error:
            left_out.append(error)
    if left_out and not (runs and show):
        raise left_out[0]
    for error in left_out:
        show(f"Left out: {str(error).partition('. ')[0]}.")
    names = [run.name for run in runs]
    return [replace(run, name=absolute(run.directory).name) if names.count(run.name) > 1 else run for run in runs]


def _imported_from(phases: Sequence[PhaseFiles]) -> str:
    """The external checkpoint that the lineages of the phases begin with; "" if there is none."""
    entries = [str(entry.get("what", "")) for phase in phases for entry in phase.lineage]
    return next((what.removeprefix(p) for what in entries for p in EXTERNAL if what.startswith(p)), "")


def _read_phase(path: AnyPath, root: AnyPath, problems: list[str]) -> PhaseFiles:
    """The phase whose `phase.json` is `path`."""
    directory = path.parent
    info = _read_json(path, root, problems)
    trained = number(info, "steps") or log_exists(directory / "metrics.jsonl")  # surgery makes phases without steps
    metrics = _read_records(directory / "metrics.jsonl", root, problems) if trained else []
    speed = _read_records(directory / "speed.jsonl", root, [])  # of runs without it, nothing is missing
    if odd := [no_count for record in metrics if (no_count := _no_count(record))]:
        where = (directory / "metrics.jsonl").relative_to(root)
        problems.append(
            f"{where}: {len(odd)} record(s) whose step or tokens are no count are left out (first: {odd[0]})."
        )
        metrics = [record for record in metrics if not _no_count(record)]
    # Behind the log of a phase that is being trained, or was killed. Of a complete one they are not asked for: a store
    # answers for each.
    saved = () if info.get("status") == "complete" else _saved_steps(directory / "checkpoints")
    return PhaseFiles(str(info.get("phase") or absolute(directory).name), info, metrics, speed, saved)


def _saved_steps(directory: AnyPath) -> tuple[int, ...]:
    """The steps of the checkpoints in a directory, ascending. Not by `pe_lab.checkpoints`, which imports JAX."""
    steps = [path for path in children(directory) if path.name.isascii() and path.name.isdecimal()]
    return tuple(sorted(int(path.name) for path in steps if is_file(path / MANIFEST)))


def _no_count(record: Record) -> str:
    """The step or the tokens of a record that are known and can be no count, in words; "" of any other record."""
    for name in ("step", "tokens"):
        value = record.get(name)
        known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
        if value is not None and not known:
            return f"{name} {shortened(str(value), 30)}"
    return ""


def _read_analyses(paths: Sequence[AnyPath], problems: list[str]) -> dict[str, Written]:
    """The analyses whose `analysis.json` these are, by the names of their directories; damaged ones become problems."""
    if not paths:
        return {}
    from pe_lab.results.findings import read_findings  # scipy takes a second to import

    analyses = {}
    for path in paths:
        try:
            analysis = read_findings(path.parent)
        except DataError as error:
            problems.append(str(error))
            continue
        if defect := _analysis_defect(analysis):
            problems.append(f"{path.parent} holds no whole analysis: {defect} Run the analysis again.")
        else:
            analyses[path.parent.name] = analysis
    return analyses


def _analysis_defect(analysis: Written) -> str:
    """Why an analysis that could be read cannot be shown; "" if it can."""
    found = analysis.findings
    for table in found.tables:
        if any(len(row) != len(table.header) for row in table.rows):
            return f"the table '{table.title}' has a row of another length than its header."
    for figure in found.figures:
        if figure.kind == "heat_maps":
            if not figure.values.size:
                return f"the figure '{figure.name}' has no values."
            continue
        for line in (line for _, lines in figure.panels for line in lines):
            parts = [line.x, line.y, *(part for part in (line.low, line.high) if part is not None)]
            if any(part is None or part.shape != line.x.shape for part in parts):
                return f"the figure '{figure.name}' lacks values of '{line.label}'."
    return ""


def _read_bytes(path: AnyPath, root: AnyPath, problems: list[str]) -> bytes | None:
    """The content of a file; None and a problem if it cannot be read."""
    try:
        return read_log(path)
    except FileNotFoundError:
        problems.append(f"{path.relative_to(root)} is missing.")
    except OSError as error:
        problems.append(f"{path.relative_to(root)} could not be read ({error.strerror}).")
    return None


def _read_json(path: AnyPath, root: AnyPath, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file; {} and a problem if there is none."""
    content = _read_bytes(path, root, problems)
    value = None if content is None else json_object(content)
    if content is not None and value is None:
        problems.append(f"{path.relative_to(root)} could not be read: it holds no whole JSON object.")
    return value or {}


def _read_records(path: AnyPath, root: AnyPath, problems: list[str]) -> list[Record]:
    """The records of a file of JSON lines; lines that cannot be read are left out and become a problem."""
    name = path.relative_to(root)
    lines = (_read_bytes(path, root, problems) or b"").rstrip(b"\n").split(b"\n")
    numbers, last = [number for number, line in enumerate(lines, 1) if line.strip()], len(lines)
    found = list(json_objects([line for line in lines if line.strip()]))
    del lines  # which take as much memory as the records
    broken = [number for number, record in zip(numbers, found, strict=True) if record is None]
    if broken == [last]:
        problems.append(f"The last line of {name} was cut off (still being written?) and is left out.")
    elif broken:
        problems.append(f"{name}: {len(broken)} line(s) could not be read and are left out (first: line {broken[0]}).")
    return [record for record in found if record is not None]
