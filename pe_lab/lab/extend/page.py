"""The page of an extension: its answer, the arms with intervals, numbers by length, and what was compared before."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pe_lab.lab.extend.answer import Answer, answer_rows
from pe_lab.lab.extend.arms import ExtensionArm
from pe_lab.lab.extend.methods import METHODS
from pe_lab.lab.extend.numbers import MEASURES, Numbers, in_order, interval, measure_of
from pe_lab.lab.extend.screening import Screening, text_rows
from pe_lab.page.charts import line_charts
from pe_lab.page.markup import Markup, element, folded, note
from pe_lab.page.stylesheet import CSS, SCRIPT
from pe_lab.page.tables import plain_table
from pe_lab.results.figures import Line, LineCharts
from pe_lab.results.formatting import count
from pe_lab.results.table import TextTable

SHOWN = 6  # methods without training in a chart


def html_page(answer: Answer, screening: Screening, checkpoint: str, commands: Sequence[str]) -> str:
    """The page as one HTML document that refers to nothing outside itself.

    Args:
      commands: that repeat its parts by hand.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"A longer context for {checkpoint}"),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(CSS)),
    )
    about = [element("div", element("dt", name), element("dd", value)) for name, value in _about(answer)]
    top = element(
        "header",
        element("p", f"pe_lab extend · {checkpoint}", class_="kicker"),
        element("h1", answer.sentence()),
        element("dl", about, class_="summary"),
    )
    main = element(
        "main", _trained(answer), _screened(screening), _how_to_read(answer), folded("Commands", _commands(commands))
    )
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    footer = element("footer", f"Made by pe_lab.extend on {when}.")
    script = element("script", Markup(SCRIPT))
    return f"<!doctype html>\n{element('html', head, element('body', top, main, footer, script), lang='en')}\n"


def _about(answer: Answer) -> list[tuple[str, str]]:
    arm = answer.best.arm
    found = [
        ("from", f"{answer.training_length:,} tokens"),
        ("to", f"{answer.target:,} tokens"),
        ("FLOPs an arm", f"{arm.flops:.2e}"),
        ("seeds", str(answer.seeds)),
    ]
    if not math.isnan(answer.correlation):
        found.append(("screening against training, rank correlation", f"{answer.correlation:.2f}"))
    return found


def _trained(answer: Answer) -> Markup:
    header, rows = answer_rows(answer)
    units = "seeds" if answer.seeds > 1 else "documents"
    caption = f"95% intervals over {units}; lower is better of losses, in nats."
    before = {"before training": answer.before}
    charts = curves(
        {one.arm.chosen.name: one.numbers for one in answer.trained} | before, answer.training_length, caption
    )
    measured = {at.measure for one in answer.trained for at in one.numbers}
    missing = "Not measured: RULER and realistic tasks. --suites=ruler,lm_eval:TASK,... adds them, in hours."
    return element(
        "section",
        element("h2", "After training, at equal FLOPs"),
        plain_table("Arms", header, rows, words=header[:1]),
        *([] if measured - MEASURES.keys() else [note(missing)]),
        element("div", [line_charts(chart) for chart in charts], class_="grid", style="margin-top:18px"),
    )


def _screened(screening: Screening) -> Markup:
    header, rows = text_rows(screening)
    best = screening.ranked()[:SHOWN]
    rest = [key for key in ("unchanged", "yarn") if key in screening.numbers and key not in best]
    named = {METHODS[key].name: screening.numbers[key] for key in (*best, *rest)}
    caption = f"The best {len(best)} by score, unchanged and YaRN; the table has intervals of their differences."
    charts = curves(named, screening.trained, caption, intervals=False)
    return element(
        "section",
        element("h2", "Without training"),
        note("Every method has the logit scale β that fits held-out text best at that length."),
        plain_table("Methods", header, rows, words=header[:1]),
        element("div", [line_charts(chart) for chart in charts], class_="grid", style="margin-top:18px"),
    )


def curves(
    named: Mapping[str, Numbers], training_length: int, caption: str, intervals: bool = True
) -> Iterator[LineCharts]:
    """A chart of each measure by length, perhaps with intervals over units."""
    for name in dict.fromkeys(at.measure for at in in_order(named.values())):
        measure, lines = measure_of(name), []
        for label, numbers in named.items():
            at = sorted((at for at in numbers if at.measure == name), key=lambda at: at.length)
            if len(at) < 2:
                continue
            ends = np.array([interval(numbers[one]) for one in at])
            x = np.array([one.length for one in at], np.float64)
            y = np.array([numbers[one].mean for one in at])
            lines.append(Line(label, x, y, *(ends.T if intervals else ())))
        if lines:
            share = not measure.lower
            yield LineCharts(
                name,
                measure.title,
                caption,
                (("", tuple(lines)),),
                x_label="position" if name == "position" else "tokens of the sequence",
                y_label=measure.unit or "share",
                log_x=True,
                marks=((float(training_length), "training length"),),
                x_unit="length",
                y_unit="share" if share else "",
                y_limits=(0.0, 1.0) if share else None,
            )


def _how_to_read(answer: Answer) -> Markup:
    terms = " and ".join(measure_of(at.measure).title for at in answer.terms)
    rows = [
        (
            "score",
            f"The sum of {terms}, at {answer.target:,} tokens, in nats, by which methods are ranked. Each is the mean "
            "over documents and windows, or over seeds; columns are means over tokens.",
        ),
        (
            "against the best",
            "The score less that of the best arm. The answer corrects for the number of arms (Holm), so that an arm "
            "whose interval hardly leaves out 0 may be one that cannot be distinguished.",
        ),
        (
            "loss on far tokens",
            "On tokens of long held-out documents whose loss falls by more than 2 nats, to less than 2, when the "
            "checkpoint as it was reads its training length before them, and not a quarter of that (LongPPL's).",
        ),
        ("loss on text", "On all tokens of these documents; by position, of the longest sequences that were measured."),
        ("price", "The loss on text at the training length, less that of the checkpoint as it was."),
        (
            "FLOPs",
            "Of all steps, visible keys alone. An arm that reads shorter windows reads more tokens; one whose table "
            "was searched has the search's FLOPs less, and one with a teacher those of its forward passes.",
        ),
        *((METHODS[one.arm.key].name, METHODS[one.arm.key].about) for one in answer.trained),
    ]
    return folded("How to read this", plain_table("Terms", ("term", "meaning"), rows))


def _commands(commands: Sequence[str]) -> Markup:
    return element("div", [element("pre", line, class_="command") for line in commands])


def markdown(answer: Answer, screening: Screening) -> str:
    """The answer and both tables as Markdown."""
    parts = [
        answer.sentence(),
        "",
        _table(*answer_rows(answer)),
        "",
        "Without training:",
        "",
        _table(*text_rows(screening)),
    ]
    return "\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return TextTable("", tuple(header), tuple(map(tuple, rows))).markdown


def plan_rows(arms: Sequence[ExtensionArm]) -> tuple[list[str], list[list[str]]]:
    """The arms before they are trained, as texts."""
    header = ["arm", "window", "windows a step", "steps", "tokens", "rate", "FLOPs", "of which before"]
    rows = []
    for arm in arms:
        rows.append(
            [arm.chosen.name, f"{arm.length:,}", f"{arm.windows:,}", f"{arm.steps:,}", count(arm.tokens)]
            + [f"{arm.rate:g}", f"{arm.flops:.2e}", f"{arm.before:.2e}" if arm.before else ""]
        )
    return header, rows
