"""Evaluation rows as tables, method by length: every value with its interval, the best of a length known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pe_lab.analysis.run_files import Row, Run, as_dict, number
from pe_lab.analysis.variants import order
from pe_lab.results.formatting import percent, short_number, times

Z95 = 1.96  # normal quantile of a two-sided 95% interval


@dataclass(frozen=True)
class Cell:
    """One measurement. `score` is on the scale where errors are normal and higher is better."""

    value: float
    score: float
    stderr: float | None  # of score
    row: Row = field(repr=False)
    shown: str = ""
    low: str = ""
    high: str = ""
    share: bool = False  # of 1, and shown in per cent
    ends: tuple[float, float] | None = None  # of the 95% interval, where it is known better than from stderr

    @property
    def interval(self) -> str:
        """`48–57%`, or nothing where no standard error was given."""
        low = self.low.removesuffix("%") if self.high.endswith("%") else self.low
        return f"{low}–{self.high}" if low else ""

    @property
    def all_found(self) -> float | None:
        """The share of prompts whose every needle was found, where that says more than the main number."""
        found = number(as_dict(self.row.get("scores")), "all_found")
        return found if found is not None and abs(found - self.value) > 1e-6 else None


@dataclass(frozen=True)
class Column:
    """A length: in multiples of the training length where that is known, else in tokens; neither for tasks whose
    texts have lengths of their own."""

    factor: float | None
    length: int | None

    @property
    def title(self) -> str:
        if self.factor is None and self.length is None:
            return "the texts' own lengths"
        return times(self.factor) if self.factor is not None else f"{self.length:,} tokens"

    @property
    def small(self) -> str:
        """What stands below the title: the length in tokens, where the title is a multiple."""
        return f"{self.length:,}" if self.length and self.factor is not None else ""

    @property
    def key(self) -> float:
        return self.factor if self.factor is not None else float(self.length or 0)


@dataclass(frozen=True)
class Bucket(Column):
    """Texts of `start` up to `length` tokens; `multiples` says it in training lengths."""

    start: int = 0
    multiples: str = ""

    @property
    def title(self) -> str:
        thousands = self.start % 1024 == 0 == (self.length or 1) % 1024
        ends = (self.start, self.length or 0)
        return f"{ends[0] // 1024}–{ends[1] // 1024}K" if thousands else f"{ends[0]:,}–{ends[1]:,}"

    @property
    def small(self) -> str:
        return self.multiples


@dataclass(frozen=True)
class Table:
    """One suite on one source. `rows`: label -> a row of that method, in order; `cells`: (label, column
    key)."""

    suite: str
    source: str
    columns: tuple[Column, ...]
    rows: dict[str, Row]
    cells: dict[tuple[str, float], Cell]
    higher_is_better: bool
    skipped: int = 0

    def cell(self, label: str, column: Column) -> Cell | None:
        return self.cells.get((label, column.key))

    def column(self, column: Column) -> dict[str, Cell]:
        """The measurements at one length, by label."""
        return {label: cell for label in self.rows if (cell := self.cell(label, column))}

    def best(self, column: Column) -> tuple[str, set[str]]:
        """The label with the best score at a length, and those that cannot be told from it at 95%."""
        cells = self.column(column)
        if not cells:
            return "", set()
        winner = max(cells, key=lambda label: cells[label].score)
        ties = {
            label
            for label, cell in cells.items()
            if label != winner and cells[winner].stderr is not None and compare(cell, cells[winner]) == "tie"
        }
        return winner, ties


def compare(ours: Cell, theirs: Cell) -> str:
    """`win`, `loss`, or `tie` where the difference is within 95% of the noise of the two."""
    difference = ours.score - theirs.score
    noise = Z95 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0)
    if abs(difference) <= noise or difference == 0:
        return "tie"
    return "win" if difference > 0 else "loss"


def proportion_stderr(accuracy: float, stderr: float | None, queries: float | None) -> float | None:
    """The given standard error; where it is 0 because all (or no) answers were right, Agresti and Coull's."""
    if stderr or not queries or not 0 <= accuracy <= 1:
        return stderr
    adjusted = (accuracy * queries + 2) / (queries + 4)
    return math.sqrt(adjusted * (1 - adjusted) / (queries + 4))


def measure(row: Row) -> Cell | None:
    """The main number of a row: a task's score, an accuracy, a loss as perplexity, or what an unknown suite calls its
    score."""
    if is_prompted(row):
        return measure_task(row)
    accuracy, stderr = number(row, "accuracy"), number(row, "stderr")
    if accuracy is not None:
        error = proportion_stderr(accuracy, stderr, number(row, "queries"))
        return share_cell(accuracy, error, row)
    nll, perplexity = number(row, "nll"), number(row, "perplexity")
    if nll is None and perplexity is not None and perplexity > 0:
        nll = math.log(perplexity)
    if nll is not None:
        low, high = bounds(nll, stderr)
        ends = map_shown(lambda loss: short_number(exp(loss)), low, high, stderr)
        return Cell(exp(nll), -nll, stderr, row, short_number(exp(nll)), *ends)
    for key in ("score", "value", "exact_match", "f1"):
        value = number(row, key)
        if value is not None:
            low, high = bounds(value, stderr)
            return Cell(value, value, stderr, row, short_number(value), *map_shown(short_number, low, high, stderr))
    return None


def is_prompted(row: Row) -> bool:
    """Whether a row is of a task that asks with prompts: it names the metric of its score."""
    return isinstance(row.get("metric"), str) and "score" in row


