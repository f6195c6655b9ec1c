"""The results of a sweep as files: table.csv, cells.csv, table.md, figure.png, figure.svg and report.html."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pe_lab import terminal
from pe_lab.lab.sweeps.cells import Sweep
from pe_lab.lab.sweeps.figure import draw
from pe_lab.lab.sweeps.table import TRAINING, VALIDATION, SweepTable, collect, setting_of, summarize
from pe_lab.page.document import build_page
from pe_lab.results.table import TextTable, csv_text, with_half
from pe_lab.storage import AnyPath, write_files

NAMES = {VALIDATION: "validation loss", TRAINING: "training loss"}
SHOWN = 4  # metrics in a terminal; table.md has all


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
    texts = _texts(table, metrics)
    left = len(table.metrics) - len(metrics)
    more = f"\n{left} more metrics are in table.md" if left else ""
    caption = "\n".join([_caption(table), *_remarks(table)])
    return f"{terminal.table(texts.header, texts.rows, texts.words)}{more}\n{caption}"


def _remarks(table: SweepTable) -> list[str]:
    """What the numbers of some cells lack, the first few."""
    found = [remark for record in table.records for remark in record.remarks]
    return found[:SHOWN] + ([f"{len(found) - SHOWN} more cells have such remarks."] if len(found) > SHOWN else [])


def _first(table: SweepTable) -> list[str]:
    """The metrics, the one that sorts first."""
    return [table.metric, *(name for name in table.metrics if name != table.metric)] if table.metrics else []


def _texts(table: SweepTable, metrics: Sequence[str]) -> TextTable:
    """A row for each setting; of the first metric with the difference to the baseline, and the corrected p-value."""
    header, rows = [*table.keys.values(), "seeds"], []
    for n, name in enumerate(metrics):
        header += [NAMES.get(name, name), *(["difference", "p"] if n == 0 else [])]
    differences = table.differences(metrics[0]) if metrics else {}
    for label, setting in table.numbers.rows.items():
        row, of = [*setting.values.values(), setting.seeds], len(setting.records)
        for n, name in enumerate(metrics):
            found = table.cell(label, name)
            few = f" ({len(found.scores)} of {of})" if found and len(found.scores) < of else ""
            row.append(
                "–" if found is None else with_half(found.value, found.ends and found.ends[1], ".4g", ".4g") + few
            )
            if n == 0 and (one := differences.get(label)):
                p = "" if math.isnan(one.corrected) else f"{one.corrected:.2g}"
                row += [with_half(one.mean, one.high, "+.3g", ".2g"), p]
            elif n == 0:
                row += ["", ""]
        rows.append(tuple(row))
    return TextTable("", tuple(header), tuple(rows), len(table.keys))


def _caption(table: SweepTable) -> str:
    name = NAMES.get(table.metric, table.metric)
    order = "highest" if table.metric in table.higher else "lowest"
    which = "the best setting" if table.best_is_baseline else "the baseline"
    fewer = any(
        len(cell.scores) < len(table.numbers.rows[label].records) for (label, _), cell in table.numbers.cells.items()
    )
    few = " (2 of 3): of so many seeds, where not all have been measured." if fewer else ""
    chosen = " It was chosen by these numbers, which favours it." if table.best_is_baseline else ""
    return (
        f"{order.capitalize()} {name} first. ±: 95% intervals over the seeds (Student's t), of two seeds their range. "
        f"Differences of {name}: to {which} ({table.baseline}), on the same seeds, p by Student's t test for pairs, "
        f"corrected for the number of settings by Holm's method.{chosen}{few}"
    )


def _markdown(sweep: Sweep, table: SweepTable) -> str:
    title = f"Sweep of {sweep.description.get('recipe', '')}"
    body = _texts(table, _first(table)).markdown
    return "\n\n".join([f"# {title}", body, _caption(table), *_remarks(table)]) + "\n"


def _settings_csv(table: SweepTable) -> str:
    """A line for each setting; numbers that are not known are empty."""
    parts = ("mean", "low", "high", "difference", "difference_low", "difference_high", "p")
    header = ["setting", *table.keys, "seeds", "missing", *(f"{m} {part}" for m in table.metrics for part in parts)]
    rows = []
    differences = {metric: table.differences(metric) for metric in table.metrics}
    for label, setting in table.numbers.rows.items():
        row = [label, *setting.values.values(), len(setting.records), setting.missing]
        for metric in table.metrics:
            cell, one = table.cell(label, metric), differences[metric].get(label)
            mean = (cell.value, *(cell.ends or ("", ""))) if cell else ("", "", "")
            numbers = (one.mean, one.low, one.high, one.corrected) if one else ("", "", "", "")
            row += ["" if number != number else number for number in (*mean, *numbers)]
        rows.append(row)
    return csv_text([header, *rows])


def _cells_csv(table: SweepTable) -> str:
    """A line for each complete cell."""
    rows = [["cell", *table.keys, "seed", *table.metrics]]
    for record in table.records:
        cell = record.cell
        seed = "" if cell.seed is None else cell.seed
        setting = setting_of(cell, table.keys).values()
        rows.append([cell.name, *setting, seed, *(record.metrics.get(name, "") for name in table.metrics)])
    return csv_text(rows)
