"""Tables as HTML: one builder, and the tables of scores, duels, fitted scales and checkpoints made with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pe_lab.evaluation.suites import AVERAGED
from pe_lab.page.colours import Style
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.variants import metric_name, suite_title, table_title, task_name
from pe_lab.results.formatting import percent, short_number, shortened
from pe_lab.results.records import Record, as_dict, number
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import averages, label_of, variants_of
from pe_lab.results.statistics import Z95
from pe_lab.results.table import Cell, Length, Table
from pe_lab.results.variants import is_dropped, is_unchanged
from pe_lab.results.verdict import Duel

STACKED = 8  # columns of a table that is stacked, at most: of more, it scrolls sideways
UNMEASURED = element("span", "–", aria_label="not measured")
BEST = element("i", "●", class_="flag", aria_label="best:")
TIE = element("i", "○", class_="flag", aria_label="not distinguishable from the best:")


def table(
    name: str,
    head: Sequence[Markup],
    body: Sequence[Markup],
    look: str | None = None,
    about: str = "",
    box: str = "scroll",
    foot: Markup | None = None,
    stacked: bool = False,
) -> Markup:
    """A table in a box that scrolls sideways and can be reached by keyboard; `look` and `box` are their classes.

    `head` holds header cells, `body` and `foot` hold rows. `name` is for screen readers; `about` continues it.
    `stacked`: on a phone, the header of a row stands above its cells, which have the whole width.
    """
    inner = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", list(body)),
        element("tfoot", foot) if foot else None,
        class_=look,
        aria_label=name + about,
    )
    stacked = stacked and 1 < len(head) <= STACKED
    columns = f"--n:{len(head) - 1}" if stacked else None
    box += " stacked" * stacked
    return element("div", inner, style=columns, class_=box, tabindex="0", role="region", aria_label=f"{name}, table")


def header(title: object, small: object = None, trained: bool = False, look: str | None = None) -> Markup:
    """The header cell of a column; `trained` frames the training length."""
    above = element("small", "trained") if trained else None
    below = element("small", small) if small else None
    return element("th", above, title, below, scope="col", class_="trained" if trained else look)


def row(title: object, cells: Sequence[Markup], look: str | None = None) -> Markup:
    """A row of a table: its header and its cells."""
    return element("tr", element("th", title, scope="row"), cells, class_=look)


def plain_table(
    name: str, head: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[str] | None = None
) -> Markup:
    """A table of texts and numbers; the columns named in `words` (None: all) are aligned to the left."""
    looks = ["text" if words is None or title in words else None for title in head]
    heads = [header(title, look=look) for title, look in zip(head, looks, strict=True)]
    body = [
        row(first, [element("td", cell, class_=look) for cell, look in zip(rest, looks[1:], strict=True)])
        for first, *rest in rows
    ]
    return table(name, heads, body)


def seeds_interval(runs: Sequence[RunFiles]) -> str:
    """What the intervals over the seeds of groups are."""
    counts = {len(run.members) for run in runs if run.members}
    if counts == {2}:
        return "the range of the two seeds"
    return "95% intervals of Student's t over the seeds" + (" (of two seeds their range)" if 2 in counts else "")


def marks(runs: Sequence[RunFiles], of: str = "column") -> str:
    """The words for the marks and the small figures of a table of runs or groups."""
    words = f"● marks the best of a {of}, ○ a tie with it; the small figures are "
    counts = sorted({len(run.members) for run in runs if run.members})
    if not counts:
        return f"{words}95% intervals"
    return f"Values are means over {' or '.join(map(str, counts))} seeds. {words}{seeds_interval(runs)}"


def label_markup(label: str, styles: Mapping[str, Style] | None = None) -> Markup:
    """A variant's label after a stroke in its style; a long label is shortened and shown whole on hover."""
    shown = shortened(label)
    name = text(label) if shown == label else element("span", shown, title=label)
    return text([swatch((styles or {}).get(label)), name])


