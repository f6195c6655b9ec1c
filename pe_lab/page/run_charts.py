"""The charts of a run's logs: losses by phase and by source, what encodings learned, time, events, and frequencies.

Those of a group of seeds have bands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pe_lab.errors import UserError
from pe_lab.evaluation.suites import SUITES
from pe_lab.page.charts import file_parts, legend, line_chart
from pe_lab.page.colours import INK, STYLES, Style, run_style
from pe_lab.page.markup import Markup, element
from pe_lab.page.plot import MOST, PlotAxis, Point, Series, decimate, smooth
from pe_lab.page.tables import plain_table
from pe_lab.results.comparison import encoding_text
from pe_lab.results.formatting import Number, count, percent, short_number, times
from pe_lab.results.groups import curve_over_seeds
from pe_lab.results.records import Record, as_dict, number
from pe_lab.results.runs import PhaseFiles, RunFiles
from pe_lab.results.statistics import Mean
from pe_lab.results.variants import is_dropped

LOSS = PlotAxis("loss (nats per token)")
EVENTS = {"warn": "spike", "skip": "update skipped", "rewind": "rewound", "stop": "stopped"}
# Entries of the lineage that change how a phase trains on, and begin like this.
CHANGES = ("continued", "prolonged")


def encoding_name(phase: PhaseFiles) -> str:
    """The name of the encoding of a phase's first layers: rope, nope, ..."""
    described = encoding_text(phase.encodings[0].get("encoding") if phase.encodings else "")
    return re.split(r"[^a-z_]", described.lower(), maxsplit=1)[0]


def phase_style(run: RunFiles, phase: PhaseFiles) -> Style:
    """The style of the model that a phase makes: grey if it rotates, green if it was dropped, else orange."""
    before = run.phases[: run.phases.index(phase)]
    if encoding_name(phase) != "nope":
        return STYLES["RoPE"]
    edits = [str(entry.get("what", "")) for entry in phase.lineage]
    dropped = any(encoding_name(p) != "nope" for p in before) or any(e == "drop" or "-> nope" in e for e in edits)
    return STYLES["DroPE paper beta" if dropped else "NoPE paper beta"]


def offsets(run: RunFiles) -> dict[str, float]:
    """Tokens read before each phase; 0 for a phase that counts on from the total of the phase before it."""
    result, total = {}, 0.0
    for phase in run.phases:
        result[phase.name] = 0.0 if 0 < total < _counted_before(phase) else total
        points = phase.series("loss") or phase.series("validation_loss")
        total = points[-1][0] + result[phase.name] if points else total
    return result


def _counted_before(phase: PhaseFiles) -> float:
    """The tokens of the first record of a phase, if its counts do not begin at 0 there; else 0.

    Counts that begin at 0 have read a step's tokens for each step, and reach their first record within an interval of
    logging, however long that is.
    """
    each = number(phase.info, "tokens_per_step") or 0.0
    counts = ((number(record, "step"), number(record, "tokens")) for record in phase.metrics)
    known = sorted({(step, tokens) for step, tokens in counts if step is not None and tokens is not None})
    if not known:
        return 0.0
    (step, tokens), *later = known
    ahead = tokens > 1.5 * step * each
    return tokens if ahead or (later and step > later[0][0] - step) else 0.0


def curves(run: RunFiles, key: str, smoothly: bool = False) -> list[list[tuple[float, Mean]]]:
    """A logged number in each phase against the tokens of the whole run: of one run, or the mean over the members.

    `smoothly`: a running mean of each run, within phases: across their border it would flatten the jump there.
    """
    of_members = []
    for member in run.members or (run,):
        shift = offsets(member)
        moved = {p.name: [(x + shift[p.name], y) for x, y in p.series(key)] for p in member.phases}
        of_members.append({name: running_mean(points) if smoothly else points for name, points in moved.items()})
    return [curve_over_seeds([by_phase.get(phase.name, []) for by_phase in of_members]) for phase in run.phases]


