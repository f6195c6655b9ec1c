"""The results of a sweep as files: table.csv, cells.csv, table.md, figure.png, figure.svg and report.html."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from pe_lab import terminal
from pe_lab.lab.sweeps.cells import Sweep
from pe_lab.lab.sweeps.figure import draw
from pe_lab.lab.sweeps.grid import label
from pe_lab.lab.sweeps.table import (
    TRAINING,
    VALIDATION,
    Summary,
    SweepTable,
    collect,
    seeds_text,
    setting_of,
    summarize,
)
from pe_lab.page.document import build_page
from pe_lab.results.statistics import Mean
from pe_lab.results.statistics import Difference
from pe_lab.storage import AnyPath, write_files

NAMES = {VALIDATION: "validation loss", TRAINING: "training loss"}
SHOWN = 4  # metrics in a terminal; table.md has all
UNKNOWN = (math.nan,) * 3


def write_results(sweep: Sweep, metric: str | None = None, baseline: str | None = None) -> SweepTable:
    """Writes the files of the results of a sweep, and returns its table; the files need a complete cell.

    Raises:
      ConfigError: no complete cell has this metric, or no setting is this baseline.
      DataError: a file cannot be written.
    """
    table = summarize(sweep, collect(sweep), metric, baseline)
    if not table.records:
        return table
    files: dict[AnyPath, bytes | str] = {
        sweep.directory / "table.csv": _settings_csv(table),
        sweep.directory / "cells.csv": _cells_csv(table),
        sweep.directory / "table.md": _markdown(sweep, table),
        sweep.directory / "report.html": build_page([record.run for record in table.records]),
    }
    for form in ("png", "svg"):
        files[sweep.directory / f"figure.{form}"] = draw(table, form)
    write_files(files)
    return table


def shown(table: SweepTable) -> str:
    """The table for a terminal."""
    metrics = _first(table)[:SHOWN]
    header, rows = _rows(table, metrics)
    left = len(table.metrics) - len(metrics)
    more = f"\n{left} more metrics are in table.md" if left else ""
    caption = "\n".join([_caption(table), *_remarks(table)])
    return f"{terminal.table(header, rows, words=len(table.keys))}{more}\n{caption}"


def _remarks(table: SweepTable) -> list[str]:
    """What the numbers of some cells lack, the first few."""
    found = [remark for record in table.records for remark in record.remarks]
    return found[:SHOWN] + ([f"{len(found) - SHOWN} more cells have such remarks."] if len(found) > SHOWN else [])


def _first(table: SweepTable) -> list[str]:
    """The metrics, the one that sorts first."""
    return [table.metric, *(name for name in table.metrics if name != table.metric)] if table.metrics else []


def _rows(table: SweepTable, metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    header, rows = [*table.keys.values(), "seeds"], []
    for n, name in enumerate(metrics):
        header += [NAMES.get(name, name), *(["difference", "p"] if n == 0 else [])]
    for summary in table.summaries:
        row = [*summary.setting.values(), seeds_text(summary)]
        for n, name in enumerate(metrics):
            found = summary.means.get(name)
            few = f" ({found.count} of {len(summary.records)})" if found and found.count < len(summary.records) else ""
            row.append("–" if found is None else _with_interval(found, ".4g", ".4g") + few)
            row += _difference(summary, name) if n == 0 else []
        rows.append(row)
    return header, rows


def _difference(summary: Summary, metric: str) -> list[str]:
    """The difference with its interval, and the corrected p-value."""
    if metric not in summary.differences:
        return ["", ""]
    difference, p = summary.differences[metric]
    return [_with_interval(difference, "+.3g", ".2g"), "" if math.isnan(p) else f"{p:.2g}"]


def _with_interval(found: Mean | Difference, form: str, form_of_interval: str) -> str:
    """`3.1 ± 0.2`; without the interval where one value has none."""
    half = "" if math.isnan(found.high) else f" ± {found.high - found.mean:{form_of_interval}}"
    return f"{found.mean:{form}}{half}"


def _caption(table: SweepTable) -> str:
    name = NAMES.get(table.metric, table.metric)
    order = "highest" if table.metric in table.higher else "lowest"
    which = "the best setting" if table.best_is_baseline else "the baseline"
    fewer = any(found.count < len(one.records) for one in table.summaries for found in one.means.values())
    few = " (2 of 3): of so many seeds, where not all have been measured." if fewer else ""
    chosen = " It was chosen by these numbers, which favours it." if table.best_is_baseline else ""
    return (
        f"{order.capitalize()} {name} first. ±: 95% intervals over the seeds (Student's t), of two seeds their range. "
        f"Differences of {name}: to {which} ({table.baseline}), on the same seeds, p by Student's t test for pairs, "
        f"corrected for the number of settings by Holm's method.{chosen}{few}"
    )


def _markdown(sweep: Sweep, table: SweepTable) -> str:
    header, rows = _rows(table, _first(table))
    lines = [header, ["---"] * len(header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    body = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    recipe = sweep.description.get("recipe", "")
    return "\n\n".join([f"# Sweep of {recipe}", body, _caption(table), *_remarks(table)]) + "\n"


def _settings_csv(table: SweepTable) -> str:
    """A line for each setting; numbers that are not known are empty."""
    parts = ("mean", "low", "high", "difference", "difference_low", "difference_high", "p")
    header = ["setting", *table.keys, "seeds", "missing", *(f"{m} {part}" for m in table.metrics for part in parts)]
    rows = []
    for summary in table.summaries:
        row = [label(summary.setting), *summary.setting.values(), len(summary.records), summary.missing]
        for metric in table.metrics:
            found, (difference, p) = summary.means.get(metric), summary.differences.get(metric, (None, math.nan))
            numbers = [*(found or UNKNOWN)[:3], *(difference or UNKNOWN)[:3], p]
            row += ["" if math.isnan(number) else number for number in numbers]
        rows.append(row)
    return _csv([header, *rows])


def _cells_csv(table: SweepTable) -> str:
    """A line for each complete cell."""
    rows = [["cell", *table.keys, "seed", *table.metrics]]
    for record in table.records:
        cell = record.cell
        seed = "" if cell.seed is None else cell.seed
        setting = setting_of(cell, table.keys).values()
        rows.append([cell.name, *setting, seed, *(record.metrics.get(name, "") for name in table.metrics)])
    return _csv(rows)


def _csv(rows: Sequence[Sequence[object]]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue()
