"""The charts of one run beside its losses: its events, where its time went, and its frequencies under each scaling."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pe_lab.errors import UserError
from pe_lab.page.chart_parts import Axis, Series, file_parts, legend
from pe_lab.page.charts import line_chart
from pe_lab.page.loss_charts import EVENTS
from pe_lab.page.markup import Markup, element
from pe_lab.page.tables import plain_table
from pe_lab.page.variants import STYLES, Style
from pe_lab.results.comparison import encoding_text
from pe_lab.results.formatting import Number, count, times
from pe_lab.results.records import as_dict, number
from pe_lab.results.runs import RunFiles
from pe_lab.results.variants import is_dropped

TIME_COLOURS = ("extra-1", "pi", "yarn", "drope", "ntk", "extra-2", "extra-3", "nope", "rope")


def event_table(run: RunFiles) -> Markup:
    """The steps that were warned of, skipped or rewound; "" without any."""
    rows = []
    for phase in run.phases:
        for event in phase.events:
            at, before = as_dict(event.get("at")), as_dict(event.get("before"))
            batches = event.get("batches")
            rows.append(
                [
                    phase.name,
                    count(number(event, "step") or 0.0),
                    EVENTS.get(str(event["event"]), str(event["event"])),
                    *(_against(at.get(key), number(before, key)) for key in ("loss", "grad_norm")),
                    ", ".join(map(str, batches)) if isinstance(batches, list) else "–",
                ]
            )
    head = ("Phase", "Step", "What was done", "Loss (mean before)", "Gradient norm (mean before)", "Batches")
    if not rows:
        return Markup("")
    words = "What is in the batches that were left out is in spikes.jsonl of the phase."
    table = plain_table("Spikes, and losses that are not finite", head, rows[-100:], words=(head[0], head[2], head[5]))
    return element("div", element("p", words, class_="soft"), table)


def _against(value: object, mean: float | None) -> str:
    shown = f"{value:.4g}" if isinstance(value, int | float) else str(value)
    return f"{shown} ({mean:.4g})" if mean is not None else shown


def time_chart(run: RunFiles) -> Markup:
    """The time of a run by what it went to: a bar for each start, and one for their sum; "" without a ledger."""
    if not run.ledger:
        return Markup("")
    from pe_lab.training.ledger import BUCKETS, balance, whole_records  # jax is slow to import

    found = balance(whole_records(run.ledger))
    if not found.wall:
        return Markup("")
    colours = dict(zip(BUCKETS, TIME_COLOURS, strict=True))
    starts = list(enumerate(found.starts, 1))[-30:]
    longest = max(sum(seconds.values()) for _, seconds in starts)
    bars = [(f"start {n}", seconds, longest) for n, seconds in starts]
    if len(starts) > 1:
        bars.append(("all", found.seconds, found.wall))
    left, width, height = 64, 640, 22
    shapes = []
    for n, (name, seconds, whole) in enumerate(bars):
        x, y = float(left), n * height
        shapes.append(element("text", name, x=left - 8, y=y + 14, text_anchor="end"))
        for bucket in BUCKETS:
            if wide := width * seconds.get(bucket, 0.0) / whole:
                words = f"{bucket.replace('_', ' ')}: {duration(seconds[bucket])}"
                fill = f"var(--c-{colours[bucket]})"
                shapes.append(element("rect", element("title", words), x=x, y=y, width=wide, height=16, fill=fill))
                x += wide
        shapes.append(element("text", duration(sum(seconds.values())), x=x + 6, y=y + 14))
    used = [bucket for bucket in BUCKETS if found.seconds[bucket]]
    names = [Series(bucket.replace("_", " "), [], Style(colours[bucket]), line=False) for bucket in used]
    summary = f"Where the time of the run went. {found}."
    size = f"0 0 {left + width + 90} {len(bars) * height}"
    title, sides = "Where the time went", (left + width + 90, len(bars) * height)
    file = json.dumps(file_parts(title, names, sides))
    table = [["of", "went to", "seconds"]]
    table += [[name, bucket, f"{seconds.get(bucket, 0.0):.6g}"] for name, seconds, _ in bars for bucket in BUCKETS]
    about = {"viewBox": size, "role": "img", "aria_label": summary, "data_file": file}
    return element(
        "figure",
        element("div", title, class_="chart-title"),
        legend(names),
        element("svg", element("title", summary), *shapes, **about),
        element("figcaption", f"{found}. Productive are steps that were trained for the first time."),
        class_="chart",
        data_table=json.dumps(table),
    )


def duration(seconds: float) -> str:
    """`42 s`, `3.5 min` or `12.1 h`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def rotation_of(run: RunFiles) -> tuple[float, int, int] | None:
    """(base, head_dim, training length) of the run's first rotary phase; None without one."""
    model = as_dict(run.config.get("model"))
    heads, width = number(model, "heads"), number(model, "d_model")
    head_dim = number(model, "head_dim") or (width // heads if heads and width else None)
    for phase in run.phases:
        for record in phase.encodings:
            described = encoding_text(record.get("encoding"))
            if described.lower().startswith("rope") and head_dim and phase.length:
                found = re.search(r"base=([-+.\deE]+)", described)
                return float(found.group(1)) if found else 10000.0, int(head_dim), phase.length
    return None


def frequency_charts(run: RunFiles, factors: Sequence[Number], base: float, head_dim: int, length: int) -> Markup:
    """Each frequency under PI, NTK and YaRN, one panel for each factor."""
    stretched = [factor for factor in factors if factor > 1][:6] or [2.0, 4.0, 8.0]
    try:
        panels = [_frequency_panel(run, factor, base, head_dim, length) for factor in stretched]
    except UserError as error:
        return element("p", f"The frequencies cannot be drawn: {error}", class_="soft")
    return element("div", panels, class_="grid thirds")


def _frequency_panel(run: RunFiles, factor: Number, base: float, head_dim: int, length: int) -> Markup:
    """Relative frequency w'/w by pair at one factor, with a mark where pairs rotate less than once in training."""
    from pe_lab.analysis.frequencies import incomplete_pairs, scaling_curve  # jax is slow to import
    from pe_lab.positional import Rope, frequencies

    plain, _ = frequencies(Rope(base=base), head_dim)
    pairs = [float(i) for i in range(len(plain))]
    series = [Series("RoPE", [(i, 1.0) for i in pairs], STYLES["RoPE"])]
    for method in ("pi", "ntk", "yarn"):
        curve = scaling_curve(method, factor, head_dim, base, length)
        points = list(zip(pairs, curve.gamma, strict=True))
        series.append(Series(curve.label, points, STYLES[curve.label], markers=len(plain) <= 40))
    if any(is_dropped(record) for records in run.evaluation.values() for record in records):
        series.append(Series("DroPE", [(i, 0.0) for i in pairs], STYLES["DroPE paper beta"]))
    slow = incomplete_pairs(plain, length)
    marks = [(len(plain) - slow - 0.5, "< 1 rotation in training")] if 0 < slow < len(plain) else []
    y = Axis(
        "frequency / trained frequency",
        show=lambda value: f"1/{factor:g}" if abs(value * factor - 1) < 1e-9 else f"{value:.2f}",
        domain=(-0.04, 1.17),
        ticks=sorted({0.0, 1 / factor, 0.5, 1.0}),
    )
    x = Axis("pair of channels, fastest first", show=lambda value: f"{value:.0f}")
    return line_chart(f"Stretched {times(factor)}", series, x, y, marks, size="third")
