"""The results of a sweep of DoPE: one sorted table a variant, with the model without DoPE in it, and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pe_lab.analysis.head_spectra import rank_name
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.table import TextTable
from pe_lab.results.statistics import Mean, mean_of
from pe_lab.results.paired import verdict
from pe_lab.results.statistics import Difference, SIGNIFICANT

ORDER_NAMES = {"ascending": "ASC", "descending": "DESC"}
Scores = tuple[list[float], list[Any]]  # of samples, and their clusters


class Cell(NamedTuple):
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


class Comparison(NamedTuple):
    """A difference from the model without DoPE on the same samples, and its p-value after Holm's correction."""

    difference: Difference
    corrected: float

    @property
    def verdict(self) -> str:
        return verdict(self.difference, self.corrected)


Row = tuple[Cell, Mapping[str, Scores], Mapping[str, Comparison] | None]


class CellScores(NamedTuple):
    """All that was measured of one variant.

    Attributes:
      name: of the variant.
      base: task -> scores without DoPE.
      rows: (cell, task -> scores, task -> comparison); None: the cell changes nothing.
      zero_shot: sample records of the zero-shot task; None: not asked.
      heads: [layer, head] of those that each cell denoises.
    """

    name: str
    base: Mapping[str, Scores]
    rows: Sequence[Row]
    zero_shot: Sequence[Mapping[str, Any]] | None
    heads: Mapping[Cell, list[list[int]]]


def findings(results: Sequence[CellScores], tasks: Sequence[str], length: int, seed: int) -> Findings:
    """The tables, figures, sentences and `cells.json` of a sweep."""
    compared = [one for result in results for one in _distinct(result)]
    luck = len(compared) * SIGNIFICANT / 2
    looks = sum(one.difference.p < SIGNIFICANT and one.difference.mean > 0 for one in compared)
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
        ranked = sorted(result.rows, key=lambda row: -_mean(row[1][tasks[0]]).score)
        title = (
            f"DoPE on {result.name} at {length:,} tokens, sorted by {tasks[0]} (95% intervals). Of {len(compared)} "
            f"comparisons up to {luck:.1f} would look better by luck; the verdicts are after Holm's correction"
        )
        tables.append(_table(result, ranked, tasks, title))
        figures += _figures(result, ranked, tasks, suffix, of)
        sentences += _sentences(result, ranked, tasks, seed)
        shape = (len(result.rows), len(tasks))
        for key, of_pair in (("score", _score), ("difference", _difference), ("corrected_p", _corrected)):
            values = [[of_pair(row, task) for task in tasks] for row in result.rows]
            numbers[f"{key}{suffix}"] = np.array(values, np.float64).reshape(shape)
        written += [_record(result, row, task) for row in result.rows for task in tasks]
    shapes = {name: "[C, T] cell as in cells.json, task" for name in ("score", "difference", "corrected_p")}
    files = {"cells.json": (json.dumps(written, indent=1, allow_nan=False) + "\n").encode()}
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, shapes, files=files)


def _distinct(result: CellScores) -> list[Comparison]:
    """The comparisons of all different models of a variant."""
    found = {id(comparisons): comparisons for _, _, comparisons in result.rows if comparisons is not None}
    return [one for comparisons in found.values() for one in comparisons.values()]


def _mean(scores: Scores) -> Mean:
    found = mean_of(*scores)
    assert found is not None  # samples were counted before anything was measured
    return found


def _score(row: Row, task: str) -> float:
    return _mean(row[1][task]).score


def _difference(row: Row, task: str) -> float:
    return 0.0 if row[2] is None else row[2][task].difference.mean


def _corrected(row: Row, task: str) -> float:
    return 1.0 if row[2] is None else row[2][task].corrected


def _percent(mean: Mean) -> str:
    return f"{100 * mean.score:.1f}% ({100 * mean.low:.0f}–{100 * mean.high:.0f})"


def _points(difference: Difference) -> str:
    low, high = (f"{100 * x:+.1f}" for x in (difference.low, difference.high))
    return f"{100 * difference.mean:+.1f} ({low} to {high})"


