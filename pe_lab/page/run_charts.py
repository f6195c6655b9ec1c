"""The charts of one run: its losses, what the methods do with length, position and distance, and the
frequencies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from pe_lab.analysis.run_files import Phase, Run, as_dict, as_list, number
from pe_lab.analysis.scores import Column, Table, exp
from pe_lab.analysis.variants import STYLES, Style, is_dropped
from pe_lab.errors import UserError
from pe_lab.page.charts import Axis, Mark, Point, Series, decimate, line_chart, smooth
from pe_lab.page.markup import Markup, element
from pe_lab.results.formatting import Number, count, percent, times

INK = Style("ink", None, 2.0)


def encoding_name(phase: Phase) -> str:
    """The name of a phase's encoding (of its first layers): rope, nope, ..."""
    encoding = phase.encodings[0].get("encoding") if phase.encodings else ""
    name = as_dict(encoding).get("kind", encoding)
    return re.split(r"[^a-z_]", str(name).lower(), maxsplit=1)[0]


def phase_style(run: Run, phase: Phase) -> Style:
    """A phase has the colour of the model it makes: grey while it rotates, green once dropped, orange if it
    never did."""
    before = run.phases[: run.phases.index(phase)]
    rotates = encoding_name(phase) != "nope"
    dropped = not rotates and (any(encoding_name(p) != "nope" for p in before) or len(lineage(phase)) > 1)
    return STYLES["RoPE" if rotates else "DroPE paper beta" if dropped else "NoPE paper beta"]


def lineage(phase: Phase) -> list[dict]:
    """The checkpoints a phase descends from, oldest first."""
    return [row for row in as_list(phase.info.get("lineage")) if isinstance(row, dict)]


def offsets(run: Run) -> dict[str, float]:
    """Tokens read before each phase. Phases that count on from their predecessor's total have none."""
    result, total = {}, 0.0
    for phase in run.phases:
        points = phase.series("loss") or phase.series("validation_loss")
        counts_on = bool(points) and points[0][0] > total > 0
        result[phase.name] = 0.0 if counts_on else total
        total = (points[-1][0] if points else 0.0) + result[phase.name] if points else total
    return result


def moved(points: Sequence[Point], by: Number) -> list[Point]:
    """Points shifted along x."""
    return [(x + by, y) for x, y in points]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A running mean wide enough to read, narrow enough to keep the jump at a drop."""
    return decimate(smooth(points, max(1, len(points) // 60)), 160)


def token_axis(run: Run) -> Axis:
    """Training tokens, or steps for logs without tokens."""
    known = any(number(row, "tokens") is not None for p in run.phases for row in p.metrics[:1]) or any(
        number(phase.info, "tokens_per_step") for phase in run.phases
    )
    return Axis("training tokens" if known else "training steps", show=count)


def loss_chart(run: Run) -> Markup:
    """Training and validation loss of all phases on one axis, the borders between phases marked."""
    shift = offsets(run)
    series, marks, validation = [], [], []
    used: set[Style] = set()
    for phase in run.phases:
        points = moved(phase.series("loss"), shift[phase.name])
        validation += moved(phase.series("validation_loss"), shift[phase.name])
        if not points:
            continue
        style = phase_style(run, phase)
        if style in used:  # a later phase of the same kind
            style = Style(f"extra-{len(used) % 4 + 1}", style.dash, style.width)
        used.add(style)
        if series:
            marks.append(Mark(points[0][0], f"{phase.name} starts"))
        if len(points) > 40:
            series.append(Series(phase.name, decimate(points), style, faint=True))
        series.append(Series(phase.name, smoothed(points) if len(points) > 40 else points, style))
    if validation:
        series.append(Series("validation", validation, INK, line=False))
    y = Axis("loss (nats per token)")
    caption = "Thin: every logged step. Thick: running mean. Dots: loss on held-out text." + jump(run)
    return line_chart("Loss over training", series, token_axis(run), y, marks, caption)


def jump(run: Run) -> str:
    """What the loss does where a phase with another encoding begins."""
    sentences = []
    for before, after in zip(run.phases, run.phases[1:], strict=False):
        old, new = before.series("loss"), after.series("loss")
        if not old or not new or encoding_name(before) == encoding_name(after):
            continue
        level = sum(value for _, value in old[-20:]) / len(old[-20:])
        peak = max(value for _, value in new[:10])
        sentence = f" Where {after.name} starts, the loss jumps from {level:.2f} to {peak:.2f}"
        start = after.series("loss")[0][0]
        window = smooth(new, min(20, len(new)))
        back = next((x - start for x, value in window[1:] if value <= level), None)
        ending = f" and is back within {count(back)} tokens." if back else "; the old level was not reached again."
        sentences.append(sentence + ending if peak > level else f" At {after.name} the loss does not jump.")
    return "".join(sentences)


def source_losses(run: Run) -> Markup:
    """Validation loss by held-out source, where a run logged several."""
    shift, found = offsets(run), {}
    for phase in run.phases:
        keys = dict.fromkeys(key for row in phase.metrics for key in row if key.startswith("validation_loss/"))
        for key in keys:
            name = key.removeprefix("validation_loss/")
            found.setdefault(name, []).extend(moved(phase.series(key), shift[phase.name]))
    if len(found) < 2:
        return Markup("")
    colours = ("ntk", "nope", "extra-1", "extra-3", "yarn", "pi")
    series = [
        Series(name, points, Style(colours[i % len(colours)]), markers=len(points) < 60)
        for i, (name, points) in enumerate(found.items())
    ]
    marks = [Mark(shift[phase.name], f"{phase.name} starts") for phase in run.phases[1:] if shift[phase.name]]
    return line_chart("Validation loss by source", series, token_axis(run), Axis("loss (nats per token)"), marks)


def length_chart(table: Table, styles: Mapping[str, Style]) -> Markup:
    """A table's values against the length factor."""
    factors = [column.key for column in table.columns]
    if len(factors) < 2 or min(factors) <= 0:
        return Markup("")
    multiples = all(column.factor is not None for column in table.columns)
    series = [
        Series(
            label,
            [(c.key, cell.value) for c in table.columns if (cell := table.cell(label, c))],
            styles.get(label, INK),
            markers=True,
        )
        for label in table.rows
    ]
    x = Axis(
        "text length / training length" if multiples else "tokens",
        True,
        times if multiples else count,
        factors,
    )
    accuracy = any("accuracy" in cell.row for cell in table.cells.values())
    name = {"needles": "Needle accuracy", "perplexity": "Perplexity"}.get(table.suite, table.suite)
    top = max((cell.value for cell in table.cells.values()), default=1.0)
    y = (
        Axis("accuracy", show=percent, domain=(0.0, min(1.0, max(top * 1.12, 0.1))))
        if accuracy
        else Axis("perplexity (log scale)" if table.suite == "perplexity" else "score", table.suite == "perplexity")
    )
    marks = [Mark(1.0, "trained")] if multiples and 1.0 in factors and min(factors) < 1 else []
    return line_chart(f"{name} against length", series, x, y, marks, size="half")


