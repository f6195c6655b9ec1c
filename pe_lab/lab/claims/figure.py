"""The figure of a claim: its numbers by length, with intervals over seeds, and the differences that decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pe_lab.lab.claims.results import described, effect, point
from pe_lab.lab.claims.verdict import CONFIRMED, EQUIVALENT, REFUTED, UNTESTABLE
from pe_lab.page.figure_files import render_all
from pe_lab.results.figures import Effect, Effects, Line, LineCharts
from pe_lab.results.records import as_dict, mappings

COLOURS = {CONFIRMED: "#00805c", REFUTED: "#c04a00", EQUIVALENT: "#1f7cbd"}


def draw(result: Mapping[str, Any], form: str) -> bytes:
    """The figure of a result as the bytes of a `png` or `svg` file."""
    curves = {panel: as_dict(lines) for panel, lines in as_dict(result.get("curves")).items()}
    curves = {panel: lines for panel, lines in curves.items() if any(_has(result, term) for term in lines.values())}
    units: dict[str, list[dict[str, Any]]] = {}
    for one in mappings(result["criteria"]):
        units.setdefault(str(one["unit"]), []).append(one)
    figures = [_curves(result, panel, lines) for panel, lines in curves.items()]
    effects = [_effects(unit, criteria) for unit, criteria in units.items()]
    return render_all([figures, *([one] for one in effects)], form, _verdict(result))


def _verdict(result: Mapping[str, Any]) -> str:
    """The verdict, with the precondition that was not met."""
    unmet = [one for one in mappings(result["preconditions"]) if not one["met"]]
    why = f": not met: {unmet[0]['text']}; here {described(unmet[0])}" if result["verdict"] == UNTESTABLE else ""
    return f"{result['verdict']}{why}"


def _curves(result: Mapping[str, Any], panel: str, lines: Mapping[str, str]) -> LineCharts:
    """A line for each term against what stands for {x} in it, or a point for each term without {x}."""
    plain = {label: term for label, term in lines.items() if "{x}" not in term}
    limits = (-0.05, 1.05) if panel.startswith("needles found") else None  # Student's t may go beyond 0 and 1
    if plain:
        found = {label: at for label, term in plain.items() if (at := point(result, term))}
        numbers = np.array([at.numbers for at in found.values()])
        drawn = (Line("", np.arange(float(len(found))), *numbers.T),)
        return LineCharts(panel, panel, "", (("", drawn),), "", "", tuple(found), points=True, y_limits=limits)
    drawn = []
    for label, term in lines.items():
        known = {x: at for x in _places(result, term) if (at := point(result, term.replace("{x}", f"{x:g}")))}
        if known:
            drawn.append(Line(label, np.array([*known]), *np.array([at.numbers for at in known.values()]).T))
    places = sorted({x for line in drawn for x in line.x.tolist()})
    log = bool(places) and 0 < 2 * places[0] < places[-1]  # a layer's number may be 0
    name = "length / training length" if "by length" in panel else "layer" if "by layer" in panel else ""
    return LineCharts(
        panel, panel, "", (("", tuple(drawn)),), name, "", log_x=log, bars=True, x_ticks=tuple(places), y_limits=limits
    )


def _places(result: Mapping[str, Any], term: str) -> list[float]:
    """The numbers that stand for {x} in a term, of the metrics that the result has."""
    found = set()
    head, _, tail = term.partition("{x}")
    for arm, metrics in as_dict(result["values"]).items():
        for metric in as_dict(metrics):
            whole = f"{arm}: {metric}"
            middle = whole[len(head) : len(whole) - len(tail)]
            if whole.startswith(head) and whole.endswith(tail) and len(whole) > len(head) + len(tail):
                try:
                    found.add(float(middle))
                except ValueError:
                    continue
    return sorted(found)


def _has(result: Mapping[str, Any], term: str) -> bool:
    """Whether the result has a number of a term, for some {x} where it has one."""
    return bool(_places(result, term)) if "{x}" in term else point(result, term) is not None


def _effects(unit: str, criteria: list[dict[str, Any]]) -> Effects:
    """The differences of one unit on one axis, each with the interval that decided; right of 0 the claim holds."""
    rows = []
    for one in criteria:
        numbers = (math.nan if one[key] is None else float(one[key]) for key in ("mean", "low", "high"))
        margin = one["by"] or one["tolerance"] or one["within"]
        marks = (-margin,) if one["tolerance"] else (-margin, margin)
        rows.append(Effect(one["text"], *numbers, marks, effect(one), COLOURS.get(one["outcome"], "#777777")))
    return Effects(unit, "", tuple(rows), f"{unit or 'difference'}: against the claim < 0 < for the claim")
