"""The result of a claim as JSON, with its history, and what the pages and the terminal show of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pe_lab.errors import ConfigError, DataError, UserError
from pe_lab.lab.claims import reruns
from pe_lab.lab.claims.claim import Arm, Claim, claim_names, claims_directory, load_claim
from pe_lab.lab.claims.history import continued, now
from pe_lab.lab.claims.power import power_table
from pe_lab.lab.claims.values import Values, WindowMean, arm_of, number
from pe_lab.lab.claims.verdict import OPEN, UNMEASURED, UNTESTABLE, VERDICTS, judge
from pe_lab.recipes import load_config
from pe_lab.results.groups import SEEDS
from pe_lab.results.records import as_dict, as_list, finite, mappings
from pe_lab.results.statistics import LEVEL, Mean, student
from pe_lab.storage import AnyPath, is_file, read_json, write_json

FITS = "fits: "  # a term of a curve that is no number of an arm


def results_directory() -> Path:
    """Where committed results are: claims/results."""
    return claims_directory() / "results"


def make_result(
    claim: Claim,
    size: str,
    seeds: Sequence[int],
    values: Values,
    costs: Mapping[str, Mapping[str, float]],
    command: str,
    conditions: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    pilot: Sequence[Mapping[str, Any]] = (),
    why: str = "",
) -> dict[str, Any]:
    """The result of a claim as JSON.

    Args:
      claim: at this size.
      values: of `running.collect`.
      costs: of `running.costs`.
      command: that makes it again.
      conditions: of `running.conditions`.
      before: the result that it replaces. Its history goes on, and its re-runs stay.
      pilot: the power table that the number of seeds follows from.
      why: the conditions have changed, for the history.

    Raises:
      ConfigError: a number that a criterion names was not measured.
    """
    from pe_lab.identity import machine, versions

    trained = {arm.name: len(claim.seeds_of(arm, seeds)) for arm in claim.all_arms}
    seconds = sum(each["seconds"] * trained[arm] for arm, each in costs.items())
    kept = _reruns_of(claim, before)
    return finite(
        {
            "claim": claim.name,
            **_words(claim),
            "size": size,
            **_judged(claim, values, len(seeds), before, conditions, kept, why=why),
            "pilot": list(pilot),
            "seeds": list(seeds),
            "command": command,
            "minutes": seconds / 60,
            "time": now(),
            "arms": {
                arm.name: {
                    "recipe": arm.recipe,
                    "surgery": arm.surgery,
                    **_at_paper_size(claim, arm.name),
                    **{key: costs[arm.name][key] for key in ("parameters", "tokens", "flops", "seconds")},
                }
                for arm in claim.all_arms
            },
            "values": {
                arm: {metric: [found.get(seed) for seed in seeds] for metric, found in metrics.items()}
                for arm, metrics in values.items()
            },
            "windows": _windows(claim, seeds, values),
            **_fitted(claim, values),
            "machine": machine(),
            "versions": versions(),
        }
    )


def _fitted(claim: Claim, values: Values) -> dict[str, Any]:
    """What the claim fits to its numbers, as a part of its result, or why they cannot be fitted."""
    if claim.fits is None:
        return {}
    try:
        return {"fits": dict(claim.fits(values))}
    except DataError as error:
        return {"fits": {"error": str(error)}}


def _windows(claim: Claim, seeds: Sequence[int], values: Values) -> dict[str, Any]:
    """The values of each seed and window of the numbers that the criteria name, {arm: {metric: text, values}}."""
    found: dict[str, Any] = {}
    for term in dict.fromkeys(term for one in claim.criteria for term in one.terms):
        arm, _, metric = term.partition(": ")
        each = [values.get(arm, {}).get(metric, {}).get(seed) for seed in seeds]
        known = [one for one in each if isinstance(one, WindowMean)]
        if len(known) == len(each) and len({one.text for one in known}) == 1:
            found.setdefault(arm, {})[metric] = {"text": known[0].text, "values": [one.windows for one in known]}
    return found


def _reruns_of(claim: Claim, before: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The re-runs of a result of arms whose recipe the claim still has."""
    known, arms = {arm.name: arm for arm in claim.all_arms}, as_dict((before or {}).get("arms"))
    return [
        one
        for one in mappings((before or {}).get("reruns"))
        if one["arm"] in known and _recipe(as_dict(arms.get(one["arm"]))) == _recipe(vars(known[one["arm"]]))
    ]


