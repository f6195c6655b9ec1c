"""What is shown of the results of claims: a figure of each, docs/claims.md, and one HTML page."""

from __future__ import annotations

import base64
import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pe_lab.lab.claims.equal_help import HELP
from pe_lab.lab.claims.history import changes
from pe_lab.lab.claims.power import POWER_HEADER, power_rows
from pe_lab.lab.claims.reruns import summary
from pe_lab.lab.claims.results import (
    FITS,
    changes_after_runs,
    described,
    effect,
    fitted,
    leading,
    outcome_text,
    point,
    verdict_text,
)
from pe_lab.lab.claims.values import MINUS
from pe_lab.lab.claims.verdict import CONFIRMED, EQUIVALENT, OPEN, REFUTED, UNTESTABLE
from pe_lab.page.figure_files import render_all
from pe_lab.page.markup import Markup, element, folded
from pe_lab.page.stylesheet import CSS
from pe_lab.page.tables import plain_table
from pe_lab.results.figures import Effect, Effects, Line, LineCharts
from pe_lab.results.formatting import count
from pe_lab.results.records import as_dict, mappings
from pe_lab.results.table import TextTable

# Of the two made parts of the page: the table at its top, and the sections below.
BEGIN, END = "<!-- made by `python -m pe_lab.claims --write`: do not edit below -->", "<!-- end of what is made -->"
TOP, TOP_END = "<!-- the papers' claims, made by `--write` -->", "<!-- end of the papers' claims -->"
# verdict: colour of the stylesheet
LOOKS = {CONFIRMED: "win", REFUTED: "loss", EQUIVALENT: "soft", OPEN: "soft", UNTESTABLE: "soft"}
MOST = 12  # claims in the table at the top
TOP_HEADER = ("claim", "in the paper's words", "paper", "asked of", "verdict", "effect, with its interval")
HEADER = ("sentence", "paper", "verdict", "what decided, with its interval", "size", "seeds", "minutes")


def table_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of texts for each result, under `HEADER`."""
    rows = []
    for result in results:
        one = leading(result)
        rows.append(
            [
                result["sentence"],
                result["paper"],
                result["verdict"],
                f"{one['text']}: {described(one)}",
                result["size"],
                str(len(result["seeds"])),
                f"{result['minutes']:.0f}",
            ]
        )
    return rows


def outcome_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The sentence, the number and the outcome of each criterion, then of each precondition."""
    stated = [*mappings(result["criteria"]), *mappings(result["preconditions"])]
    return [(one["text"], described(one), outcome_text(one)) for one in stated]


def fit_tables(result: Mapping[str, Any]) -> list[TextTable]:
    """What the claim fitted to its numbers: a table of single numbers, and one of each list of records."""
    fits = as_dict(result.get("fits"))
    if "error" in fits:
        return [TextTable("", ("not fitted, because",), ((str(fits["error"]),),))]
    rows = tuple(
        (name, at if isinstance(at, str) else effect({"mean": at.mean, "low": at.low, "high": at.high}, ".3g"))
        for name, at in fitted(result).items()
    )
    tables = [TextTable("", ("fitted to these numbers", "value [95% interval]"), rows)] if rows else []
    for name, listed in fits.items():
        records = mappings(listed) if isinstance(listed, list) else []
        if records:
            header = tuple(dict.fromkeys(key for one in records for key in one))
            tables.append(
                TextTable(name, header, tuple(tuple(_text(one.get(key)) for key in header) for one in records))
            )
    return tables


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def covered(result: Mapping[str, Any]) -> str:
    """What the intervals of a result cover, and the help that its arms have at test time."""
    covers = Counter(str(one.get("covers", "seeds alone")) for one in mappings(result["criteria"]))
    parts = [what if len(covers) == 1 else f"{what} ({n} of the criteria)" for what, n in covers.items()]
    return (
        f"Intervals cover {', '.join(parts)}. Help at test time: {HELP.get(str(result.get('help')), 'not recorded')}."
    )


def markdown(results: Sequence[Mapping[str, Any]], figures: str) -> str:
    """The generated part of docs/claims.md; `figures` is the directory of the figures, as the page links to it."""
    rows = [
        (f"[{result['claim']}](#{result['claim'].replace('_', '-')})", *row)
        for result, row in zip(results, table_rows(results), strict=True)
    ]
    return "\n".join([_markdown(("claim", *HEADER), rows), "", *(_section(result, figures) for result in results)])


