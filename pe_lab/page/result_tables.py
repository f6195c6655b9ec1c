"""Tables of results as HTML: method by length, the duel board, beta, rows of suites this report does not
know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pe_lab.analysis.run_files import Row, as_dict, number
from pe_lab.analysis.scores import Cell, Column, Table, is_prompted, label_of
from pe_lab.analysis.variants import STYLES, Style, is_dropped, kind
from pe_lab.analysis.verdict import Duel
from pe_lab.page.markup import Markup, element, text
from pe_lab.results.formatting import percent, short_number

TITLES = {
    "needles": "Needle accuracy",
    "perplexity": "Perplexity",
    "niah": "Needle in a haystack",
    "ruler": "RULER",
    "longbench": "LongBench",
    "many_shot": "Many-shot learning",
    "lm_eval": "lm-evaluation-harness",
}


def suite_title(suite: str) -> str:
    """A suite's name for people."""
    return TITLES.get(suite, suite.replace("_", " ").capitalize())


def table_title(table: Table, several: bool) -> Markup:
    """What a table shows, and which way is better."""
    direction = "higher is better" if table.higher_is_better else "lower is better"
    source = f" on {table.source}" if table.source and several else ""
    name = task_title(table) or f"{suite_title(table.suite)}{source}"
    return element("p", name, " ", element("small", f"({direction})"), class_="title")


def task_title(table: Table) -> str:
    """`RULER, niah single 1`; nothing for a table that is of no task asked in prompts."""
    asked = any(is_prompted(cell.row) for cell in table.cells.values())
    return f"{suite_title(table.suite)}, {table.source.replace('_', ' ')}" if asked else ""


def score_table(table: Table, styles: Mapping[str, Style], several: bool = False) -> Markup:
    """Method by length: the best of each length marked, the training length framed, deeper green for
    better."""
    known = any(column.small and column.factor is not None for column in table.columns)
    head = [element("th", "Method", element("small", "length in tokens") if known else None, scope="col")]
    for column in table.columns:
        trained = column.factor == 1
        head.append(
            element(
                "th",
                element("small", "trained") if trained else None,
                column.title,
                element("small", column.small) if column.small else None,
                scope="col",
                class_="trained" if trained else None,
            )
        )
    best = {column.key: table.best(column) for column in table.columns}
    body = []
    for label, row in table.rows.items():
        cells = [element("th", swatch(styles.get(label)), label, scope="row")]
        cells += [score_cell(table, label, column, *best[column.key]) for column in table.columns]
        body.append(element("tr", cells, class_="ours" if is_dropped(row) else None))
    name = task_title(table) or suite_title(table.suite)
    inner = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", body),
        class_="scores",
        aria_label=f"{name} of each method at each length",
    )
    skipped = (
        element("p", f"{table.skipped} row(s) had no number that could be shown.", class_="small soft")
        if table.skipped
        else None
    )
    return element("div", table_title(table, several), scroll(inner, name), skipped)


def score_cell(table: Table, label: str, column: Column, winner: str, ties: set[str], framed: bool = True) -> Markup:
    """One value: its interval in small, how it was measured on hover; `framed` at the training length."""
    trained = "trained" if framed and column.factor == 1 else None
    cell = table.cell(label, column)
    if cell is None:
        return element("td", element("span", "–", aria_label="not measured"), class_=trained)
    flag, value = "", element("span", cell.shown)
    if label == winner:
        flag, value = element("i", "●", class_="flag", aria_label="best:"), element("b", cell.shown)
    elif label in ties:
        flag = element("i", "○", class_="flag", aria_label="not distinguishable from the best:")
    return element(
        "td",
        flag,
        value,
        element("small", cell.interval) if cell.interval else None,
        element("small", f"all: {percent(cell.all_found)}") if cell.all_found is not None else None,
        class_=trained,
        title=measured(label, column, cell),
        style=f"--heat:{heat(table, column, cell):.2f}",
    )


def measured(label: str, column: Column, cell: Cell) -> str:
    """How a value was measured, for the hover text."""
    row = cell.row
    parts = [f"{label} at {column.title}: {cell.shown}"]
    if cell.interval:
        parts.append(f"95% interval {cell.interval}")
    if (loss := number(row, "nll")) is not None:
        parts.append(f"{loss:.4f} nats per token")
    for name, value in as_dict(row.get("scores")).items():
        if name != row.get("metric") and isinstance(value, int | float):
            parts.append(f"{name.replace('_', ' ')} {percent(value) if cell.share else short_number(value)}")
    for key, unit in (
        ("samples", "answers"),
        ("truncated", "of them to texts that were cut to fit"),
        ("queries", "questions"),
        ("windows", "windows"),
        ("tokens", "tokens"),
    ):
        if amount := number(row, key):
            parts.append(f"{amount:,.0f} {unit}")
    if (beta := number(row, "beta")) is not None and beta != 1:
        parts.append(f"β = {beta:.3f}")
    if row.get("checkpoint"):
        parts.append(f"weights {row['checkpoint']}")
    return " · ".join(parts)


def heat(table: Table, column: Column, cell: Cell) -> float:
    """How good a cell is, 0 to 1. Shares as they are; perplexities 1 at the table's best, 0 at four times it."""
    if cell.share:
        return min(max(cell.value, 0.0), 1.0)
    scores = [other.score for other in table.cells.values() if math.isfinite(other.score)]
    best, spread = max(scores), max(scores) - min(scores)
    room = math.log(4) if not table.higher_is_better else spread
    return max(0.0, 1 - (best - cell.score) / room) if room else 1.0


