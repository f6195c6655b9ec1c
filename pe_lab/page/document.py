"""The whole report as one HTML document: verdicts first, then comparisons, a section a run, and how to read
it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from pe_lab.analysis.run_files import Run
from pe_lab.analysis.scores import build_tables
from pe_lab.analysis.variants import DEFINITIONS, GLOSSARY, STYLES, Style, kind, task_terms
from pe_lab.analysis.verdict import judge
from pe_lab.page import result_tables, run_charts, run_facts
from pe_lab.page.charts import Series, line_chart
from pe_lab.page.heat_maps import heat_maps, palette_css
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.prompted_tables import is_task_table, suite_parts, task_suites
from pe_lab.page.run_section import SCORED, Results, run_sections, section, top, work_out
from pe_lab.page.stylesheet import CSS, SCRIPT
from pe_lab.results.formatting import count, duration, listing, short_number

NAMES = {
    "cropped": "RoPE, cropped context",
    "PI": "RoPE + PI",
    "NTK": "RoPE + NTK",
    "YaRN": "RoPE + YaRN",
    "DroPE beta": "DroPE, β",
    "DroPE paper beta": "DroPE, paper's β",
    "NoPE beta": "NoPE, β",
    "NoPE paper beta": "NoPE, paper's β",
}


def build_page(runs: Sequence[Run]) -> str:
    """The document for these runs; text, complete, referring to nothing outside itself."""
    worked = [work_out(run) for run in runs]
    body = one_run(worked[0]) if len(worked) == 1 else several_runs(worked)
    title = f"pe_lab report: {', '.join(run.name for run in runs)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),  # or the browser asks the server for one
        element("style", Markup(CSS + palette_css())),
    )
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    footer = element(
        "footer",
        f"Made by pe_lab.report on {when} from the files of ",
        ", ".join(str(run.directory) for run in runs),
        ".",
    )
    page = element("html", head, element("body", body, footer, element("script", Markup(SCRIPT))), lang="en")
    return f"<!doctype html>\n{page}\n"


def headline(runs: Sequence[Run]) -> str:
    """The page's verdict as text, for the terminal."""
    return "\n".join(
        (f"{run.name}: " if len(runs) > 1 else "") + " ".join(filter(None, (found.opening, found.headline)))
        for run in runs
        for found in [work_out(run).verdict]
    )


def one_run(results: Results) -> Markup:
    """Body of a page about one run."""
    run = results.run
    kicker = element("p", "pe_lab report · run ", element("b", run.name), class_="kicker")
    sections = [*run_sections(results, 2, ""), how_to_read([results])]
    return text([element("header", kicker, top(results, 1), contents(sections)), element("main", sections)])


def contents(sections: Sequence[Markup]) -> Markup:
    """Links to the sections that are there."""
    links = []
    for identity, name in (
        ("compare", "Comparison"),
        ("results", "Results"),
        ("depth", "Heat maps"),
        ("tasks", "Tasks"),
        ("position", "Where in the text"),
        ("training", "Training"),
        ("frequencies", "Frequencies"),
        ("run", "What was run"),
        ("caveats", "Keep in mind"),
        ("read", "How to read this"),
    ):
        if any(f'id="{identity}"' in part for part in sections):
            links.append(element("a", name, href=f"#{identity}"))
    return element("nav", links, aria_label="Sections")


def several_runs(worked: Sequence[Results]) -> Markup:
    """Body of a page about several runs: the comparison, then each run."""
    runs = [results.run for results in worked]
    kicker = element("p", "pe_lab report · ", element("b", f"{len(runs)} runs"), class_="kicker")
    parts = []
    for index, results in enumerate(worked):
        inner = [element("h2", results.run.name, id=f"run-{index}"), top(results, 2)]
        parts.append(element("section", inner, run_sections(results, 3, f"run-{index}-"), class_="run"))
    links = [element("a", "Comparison", href="#compare")]
    links += [element("a", run.name, href=f"#run-{index}") for index, run in enumerate(runs)]
    links += [element("a", "How to read this", href="#read")]
    joint = joint_headline(worked)
    intro = [
        element("h1", joint, class_="long" if len(joint) > 180 else None),
        element("nav", links, aria_label="Sections"),
    ]
    compared = section(2, "The runs side by side", "compare", *comparison(worked))
    return text([element("header", kicker, intro), element("main", compared, parts, how_to_read(worked))])


def joint_headline(worked: Sequence[Results]) -> str:
    """The verdict of the one run that has one, or of all runs together where RoPE and DroPE are runs
    apart."""
    decided = [results for results in worked if results.verdict.tone != "missing"]
    if len(decided) == 1:
        return f"{decided[0].run.name}: {decided[0].verdict.headline}"
    if decided:
        wins = [results.run.name for results in decided if results.verdict.tone == "win"]
        return (
            f"{len(wins) or 'None'} of the {len(decided)} runs that drop their positional encoding "
            f"{'beats' if len(wins) == 1 else 'beat'} every RoPE variant at all lengths past training"
            f"{f': {listing(wins)}' if wins else ''}."
        )
    lengths = {results.run.training_length for results in worked}
    if len(lengths) == 1:
        joint = []
        for suite in SCORED:
            found = build_tables(suite, all_rows(worked, suite), name_runs=True)
            joint.append(found[0] if found else None)
        verdict = judge(*joint)
        if verdict.tone != "missing":
            return f"Across runs: {verdict.headline}"
    return f"{len(worked)} runs side by side; none has both RoPE and a dropped model measured past the "
    "training length."


