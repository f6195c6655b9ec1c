"""The figure of a claim: its numbers by length, with intervals over seeds, and the differences that decide."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from pe_lab.lab.claims.results import Point, described, effect, point
from pe_lab.lab.claims.verdict import CONFIRMED, EQUIVALENT, REFUTED, UNTESTABLE
from pe_lab.page.figure_style import OKABE_ITO, look, render
from pe_lab.results.records import as_dict, mappings

COLOURS = {CONFIRMED: "#009E73", REFUTED: "#D55E00", EQUIVALENT: "#0072B2"}


def draw(result: Mapping[str, Any], form: str) -> bytes:
    """The figure of a result as the bytes of a `png` or `svg` file."""
    from matplotlib.figure import Figure

    curves = {panel: as_dict(lines) for panel, lines in as_dict(result.get("curves")).items()}
    curves = {panel: lines for panel, lines in curves.items() if any(_has(result, term) for term in lines.values())}
    units: dict[str, list[dict[str, Any]]] = {}
    for one in mappings(result["criteria"]):
        units.setdefault(str(one["unit"]), []).append(one)
    heights = [0.3 * len(criteria) + 0.75 for criteria in units.values()]
    rows = -(-len(curves) // 2)
    with look():
        figure = Figure(figsize=(7, 2.7 * rows + sum(heights) + 0.3), layout="constrained")
        ratios = [2.7 * rows, sum(heights) + 0.3]
        parts = figure.subfigures(2, 1, height_ratios=ratios) if curves else (None, figure)
        if curves:
            panels = list(parts[0].subplots(rows, min(2, len(curves)), squeeze=False).flatten())
            for axis, (panel, lines) in zip(panels, curves.items(), strict=False):
                _draw_curves(axis, result, panel, lines)
            for empty in panels[len(curves) :]:
                empty.remove()
        axes = parts[1].subplots(len(units), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (unit, criteria) in zip(axes, units.items(), strict=True):
            _draw_differences(axis, criteria, unit)
        parts[1].suptitle(_verdict(result), fontsize=8)
        return render(figure, form)


def _verdict(result: Mapping[str, Any]) -> str:
    """The verdict, with the precondition that was not met."""
    unmet = [one for one in mappings(result["preconditions"]) if not one["met"]]
    why = f": not met: {unmet[0]['text']}; here {described(unmet[0])}" if result["verdict"] == UNTESTABLE else ""
    return textwrap.fill(f"{result['verdict']}{why}", 110)


def _draw_curves(axis: Any, result: Mapping[str, Any], panel: str, lines: Mapping[str, str]) -> None:
    """A line for each term against what stands for {x} in it, or a point for each term without {x}."""
    plain = {label: term for label, term in lines.items() if "{x}" not in term}
    for n, (label, term) in enumerate(one for one in lines.items() if "{x}" in one[1]):
        found = {x: at for x in _places(result, term) if (at := point(result, term.replace("{x}", f"{x:g}")))}
        if found:
            _errorbar(axis, list(found), list(found.values()), n, label)
    if plain:
        found = {label: at for label, term in plain.items() if (at := point(result, term))}
        for n, (x, at) in enumerate(enumerate(found.values())):
            _errorbar(axis, [x], [at], n, None)
        width = max(7, 56 // max(len(found), 1))
        axis.set_xticks(range(len(found)), [textwrap.fill(label, width) for label in found], fontsize=7)
        axis.set_xlim(-0.5, len(found) - 0.5)
    else:
        places = sorted({x for term in lines.values() for x in _places(result, term)})
        if places and 0 < 2 * places[0] < places[-1]:  # a layer's number may be 0
            axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{x:g}" for x in places])
        axis.minorticks_off()
        if "by length" in panel:
            axis.set_xlabel("length / training length", fontsize=8)
        elif "by layer" in panel:
            axis.set_xlabel("layer", fontsize=8)
        axis.legend(fontsize=6.5)
    if panel.startswith("needles found"):  # a share; intervals by Student's t may go beyond 0 and 1
        axis.set_ylim(-0.05, 1.05)
    axis.set_title(panel, fontsize=9)


def _errorbar(axis: Any, x: list[float], points: list[Point], n: int, label: str | None) -> None:
    bars = [0.0 if math.isnan(at.high) else at.high - at.mean for at in points]
    axis.errorbar(
        x,
        [at.mean for at in points],
        yerr=bars,
        label=label,
        color=OKABE_ITO[n % len(OKABE_ITO)],
        marker="os^DvP*"[n % 7],
        markersize=4,
        linewidth=1.2,
        capsize=2.5,
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


def _draw_differences(axis: Any, criteria: list[dict[str, Any]], unit: str) -> None:
    """The differences of one unit on one axis, each with the interval that decided; right of 0 the claim holds.

    Marks are the margins: at both ends of what counts as equal, and of how much better or worse counts.
    """
    for n, one in enumerate(reversed(criteria)):
        mean, low, high = (float("nan") if one[key] is None else float(one[key]) for key in ("mean", "low", "high"))
        colour = COLOURS.get(one["outcome"], "#777777")
        axis.plot([low, high], [n, n], color=colour, linewidth=2)
        axis.plot([mean], [n], "o", color=colour, markersize=4)
        margin = one["by"] or one["tolerance"] or one["within"]
        for mark in (-margin,) if one["tolerance"] else (-margin, margin):
            axis.plot([mark, mark], [n - 0.3, n + 0.3], color="#999999", linewidth=1)
        axis.text(1.02, n, effect(one), transform=axis.get_yaxis_transform(), fontsize=7, va="center", clip_on=False)
    axis.axvline(0, color="#444444", linewidth=0.8)
    axis.set_yticks(range(len(criteria)), [textwrap.fill(one["text"], 46) for one in reversed(criteria)], fontsize=6.5)
    axis.set_ylim(-0.7, len(criteria) - 0.3)
    axis.margins(x=0.08)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(f"{unit or 'difference'}: against the claim < 0 < for the claim", fontsize=7.5)