def swatch(style: Style | None) -> Markup:
    """A short stroke in a method's colour and dash."""
    if style is None:
        return Markup("")
    line = element(
        "line",
        x1=0,
        y1=5,
        x2=22,
        y2=5,
        stroke=f"var(--c-{style.colour})",
        stroke_width=max(style.width, 2.4),
        stroke_dasharray=style.dash,
    )
    return element("svg", line, width=22, height=10, class_="swatch", aria_hidden="true")


def scroll(table: Markup, name: str, look: str = "scroll") -> Markup:
    """A box in which a wide table scrolls sideways, reachable by keyboard."""
    return element("div", table, class_=look, tabindex="0", role="region", aria_label=f"{name}, table")


def duel_board(judged: Sequence[tuple[Table, Sequence[Duel]]]) -> Markup:
    """One row a suite, one column a length: does the dropped model beat the best RoPE row there, by how
    much."""
    judged = [(table, found) for table, found in judged if found]
    if not judged:
        return Markup("")
    columns = {duel.column.key: duel.column.title for _, found in judged for duel in found}
    head = [element("th", "Text length", scope="col")]
    head += [element("th", columns[key], scope="col", style="text-align:center") for key in sorted(columns)]
    words = {"win": "✓ wins", "loss": "✗ loses", "tie": "≈ ties"}
    body = []
    for table, found in judged:
        cells = [element("th", suite_title(table.suite), scope="row")]
        by_key = {duel.column.key: duel for duel in found}
        for key in sorted(columns):
            duel = by_key.get(key)
            if duel is None:
                cells.append(element("td", "–"))
                continue
            small = element("small", duel.gap.removeprefix("perplexity "), element("br"), f"vs {duel.rival}")
            cells.append(
                element(
                    "td",
                    element("b", words[duel.outcome], class_=duel.outcome),
                    small,
                    title=f"{duel.label} {duel.ours.shown}, {duel.rival} {duel.theirs.shown}",
                )
            )
        body.append(element("tr", cells))
    inner = element("table", element("thead", element("tr", head)), element("tbody", body), class_="score-board")
    title = element("p", "The dropped model against the best RoPE variant of each length", class_="title board")
    return text([title, scroll(inner, "Dropped model against the best RoPE variant", "scroll fit")])


def beta_table(rows: Sequence[Row]) -> Markup:
    """The fitted logit scales."""
    head = ("Model", "Length", "β", "c in β = 1 + c ln s", "Loss before", "Loss after", "Fitted on")
    body = []
    for row in sorted(rows, key=lambda row: (label_of(row), number(row, "length") or 0)):
        length, factor = number(row, "length"), number(row, "factor")
        shown = (f"{factor:g}× " if factor is not None else "") + (f"({length:,.0f} tokens)" if length else "")
        cells = [element("th", label_of(row), scope="row"), element("td", shown or "–")]
        cells += [element("td", decimals(number(row, key), 3)) for key in ("beta", "c")]
        cells += [element("td", decimals(number(row, key), 4)) for key in ("nll_before", "nll_after")]
        body.append(element("tr", cells, element("td", row.get("fitted_on") or "–", class_="text")))
    return scroll(plain_table(head, body, head[-1:]), "Fitted beta")


def plain_table(head: Sequence[str], body: Sequence[Markup], words: Sequence[str] = ()) -> Markup:
    """A table with a row of headers; the columns in `words` hold text, the others numbers."""
    cells = [element("th", name, scope="col", class_="text" if name in words else None) for name in head]
    return element(
        "table",
        element("thead", element("tr", cells)),
        element("tbody", list(body)),
    )


def decimals(value: float | None, digits: int) -> str:
    """A number with so many decimals, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def weights_table(tables: Sequence[Table]) -> Markup:
    """Which checkpoint is behind each row: any value can be traced to the weights that made it."""
    seen: dict[tuple[str, str, str, str], None] = {}
    for table in tables:
        for (label, _), cell in table.cells.items():
            row = cell.row
            step = number(row, "step")
            seen[
                label,
                str(row.get("checkpoint") or "–"),
                "–" if step is None else f"{step:,.0f}",
                str(row.get("seed", "–")),
            ] = None
    body = [
        element("tr", element("th", label, scope="row"), [element("td", part, class_="text") for part in rest])
        for label, *rest in seen
    ]
    head = ("Method", "Weights", "Step", "Seed")
    return scroll(plain_table(head, body, head), "Weights behind each row")


def rows_table(suite: str, rows: Sequence[Row]) -> Markup:
    """Rows of a suite that have no known score, as they are: every key that holds a short value."""
    skip = {"suite", "run", "versions", "model", "method"}
    keys = list(
        dict.fromkeys(k for row in rows for k, v in row.items() if k not in skip and not isinstance(v, list | dict))
    )
    body = []
    for row in rows[:200]:
        cells = []
        for key in keys:
            value = row.get(key)
            cells.append(element("td", short_number(value) if isinstance(value, float) else text(value), class_="text"))
        body.append(element("tr", cells))
    return element(
        "div", element("p", suite_title(suite), class_="title"), scroll(plain_table(keys, body, keys), suite)
    )


def comparison_styles(table: Table) -> dict[str, Style]:
    """Looks for a table of several runs, where one method has several rows."""
    return {label: style for label, row in table.rows.items() if (style := STYLES.get(kind(row)))}