def all_rows(worked: Sequence[Results], suite: str) -> list[tuple[Run, dict]]:
    """The rows of a suite in all runs."""
    return [(results.run, row) for results in worked for row in results.run.evaluation.get(suite, [])]


def comparison(worked: Sequence[Results]) -> list[object]:
    """Tables over all runs, and their losses on one chart."""
    parts: list[object] = [runs_table(worked)]
    tokenizers = {name for results in worked if (name := run_facts.tokenizer(results.run))}
    if len(tokenizers) > 1:
        parts.append(
            element(
                "div",
                element(
                    "p",
                    "These runs cut text with different tokenizers, so losses and perplexities "
                    "per token are not comparable between them.",
                ),
                class_="note",
            )
        )
    suites = [*SCORED, *task_suites({s for r in worked for s in r.run.evaluation} - set(SCORED) - {"beta"})]
    grids, tasks = [], []
    for suite in suites:
        found = [table for table in build_tables(suite, all_rows(worked, suite), name_runs=True) if table.cells]
        asked = [table for table in found if is_task_table(table)]
        plain = [table for table in found if not is_task_table(table)]
        grids += [result_tables.score_table(t, result_tables.comparison_styles(t), len(plain) > 1) for t in plain]
        looks = {label: look for t in asked for label, look in result_tables.comparison_styles(t).items()}
        tasks += suite_parts(suite, asked, looks, 3, charts=False)
    parts.append(element("div", grids, class_="grid", style="margin-top:28px"))
    return [*parts, *tasks, loss_comparison(worked)]


def runs_table(worked: Sequence[Results]) -> Markup:
    """One line a run."""
    body = []
    for index, results in enumerate(worked):
        run = results.run
        size, seconds = run_facts.parameters(run), run_facts.seconds(run)
        validation = [value for phase in run.phases for _, value in phase.series("validation_loss")]
        status = "complete" if run.phases and not any(phase.running for phase in run.phases) else "not complete"
        cells = (
            " → ".join(phase.name for phase in run.phases) or "–",
            count(size) if size else "–",
            f"{run.training_length:,}" if run.training_length else "–",
            count(sum(p.tokens for p in run.phases)),
            short_number(validation[-1]) if validation else "–",
            duration(seconds) if seconds else "–",
            status,
        )
        name = element("th", element("a", run.name, href=f"#run-{index}"), scope="row")
        body.append(element("tr", name, [element("td", cell) for cell in cells]))
    head = (
        "Run",
        "Phases",
        "Parameters",
        "Training length",
        "Tokens",
        "Last validation loss",
        "Time",
        "Status",
    )
    return result_tables.scroll(result_tables.plain_table(head, body), "Runs")


def loss_comparison(worked: Sequence[Results]) -> Markup:
    """The runs' training losses, a running mean each."""
    colours = ("ntk", "nope", "drope", "yarn", "extra-1", "pi", "extra-3", "extra-4", "extra-2", "rope")
    series = []
    for index, results in enumerate(worked):
        shift = run_charts.offsets(results.run)
        points = []
        for phase in results.run.phases:  # each by itself: a mean across the border would flatten the jump there
            points += run_charts.moved(run_charts.smoothed(phase.series("loss")), shift[phase.name])
        style = Style(colours[index % len(colours)], None if index < len(colours) else "6 3")
        series.append(Series(results.run.name, points, style))
    x, y = run_charts.token_axis(worked[0].run), run_charts.Axis("loss (nats per token)")
    return line_chart("Training loss of the runs (running mean)", series, x, y)


def how_to_read(worked: Sequence[Results]) -> Markup:
    """The methods on this page in a line each, and the words."""
    present: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for results in worked:
        for table in results.all_tables:
            for label, row in table.rows.items():
                name = kind(row)
                (present if name else unknown).setdefault(name or label)
    methods: list[object] = []
    for name in [name for name in STYLES if name in present] or list(STYLES):
        methods += run_facts.pair(text([result_tables.swatch(STYLES[name]), NAMES.get(name, name)]), DEFINITIONS[name])
    for label in unknown:
        methods += run_facts.pair(label, "Not one of the methods this report has words for; see its evaluation file.")
    depths = any(heat_maps(table) for results in worked for table in results.all_tables)
    suites = {suite for results in worked for suite in results.task_tables}
    words_of = GLOSSARY | task_terms(suites, depths)
    terms = [part for name, words in words_of.items() for part in run_facts.pair(name, words)]
    return section(
        2,
        "How to read this",
        "read",
        element("h3", "The methods"),
        element("dl", methods, class_="terms"),
        element("h3", "The words"),
        element("dl", terms, class_="terms"),
        element("h3", "How the verdict is made"),
        element(
            "p",
            "At each length the dropped model (with β where that was measured) is set against whichever "
            "RoPE row did "
            "best at that length, cropping included, so the comparison leans against it. It wins or loses "
            "there if the "
            "difference exceeds 1.96 standard errors of the two together, and ties otherwise. Lengths up "
            "to the "
            "training length do not enter the headline.",
        ),
    )