def summary_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The table at the top of docs/claims.md: the papers' claims in their own words, at most `MOST`."""
    rows = []
    for result in [one for one in results if one["quote"]][:MOST]:
        one, name = leading(result), result["claim"].replace("_", "-")
        arms = as_dict(result["arms"]).values()
        largest, tokens = (max(float(about[key] or 0) for about in arms) for key in ("parameters", "tokens"))
        asked = f"{count(largest)} parameters, {count(tokens)} tokens, {len(result['seeds'])} seeds"
        link = f"[{result['claim']}](#{name})"
        rows.append(
            (link, result["quote"], result["paper"], asked, result["verdict"], f"{one['text']}: {described(one)}")
        )
    return _markdown(TOP_HEADER, rows)


def _section(result: Mapping[str, Any], figures: str) -> str:
    name = result["claim"]
    lines = [f"## {name.replace('_', '-')}", "", f"**{result['sentence']}** ({result['paper']})", ""]
    if result["quote"]:
        lines += [f"> {result['quote']}", ""]
    lines += [f"Verdict at {result['size']} size: **{verdict_text(result)}**.", ""]
    if result["preconditions"]:
        rows = [
            (one["text"], f"`{one['rule']}`", described(one), "yes" if one["met"] else f"**{outcome_text(one)}**")
            for one in mappings(result["preconditions"])
        ]
        lines += [_markdown(("precondition", "rule", "measured [95% interval]", "met"), rows), ""]
    outcome = "outcome here, which says nothing about the claim" if result["verdict"] == UNTESTABLE else "outcome"
    rows = [
        (one["text"], f"`{one['rule']}`", described(one), outcome_text(one)) for one in mappings(result["criteria"])
    ]
    lines += [_markdown(("criterion", "rule", "difference [95% interval]", outcome), rows), ""]
    lines += [covered(result), "", summary(result), ""]
    lines += [_markdown(POWER_HEADER, power_rows(mappings(result.get("power")))), ""]
    for fit in fit_tables(result):
        lines += [f"{fit.title}:", ""] * bool(fit.title) + [fit.markdown, ""]
    lines += [f"![{name}]({figures}/{name}.png)", ""]
    rows = []
    for arm, about in as_dict(result["arms"]).items():
        paper = ", ".join(filter(None, [f"`{about['paper']}`" if about["paper"] else "–", about.get("paper_cost")]))
        cells = (
            arm,
            count(about["parameters"]),
            count(about["tokens"]),
            f"{about['flops']:.2g}",
            f"{about['seconds'] / 60:.1f}",
            paper,
        )
        rows.append(cells)
    lines.append(_markdown(("arm", "parameters", "tokens", "FLOPs", "minutes a seed", "at paper size"), rows))
    lines += ["", f"Command: `{result['command']}`", ""]
    if result["tried"]:
        lines += [" ".join(result["tried"].split()), ""]
    for same_runs, words in ((True, "the same runs"), (False, "the same recipe and seeds, of runs that may be others")):
        taken = {
            arm: about["claim"]
            for arm, about in as_dict(result.get("taken_from")).items()
            if about["same_runs"] == same_runs
        }
        if taken:
            of = ", ".join(f"`{arm}` of [{claim}](#{claim.replace('_', '-')})" for arm, claim in taken.items())
            lines += [f"Numbers of {words}, measured in another claim: {of}.", ""]
    if (times := changes_after_runs(result)) > 0:
        lines += [f"Changed after a run, {times} time{'s' * (times > 1)}:", ""]
        for one in mappings(result["history"]):
            why = f" ({one['why']})" if one.get("why") else ""
            # What was changed; of a result from before this was kept, and of the first one, the rule.
            what = changes(one) or one["rule"]
            lines.append(f"- {one['time'][:10]}{why}, then {one['verdict']}: {'; '.join(what)}")
        lines.append("")
    return "\n".join(lines)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return TextTable("", tuple(header), tuple(map(tuple, rows))).markdown


def with_generated(page: str, results: Sequence[Mapping[str, Any]], figures: str) -> str:
    """A page with both of its made parts anew; one that has no marks gets them after its title and at its end."""
    if TOP not in page:
        title, _, rest = page.partition("\n")
        page = f"{title}\n\n{TOP}\n{TOP_END}\n{rest}"
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n{BEGIN}\n{END}\n"
    for begin, end, made in ((TOP, TOP_END, summary_table(results)), (BEGIN, END, markdown(results, figures))):
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{made.strip()}\n\n{end}{rest.partition(end)[2]}"
    return page


