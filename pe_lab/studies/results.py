"""The result of a study as JSON, with its history, and what the pages and the terminal show of it."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.errors import ConfigError, DataError, UserError
from pe_lab.recipes import load_config
from pe_lab.results.records import as_dict, as_list, digest, finite, mappings
from pe_lab.storage import AnyPath, is_file, read_json, write_json
from pe_lab.studies.study import Study, studies_directory
from pe_lab.studies.verdict import CONFIRMED, OPEN, REFUTED, Judged, Values, judge, number, student

VERDICTS = (CONFIRMED, REFUTED, OPEN)


def results_directory() -> Path:
    """Where committed results are: studies/results."""
    return studies_directory() / "results"


def make_result(
    study: Study,
    size: str,
    seeds: Sequence[int],
    values: Values,
    costs: Mapping[str, Mapping[str, float]],
    command: str,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of a study as JSON.

    Args:
      study: at this size.
      values: of `running.collect`.
      costs: of `running.costs`.
      command: that makes it again.
      before: the result that it replaces. If its rule was another one, the history says so.

    Raises:
      ConfigError: a number that a criterion names was not measured.
    """
    from pe_lab.training.machine import machine, versions

    judged, verdict = judge(study.criteria, values)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    history = mappings((before or {}).get("history"))
    if not history or history[-1].get("rule") != study.rule:
        history = [*history, {"time": now, "rule": study.rule}]
    history[-1] = {**history[-1], "verdict": verdict, "seeds": len(seeds)}
    seconds = sum(each["seconds"] * len(seeds) for each in costs.values())
    return finite(
        {
            "study": study.name,
            "claim": study.claim,
            "paper": study.paper,
            "size": size,
            "verdict": verdict,
            "seeds": list(seeds),
            "command": command,
            "minutes": seconds / 60,
            "time": now,
            "criteria": [_criterion(one) for one in judged],
            "history": history,
            "tried": study.tried,
            "curves": {panel: dict(lines) for panel, lines in study.curves.items()},
            "arms": {
                arm.name: {
                    "recipe": arm.recipe,
                    "surgery": arm.surgery,
                    "paper": study.recipes.get(arm.name, ""),
                    "paper_cost": _paper_cost(study.recipes.get(arm.name, "")),
                    **{key: costs[arm.name][key] for key in ("parameters", "tokens", "flops", "seconds")},
                }
                for arm in study.all_arms
            },
            "values": {
                arm: {metric: [found.get(seed) for seed in seeds] for metric, found in metrics.items()}
                for arm, metrics in values.items()
            },
            "machine": machine(),
            "versions": versions(),
        }
    )


def _paper_cost(recipe: str) -> str:
    """What the recipe at the paper's size says it costs; "" without one."""
    try:
        return load_config(recipe).notes.cost if recipe else ""
    except UserError:  # it takes its model from a checkpoint that is not here
        return ""


def _criterion(judged: Judged) -> dict[str, Any]:
    criterion = judged.criterion
    return {
        "text": criterion.text,
        "rule": criterion.rule,
        "outcome": judged.outcome,
        "mean": judged.mean,
        "low": judged.low,
        "high": judged.high,
        "by": criterion.by,
        "tolerance": criterion.tolerance,
        "seeds": len(judged.differences),
    }


def write_result(result: Mapping[str, Any], directory: AnyPath) -> AnyPath:
    """Writes `directory/NAME.json`, atomically."""
    return write_json(directory / f"{result['study']}.json", dict(result))


def read_result(name: str, directory: AnyPath) -> dict[str, Any] | None:
    """A result; None if there is none.

    Raises:
      DataError: the file is no result.
    """
    path = directory / f"{name}.json"
    if not is_file(path):
        return None
    found = read_json(path)
    if found.get("verdict") not in VERDICTS or not mappings(found.get("criteria")):
        raise DataError(f"'{path}' is no result of a study. Move it away, and run the study again.")
    return found


def read_results(directory: AnyPath | None = None) -> list[dict[str, Any]]:
    """All results of a directory: those on papers' claims first, by paper."""
    where = Path(str(directory)) if directory else results_directory()
    found = [read_result(path.stem, where) for path in sorted(where.glob("*.json"))]
    return sorted(filter(None, found), key=lambda one: (one["paper"].startswith("none"), one["paper"]))


@dataclass(frozen=True)
class Point:
    """A number over seeds: the mean and its 95% interval, whose ends are NaN of one seed."""

    mean: float
    low: float
    high: float


def point(result: Mapping[str, Any], term: str) -> Point | None:
    """The number "ARM: METRIC" of a result over its seeds; None where no seed has it."""
    try:
        listed = [*number(_values(result), term).values()]
    except ConfigError:
        return None
    return Point(*student(listed, 0.95)) if listed else None


def _values(result: Mapping[str, Any]) -> Values:
    """The numbers of a result by arm, metric and seed."""
    return {
        arm: {
            metric: {seed: float(v) for seed, v in zip(result["seeds"], as_list(listed), strict=False) if v is not None}
            for metric, listed in as_dict(metrics).items()
        }
        for arm, metrics in as_dict(result["values"]).items()
    }


def effect(criterion: Mapping[str, Any], form: str = "+.3g") -> str:
    """`+0.31 [+0.29, +0.33]` of a criterion; positive where the claim holds."""
    numbers = [criterion.get(key) for key in ("mean", "low", "high")]
    mean, low, high = (math.nan if n is None else float(n) for n in numbers)
    return f"{mean:{form}}" if math.isnan(low) else f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def rule_changes(result: Mapping[str, Any]) -> int:
    """How often the rule was changed after a run."""
    return len({digest(one.get("rule")) for one in mappings(result.get("history"))}) - 1


def leading(result: Mapping[str, Any]) -> dict[str, Any]:
    """The criterion that stands for a study in a table: the median one of those that decided the verdict."""
    found = mappings(result["criteria"])
    decided = [one for one in found if one["outcome"] == result["verdict"]] or found
    middle = statistics.median_low([float(one["mean"] or 0.0) for one in decided])
    return next(one for one in decided if float(one["mean"] or 0.0) == middle)
