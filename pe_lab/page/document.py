"""The whole report as one HTML document: verdicts first, then comparisons, a section for each run, and explanations."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from pe_lab.page import provenance
from pe_lab.page.colours import STYLES, palette_css
from pe_lab.page.comparison import comparison_parts, members_part, paired_sentence
from pe_lab.page.maps import needle_maps
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.run_section import Results, problem_note, run_sections, section, title_of, top, work_out
from pe_lab.page.stylesheet import CSS, FILES_CSS, FILES_SCRIPT, MAPS_CSS, MAPS_SCRIPT, SCRIPT
from pe_lab.page.tables import label_markup, swatch
from pe_lab.page.variants import DEFINITIONS, GLOSSARY, NAMES, SCORED, definition, task_terms
from pe_lab.results.comparison import last_losses, paired_differences, stand_ins
from pe_lab.results.formatting import listing, shortened
from pe_lab.results.groups import pooled
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables
from pe_lab.results.standing import comparable, not_compared
from pe_lab.results.statistics import over_seeds
from pe_lab.results.table import Table
from pe_lab.results.variants import kind
from pe_lab.results.verdict import best_headline, judge

MANY = 40  # runs on a page of which each has all of its sections
SHORT = ("results", "tasks", "caveats")  # the sections of each run on a page of more
READ = ("#read", "How to read this")
HOW_THE_VERDICT_IS_MADE = (
    "At each length the dropped model is compared with the best RoPE variant at that length, cropping included, so the "
    "comparison favours RoPE. One variant of the dropped model is compared at all lengths of a table: the one measured "
    "at most lengths past training; of several, with a β that was fitted to it, else as trained, else with the paper's "
    "β. It wins or loses at a length if the difference exceeds 1.96 standard errors of the two together, and ties "
    "otherwise. Of several seeds, a standard error is half of their interval (Student's t) over 1.96. Lengths up to "
    "the training length do not enter the headline."
)


def build_page(runs: Sequence[RunFiles]) -> str:
    """The document for these runs: text that refers to nothing outside itself."""
    worked = [work_out(run) for run in pooled(runs)]
    analyses = any(run.analyses for run in runs)
    css, script = (MAPS_CSS, MAPS_SCRIPT) if analyses else ("", "")
    css, script = FILES_CSS + css, script + FILES_SCRIPT
    about = worked[0].run.name if len(worked) == 1 else "comparison"
    body = _one_run(worked[0]) if len(worked) == 1 else _several_runs(worked)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width,initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"pe_lab report: {', '.join(run.name for run in runs)}"),
        element("link", rel="icon", href="data:,"),  # or the browser asks the server for one
        element("style", Markup(CSS + palette_css() + css)),
    )
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    names = ", ".join(str(run.directory) for run in runs)
    footer = element("footer", f"Made by pe_lab.report on {when} from the files of ", names, ".")
    scripts = element("script", Markup(SCRIPT + script))
    page = element("html", head, element("body", body, footer, scripts, data_run=about), lang="en")
    return f"<!doctype html>\n{page}\n"


def headline(runs: Sequence[RunFiles]) -> str:
    """The page's verdicts as text, for the terminal."""
    groups = pooled(runs)
    lines = []
    for run in groups:
        found = work_out(run).verdict
        before = f"{run.name}: " if len(groups) > 1 else ""
        lines += [f"{before}{line}" for line in (*found.cautions, " ".join(found.sentences))]
    return "\n".join(lines)


def _one_run(results: Results) -> Markup:
    """Body of a page about one run."""
    what = f"{len(results.run.members)} seeds of " if results.run.members else "run "
    kicker = element("p", f"pe_lab report · {what}", element("b", results.run.name), class_="kicker")
    sections = run_sections(results, 2, "")
    if members := _members(results.run, "run-0-"):
        sections.append(("members", "Runs", section(2, "The runs, one by one", "members", members)))
    links = [*((f"#{identity}", name) for identity, name, _ in sections), READ]
    main = element("main", problem_note(results.run), [part for *_, part in sections], _how_to_read([results]))
    return text([element("header", kicker, top(results, 1), _navigation(links)), main])


def _several_runs(worked: Sequence[Results]) -> Markup:
    """Body of a page about several runs: the comparison, then each run."""
    count = sum(max(len(results.run.members), 1) for results in worked)
    groups = f" in {len(worked)} groups by seed" if count > len(worked) else ""
    kicker = element("p", "pe_lab report · ", element("b", f"{count} runs{groups}"), class_="kicker")
    parts = []
    for index, results in enumerate(worked):
        inner = [element("h2", results.run.name, id=f"run-{index}"), top(results, 2), problem_note(results.run)]
        inner += _sections(results, 3, f"run-{index}-", len(worked))
        inner.append(_members(results.run, f"run-{index}-"))
        parts.append(element("section", inner, class_="run", data_run=results.run.name))
    links = [(f"#run-{index}", results.run.name) for index, results in enumerate(worked)]
    navigation = _navigation([("#compare", "Comparison"), *links, READ])
    runs = [results.run for results in worked]
    compared = section(2, "The runs side by side", "compare", *comparison_parts(runs))
    pairs = paired_sentence(runs)
    top_parts = [kicker, title_of(joint_headline(worked)), element("p", pairs, class_="lede") if pairs else None]
    return text([element("header", *top_parts, navigation), element("main", compared, parts, _how_to_read(worked))])


