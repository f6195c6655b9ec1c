"""The charts of one run: its losses, and its frequencies under each scaling."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pe_lab.analysis.runs import Phase, Run
from pe_lab.errors import UserError
from pe_lab.page.charts import Axis, Point, Series, decimate, legend, line_chart, smooth
from pe_lab.page.markup import Markup, element
from pe_lab.page.tables import plain_table
from pe_lab.page.variants import INK, STYLES, Style
from pe_lab.results.formatting import Number, count, times
from pe_lab.results.records import as_dict, number
from pe_lab.results.variants import is_dropped

LOSS = Axis("loss (nats per token)")
# Of several runs, and of several sources.
RUN_COLOURS = ("ntk", "nope", "drope", "yarn", "extra-1", "pi", "extra-3", "extra-4", "extra-2", "rope")
TIME_COLOURS = ("extra-1", "pi", "yarn", "drope", "ntk", "extra-2", "extra-3", "nope", "rope")
EVENTS = {"warn": "spike", "skip": "update skipped", "rewind": "rewound", "stop": "stopped"}
SOURCE_COLOURS = ("ntk", "nope", "extra-1", "extra-3", "yarn", "pi")


def encoding_text(encoding: object) -> str:
    """An encoding in one line, whether it was written as a text or as a mapping."""
    described = as_dict(encoding)
    if not described:
        return str(encoding or "unknown encoding")
    rest = ", ".join(f"{k}={v}" for k, v in described.items() if k != "kind" and v is not None)
    return f"{described.get('kind', '?')}({rest})" if rest else str(described.get("kind", "?"))


def encoding_name(phase: Phase) -> str:
    """The name of the encoding of a phase's first layers: rope, nope, ..."""
    described = encoding_text(phase.encodings[0].get("encoding") if phase.encodings else "")
    return re.split(r"[^a-z_]", described.lower(), maxsplit=1)[0]


def phase_style(run: Run, phase: Phase) -> Style:
    """The style of the model that a phase makes: grey if it rotates, green if it was dropped, else orange."""
    before = run.phases[: run.phases.index(phase)]
    if encoding_name(phase) != "nope":
        return STYLES["RoPE"]
    edits = [str(entry.get("what", "")) for entry in phase.lineage]
    dropped = any(encoding_name(p) != "nope" for p in before) or any(e == "drop" or "-> nope" in e for e in edits)
    return STYLES["DroPE paper beta" if dropped else "NoPE paper beta"]


def offsets(run: Run) -> dict[str, float]:
    """Tokens read before each phase; 0 for a phase that counts on from the total of the phase before it."""
    result, total = {}, 0.0
    for phase in run.phases:
        points = phase.series("loss") or phase.series("validation_loss")
        counts_on = bool(points) and points[0][0] > total > 0
        result[phase.name] = 0.0 if counts_on else total
        total = points[-1][0] + result[phase.name] if points else total
    return result