def with_rerun(
    claim: Claim, result: Mapping[str, Any], arm: str, seed: int, numbers: Mapping[str, float]
) -> dict[str, Any]:
    """A result with one more re-run, judged again.

    Raises:
      ConfigError: the result has no numbers of this arm and seed, or they are those of another recipe.
    """
    from pe_lab.identity import machine

    (known,) = (one for one in claim.all_arms if one.name == arm)
    if _recipe(as_dict(as_dict(result["arms"]).get(arm))) != _recipe(vars(known)):
        raise ConfigError(f"claim '{claim.name}': arm '{arm}' has another recipe than its runs. Run the claim again.")
    before = {
        metric: found[seed] for metric, found in values_of(result)[arm].items() if metric in numbers and seed in found
    }
    if not before:
        raise ConfigError(f"claim '{claim.name}': its result has no numbers of '{arm}' with seed {seed}.")
    made = reruns.rerun(arm, seed, numbers, before, {"machine": machine()["host"], "time": now()})
    kept = [*mappings(result.get("reruns")), made]
    why, seeds = f"{arm} (seed {seed}) was run again", len(result["seeds"])
    judged = _judged(claim, values_of(result), seeds, result, {"rule": claim.rule}, kept, why, True)
    return finite({**result, **judged})


def judge_again(
    claim: Claim, result: Mapping[str, Any], others: Sequence[Mapping[str, Any]], why: str
) -> dict[str, Any]:
    """A result under the rule that its claim has now, from the numbers that it has; no run is needed.

    Numbers that the claim did not measure when it was run are those of other results, whose arm has the same recipe;
    `taken_from` says which, of which, and whether they are of the same runs. References are measured, once for all
    results: `others` has them then. A criterion on numbers that no run has logged is "not measured".

    Args:
      claim: at the result's size.
      result: as `make_result` made it.
      others: more results.
      why: the rule was changed, for the history.

    Raises:
      ConfigError: a precondition's number is in none of them, or the numbers are those of another recipe.
      DataError: the data of a reference cannot be read.
    """
    result = _without_taken(result)
    values = {arm: dict(metrics) for arm, metrics in as_dict(result["values"]).items()}
    arms = {name: dict(about) for name, about in as_dict(result["arms"]).items()}
    taken: dict[str, Any] = {}
    known = {arm.name: arm for arm in claim.all_arms}
    for name in arms:
        if name in values and name in known and _recipe(arms[name]) != _recipe(vars(known[name])):
            raise ConfigError(f"claim '{claim.name}': arm '{name}' has another recipe than its runs. Run it again.")
    for name in (arm.name for arm in claim.arms):
        missing = _needed(claim, name) - set(values.get(name, {}))
        # What nobody has measured is not measured, and no reason to do without the rest.
        missing &= {metric for other in map(_without_taken, others) for metric in as_dict(other["values"].get(name))}
        if missing and (found := _with_numbers(known[name], missing, result, others)):
            other, same_runs = found
            if name not in values:
                arms[name] = dict(other["arms"][name])
            values.setdefault(name, {}).update({metric: other["values"][name][metric] for metric in sorted(missing)})
            taken[name] = {"claim": other["claim"], "numbers": sorted(missing), "same_runs": same_runs}
    for name, about in _references(claim).items():
        if name in values and as_dict(result.get("references")).get(name) == about:
            continue
        kept = [
            one["values"][name]
            for one in others
            if as_dict(one.get("references")).get(name) == about
            and (one["seeds"], one["size"]) == (result["seeds"], result["size"])
        ]
        values[name] = kept[0] if kept else _measured(claim, name, result["seeds"])
    for name, about in arms.items():
        about |= _at_paper_size(claim, name)
    again = {**result, **_words(claim), "arms": arms, "values": values}
    own = [one for one in _reruns_of(claim, result) if "claim" not in one]
    kept = [*own, *reruns.among(again, list(map(_without_taken, others)), partial(_comparable, claim), _same_recipe)]
    conditions = {"rule": claim.rule}
    seeds = len(result["seeds"])
    again |= _judged(claim, values_of(again), seeds, result, conditions, kept, why, missing_is_unmeasured=True)
    return finite(again | ({"taken_from": taken} if taken else {}))