def swatch(style: Style | None) -> Markup:
    """A short stroke in a style; "" without one."""
    if style is None:
        return Markup("")
    width, stroke = max(style.width, 2.4), f"var(--c-{style.colour})"
    line = element("line", x1=0, y1=5, x2=22, y2=5, stroke=stroke, stroke_width=width, stroke_dasharray=style.dash)
    return element("svg", line, width=22, height=10, class_="swatch", aria_hidden="true")


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def score_cell(scores: Table, label: str, column: Length, *, framed: bool = True, small: str | None = None) -> Markup:
    """One value, marked if it is the best of its column or a tie with it; its measurement on hover.

    `framed`: with a frame around the column of the training length. `small`: shown instead of the 95% interval.
    """
    trained = "trained" if framed and column.factor == 1 else None
    cell = scores.cell(label, column)
    if cell is None:
        return element("td", UNMEASURED, class_=trained, data_csv="")
    winner, ties = scores.best(column)
    notes = [cell.interval if small is None else small]
    if small is None and cell.all_found is not None and abs(cell.all_found - cell.value) > 1e-6:
        notes.append(f"all: {percent(cell.all_found)}")
    notes += ["as trained"] if is_unchanged(cell.record, column.factor) else []
    notes += [fewer] if (fewer := fewer_seeds(cell.record)) else []
    return element(
        "td",
        BEST if label == winner else TIE if label in ties else None,
        element("b" if label == winner else "span", cell.shown),
        [element("small", note) for note in notes if note],
        class_=trained,
        title=_measurement(label, column, cell),
        data_csv="|".join(f"{value:.6g}" for value in (cell.value, *(cell.ends or ()))),
        style=f"--heat:{_heat(scores, cell):.2f}",
    )


def fewer_seeds(record: Record) -> str:
    """`2 of 3 seeds` where not all seeds of a group were measured; "" else."""
    seeds, of = number(record, "seeds"), number(record, "of_seeds")
    return f"{seeds:.0f} of {of:.0f} seeds" if seeds is not None and of is not None and seeds < of else ""


def _measurement(label: str, column: Length, cell: Cell) -> str:
    """How a value was measured, for the hover text."""
    record = cell.record
    parts = [f"{label} at {column.title}: {cell.shown}"]
    if cell.interval:
        two = number(record, "seeds") == 2
        parts.append(f"{'range of two seeds' if two else '95% interval'} {cell.interval}")
    if seeds := number(record, "of_seeds"):
        parts.append(fewer_seeds(record) or f"mean over {seeds:.0f} seeds")
    if is_unchanged(record, column.factor):
        parts.append("the model as trained: nothing is changed up to the training length")
    if (loss := number(record, "nll")) is not None:
        parts.append(f"{loss:.4f} nats per token")
    for name, value in as_dict(record.get("scores")).items():
        if name != record.get("metric") and isinstance(value, int | float):
            parts.append(f"{name.replace('_', ' ')} {cell.format(value)}")
    for key, unit in (
        ("samples", "answers"),
        ("truncated", "of them to sequences that were cut to fit"),
        ("queries", "questions"),
        ("windows", "sequences"),
        ("tokens", "tokens"),
    ):
        if amount := number(record, key):
            parts.append(f"{amount:,.0f} {unit}")
    if (beta := number(record, "beta")) is not None and beta != 1:
        parts.append(f"β = {beta:.3f}")
    if record.get("checkpoint"):
        parts.append(f"weights {record['checkpoint']}")
    return " · ".join(parts)


def _heat(scores: Table, cell: Cell) -> float:
    """How good a cell is, 0 to 1: a share itself; of perplexities 1 for the table's best, 0 for four times that."""
    if cell.share:
        return min(max(cell.value, 0.0), 1.0)
    finite = [other.score for other in scores.cells.values() if math.isfinite(other.score)]
    spread = math.log(4) if not scores.higher_is_better else max(finite) - min(finite)
    return max(0.0, 1 - (max(finite) - cell.score) / spread) if spread else 1.0


def _variant_row(label: str, record: Record, styles: Mapping[str, Style], cells: Sequence[Markup]) -> Markup:
    """The row of a variant; that of a dropped model stands out."""
    return row(label_markup(label, styles), cells, "ours" if is_dropped(record) else None)


