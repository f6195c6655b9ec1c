"""The results of a sweep of DoPE: one sorted table a variant, with the model without DoPE in it, and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pe_lab.analysis.head_spectra import rank_name
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import SIGNIFICANT, Difference
from pe_lab.results.table import Cell, Table, TextTable

ORDER_NAMES = {"ascending": "ASC", "descending": "DESC"}
BASE = "no DoPE"  # the row of the model without it


class DopeCell(NamedTuple):
    """One combination of a sweep: how heads are denoised, and by what score which of them are chosen."""

    method: str
    indicator: str
    stage: str
    rank: str
    heads: int
    order: str

    @property
    def criterion(self) -> str:
        return f"{self.stage}_{self.indicator}"

    @property
    def name(self) -> str:
        return f"{self.method} {self.criterion} {rank_name(self.rank)} {self.heads} {self.order}"


class DopeScores(NamedTuple):
    """All that was measured of one variant.

    Attributes:
      name: of the variant.
      table: scores by cell of the sweep, and of `BASE`, and by task. Cells that choose the same heads are one model.
      models: the model of each cell; cells whose model is that of `BASE` change nothing.
      differences: {(model, task): from the model without DoPE on the same samples}, p corrected for the whole sweep.
      zero_shot: of the zero-shot task; None: not asked.
      heads: [layer, head] of those that each cell denoises.
    """

    name: str
    table: Table
    models: Mapping[DopeCell | str, int]
    differences: Mapping[tuple[int, str], Difference]
    zero_shot: Cell | None
    heads: Mapping[DopeCell, list[list[int]]]

    @property
    def cells(self) -> list[DopeCell]:
        return [cell for cell in self.table.rows if cell != BASE]

    def score(self, cell: DopeCell | str, task: str) -> Cell:
        return self.table.cells[cell, task]

    def difference(self, cell: DopeCell, task: str) -> Difference | None:
        """The difference that a cell makes; None if it changes nothing."""
        return self.differences.get((self.models[cell], task))


def findings(results: Sequence[DopeScores], tasks: Sequence[str], length: int, seed: int) -> Findings:
    """The tables, figures, sentences and `cells.json` of a sweep."""
    compared = [one for result in results for one in result.differences.values()]
    luck = len(compared) * SIGNIFICANT / 2
    looks = sum(one.p < SIGNIFICANT and one.mean > 0 for one in compared)
    counts = {word: sum(one.verdict == word for one in compared) for word in ("better", "worse", "tie")}
    sentences = [
        f"{len(compared)} comparisons with the model without DoPE, on the same prompts: {counts['better']} better, "
        f"{counts['worse']} worse, {counts['tie']} ties after Holm's correction at {SIGNIFICANT:.0%}.",
        f"Without the correction {looks} would look better; by luck alone up to {luck:.1f} of {len(compared)} would.",
    ]
    tables, figures = [], []
    numbers: dict[str, np.ndarray] = {}
    written = []
    for v, result in enumerate(results):
        suffix, of = (f"_{v}", f" of {result.name}") if len(results) > 1 else ("", "")
        title = (
            f"DoPE on {result.name} at {length:,} tokens, sorted by {tasks[0]} (95% intervals). Of {len(compared)} "
            f"comparisons up to {luck:.1f} would look better by luck; the verdicts are after Holm's correction"
        )
        tables.append(_table(result, tasks, title))
        figures += _figures(result, tasks, suffix, of)
        sentences += _sentences(result, tasks, seed)
        shape = (len(result.cells), len(tasks))
        for key, of_pair in (("score", _score), ("difference", _difference), ("corrected_p", _corrected)):
            values = [[of_pair(result, cell, task) for task in tasks] for cell in result.cells]
            numbers[f"{key}{suffix}"] = np.array(values, np.float64).reshape(shape)
        written += [_record(result, cell, task) for cell in result.cells for task in tasks]
    shapes = {name: "[C, T] cell as in cells.json, task" for name in ("score", "difference", "corrected_p")}
    files = {"cells.json": (json.dumps(written, indent=1, allow_nan=False) + "\n").encode()}
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, shapes, files=files)


def _score(result: DopeScores, cell: DopeCell, task: str) -> float:
    return result.score(cell, task).value


def _difference(result: DopeScores, cell: DopeCell, task: str) -> float:
    found = result.difference(cell, task)
    return 0.0 if found is None else found.mean


def _corrected(result: DopeScores, cell: DopeCell, task: str) -> float:
    found = result.difference(cell, task)
    return 1.0 if found is None else found.corrected


def _percent(cell: Cell) -> str:
    low, high = cell.ends
    return f"{100 * cell.value:.1f}% ({100 * low:.0f}–{100 * high:.0f})"


def _points(difference: Difference) -> str:
    low, high = (f"{100 * x:+.1f}" for x in (difference.low, difference.high))
    return f"{100 * difference.mean:+.1f} ({low} to {high})"


def _table(result: DopeScores, tasks: Sequence[str], title: str) -> TextTable:
    header = ["method", "criterion", "entropy", "order", "heads"]
    for task in tasks:
        header += [task, "points from none", "after Holm"]
    rows = []  # (score, place among equal ones, texts)
    for cell in result.cells:
        row = [cell.method, cell.criterion, rank_name(cell.rank), ORDER_NAMES[cell.order], str(cell.heads)]
        for task in tasks:
            found = result.difference(cell, task)
            row += [_percent(result.score(cell, task)), *_compared(found)]
        rows.append((_score(result, cell, tasks[0]), 1, row))
    none = [BASE, "", "", "", ""]
    for task in tasks:
        none += [_percent(result.score(BASE, task)), "", ""]
    rows.append((result.score(BASE, tasks[0]).value, 0, none))
    if result.zero_shot is not None:
        row = ["zero-shot, as trained", "", "", "", ""]
        for task in tasks:
            row += [_percent(result.zero_shot) if task.startswith("many_shot:") else "", "", ""]
        rows.append((result.zero_shot.value, 0, row))
    rows.sort(key=lambda row: (-row[0], row[1]))
    return TextTable(title, tuple(header), tuple(tuple(row) for *_, row in rows), words=4)


def _compared(difference: Difference | None) -> list[str]:
    return ["", "same model"] if difference is None else [_points(difference), difference.verdict]


def _sentences(result: DopeScores, tasks: Sequence[str], seed: int) -> list[str]:
    written = []
    models, same = set(result.models.values()), sum(result.models[c] == result.models[BASE] for c in result.cells)
    if len(models) - 1 + same < len(result.cells):
        written.append(
            f"{result.name}: {len(result.cells)} cells are {len(models) - 1} different models; others choose the same "
            "heads."
        )
    for task in tasks:
        ranked = sorted(result.cells, key=lambda cell: -_score(result, cell, tasks[0]))
        best = max(ranked, key=lambda cell: _score(result, cell, task))
        base, text = result.score(BASE, task), ""
        if found := result.difference(best, task):
            text = f", {_points(found)} points, p = {found.corrected:.2g} after Holm ({found.verdict})"
        written.append(
            f"{result.name}, {task}: {_percent(base)} without DoPE; the best cell, {best.name}, has "
            f"{_percent(result.score(best, task))}{text}. The best of many is partly luck: measure it again on other "
            f"prompts (--seed={seed + 2})."
        )
    return written


def _record(result: DopeScores, cell: DopeCell, task: str) -> dict[str, Any]:
    """One cell on one task, for `cells.json`."""
    of = result.score(cell, task)
    low, high = of.ends
    record = {"variant": result.name, "task": task, **cell._asdict(), "chosen": result.heads[cell]}
    record |= {"score": of.value, "low": low, "high": high, "samples": of.record["samples"]}
    record["baseline"] = result.score(BASE, task).value
    if found := result.difference(cell, task):
        numbers = {name: getattr(found, name) for name in ("mean", "low", "high", "p", "count")}
        record |= {"difference": numbers, "corrected_p": found.corrected, "verdict": found.verdict}
    return record


def _figures(result: DopeScores, tasks: Sequence[str], suffix: str, of: str) -> list[Figure]:
    cells = result.cells
    panels = list(dict.fromkeys((c.method, c.criterion) for c in cells))
    rows = list(dict.fromkeys((c.rank, c.order) for c in cells))
    columns = list(dict.fromkeys(c.heads for c in cells))
    drawn: list[Figure] = []
    for task in tasks:
        name = task.replace(":", "_")
        values = np.full((len(panels), len(rows), len(columns)), np.nan)
        for c in cells:
            at = panels.index((c.method, c.criterion)), rows.index((c.rank, c.order)), columns.index(c.heads)
            values[at] = 100 * _difference(result, c, task)
        drawn.append(
            HeatMaps(
                f"difference_{name}{suffix}",
                f"DoPE against none{of}, {task}",
                "Points of score that a cell gains over the model without DoPE on the same prompts. Single cells are "
                "partly luck; the table has intervals and tests.",
                values,
                tuple(f"{method}, {criterion}" for method, criterion in panels),
                tuple(f"{rank_name(rank)} {ORDER_NAMES[order]}" for rank, order in rows),
                tuple(map(str, columns)),
                "method and criterion",
                "entropy and order",
                "heads",
                "points",
                "diverging",
            )
        )
        ranked = sorted((result.score(cell, task) for cell in cells), key=lambda one: -one.value)
        base, x = result.score(BASE, task), np.arange(len(ranked), dtype=float)
        lines = (
            Line("DoPE", x, *np.array([(one.value, *one.ends) for one in ranked]).T),
            Line("without DoPE", x, *(np.full(len(x), y) for y in (base.value, *base.ends))),
        )
        drawn.append(
            LineCharts(
                f"sorted_{name}{suffix}",
                f"Scores of all cells{of}, {task}, sorted",
                "95% intervals of each cell by itself, and of the model without DoPE.",
                ((task, lines),),
                "cells, from the best to the worst",
                "score",
            )
        )
    return drawn