def html_page(results: Sequence[Mapping[str, Any]]) -> str:
    """All results as one HTML document that refers to nothing outside itself."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", "pe_lab: the claims"),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(CSS)),
    )
    counts = Counter(result["verdict"] for result in results)
    counted = [element("div", element("dt", name), element("dd", str(counts[name]))) for name in LOOKS]
    top = element(
        "header",
        element("p", "pe_lab claim", class_="kicker"),
        element("h1", "The claims of the papers, tested"),
        element("dl", counted, class_="summary"),
    )
    rows = []
    for result, (sentence, paper, verdict, *rest) in zip(results, table_rows(results), strict=True):
        link = element("a", sentence, href=f"#{result['claim']}", style="display:block;min-width:36ch")
        rows.append([link, paper, _coloured(verdict), *rest])
    verdicts = plain_table("Verdicts", HEADER, rows, words=HEADER[:5])
    main = element("main", element("h2", "Verdicts"), verdicts, *map(_html_section, results))
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    footer = element("footer", f"Made by pe_lab.claims on {when}.")
    return f"<!doctype html>\n{element('html', head, element('body', top, main, footer), lang='en')}\n"


def _coloured(verdict: str, words: str = "") -> Markup:
    return element("b", words or verdict, style=f"color:var(--{LOOKS.get(verdict, 'soft')})")


def _html_section(result: Mapping[str, Any]) -> Markup:
    picture = base64.b64encode(draw(result, "png")).decode()
    rows = [
        (text, found, _coloured(outcome.partition(":")[0], outcome)) for text, found, outcome in outcome_rows(result)
    ]
    stated = [*mappings(result["criteria"]), *mappings(result["preconditions"])]
    rules = element("ul", *(element("li", element("code", one["rule"])) for one in stated))
    seeds = len(result["seeds"])
    scope = f"{seeds} seed{'s' * (seeds != 1)} at {result['size']} size"
    about = f"{result['claim']} · {result['paper']} · {scope} · "
    header = ("criterion or precondition", "difference, with its interval", "outcome")
    tried = " ".join(str(result["tried"]).split())
    return element(
        "section",
        element("h2", result["sentence"]),
        element("p", about, _coloured(result["verdict"], verdict_text(result)), class_="kicker"),
        element("img", src=f"data:image/png;base64,{picture}", alt=result["sentence"], style="max-width:100%"),
        element("blockquote", result["quote"]) if result["quote"] else None,
        plain_table(result["sentence"], header, rows),
        element("p", covered(result), " ", summary(result)),
        *(plain_table(fit.title or "Fitted", fit.header, fit.rows, words=fit.header[:1]) for fit in fit_tables(result)),
        folded("Power", plain_table("Power", POWER_HEADER, power_rows(mappings(result.get("power"))))),
        element("pre", result["command"], class_="command"),
        element("p", tried) if tried else None,
        folded("The rule", rules),
        id=result["claim"],
    )


# ---------------------------------------------------------------------------------------------------------------------
# The figure: the numbers by length, with intervals over seeds, and the differences that decide

COLOURS = {CONFIRMED: "#00805c", REFUTED: "#c04a00", EQUIVALENT: "#1f7cbd"}


def draw(result: Mapping[str, Any], form: str) -> bytes:
    """The figure of a result as the bytes of a `png` or `svg` file."""
    curves = {panel: as_dict(lines) for panel, lines in as_dict(result.get("curves")).items()}
    curves = {panel: lines for panel, lines in curves.items() if any(_has(result, term) for term in lines.values())}
    units: dict[str, list[dict[str, Any]]] = {}
    for one in mappings(result["criteria"]):
        units.setdefault(str(one["unit"]), []).append(one)
    figures = _on_shared_axes([_curves(result, panel, lines) for panel, lines in curves.items()])
    effects = [_effects(unit, criteria) for unit, criteria in units.items()]
    return render_all([figures, *([one] for one in effects)], form, verdict_text(result))


def _on_shared_axes(figures: Sequence[LineCharts]) -> list[LineCharts]:
    """Charts whose numbers have one unit, nats, with one upward axis; that of needles found is from 0 to 1 already."""
    in_nats = ["nats" in one.name and one.y_limits is None for one in figures]
    ends = [
        part[np.isfinite(part)]
        for one, shared in zip(figures, in_nats, strict=True)
        if shared
        for _, lines in one.panels
        for line in lines
        for part in (line.y, line.low, line.high)
        if part is not None
    ]
    found = np.concatenate(ends) if ends else np.zeros(0)
    if sum(in_nats) < 2 or not len(found):
        return list(figures)
    low, high = float(found.min()), float(found.max())
    margin = 0.05 * (high - low) or 1.0
    limits = low - margin, high + margin
    return [replace(one, y_limits=limits) if shared else one for one, shared in zip(figures, in_nats, strict=True)]


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
    term = term.partition(MINUS)[0]  # of a difference: both have the same places
    head, _, tail = term.partition("{x}")
    known = [f"{arm}: {metric}" for arm, metrics in as_dict(result["values"]).items() for metric in as_dict(metrics)]
    for whole in [*known, *(f"{FITS}{path}" for path in fitted(result))]:
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
