"""Groups of runs that differ by seed only. A group is read as one run: means over its seeds.

The intervals are those of `statistics.over_seeds`: Student's t, of two seeds their range. Comparisons use the t
interval of two seeds all the same. Seeds whose scores are equal have the interval of their samples.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from pe_lab.config import Config, flat, from_dict
from pe_lab.errors import UserError
from pe_lab.identity import identity
from pe_lab.results.records import Record, as_dict, as_list, number
from pe_lab.results.runs import PhaseFiles, RunFiles
from pe_lab.results.scores import label_of, measure, source_of
from pe_lab.results.statistics import Z95, Mean, exp, interval, over_seeds, student
from pe_lab.results.table import Cell

SEEDS = ("seed", "data.seed")  # keys of the identity


def identity_of(run: RunFiles) -> dict[str, Any]:
    """What the results of a run depend on (`config.identity`), flat; {} for a run without a config.

    A config that this process cannot read, of an encoding that only the run's own code knows, counts as it is written.
    """
    if not run.config:
        return {}
    try:
        return identity(from_dict(Config, run.config))
    except UserError:
        written = {name: run.config.get(name) for name in ("seed", "model", "data", "phases")}
        return as_dict(run.info.get("identity")) or dict(flat(written))


def seeds_of(run: RunFiles) -> tuple[Any, ...]:
    """The seeds of a run: of initialization, and of the data's order."""
    known = identity_of(run)
    return tuple(known.get(name, 0) for name in SEEDS)


def seed_words(run: RunFiles) -> str:
    """`3`; `3, data 4` where the data has another seed."""
    first, data = seeds_of(run)
    return f"{first}" if first == data else f"{first}, data {data}"


def group_runs(runs: Sequence[RunFiles]) -> list[tuple[RunFiles, ...]]:
    """The runs by groups, in the order of the first of each; runs of a group are in the order of their seeds.

    Runs are of one group if their identities differ by `SEEDS` only. Of runs with equal seeds, which say nothing about
    other seeds, only the first is of the group; the others are groups of one, as are runs without a config.
    """
    groups: list[dict[tuple[Any, ...], RunFiles]] = []
    by_identity: dict[str, dict[tuple[Any, ...], RunFiles]] = {}
    for run in runs:
        known = identity_of(run)
        rest = repr(sorted((key, value) for key, value in known.items() if key not in SEEDS))
        seeds = seeds_of(run)
        group = by_identity.get(rest) if known else None
        if group is None or seeds in group:
            group = {}
            groups.append(group)
            if known:
                by_identity.setdefault(rest, group)
        group[seeds] = run
    return [tuple(group[seeds] for seeds in sorted(group, key=str)) for group in groups]