def _table(result: CellScores, ranked: Sequence[Row], tasks: Sequence[str], title: str) -> TextTable:
    header = ["method", "criterion", "entropy", "order", "heads"]
    for task in tasks:
        header += [task, "points from none", "after Holm"]
    rows = []
    for cell, scores, comparisons in ranked:
        row = [cell.method, cell.criterion, rank_name(cell.rank), ORDER_NAMES[cell.order], str(cell.heads)]
        for task in tasks:
            row.append(_percent(_mean(scores[task])))
            row += ["", "same model"] if comparisons is None else _cells(comparisons[task])
        rows.append((_mean(scores[tasks[0]]).score, 1, row))
    none = ["no DoPE", "", "", "", ""]
    for task in tasks:
        none += [_percent(_mean(result.base[task])), "", ""]
    rows.append((_mean(result.base[tasks[0]]).score, 0, none))
    if result.zero_shot is not None:
        mean = _zero_mean(result.zero_shot)
        row = ["zero-shot, as trained", "", "", "", ""]
        for task in tasks:
            row += [_percent(mean) if task.startswith("many_shot:") else "", "", ""]
        rows.append((mean.score, 0, row))
    rows.sort(key=lambda row: (-row[0], row[1]))
    return TextTable(title, tuple(header), tuple(tuple(row) for *_, row in rows), words=4)


def _cells(comparison: Comparison) -> list[str]:
    return [_points(comparison.difference), comparison.verdict]


def _zero_mean(records: Sequence[Mapping[str, Any]]) -> Mean:
    return _mean(([record["score"] for record in records], [record["index"] for record in records]))


def _sentences(result: CellScores, ranked: Sequence[Row], tasks: Sequence[str], seed: int) -> list[str]:
    written = []
    models = {id(comparisons) for _, _, comparisons in result.rows if comparisons is not None}
    same = sum(comparisons is None for *_, comparisons in result.rows)
    if len(models) + same < len(result.rows):
        written.append(
            f"{result.name}: {len(result.rows)} cells are {len(models)} different models; others choose the same heads."
        )
    for task in tasks:
        best = max(ranked, key=lambda row: _score(row, task))
        base, text = _mean(result.base[task]), ""
        if best[2] is not None:
            one = best[2][task]
            text = f", {_points(one.difference)} points, p = {one.corrected:.2g} after Holm ({one.verdict})"
        written.append(
            f"{result.name}, {task}: {_percent(base)} without DoPE; the best cell, {best[0].name}, has "
            f"{_percent(_mean(best[1][task]))}{text}. The best of many is partly luck: measure it again on other "
            f"prompts (--seed={seed + 2})."
        )
    return written


def _record(result: CellScores, row: Row, task: str) -> dict[str, Any]:
    """One cell on one task, for `cells.json`."""
    cell, scores, comparisons = row
    mean = _mean(scores[task])
    record = {"variant": result.name, "task": task, **cell._asdict(), "chosen": result.heads[cell]}
    record |= {"score": mean.score, "low": mean.low, "high": mean.high, "samples": mean.count}
    record["baseline"] = _mean(result.base[task]).score
    if comparisons is not None:
        one = comparisons[task]
        record |= {"difference": one.difference._asdict(), "corrected_p": one.corrected, "verdict": one.verdict}
    return record


def _figures(result: CellScores, ranked: Sequence[Row], tasks: Sequence[str], suffix: str, of: str) -> list[Figure]:
    cells = [row[0] for row in result.rows]
    panels = list(dict.fromkeys((c.method, c.criterion) for c in cells))
    rows = list(dict.fromkeys((c.rank, c.order) for c in cells))
    columns = list(dict.fromkeys(c.heads for c in cells))
    drawn: list[Figure] = []
    for task in tasks:
        name = task.replace(":", "_")
        values = np.full((len(panels), len(rows), len(columns)), np.nan)
        for row in result.rows:
            c = row[0]
            at = panels.index((c.method, c.criterion)), rows.index((c.rank, c.order)), columns.index(c.heads)
            values[at] = 100 * _difference(row, task)
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
        means = sorted((_mean(row[1][task]) for row in ranked), key=lambda mean: -mean.score)
        base, x = _mean(result.base[task]), np.arange(len(means), dtype=float)
        level = [np.full(len(x), y) for y in (base.score, base.low, base.high)]
        lines = (
            Line("DoPE", x, *(np.array([getattr(m, part) for m in means]) for part in ("score", "low", "high"))),
            Line("without DoPE", x, *level),
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