def position_chart(
    run: Run, table: Table, column: Column, styles: Mapping[str, Style], size: str, caption: str = ""
) -> Markup:
    """Perplexity at each position of texts of one length: where in the text a method goes wrong."""
    series = []
    for label, cell in table.column(column).items():
        points = binned(cell.row.get("position_edges"), cell.row.get("nll_by_position"))
        series.append(Series(label, [(x, exp(min(y, 50.0))) for x, y in points], styles.get(label, INK)))
    marks = [Mark(float(run.training_length), "training length")] if run.training_length else []
    title = f"Perplexity by position, texts of {length_words(column)}"
    x = Axis("position in the text (tokens, log scale)", True, lambda v: f"{v:,.0f}", powers(series))
    return line_chart(title, series, x, Axis("perplexity (log scale)", True), inside(marks, series), caption, size)


def distance_chart(
    run: Run, table: Table, column: Column, styles: Mapping[str, Style], size: str, caption: str = ""
) -> Markup:
    """Needle accuracy by the distance between a fact and the question about it."""
    series = []
    for label, cell in table.column(column).items():
        by = as_dict(cell.row.get("accuracy_by_distance"))
        asked = as_list(by.get("count"))
        points = binned(by.get("edges"), by.get("accuracy"), [n if isinstance(n, int | float) else 0 for n in asked])
        series.append(Series(label, points, styles.get(label, INK), markers=True))
    marks = [Mark(float(run.training_length), "training length")] if run.training_length else []
    title = f"Needle accuracy by distance, texts of {length_words(column)}"
    x = Axis("tokens from fact to question (log scale)", True, lambda v: f"{v:,.0f}", powers(series))
    top = max((y for s in series for _, y in s.points), default=1.0)
    y = Axis("accuracy", show=percent, domain=(0.0, min(1.0, max(1.12 * top, 0.1))))
    return line_chart(title, series, x, y, inside(marks, series), caption, size)


def binned(edges: object, values: object, counts: Sequence[Number] | None = None) -> list[Point]:
    """(middle of the bin, value) for bins that have a value, and, if counts are given, something in them."""
    edges, values = as_list(edges), as_list(values)
    if len(edges) != len(values) + 1:
        return []
    points = []
    for index, value in enumerate(values):
        empty = counts is not None and len(counts) == len(values) and not counts[index]
        ends = [number({"v": v}, "v") for v in (edges[index], edges[index + 1], value)]
        if not empty and None not in ends:
            points.append((max((ends[0] + ends[1]) / 2, 0.5), ends[2]))
    return points


