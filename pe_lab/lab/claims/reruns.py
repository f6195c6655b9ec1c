"""The noise of re-running: how far a number moves when the same arm and seed are trained again, on another machine.

A re-run is a record of a result: `arm`, `seed`, `machine`, its `numbers`, and their `difference` from those of the
result. A difference that is smaller than what re-running moves it by settles nothing: a re-run of the same seeds could
say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pe_lab.lab.claims.values import MINUS, arm_of
from pe_lab.results.records import as_dict, mappings, number
from pe_lab.results.statistics import LEVEL, t_quantile

Rerun = Mapping[str, Any]


def noise(term: str, against: str, seeds: int, reruns: Sequence[Rerun]) -> float | None:
    """The bound that the mean difference of two terms over seeds keeps to with 95%, if all its runs are run again.

    Numbers of one metric are taken to move alike in all arms, and runs to move apart: the variance of a difference is
    the sum of those of its arms, each the mean square of what re-runs moved by. The bound is Student's t of as many
    degrees of freedom as there are re-runs. None: no re-run has the numbers.
    """
    variance, known = 0.0, []
    for metrics in _by_arm(term, against).values():
        moved = [
            math.fsum(sign * one["difference"][metric] for metric, sign in metrics.items())
            for one in reruns
            if all(number(as_dict(one.get("difference")), metric) is not None for metric in metrics)
        ]
        if not moved:
            return None
        variance += math.fsum(each**2 for each in moved) / len(moved) / seeds
        known.append(len(moved))
    return t_quantile((1 + LEVEL) / 2, min(known)) * math.sqrt(variance)


def _by_arm(term: str, against: str) -> dict[str, dict[str, float]]:
    """{arm: {metric: its sign}} of a difference."""
    found: dict[str, dict[str, float]] = {}
    for sign, whole in ((1.0, term), (-1.0, against)):
        for n, one in enumerate(whole.split(MINUS) if whole else ()):
            found.setdefault(arm_of(one), {})[one.partition(": ")[2]] = sign * (-1.0) ** n
    return found


def rerun(
    arm: str, seed: int, numbers: Mapping[str, float], before: Mapping[str, float], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a re-run; `about` says where and when, `before` has the numbers of the result."""
    kept = {metric: float(numbers[metric]) for metric in sorted(numbers) if metric in before}
    difference = {metric: value - before[metric] for metric, value in kept.items()}
    return {"arm": arm, "seed": seed, **about, "numbers": kept, "difference": difference}


def among(
    result: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    comparable: Callable[[str, Mapping[str, Any]], set[str]],
    alike: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
) -> list[dict[str, Any]]:
    """The re-runs of a result's arms that other results are: of the same recipe, size and seeds, trained again.

    Runs are others by the seconds that they took. Several results may have numbers of one re-run.

    Args:
      comparable: the numbers of an arm that the rule names, and that another result has of the same text.
      alike: whether two arms have one recipe.
    """
    found: dict[tuple[str, int, float], dict[str, Any]] = {}
    for other in others:
        if (other["seeds"], other["size"]) != (result["seeds"], result["size"]):
            continue
        for arm, about in as_dict(result["arms"]).items():
            there = as_dict(as_dict(other["arms"]).get(arm))
            mine, theirs = (as_dict(as_dict(one["values"]).get(arm)) for one in (result, other))
            seconds = there.get("seconds")
            if not alike(about, there) or not seconds or not about.get("seconds") or seconds == about["seconds"]:
                continue
            for n, seed in enumerate(result["seeds"]):
                kept = {
                    metric: (theirs[metric][n], mine[metric][n])
                    for metric in sorted(comparable(arm, other) & set(mine) & set(theirs))
                    if theirs[metric][n] is not None and mine[metric][n] is not None
                }
                numbers, before = ({m: both[i] for m, both in kept.items()} for i in (0, 1))
                machine = as_dict(other.get("machine")).get("host")
                where = {"claim": other["claim"], "machine": machine, "time": other.get("time")}
                made = rerun(arm, seed, numbers, before, where)
                if kept:
                    known = found.setdefault((arm, seed, seconds), made)
                    for key in ("numbers", "difference"):
                        known[key] = {**made[key], **known[key]}
    return list(found.values())


def summary(result: Mapping[str, Any]) -> str:
    """What re-running moved, in a line: the arms and seeds, and of each metric the root mean square and the largest."""
    reruns = mappings(result.get("reruns"))
    if not reruns:
        return "No run was run again: the noise of re-running is not known."
    moved: dict[str, list[float]] = {}
    for one in reruns:
        for metric, value in as_dict(one["difference"]).items():
            moved.setdefault(metric, []).append(float(value))
    arms: dict[str, list[str]] = {}
    for one in reruns:
        arms.setdefault(str(one["arm"]), []).append(str(one["seed"]))
    of = ", ".join(f"{arm} (seed {', '.join(seeds)})" for arm, seeds in arms.items())
    numbers = "; ".join(
        f"{metric} {math.sqrt(math.fsum(v * v for v in values) / len(values)):.2g}, at most {max(map(abs, values)):.2g}"
        for metric, values in sorted(moved.items())
    )
    return f"Run again: {of}. Root mean square of what a number moved by: {numbers}."