def curves(run: Run, key: str) -> list[list[Point]]:
    """The points of a logged number in each phase, against the tokens of the whole run."""
    shift = offsets(run)
    return [[(x + shift[phase.name], y) for x, y in phase.series(key)] for phase in run.phases]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A running mean that is wide enough to read and narrow enough to keep the jump at a drop."""
    return decimate(smooth(points, max(1, len(points) // 60)), 160)


def token_axis(run: Run) -> Axis:
    """Training tokens, or steps if the logs have no tokens."""
    logged = (record for phase in run.phases for record in phase.metrics[:1])
    known = any(number(record, "tokens") is not None for record in logged)
    known = known or any(number(phase.info, "tokens_per_step") for phase in run.phases)
    return Axis("training tokens" if known else "training steps", show=count)


def loss_chart(run: Run) -> Markup:
    """Training and validation loss of all phases on one axis, with marks where phases begin."""
    series, marks = [], []
    used: set[Style] = set()
    for phase, points in zip(run.phases, curves(run, "loss"), strict=True):
        if not points:
            continue
        style = phase_style(run, phase)
        if style in used:  # a later phase of the same kind
            style = Style(f"extra-{len(used) % 4 + 1}", style.dash, style.width)
        used.add(style)
        if series:
            marks.append((points[0][0], f"{phase.name} starts"))
        if len(points) > 40:
            series.append(Series(phase.name, decimate(points), style, faint=True))
        series.append(Series(phase.name, smoothed(points) if len(points) > 40 else points, style))
    marks += _event_marks(run)
    if validation := [point for points in curves(run, "validation_loss") for point in points]:
        series.append(Series("validation", validation, INK, line=False))
    caption = "Thin: every logged step. Thick: running mean. Dots: loss on held-out text." + _jumps(run)
    return line_chart("Loss over training", series, token_axis(run), LOSS, marks, caption)


def _event_marks(run: Run) -> list[tuple[float, str]]:
    """A mark for each event, the first of each kind with its name; the last forty, if there are more."""
    shift, marks, named = offsets(run), [], set()
    for phase in run.phases:
        for event in phase.events:
            kind = str(event["event"])
            at = number(event, "tokens") or number(event, "step") or 0.0
            marks.append((at + shift[phase.name], "" if kind in named else EVENTS.get(kind, kind)))
            named.add(kind)
    return marks[-40:]


def event_table(run: Run) -> Markup:
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


def time_chart(run: Run) -> Markup:
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
    return element(
        "figure",
        element("div", "Where the time went", class_="chart-title"),
        legend(names),
        element("svg", element("title", summary), *shapes, viewBox=size, role="img", aria_label=summary),
        element("figcaption", f"{found}. Productive are steps that were trained for the first time."),
        class_="chart",
    )


def duration(seconds: float) -> str:
    """`42 s`, `3.5 min` or `12.1 h`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _jumps(run: Run) -> str:
    """Sentences about the loss where a phase with another encoding begins."""
    sentences = []
    for before, after in zip(run.phases, run.phases[1:], strict=False):
        old, new = before.series("loss"), after.series("loss")
        if not old or not new or encoding_name(before) == encoding_name(after):
            continue
        level = sum(value for _, value in old[-20:]) / len(old[-20:])
        peak = max(value for _, value in new[:10])
        if peak <= level:
            sentences.append(f" At {after.name} the loss does not jump.")
            continue
        start, *window = smooth(new, min(20, len(new)))
        back = next((x - start[0] for x, value in window if value <= level), None)
        ending = f" and is back within {count(back)} tokens." if back else "; the old level was not reached again."
        sentences.append(f" Where {after.name} starts, the loss jumps from {level:.2f} to {peak:.2f}{ending}")
    return "".join(sentences)


def source_losses(run: Run) -> Markup:
    """Validation loss by held-out source; "" for fewer than two sources."""
    logged = dict.fromkeys(key for phase in run.phases for record in phase.metrics for key in record)
    keys = [key for key in logged if key.startswith("validation_loss/")]
    if len(keys) < 2:
        return Markup("")
    series = []
    for i, key in enumerate(keys):
        points = [point for points in curves(run, key) for point in points]
        style = Style(SOURCE_COLOURS[i % len(SOURCE_COLOURS)])
        series.append(Series(key.removeprefix("validation_loss/"), points, style, markers=len(points) < 60))
    shift = offsets(run)
    marks = [(shift[phase.name], f"{phase.name} starts") for phase in run.phases[1:] if shift[phase.name]]
    return line_chart("Validation loss by source", series, token_axis(run), LOSS, marks)


def loss_comparison(runs: Sequence[Run]) -> Markup:
    """The training losses of several runs, a running mean each."""
    series = []
    for index, run in enumerate(runs):
        # A mean across the border of two phases would flatten the jump there.
        points = [point for points in curves(run, "loss") for point in smoothed(points)]
        style = Style(RUN_COLOURS[index % len(RUN_COLOURS)], None if index < len(RUN_COLOURS) else "6 3")
        series.append(Series(run.name, points, style))
    return line_chart("Training loss of the runs (running mean)", series, token_axis(runs[0]), LOSS)


def rotation_of(run: Run) -> tuple[float, int, int] | None:
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


def frequency_charts(run: Run, factors: Sequence[Number], base: float, head_dim: int, length: int) -> Markup:
    """Each frequency under PI, NTK and YaRN, one panel for each factor."""
    stretched = [factor for factor in factors if factor > 1][:6] or [2.0, 4.0, 8.0]
    try:
        panels = [_frequency_panel(run, factor, base, head_dim, length) for factor in stretched]
    except UserError as error:
        return element("p", f"The frequencies cannot be drawn: {error}", class_="soft")
    return element("div", panels, class_="grid thirds")


def _frequency_panel(run: Run, factor: Number, base: float, head_dim: int, length: int) -> Markup:
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