def inside(marks: Sequence[Mark], series: Sequence[Series]) -> list[Mark]:
    """The marks that lie within the data."""
    xs = [x for s in series for x, _ in s.points]
    return [mark for mark in marks if xs and min(xs) <= mark.x <= max(xs)]


def powers(series: Sequence[Series]) -> list[Number] | None:
    """Powers of two across the data, as ticks for positions."""
    xs = [x for s in series for x, _ in s.points if x > 0]
    if not xs:
        return None
    ticks = [2.0**e for e in range(math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs))) + 1)]
    return ticks[:: max(1, math.ceil(len(ticks) / 11))]


def length_words(column: Column) -> str:
    """`8× the training length (512 tokens)`."""
    tokens = f"{column.length:,} tokens" if column.length else ""
    if column.factor is None:
        return tokens
    return f"{times(column.factor)} the training length" + (f" ({tokens})" if tokens else "")


def rotation_of(run: Run) -> tuple[float, int, int] | None:
    """(base, head_dim, training length) of the run's first rotary phase, or None."""
    model = as_dict(run.config.get("model"))
    heads, width = number(model, "heads"), number(model, "d_model")
    head_dim = number(model, "head_dim") or (width // heads if heads and width else None)
    for phase in run.phases:
        for row in phase.encodings:
            encoding = row.get("encoding")
            described = as_dict(encoding)
            name = str(described.get("kind", encoding)).lower()
            if name.startswith("rope") and head_dim and phase.length:
                found = re.search(r"base=([-+.\deE]+)", str(encoding))
                base = number(described, "base") or (float(found.group(1)) if found else 10000.0)
                return base, int(head_dim), phase.length
    return None


def frequency_charts(run: Run, factors: Sequence[Number]) -> Markup:
    """What PI, NTK and YaRN do to each frequency, one panel a factor; "" for a run that does not rotate."""
    rotation = rotation_of(run)
    wanted = [factor for factor in factors if factor > 1][:6] or [2.0, 4.0, 8.0]
    if rotation is None:
        return Markup("")
    base, head_dim, length = rotation
    from pe_lab.positional import (
        NTK,
        PI,
        Rope,
        Yarn,
        frequencies,
    )  # jax is slow to import; nothing else here needs it

    try:
        plain, _ = frequencies(Rope(base=base), head_dim)
        panels = []
        for factor in wanted:
            scalings = {"PI": PI(factor), "NTK": NTK(factor), "YaRN": Yarn(factor, original_length=length)}
            ratios = {
                name: np.asarray(frequencies(Rope(base=base, scaling=scaling), head_dim)[0]) / np.asarray(plain)
                for name, scaling in scalings.items()
            }
            panels.append(frequency_panel(factor, np.asarray(plain), ratios, length, run))
    except UserError as error:
        return element("p", f"The frequencies cannot be drawn: {error}", class_="soft")
    return element("div", panels, class_="grid thirds")


def frequency_panel(
    factor: Number, plain: np.ndarray, ratios: Mapping[str, np.ndarray], length: int, run: Run
) -> Markup:
    """Relative frequency w'/w by pair at one factor; a mark where pairs stop completing a turn in
    training."""
    few = len(plain) <= 40
    series = [Series("RoPE", [(float(i), 1.0) for i in range(len(plain))], STYLES["RoPE"])]
    series += [
        Series(name, [(float(i), float(v)) for i, v in enumerate(ratio)], STYLES[name], markers=few)
        for name, ratio in ratios.items()
    ]
    if any(is_dropped(row) for rows in run.evaluation.values() for row in rows):
        series.append(Series("DroPE", [(float(i), 0.0) for i in range(len(plain))], STYLES["DroPE paper beta"]))
    fixed_freq = plain * length / (2 * math.pi)
    slow = next((index for index, turn in enumerate(fixed_freq) if turn < 1), None)
    marks = [Mark(slow - 0.5, "< 1 turn in training")] if slow else []
    return line_chart(
        f"Stretched {times(factor)}",
        series,
        Axis("pair of channels, fastest first", show=lambda v: f"{v:.0f}"),
        Axis(
            "frequency / trained frequency",
            show=lambda v: f"1/{factor:g}" if abs(v * factor - 1) < 1e-9 else f"{v:.2f}",
            domain=(-0.04, 1.17),
            ticks=sorted({0.0, 1 / factor, 0.5, 1.0}),
        ),
        marks,
        size="third",
    )