def measure_task(row: Row) -> Cell | None:
    """The score of a task, with the interval that its row gives, else 1.96 standard errors to both sides."""
    score, stderr = number(row, "score"), number(row, "stderr")
    low, high = number(row, "low"), number(row, "high")
    if score is None:
        return None
    lower_is_better = row.get("higher_is_better") is False
    # Harnesses know metrics of 0 to 100 too, which may be small.
    of_hundred = row.get("suite") == "lm_eval" and row["metric"].startswith(("bleu", "chrf", "rouge", "ter"))
    share = not lower_is_better and not of_hundred and 0 <= score <= 1
    if stderr is None and low is not None and high is not None:
        stderr = (high - low) / (2 * Z95)
    if share and stderr is not None:
        stderr = proportion_stderr(score, stderr, number(row, "samples"))
    known = low is not None and high is not None
    ends = (low, high) if known else bounds(score, stderr)
    if share:
        return share_cell(score, stderr, row, ends)
    shown = map_shown(short_number, *ends, stderr)
    if lower_is_better and "perplexity" in row["metric"] and score > 0:  # as a loss, whose errors are normal
        return Cell(score, -math.log(score), stderr and stderr / score, row, short_number(score), *shown)
    return Cell(score, -score if lower_is_better else score, stderr, row, short_number(score), *shown)


def share_cell(value: float, stderr: float | None, row: Row, ends: tuple[float, float] | None = None) -> Cell:
    """A cell of a share of 1; its 95% interval is `ends`, or 1.96 standard errors to both sides."""
    low, high = ends or bounds(value, stderr)
    low, high = max(low, 0.0), min(high, 1.0)
    shown = map_shown(percent, low, high, stderr)
    return Cell(value, value, stderr, row, percent(value), *shown, True, None if stderr is None else (low, high))


def exp(value: float) -> float:
    """e^value, infinite instead of an error."""
    return math.exp(value) if value < 700 else math.inf


def bounds(value: float, stderr: float | None) -> tuple[float, float]:
    """The 95% interval."""
    return value - Z95 * (stderr or 0.0), value + Z95 * (stderr or 0.0)


def map_shown(show, low: float, high: float, stderr: float | None) -> tuple[str, str]:
    """Both ends of an interval as text, empty without a standard error."""
    return (show(low), show(high)) if stderr is not None else ("", "")


def label_of(row: Row) -> str:
    """What a row's method is called in the report."""
    label = row.get("label") or " + ".join(str(row[key]) for key in ("model", "method") if row.get(key))
    return str(label or "unnamed")


def tables(run: Run, suite: str) -> list[Table]:
    """The tables of a suite in one run, one a source: the source with most text first, synthetic needles
    last."""
    return build_tables(suite, [(run, row) for row in run.evaluation.get(suite, [])], name_runs=False)


def build_tables(suite: str, rows: list[tuple[Run, Row]], name_runs: bool) -> list[Table]:
    """Tables from rows of one or several runs. Where a measurement was repeated, the latest checkpoint's
    counts."""
    sources: dict[str, list[tuple[str, Column, Row]]] = {}
    skipped: dict[str, int] = {}
    phases: dict[tuple[str, str], set[str]] = {}
    for run, row in rows:
        phases.setdefault((run.name, label_of(row)), set()).add(str(row.get("phase", "")))
    for run, row in rows:
        source = str(row.get("source") or row.get("task") or "")
        label = label_of(row)
        if len(phases[run.name, label]) > 1:  # one name, two sets of weights
            label += f" ({row.get('phase')})"
        if name_runs:
            label = f"{run.name}: {label}"
        column = column_of(run, row)
        if column is None or measure(row) is None:
            skipped[source] = skipped.get(source, 0) + 1
        else:
            sources.setdefault(source, []).append((label, column, row))
    built = [build_table(suite, source, found, skipped.get(source, 0)) for source, found in sources.items()]
    return sorted(built, key=lambda table: (table.source.startswith("needles"), -text_read(table)))


def text_read(table: Table) -> float:
    """Tokens behind a table, to tell the main source from the others; tasks keep the order of their rows."""
    if any(is_prompted(cell.row) for cell in table.cells.values()):
        return 0.0
    return max((number(cell.row, "tokens") or 0.0 for cell in table.cells.values()), default=0.0)


def column_of(run: Run, row: Row) -> Column | None:
    """The length a row was measured at."""
    factor, length = number(row, "factor"), number(row, "length")
    if factor is None and length is not None and run.training_length:
        factor = length / run.training_length
    if factor is None and length is None:
        return Column(None, None) if is_prompted(row) else None
    return Column(factor, int(length) if length is not None else None)


def build_table(suite: str, source: str, found: list[tuple[str, Column, Row]], skipped: int) -> Table:
    """One table. A method measured at several checkpoints counts at its latest; of repeated rows the last
    counts."""
    columns: dict[float, Column] = {}
    latest: dict[tuple[str, float], Row] = {}
    step_of: dict[str, float] = {}
    for label, _, row in found:
        step_of[label] = max(step_of.get(label, -1.0), number(row, "step") or 0.0)
    for label, column, row in found:
        columns.setdefault(column.key, column)
        if columns[column.key].length != column.length:  # training lengths differ: only the factor is common
            columns[column.key] = Column(column.factor, None)
        if (number(row, "step") or 0.0) == step_of[label]:
            latest[label, column.key] = row
    representatives: dict[str, Row] = {}
    for (label, _), row in latest.items():
        representatives.setdefault(label, row)
    ordered = dict(sorted(representatives.items(), key=lambda item: order(*item)))
    cells = {key: cell for key, row in latest.items() if (cell := measure(row))}
    higher = not any(
        "nll" in row or "perplexity" in row or row.get("higher_is_better") is False for row in latest.values()
    )
    return Table(suite, source, tuple(sorted(columns.values(), key=lambda c: c.key)), ordered, cells, higher, skipped)