def score_table(scores: Table, styles: Mapping[str, Style], name_source: bool = False) -> Markup:
    """Variant by length: the best of each length marked, the training length framed, deeper green for better."""
    known = any(column.small and column.factor is not None for column in scores.columns)
    head = [header("Variant", "length in tokens" if known else None)]
    head += [header(column.title, column.small, column.factor == 1) for column in scores.columns]
    body = [
        _variant_row(label, record, styles, [score_cell(scores, label, column) for column in scores.columns])
        for label, record in scores.rows.items()
    ]
    direction = "higher is better" if scores.higher_is_better else "lower is better"
    title = element("p", table_title(scores, name_source), " ", element("small", f"({direction})"), class_="title")
    notes = []
    guessing = (number(cell.record, "guessing") for cell in scores.cells.values())
    if (chance := next((share for share in guessing if share is not None), None)) is not None:
        notes.append(f"Chance: picking any value that was stated and not yet asked for finds {percent(chance)}.")
    if scores.skipped:
        notes.append(f"{scores.skipped} record(s) had no number that could be shown.")
    inner = table(table_title(scores), head, body, "scores", " of each variant at each length", stacked=True)
    return element("div", title, inner, [element("p", note, class_="small soft") for note in notes])


def measured_at(tables: Sequence[Table], column: Length) -> list[Table]:
    """The tables that have values at a length."""
    return [one for one in tables if one.column(column)]


def _at_length(suite: str, column: Length) -> str:
    """`RULER at 8× (16,384 tokens)`; the suite alone for sequences of their own lengths."""
    if column.factor is None and column.length is None:
        return suite_title(suite)
    return f"{suite_title(suite)} at {column.title}" + (f" ({column.small} tokens)" if column.small else "")


def task_table(tables: Sequence[Table], column: Length, styles: Mapping[str, Style]) -> Markup:
    """Variant by task at one length: the mean of all tasks first, the best of each task marked."""
    metrics = {metric_name(one) for one in tables}
    average = averages(tables, AVERAGED)
    shown = [*measured_at([average] if average else [], column), *tables]
    head = [header("Variant")]
    for one in shown:
        if one is average:
            title, *of = one.source.split(" of ", maxsplit=1)
            head.append(header(title, f"of {of[0]}" if of else None, look="average"))
        else:
            head.append(header(task_name(one), metric_name(one) if len(metrics) > 1 else None))
    body = [
        _variant_row(label, record, styles, [score_cell(one, label, column, framed=False) for one in shown])
        for label, record in variants_of(tables).items()
        if any(one.cell(label, column) for one in tables)
    ]
    name = _at_length(tables[0].suite, column)
    metric = element("small", f" ({metrics.pop()})") if len(metrics) == 1 else None
    inner = table(name, head, body, "scores tasks", ": each variant on each task", "scroll fit")
    return element("div", element("p", name, metric, class_="title"), inner)


def harness_table(tables: Sequence[Table], column: Length, styles: Mapping[str, Style]) -> Markup:
    """Task by variant, as the harness prints it: scores with its standard errors, the best of each task marked."""
    labels = variants_of(tables)
    head = [header("Task"), *(header(label_markup(label, styles)) for label in labels)]
    average = averages(tables, AVERAGED)
    body = []
    for one in [*tables, *([average] if average else [])]:
        direction = "" if one is average else f"{metric_name(one)} {'↑' if one.higher_is_better else '↓'}"
        cells = []
        for label in labels:
            cell = one.cell(label, column)
            stderr = None if cell is None else cell.stderr if one is average else number(cell.record, "stderr")
            if cell is not None and number(cell.record, "seeds"):
                stderr = stderr and stderr * Z95  # of seeds: the half of their interval
            in_unit = "" if stderr is None else f"±{100 * stderr:.1f}" if cell.share else f"±{short_number(stderr)}"
            cells.append(score_cell(one, label, column, framed=False, small=in_unit))
        look = "average" if one is average else None
        body.append(row([task_name(one), element("small", direction)], cells, look))
    name = _at_length(tables[0].suite, column)
    inner = table(name, head, body, "scores harness", ": each task under each variant", "scroll fit")
    return element("div", element("p", name, class_="title"), inner, class_="below")