def running_mean(points: Sequence[Point]) -> Sequence[Point]:
    """A running mean that is wide enough to read and narrow enough to keep the jump at a drop."""
    return smooth(points, max(1, len(points) // 60)) if len(points) > 40 else points


def over_seeds(
    name: str, run: RunFiles, curve: Sequence[tuple[float, Mean]], style: Style, **more: bool
) -> Iterator[Series]:
    """The series of a curve: the mean of all members with its band, then that of those members that went on.

    A mean over fewer members is a series of its own, dashed, whose name says of how many.
    """
    of = max(len(run.members), 1)
    end = max((x for x, found in curve if found.count == of), default=float("-inf"))
    for n in range(of, 0, -1):
        part = [(x, found) for x, found in curve if found.count == n and (n == of or x > end)]
        if part:
            shown = decimate([(x, found.mean, (found.low, found.high)) for x, found in part], 160)
            label = name if n == of else f"{name}, {n} of {of} seeds"
            look = style if n == of else Style(style.colour, "2 3", style.width)
            points, ends = [(x, y) for x, y, _ in shown], [pair for *_, pair in shown]
            yield Series(label, points, look, intervals=ends if n > 1 else (), **more)


def logged(name: str, run: RunFiles, key: str, style: Style, **more: bool) -> Iterator[Series]:
    """The series of a number that is logged now and then, in all phases: few points are dots."""
    points = [point for points in curves(run, key) for point in points]
    return over_seeds(name, run, points, style, **{"markers": len(points) < 60, **more})


def band_words(run: RunFiles) -> str:
    """What the band of a group's curves is; "" of a single run."""
    of = len(run.members)
    if of < 2:
        return ""
    band = "range of the two" if of == 2 else "95% interval of Student's t over them"
    return f" Means over {of} seeds; band: the {band}."


def token_axis(run: RunFiles) -> PlotAxis:
    """Training tokens, or steps if the logs have no tokens."""
    first = (record for phase in run.phases for record in phase.metrics[:1])
    known = any(number(record, "tokens") is not None for record in first)
    known = known or any(number(phase.info, "tokens_per_step") for phase in run.phases)
    return PlotAxis("training tokens" if known else "training steps", show=count)


def loss_chart(run: RunFiles) -> Markup:
    """Training and validation loss of all phases on one axis, with marks where phases begin."""
    series: list[Series] = []
    used: set[Style] = set()
    raw, mean = curves(run, "loss"), curves(run, "loss", smoothly=True)
    for phase, points, smoothed in zip(run.phases, raw, mean, strict=True):
        if not points:
            continue
        style = phase_style(run, phase)
        if style in used:  # a later phase of the same kind
            style = Style(f"extra-{len(used) % 4 + 1}", style.dash, style.width)
        used.add(style)
        if len(points) > 40 and not run.members:
            every = decimate([(x, found.mean) for x, found in points])
            series.append(Series(phase.name, every, style, faint=True))
        series += over_seeds(phase.name, run, smoothed, style)
    marks = _phase_marks(run) + _event_marks(run) + _change_marks(run)
    series += logged("validation", run, "validation_loss", INK, line=False, markers=False)
    thin = "" if run.members else "Thin: every logged step. "
    words = f"{thin}Thick: running mean. Dots: loss on held-out text.{band_words(run)}{_jumps(run)}"
    return line_chart("Loss over training", series, token_axis(run), LOSS, marks, words)


def _phase_marks(run: RunFiles) -> list[tuple[float, str]]:
    """A mark at the first logged loss of each phase but the first."""
    losses = zip(run.phases, curves(run, "loss"), strict=True)
    return [(points[0][0], f"{phase.name} starts") for phase, points in losses if points][1:]


def _event_marks(run: RunFiles) -> list[tuple[float, str]]:
    """A mark for each event, the first of each kind with its name; the last forty, if there are more."""
    shift, marks, named = offsets(run), [], set()
    for phase in run.phases:
        for event in phase.events:
            kind = str(event["event"])
            at = number(event, "tokens") or number(event, "step") or 0.0
            marks.append((at + shift[phase.name], "" if kind in named else EVENTS.get(kind, kind)))
            named.add(kind)
    return marks[-40:]


def _change_marks(run: RunFiles) -> list[tuple[float, str]]:
    """A mark where a phase went on under another config: other steps, another batch size."""
    shift, marks = offsets(run), []
    for phase in run.phases:
        for entry in changes_of(phase):
            tokens = phase.tokens_at(number(entry, "step") or 0.0)
            if tokens is not None:
                marks.append((tokens + shift[phase.name], "changed" if not marks else ""))
    return marks


def changes_of(phase: PhaseFiles) -> list[Record]:
    """The entries of a phase's own lineage that tell of a change of its config, each once."""
    own = [entry for entry in phase.lineage if str(entry.get("what", "")).startswith(CHANGES)]
    mine = [e for e in own if f"/{phase.name}/" in f"/{e.get('path', '')}" or not e.get("path")]
    return list({(str(e.get("what")), number(e, "step")): e for e in mine}.values())


def _jumps(run: RunFiles) -> str:
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


def source_losses(run: RunFiles) -> Markup:
    """Validation loss by held-out source; "" for fewer than two sources."""
    keys = logged_keys(run, SOURCE)
    if len(keys) < 2:
        return Markup("")
    series = [one for i, key in enumerate(keys) for one in logged(key.removeprefix(SOURCE), run, key, run_style(i))]
    return line_chart(
        "Validation loss by source", series, token_axis(run), LOSS, _phase_marks(run), band_words(run).strip()
    )


SOURCE = "validation_loss/"
SUITES_BEGIN = "suite/"  # and then SUITE/LENGTH/SOURCE/VARIANT, as the training loop logs them
LEARNED = "learned/"  # and then ENCODING.PARAMETER/LAYER, as the training loop logs them


def learned_charts(run: RunFiles) -> Markup:
    """The learned values of encodings over training, a chart for each parameter and a line for each layer; "" without.

    Of many layers the lines that are shown first are spread evenly over the depth.
    """
    keys = logged_keys(run, LEARNED)
    layers: dict[str, list[int]] = {}
    for name in keys:
        parameter, _, layer = name.removeprefix(LEARNED).partition("/")
        if layer.isdigit():
            layers.setdefault(parameter, []).append(int(layer))
    charts, marks = [], [(at, "") for at, _ in _phase_marks(run)]
    for parameter, places in sorted(layers.items()):
        places.sort()
        series: list[Series] = []
        for i, n in enumerate(places):
            series += logged(f"layer {n}", run, f"{LEARNED}{parameter}/{n}", run_style(i))
        several = any(name.endswith(("/low", "/high")) and name.startswith(f"{LEARNED}{parameter}/") for name in keys)
        y = PlotAxis(f"{'mean' if several else 'value'} in a layer")
        spread = [places[round(i * (len(places) - 1) / (MOST - 1))] for i in range(MOST)]
        first = [f"layer {n}" for n in dict.fromkeys(spread)]
        title, words = f"Learned: {parameter}", band_words(run).strip()
        charts.append(line_chart(title, series, token_axis(run), y, marks, words, "half", first))
    return element("div", charts, class_="grid", style="margin-top:22px") if charts else Markup("")


def suite_charts(run: RunFiles) -> Markup:
    """What suites found while the run trained: a chart for each suite and source, a line for a length and variant."""
    lines: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    for name in logged_keys(run, SUITES_BEGIN):
        suite, length, source, variant, *_ = name.removeprefix(SUITES_BEGIN).split("/") + [""] * 3
        if suite in SUITES and length.isdigit():
            lines.setdefault((suite, source), []).append((int(length), variant, name))
    charts, marks = [], [(at, "") for at, _ in _phase_marks(run)]
    for (suite, source), named in lines.items():
        metric, series = SUITES[suite].metrics[0], list[Series]()
        for i, (length, variant, key) in enumerate(sorted(named)):
            series += logged(f"{length:,} {variant}".strip(), run, key, run_style(i))
        show = percent if metric.unit == "%" else short_number
        y = PlotAxis(metric.title, metric.interval == "log", show)
        title, words = f"{SUITES[suite].title} while it trained: {source}", band_words(run).strip()
        charts.append(line_chart(title, series, token_axis(run), y, marks, words, "half"))
    return element("div", charts, class_="grid", style="margin-top:22px") if charts else Markup("")


def logged_keys(run: RunFiles, prefix: str) -> list[str]:
    """The keys of metrics that begin so, in the order in which they were first logged."""
    keys = dict.fromkeys(key for phase in run.phases for record in phase.metrics for key in record)
    return [key for key in keys if key.startswith(prefix)]


def loss_comparison(runs: Sequence[RunFiles], key: str = "loss", title: str = "Training loss (running mean)") -> Markup:
    """One logged loss of several runs: a curve each, with a band for a group; "" if none logged it."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        points = [point for points in curves(run, key, smoothly=key == "loss") for point in points]
        few = key != "loss" and len(points) < 60
        series += over_seeds(run.name, run, points, run_style(index), markers=few)
    words = max((band_words(run) for run in runs), key=len, default="").strip()
    ends = {s.name: s.points[-1][1] for s in series if s.points}
    first = sorted(ends, key=lambda name: ends[name])
    return line_chart(title, series, token_axis(runs[0]), LOSS, caption=words, first=first)


# ---------------------------------------------------------------------------------------------------------------------
# Events, time and frequencies


TIME_COLOURS = ("extra-1", "pi", "yarn", "drope", "ntk", "extra-4", "extra-2", "extra-3", "nope", "rope")


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
    table = plain_table("Spikes, and losses that are not finite", head, rows[-100:], words=(head[0], head[2], head[5]))
    if not any(event["event"] in ("skip", "rewind") for phase in run.phases for event in phase.events):
        return table
    words = "What is in the batches that were left out is in spikes.jsonl of the phase."
    return element("div", element("p", words, class_="soft"), table)


def _against(value: object, mean: float | None) -> str:
    shown = f"{value:.4g}" if isinstance(value, int | float) else str(value)
    return f"{shown} ({mean:.4g})" if mean is not None else shown


def time_chart(run: RunFiles) -> Markup:
    """The time of a run by what it went to: a bar for each start, and one for their sum; "" without a ledger."""
    if not run.ledger:
        return Markup("")
    from pe_lab.storage.run_files import whole_records
    from pe_lab.training.ledger import BUCKETS, balance  # jax is slow to import

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
    y = PlotAxis(
        "frequency / trained frequency",
        show=lambda value: f"1/{factor:g}" if abs(value * factor - 1) < 1e-9 else f"{value:.2f}",
        domain=(-0.04, 1.17),
        ticks=sorted({0.0, 1 / factor, 0.5, 1.0}),
    )
    x = PlotAxis("pair of channels, fastest first", show=lambda value: f"{value:.0f}")
    return line_chart(f"Stretched {times(factor)}", series, x, y, marks, size="third")