def _without_taken(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without the numbers that it has from others, so that they are chosen anew."""
    values = {arm: dict(metrics) for arm, metrics in as_dict(result["values"]).items()}
    arms = dict(as_dict(result["arms"]))
    for name, about in as_dict(result.get("taken_from")).items():
        for metric in about["numbers"]:
            values.get(name, {}).pop(metric, None)
        if not values.get(name):  # the arm was not in the claim when it was run
            values.pop(name, None)
            arms.pop(name, None)
    return {key: value for key, value in result.items() if key != "taken_from"} | {"values": values, "arms": arms}


def _recipe(arm: Mapping[str, Any]) -> tuple[object, object]:
    return arm.get("recipe"), arm.get("surgery")


def _comparable(claim: Claim, arm: str, other: Mapping[str, Any]) -> set[str]:
    """The numbers of an arm that the rule names, and that another result has of the same text.

    Those of an evaluation are, if its options are the same; the lengths that are asked for choose the text.
    """
    options = as_dict(as_dict(other.get("conditions")).get("evaluation")).get("options")
    if options is None and other["claim"] in claim_names():  # of a result from before this was kept
        options = load_claim(other["claim"]).evaluation
    same = options is not None and tuple(options) == (claim.evaluation or ())
    return {metric for metric in _needed(claim, arm) if same or metric.startswith("validation")}


def _same_recipe(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _recipe(one) == _recipe(other)


def _references(claim: Claim) -> dict[str, dict[str, str]]:
    """What the numbers of each reference are of: the recipe of its arm, and the name of its measure."""
    recipes = {arm.name: arm.recipe for arm in claim.arms}
    return {
        name: {"recipe": recipes[one.arm], "measure": getattr(one.measure, "__name__", "")}
        for name, one in claim.references.items()
    }


def _needed(claim: Claim, arm: str) -> set[str]:
    """The numbers of an arm that the rule of a claim names."""
    terms = [term for one in (*claim.criteria, *claim.conditions) for term in one.terms]
    return {term.partition(": ")[2] for term in terms if arm_of(term) == arm}


def _with_numbers(
    arm: Arm, metrics: set[str], result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], bool] | None:
    """A result with numbers of an arm of the same recipe, for the same seeds, and whether they are of the same runs.

    Of several, the one with the largest share of equal numbers; another result's own numbers alone count.
    """
    found = []
    for other in map(_without_taken, others):
        if (
            _recipe(as_dict(as_dict(other["arms"]).get(arm.name))) == _recipe(vars(arm))
            and metrics <= set(as_dict(other["values"].get(arm.name)))
            and (other["seeds"], other["size"]) == (result["seeds"], result["size"])
        ):
            found.append((_share_of_equal(result, other), other))
    if not found:
        return None
    share, best = max(found, key=lambda one: one[0])
    return best, share == 1


def _share_of_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Of the numbers that two results have of arms of the same recipe, the share that is equal in all seeds; 0 of none.

    The seconds that an arm was trained for are such a number. Equal numbers that are the same in every seed, such as
    all of the needles, are no evidence of the same runs, and are left out.
    """
    equal = []
    for name, about in as_dict(one["arms"]).items():
        same = as_dict(as_dict(other["arms"]).get(name))
        if _recipe(about) != _recipe(same):
            continue
        if about.get("seconds") and same.get("seconds"):
            equal.append(about["seconds"] == same["seconds"])
        theirs = as_dict(as_dict(other["values"]).get(name))
        for metric, listed in as_dict(as_dict(one["values"]).get(name)).items():
            if metric in theirs and not (listed == theirs[metric] and len(set(listed)) == 1):
                equal.append(listed == theirs[metric])
    return sum(equal) / len(equal) if equal else 0.0


def _measured(claim: Claim, name: str, seeds: Sequence[int]) -> dict[str, list[float]]:
    """{metric: a value for each seed} of a reference."""
    reference = claim.references[name]
    (arm,) = (one for one in claim.arms if one.name == reference.arm)
    each = [reference.measure(load_config(arm.recipe, dict.fromkeys(SEEDS, str(seed)))) for seed in seeds]
    return {metric: [one[metric] for one in each] for metric in each[0]}


def _words(claim: Claim) -> dict[str, Any]:
    """What a claim says and shows, apart from its numbers."""
    return {
        "sentence": claim.sentence,
        "paper": claim.paper,
        "quote": claim.quote,
        "tried": claim.tried,
        "help": claim.help,
        "curves": {panel: dict(lines) for panel, lines in claim.curves.items()},
        "references": _references(claim),
    }


def _judged(
    claim: Claim,
    values: Values,
    seeds: int,
    before: Mapping[str, Any] | None,
    conditions: Mapping[str, Any],
    kept: Sequence[Mapping[str, Any]],
    why: str = "",
    missing_is_unmeasured: bool = False,
) -> dict[str, Any]:
    """Verdict, criteria, preconditions, power, re-runs, conditions and history as JSON."""
    criteria, verdict, preconditions = judge(claim.criteria, values, claim.conditions, missing_is_unmeasured, kept)
    return {
        "verdict": verdict,
        "criteria": criteria,
        "preconditions": preconditions,
        "power": power_table(claim.criteria, values),
        "reruns": list(kept),
        "conditions": {**as_dict((before or {}).get("conditions")), **conditions},
        "history": continued(before, conditions, verdict, seeds, why),
    }


def _at_paper_size(claim: Claim, arm: str) -> dict[str, str]:
    """The recipe at the paper's size, and what it says it costs; "" without one."""
    recipe = claim.recipes.get(arm, "")
    try:
        cost = load_config(recipe).notes.cost if recipe else ""
    except UserError:  # it takes its model from a checkpoint that is not here
        cost = ""
    return {"paper": recipe, "paper_cost": cost}


def write_result(result: Mapping[str, Any], directory: AnyPath) -> AnyPath:
    """Writes `directory/NAME.json`, atomically."""
    return write_json(directory / f"{result['claim']}.json", dict(result))


def read_result(name: str, directory: AnyPath) -> dict[str, Any] | None:
    """A result; None if there is none.

    Raises:
      DataError: the file is no result.
    """
    path = directory / f"{name}.json"
    if not is_file(path):
        return None
    found = read_json(path)
    if found["verdict"] not in VERDICTS or not mappings(found.get("criteria")):
        raise DataError(f"'{path}' is no result of a claim. Move it away, and run the claim again.")
    return found


def read_results(directory: AnyPath | None = None) -> list[dict[str, Any]]:
    """All results of a directory: those on papers' claims first, by paper, then ours."""
    where = Path(str(directory)) if directory else results_directory()
    found = [read_result(path.stem, where) for path in sorted(where.glob("*.json"))]
    return sorted(filter(None, found), key=lambda one: (one["paper"].startswith("ours"), one["paper"]))


def fitted(result: Mapping[str, Any]) -> dict[str, Mean | str]:
    """What a claim fitted, by its path, as `power law: gaps: 192`: numbers, with intervals if known, and texts."""

    def leaves(of: Any, path: str) -> dict[str, Mean | str]:
        if isinstance(of, bool | str):
            return {path: of if isinstance(of, str) else "yes" if of else "no"}
        if isinstance(of, int | float):
            return {path: Mean(of, math.nan, math.nan, 1)}
        if not isinstance(of, Mapping):
            return {}
        if of.keys() == {"middle", "low", "high"}:
            return {path: Mean(of["middle"], of["low"], of["high"], 1)}
        below = [leaves(value, f"{path}: {name}" if path else name) for name, value in of.items()]
        return {name: value for one in below for name, value in one.items()}

    return leaves(result.get("fits"), "")


def point(result: Mapping[str, Any], term: str) -> Mean | None:
    """The number "ARM: METRIC" of a result over its seeds, or "fits: PATH" of `fitted`; None where there is none."""
    if term.startswith(FITS):
        found = fitted(result).get(term.removeprefix(FITS))
        return found if isinstance(found, Mean) else None
    try:
        listed = [*number(values_of(result), term).values()]
    except ConfigError:
        return None
    return student(listed) if listed else None


def values_of(result: Mapping[str, Any]) -> Values:
    """The numbers of a result by arm, metric and seed, with those of windows where it has them."""
    found: dict[str, dict[str, dict[int, float]]] = {
        arm: {
            metric: {seed: float(v) for seed, v in zip(result["seeds"], as_list(listed), strict=False) if v is not None}
            for metric, listed in as_dict(metrics).items()
        }
        for arm, metrics in as_dict(result["values"]).items()
    }
    for arm, metrics in as_dict(result.get("windows")).items():
        for metric, of in metrics.items():
            for seed, windows in zip(result["seeds"], of["values"], strict=True):
                found[arm][metric][seed] = WindowMean(found[arm][metric][seed], windows, of["text"])
    return found


def effect(criterion: Mapping[str, Any], form: str = "+.3g") -> str:
    """`+0.31 [+0.29, +0.33]` of a criterion, positive where the claim holds, or of a precondition.

    An interval of another probability than 95% has it: it decided, widened for the number of comparisons.
    """
    numbers = [criterion.get(key) for key in ("mean", "low", "high")]
    mean, low, high = (math.nan if n is None else float(n) for n in numbers)
    level = float(criterion.get("level") or LEVEL)
    if math.isnan(mean):
        return UNMEASURED
    at = "" if level == LEVEL else f" at {100 * level:.3g}%"
    return f"{mean:{form}}" if math.isnan(low) else f"{mean:{form}} [{low:{form}}, {high:{form}}]{at}"


def described(one: Mapping[str, Any]) -> str:
    """The number of a criterion, with what it is over where the rule names several, or of a precondition."""
    if "met" in one:
        if one.get("note"):
            return str(one["note"])
        return f"{one['mean']:.3g}" if one["low"] is not None and one["low"] == one["high"] else effect(one, ".3g")
    return effect(one) + (f" over {one['against']}" if " each of (" in one["rule"] and one["against"] else "")


def outcome_text(one: Mapping[str, Any]) -> str:
    """The outcome of a criterion, with the noise of re-running where that is larger, or of a precondition."""
    if "met" in one:
        return {True: "met", False: "not met"}.get(one["met"], UNMEASURED)
    margin = one["by"] or one["tolerance"] or one["within"]
    if one["outcome"] == OPEN and one.get("noise") is not None and one["noise"] > margin:
        return f"{OPEN}: smaller than the noise of re-running, {one['noise']:.2g}"
    return str(one["outcome"])


def verdict_text(result: Mapping[str, Any]) -> str:
    """The verdict, with the precondition that failed and its number, or what else than an interval leaves it open."""
    verdict = str(result["verdict"])
    for met in (False, None):
        failed = [one for one in mappings(result.get("preconditions")) if one["met"] is met]
        if failed and verdict == (UNTESTABLE if met is False else OPEN):
            more = f", and {len(failed) - 1} more" * (len(failed) > 1)
            return f"{verdict}: {failed[0]['text']}: {described(failed[0])}{more}"
    if verdict == OPEN and (outcome := outcome_text(leading(result))).startswith(f"{OPEN}:"):
        return outcome
    return verdict


def changes_after_runs(result: Mapping[str, Any]) -> int:
    """How often the rule, or another condition, was changed after a run."""
    return len(mappings(result.get("history"))) - 1


def leading(result: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for a claim in a table: of what decided the verdict, the first precondition or median criterion."""
    for met in (False, None):
        failed = [one for one in mappings(result.get("preconditions")) if one["met"] is met]
        if failed and result["verdict"] == (UNTESTABLE if met is False else OPEN):
            return failed[0]
    found = [one for one in mappings(result["criteria"]) if one["mean"] is not None]
    decided = [one for one in found if one["outcome"] == result["verdict"]] or found or mappings(result["criteria"])
    middle = statistics.median_low([float(one["mean"] or 0.0) for one in decided])
    return next(one for one in decided if float(one["mean"] or 0.0) == middle)