# ---------------------------------------------------------------------------------------------------------------------
# The other tables


def duel_board(judged: Sequence[tuple[Table, Sequence[Duel]]]) -> Markup:
    """Suite by length: whether the dropped model beats the best RoPE variant, and by how much."""
    judged = [(scores, found) for scores, found in judged if found]
    if not judged:
        return Markup("")
    columns = {duel.column.key: duel.column.title for _, found in judged for duel in found}
    centred = "text-align:center"
    head = [header("Sequence length")]
    head += [element("th", columns[key], scope="col", style=centred) for key in sorted(columns)]
    words = {"win": "✓ wins", "loss": "✗ loses", "tie": "≈ ties"}
    body = []
    for scores, found in judged:
        cells = dict.fromkeys(sorted(columns), element("td", "–"))
        for duel in found:
            small = element("small", duel.gap, element("br"), f"vs {shortened(duel.rival)}")
            title = f"{duel.label} {duel.ours.shown}, {duel.rival} {duel.theirs.shown}"
            outcome = element("b", words[duel.outcome], class_=duel.outcome)
            cells[duel.column.key] = element("td", outcome, small, title=title)
        body.append(row(suite_title(scores.suite), [*cells.values()]))
    ours = shortened(judged[0][1][-1].label)
    title = f"The dropped model ({ours}) against the best RoPE variant of each length"
    name = "Dropped model against the best RoPE variant"
    board = table(name, head, body, "score-board", box="scroll fit", stacked=True)
    return text([element("p", title, class_="title board"), board])


def beta_table(records: Sequence[Record]) -> Markup:
    """The fitted logit scales."""
    head = ("Model", "Length", "β", "c in β = 1 + c ln s", "Loss before", "Loss after", "Fitted on")
    decimals = {"beta": 3, "c": 3, "nll_before": 4, "nll_after": 4}
    rows = []
    for record in sorted(records, key=lambda record: (label_of(record), number(record, "length") or 0)):
        length, factor = number(record, "length"), number(record, "factor")
        at = (f"{factor:g}× " if factor is not None else "") + (f"({length:,.0f} tokens)" if length else "")
        values = [(number(record, name), digits) for name, digits in decimals.items()]
        numbers = ["–" if value is None else f"{value:.{digits}f}" for value, digits in values]
        rows.append([label_markup(label_of(record)), at or "–", *numbers, record.get("fitted_on") or "–"])
    return plain_table("Fitted beta", head, rows, words=("Model", "Fitted on"))


def weights_table(tables: Sequence[Table]) -> Markup:
    """The checkpoint behind each row."""
    seen: dict[tuple[str, str, str, str], None] = {}
    for scores in tables:
        for (label, _), cell in scores.cells.items():
            step, record = number(cell.record, "step"), cell.record
            shown = "–" if step is None else f"{step:,.0f}"
            seen[label, str(record.get("checkpoint") or "–"), shown, str(record.get("seed", "–"))] = None
    rows = [[label_markup(label), *rest] for label, *rest in seen]
    return plain_table("Weights behind each row", ("Variant", "Weights", "Step", "Seed"), rows)


def records_table(suite: str, records: Sequence[Record]) -> Markup:
    """The records of a suite without a known score, as they are: every key that holds a short value."""
    skip = {"suite", "run", "versions", "model", "variant"}
    short = (key for record in records for key, value in record.items() if not isinstance(value, list | dict))
    keys = [key for key in dict.fromkeys(short) if key not in skip]
    rows = [
        [short_number(value) if isinstance(value, float) else text(value) for value in map(record.get, keys)]
        for record in records[:200]
    ]
    title = element("p", suite_title(suite), class_="title")
    return element("div", title, plain_table(suite, keys, rows) if keys else None)