def pooled(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """A run for each group: a group of one as it is, any other as the means over its members, `RunFiles.members`."""
    groups = group_runs(runs)
    names = _names(groups)
    return [group[0] if len(group) == 1 else _pool(name, group) for name, group in zip(names, groups, strict=True)]


def _names(groups: Sequence[Sequence[RunFiles]]) -> list[str]:
    """A name for each group: that of its config, else what the names of its members begin with, else both."""
    ways: tuple[Callable[[Sequence[RunFiles]], str], ...] = (
        lambda group: str(group[0].info.get("name") or ""),
        lambda group: _beginning([run.name for run in group]),
        lambda group: f"{group[0].name} and {len(group) - 1} more",
    )
    for name in ways:
        names = [group[0].name if len(group) == 1 else name(group) for group in groups]
        if all(names) and len(set(names)) == len(names):
            break
    return names


def _beginning(names: list[str]) -> str:
    """What names have in common at their beginning, without the separator or the word `seed` behind it."""
    return os.path.commonprefix(names).rstrip("-_.,=/ 0123456789").removesuffix("seed").rstrip("-_.,=/ ")


def _pool(name: str, members: tuple[RunFiles, ...]) -> RunFiles:
    """The members as one run. Phases and logs are those that all of them have."""
    first = members[0]
    phases = [[one for run in members if (one := run.phase(phase.name))] for phase in first.phases]
    suites = dict.fromkeys(suite for run in members for suite in run.evaluation)
    return replace(
        first,
        name=name,
        phases=[_pool_phases(alike) for alike in phases if len(alike) == len(members)],
        evaluation={
            suite: _pool_records({seeds_of(run): run.evaluation.get(suite, []) for run in members}) for suite in suites
        },
        problems=[f"{run.name}: {problem}" for run in members for problem in run.problems],
        analyses={},
        ledger=[],
        members=members,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Means over seeds


def curve_over_seeds(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, Mean]]:
    """(x, mean and interval) of one curve for each seed, at every x that a seed has; `count` tells how many have it."""
    by_x: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in dict(curve).items():
            by_x.setdefault(x, []).append(y)
    result: dict[float, Mean] = {}
    for n in {len(values) for values in by_x.values()}:
        places = [x for x, values in by_x.items() if len(values) == n]
        values: Float[np.ndarray, "n X"] = np.array([by_x[x] for x in places]).T
        found = interval(values)
        low, high = (values.min(0), values.max(0)) if n == 2 else (found.low, found.high)
        for x, *numbers in zip(places, found.mean, low, high, strict=True):
            result[x] = Mean(*map(float, numbers), n)
    return [(x, result[x]) for x in sorted(result)]


def _pool_phases(phases: Sequence[PhaseFiles]) -> PhaseFiles:
    """A phase of all seeds, with the means of what all have logged at a step."""
    logs: list[dict[float, Record]] = []
    for phase in phases:
        logs.append({})
        for record in phase.metrics:
            if (step := number(record, "step")) is not None and "event" not in record:
                logs[-1].setdefault(step, {}).update(record)
    metrics = []
    for step, record in logs[0].items():
        alike = [log.get(step, {}) for log in logs]
        known = {key: [number(one, key) for one in alike] for key in record}
        means = {key: math.fsum(values) / len(values) for key, values in known.items() if None not in values}
        if means:
            metrics.append(means)
    complete = not any(phase.running for phase in phases)
    info = phases[0].info | {"seconds": math.fsum(number(phase.info, "seconds") or 0.0 for phase in phases)}
    whats = [re.sub(r", seed \d+$", "", str(entry.get("what", "?"))) for entry in phases[0].lineage]
    lineage = [{"what": what, "step": e.get("step")} for what, e in zip(whats, phases[0].lineage, strict=True)]
    info |= {"status": "complete" if complete else "running", "lineage": lineage}
    speed = [record for phase in phases for record in phase.speed]
    return PhaseFiles(phases[0].name, info, metrics, speed)


def _pool_records(by_seed: Mapping[Any, Sequence[Record]]) -> list[Record]:
    """The records of a suite as means over seeds, each with `seeds`, how many were measured, and `of_seeds`."""
    found: dict[tuple[Any, ...], dict[Any, Record]] = {}
    for seed, records in by_seed.items():
        for record in records:
            names = ("phase", "length", "factor", "step", "metric")
            key = (source_of(record), label_of(record), *(repr(record.get(name)) for name in names))
            if measure(record) is not None:
                found.setdefault(key, {})[seed] = record
    return [_mean_record(alike, len(by_seed)) for alike in found.values()]


def _mean_record(of_seed: Mapping[Any, Record], of: int) -> Record:
    """The mean of records of one measurement, one for each seed; `by_seed` has the score of each."""
    records = list(of_seed.values())
    cells = {seed: cell for seed, record in of_seed.items() if (cell := measure(record))}
    first = records[0]
    counts = {"seeds": len(records), "of_seeds": of, "by_seed": {seed: cell.score for seed, cell in cells.items()}}
    if len(records) == 1:
        return first | counts
    names = ("accuracy", "score", "value", "exact_match", "f1", "nll", "beta", "c", "nll_before", "nll_after")
    known = {name: [number(record, name) for record in records] for name in names}
    means: Record = {name: math.fsum(values) / len(values) for name, values in known.items() if None not in values}
    scores = [as_dict(record.get("scores")) for record in records]
    means["scores"] = {
        name: math.fsum(values) / len(values)
        for name in scores[0]
        if None not in (values := [number(one, name) for one in scores])
    }
    means["checkpoint"] = ", ".join(dict.fromkeys(str(record.get("checkpoint") or "–") for record in records))
    merged = first | counts | means | _interval_of([*cells.values()]) | _lists(records)
    if "nll" in means:
        merged["perplexity"] = exp(means["nll"])
    return merged


def _interval_of(cells: Sequence[Cell]) -> Record:
    """`low`, `high` and `stderr` of the mean; perplexities are averaged as losses.

    `stderr` is the half of the t interval in units of `Z95`, so that comparisons at 95% are as careful as the interval.
    """
    record = cells[0].record
    losses = "nll" in record or "perplexity" in record or "perplexity" in str(record.get("metric"))
    values = [-cell.score if losses else cell.value for cell in cells]
    if max(values) - min(values) < 1e-9:
        low, high = cells[0].ends or (None, None)
        return {"low": low, "high": high, "stderr": cells[0].stderr}
    found, t = over_seeds(values), student(values)
    low, high = (exp(found.low), exp(found.high)) if losses else (found.low, found.high)
    merged: Record = {"low": low, "high": high, "stderr": (t.high - t.mean) / Z95}
    if losses and "nll" not in record:  # perplexities alone
        value = exp(found.mean)
        merged |= {"perplexity": value} if "perplexity" in record else {"score": value}
    return merged


# Where a record keeps a list of numbers: (part or "", places, values).
LISTS = (
    ("accuracy_by_distance", "edges", "accuracy"),
    ("by_depth", "depth", "score"),
    ("by_length", "edges", "score"),
    ("", "position_edges", "nll_by_position"),
)


def _lists(records: Sequence[Record]) -> Record:
    """The lists of scores by place as means with `low` and `high`; those whose places differ are left out."""
    merged: Record = {}
    for part, places, values in LISTS:
        found = [as_dict(record.get(part)) if part else record for record in records]
        lists = [one.get(values) for one in found]
        if not isinstance(lists[0], list):
            continue
        shapes = [(one.get(places), len(as_list(x))) for one, x in zip(found, lists, strict=True)]
        if any(shape != shapes[0] for shape in shapes):
            merged[part or values] = None
            continue
        columns = [[number({"x": x}, "x") for x in column] for column in zip(*lists, strict=True)]
        spreads = [
            over_seeds([x for x in column if x is not None]) if None not in column else None for column in columns
        ]
        numbers = {
            values: [s and s.mean for s in spreads],
            ("low" if part else f"{values}_low"): [s and s.low for s in spreads],
            ("high" if part else f"{values}_high"): [s and s.high for s in spreads],
        }
        if part:
            merged[part] = found[0] | numbers
        else:
            merged |= numbers
    return merged