def _members(run: RunFiles, prefix: str) -> Markup:
    """The runs of a group with a section for each; "" of a single run."""
    parts = []
    for index, member in enumerate(run.members):
        results, identity = work_out(member), f"{prefix}{index}"
        inner = [element("h3", member.name, id=identity), top(results, 3), problem_note(member)]
        inner += _sections(results, 4, f"{identity}-", len(run.members))
        parts.append(element("section", inner, class_="run member", data_run=member.name))
    return members_part(run, prefix, parts)


def _sections(results: Results, level: int, prefix: str, of: int) -> list[Markup]:
    """The sections of one of many runs; of more than `MANY` runs only the scores, and how to get the others."""
    found = run_sections(results, level, prefix)
    if of <= MANY:
        return [part for *_, part in found]
    command = element("code", f"python -m pe_lab.report {results.run.directory}")
    more = element("p", "Losses, positions, heat maps and config of this run: ", command, class_="small soft")
    return [*(part for key, _, part in found if key in SHORT), more]


def _navigation(links: Sequence[tuple[str, str]]) -> Markup:
    return element("nav", [element("a", name, href=address) for address, name in links], aria_label="Sections")


def joint_headline(worked: Sequence[Results]) -> str:
    """The verdict of the one run that has one, else of all runs together, where RoPE and DroPE are runs apart.

    Of runs without a drop: which is the best, and by how much. Runs with `cautions` do not count.
    """
    what = "groups of runs" if any(results.run.members for results in worked) else "runs"
    sound = [results for results in worked if not results.verdict.cautions]
    aside = [results.run.name for results in worked if results.verdict.cautions]
    left_out = f" Left out, see its remarks: {shortened(listing(aside), 90)}." if aside else ""
    decided = [results for results in sound if results.verdict.tone != "missing"]
    if len(decided) == 1:
        return f"{decided[0].run.name}: {decided[0].verdict.headline}{left_out}"
    if decided:
        wins = [results.run.name for results in decided if results.verdict.tone == "win"]
        return (
            f"{len(wins) or 'None'} of the {len(decided)} {what} that drop their positional encoding "
            f"{'beats' if len(wins) == 1 else 'beat'} every RoPE variant at all lengths past training"
            f"{f': {listing(wins)}' if wins else ''}.{left_out}"
        )
    runs = [results.run for results in sound]
    if len({run.training_length for run in runs}) == 1:
        whole = [next((one for one in build_tables(suite, runs) if one.cells), None) for suite in SCORED]
        if words := not_compared(runs, filter(None, whole)):
            left_out = f" {words}{left_out}"
        first = [one and comparable(runs, one) for one in whole]
        verdict = judge(*first)
        if verdict.tone != "missing":
            return f"Across runs: {verdict.headline}{left_out}"
        if len(runs) > 1 and (sentence := _best_of(runs, [one for one in first if one], what)):
            return f"{sentence}{left_out}"
    return f"{len(worked)} {what} side by side, without a measurement that all of them have.{left_out}"


def _best_of(runs: Sequence[RunFiles], tables: Sequence[Table], what: str) -> str:
    """Which run is the best past the training length, else by the last validation loss; "" where nothing is common."""
    sentences = []
    for table in tables:
        some, labels = stand_ins(runs, table)
        common = tuple(column for column in some.columns if len(some.column(column)) == len(runs))
        if common:
            sentences.append(best_headline([replace(some, columns=common)], what, in_pairs=True))
    if sentences:
        return " ".join(sentences)
    losses = [(over_seeds(values), run) for run in runs if (values := last_losses(run))]
    if len(losses) < len(runs):
        return ""
    (best, run), (theirs, other), *_ = sorted(losses, key=lambda item: item[0].mean)
    start = f"{run.name} has the lowest last validation loss of {len(runs)} {what}: {best.mean:.3f}"
    found = next(iter(paired_differences([run, other], ())), None)  # the loss of the next less that of the best
    if found is None:
        several = run.members or other.members
        pairs = "They have no two finished seeds in common" if several else "One seed each"
        return f"{start}; the next is {other.name} ({theirs.mean:.3f}). {pairs}: the luck of training is not known."
    mean, low, high = (f"{value:.3f}" for value in found.difference.numbers)
    return f"{start}, {mean} [{low}, {high}] below {other.name} in {found.difference.count} pairs of seeds."


def _how_to_read(worked: Sequence[Results]) -> Markup:
    """The variants of this page in a line each, and its words."""
    records = [item for results in worked for one in results.all_tables for item in one.rows.items()]
    present = {kind(record) for _, record in records}
    variants: list[tuple[object, object]] = [
        (text([swatch(STYLES[name]), NAMES.get(name, name)]), DEFINITIONS[name])
        for name in STYLES
        if name in present or not present - {""}
    ]
    others = {(str(r.get("model")), str(r.get("variant"))): (str(label), r) for label, r in records if not kind(r)}
    variants += [(label_markup(label), definition(record)) for label, record in others.values()]
    depths = any(needle_maps(one) for results in worked for one in results.all_tables)
    terms = GLOSSARY | task_terms({suite for results in worked for suite in results.task_tables}, depths)
    return section(
        2,
        "How to read this",
        "read",
        element("h3", "The variants"),
        provenance.pairs(variants, "terms"),
        element("h3", "The words"),
        provenance.pairs(list(terms.items()), "terms"),
        element("h3", "How the verdict is made"),
        element("p", HOW_THE_VERDICT_IS_MADE),
    )
