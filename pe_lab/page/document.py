"""The whole report as one HTML document: verdicts, comparisons of runs, a section for each run, and explanations."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import replace

from pe_lab.page import provenance, run_charts
from pe_lab.page.charts import score_chart
from pe_lab.page.colours import STYLES, palette_css
from pe_lab.page.maps import needle_maps
from pe_lab.page.markup import Markup, element, folded, note, text
from pe_lab.page.run_section import Results, problem_note, run_sections, section, suite_parts, title_of, top, work_out
from pe_lab.page.stylesheet import CSS, FILES_CSS, FILES_SCRIPT, MAPS_CSS, MAPS_SCRIPT, SCRIPT
from pe_lab.page.tables import header, label_markup, marks, plain_table, row, score_table, seeds_interval, swatch, table
from pe_lab.page.variants import (
    DEFINITIONS,
    GLOSSARY,
    NAMES,
    SCORED,
    comparison_styles,
    definition,
    suite_title,
    table_title,
    task_suites,
    task_terms,
)
from pe_lab.results.comparison import Paired, differing, finished_members, last_losses, paired_differences, stand_ins
from pe_lab.results.formatting import count, duration, listing, short_number, shortened
from pe_lab.results.groups import pooled, seed_words
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables
from pe_lab.results.standing import comparable, not_compared
from pe_lab.results.statistics import holm, over_seeds
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
    number = sum(max(len(results.run.members), 1) for results in worked)
    groups = f" in {len(worked)} groups by seed" if number > len(worked) else ""
    kicker = element("p", "pe_lab report · ", element("b", f"{number} runs{groups}"), class_="kicker")
    parts = []
    for index, results in enumerate(worked):
        members = _members(results.run, f"run-{index}-")
        parts.append(_part(results, 2, f"run-{index}", len(worked), "run", members))
    links = [(f"#run-{index}", results.run.name) for index, results in enumerate(worked)]
    navigation = _navigation([("#compare", "Comparison"), *links, READ])
    runs = [results.run for results in worked]
    compared = section(2, "The runs side by side", "compare", *comparison_parts(runs))
    pairs = paired_sentence(runs)
    top_parts = [kicker, title_of(joint_headline(worked)), element("p", pairs, class_="lede") if pairs else None]
    return text([element("header", *top_parts, navigation), element("main", compared, parts, _how_to_read(worked))])


def _members(run: RunFiles, prefix: str) -> Markup:
    """The runs of a group with a section for each; "" of a single run."""
    count = len(run.members)
    each = [
        _part(work_out(member), 3, f"{prefix}{index}", count, "run member") for index, member in enumerate(run.members)
    ]
    return members_part(run, prefix, each)


def _part(results: Results, level: int, identity: str, of: int, look: str, more: object = None) -> Markup:
    """One of many runs, below a heading; of more than `MANY` only the scores, and how to get the other sections."""
    run, found = results.run, run_sections(results, level + 1, f"{identity}-")
    sections = [part for key, _, part in found if of <= MANY or key in SHORT]
    if of > MANY:
        command = element("code", f"python -m pe_lab.report {run.directory}")
        words = "Losses, positions, heat maps and config of this run: "
        sections.append(element("p", words, command, class_="small soft"))
    heading = element(f"h{level}", run.name, id=identity)
    inner = [heading, top(results, level), problem_note(run), sections, more]
    return element("section", inner, class_=look, data_run=run.name)


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
    for one in tables:
        some, labels = stand_ins(runs, one)
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


# ---------------------------------------------------------------------------------------------------------------------
# Several runs side by side: settings that differ, common tables and charts, differences in pairs of seeds


SETTINGS = 5  # columns of settings; the others are folded


def comparison_parts(runs: Sequence[RunFiles]) -> list[object]:
    """Tables and charts over all runs; groups are runs here, whose `members` are runs, too."""
    settings, equal = differing(runs)
    parts: list[object] = [runs_table(runs, settings), _equal_settings(equal)]
    if len({name for run in runs if (name := provenance.tokenizer(run))}) > 1:
        words = (
            "These runs cut text with different tokenizers, so losses and perplexities per token are not comparable "
            "between them."
        )
        parts.append(note(words))
    others = task_suites({suite for run in runs for suite in run.evaluation} - set(SCORED) - {"beta"})
    grids, charts, tasks, task_charts = [], [], [], []
    for suite in [*SCORED, *others]:
        found = [one for one in build_tables(suite, runs) if one.cells]
        asked, plain = [one for one in found if one.prompted], [one for one in found if not one.prompted]
        grids += [score_table(one, comparison_styles(one), len(plain) > 1) for one in plain]
        charts += [chart for one in plain if (chart := _score_comparison(runs, one))]
        task_charts += [chart for one in asked if (chart := _score_comparison(runs, one))]
        styles = {label: style for one in asked for label, style in comparison_styles(one).items()}
        tasks += suite_parts(suite, asked, styles, 3, charts=False)
    scored = [one for suite in SCORED for one in build_tables(suite, runs)]
    if words := not_compared(runs, scored):
        parts.append(note(words))
    if grids:
        words = f"Rows are variants of each run, columns are sequence lengths. {marks(runs)}; deeper green is better."
        parts.append(element("p", words, class_="soft"))
    parts.append(element("div", grids, class_="grid", style="margin-top:28px"))
    if charts:
        parts.append(element("div", charts, class_="grid below"))
    parts += [_paired_table(paired_differences(runs, [*SCORED, *others])), *tasks]
    parts.append(
        folded("Tasks against length, run by run", element("div", task_charts, class_="grid") * bool(task_charts))
    )
    return [*parts, run_charts.loss_comparison(runs), *_validation_charts(runs)]


def runs_table(runs: Sequence[RunFiles], settings: dict[str, list[object]]) -> Markup:
    """A line for each run or group: the settings that differ, its size, its last loss and its state.

    What is equal in all lines is a sentence below the table instead of a column.
    """
    shown = {name.replace("_", " ").capitalize(): values for name, values in [*settings.items()][:SETTINGS]}
    seeds = max(len(run.members) for run in runs)
    tokens, time = ("Tokens each", "Training time, all seeds") if seeds else ("Tokens", "Training time")
    names = [
        text([swatch(run_charts.run_style(n)), element("a", run.name, href=f"#run-{n}")]) for n, run in enumerate(runs)
    ]
    columns: dict[str, list[object]] = {"Run": names}
    if seeds:
        columns["Seeds"] = [str(max(len(run.members), 1)) for run in runs]
    columns |= {name: list(map(_setting, values)) for name, values in shown.items()}
    if "Phases" not in columns:
        columns["Phases"] = [" → ".join(phase.name for phase in run.phases) or "–" for run in runs]
    columns["Parameters"] = [count(size) if (size := provenance.parameters(run)) else "–" for run in runs]
    columns["Training length"] = [f"{run.training_length:,}" if run.training_length else "–" for run in runs]
    columns[tokens] = list(map(_tokens, runs))
    columns["Last validation loss"] = list(map(_last_loss, runs))
    columns[time] = [duration(spent) if (spent := provenance.seconds(run)) else "–" for run in runs]
    columns["Status"] = list(map(_status, runs))
    alike = ("Phases", "Parameters", "Training length", tokens, "Status")
    equal = {name: columns.pop(name)[0] for name in alike if len(runs) > 1 and len(set(columns[name])) == 1}
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    parts: list[object] = [plain_table("Runs", [*columns], rows, words=())]
    words = "; ".join(f"{name.lower()} {value}" for name, value in equal.items())
    notes = [f"In all of them: {words}."] if equal else []
    if seeds:
        notes.append(f"Small figures: {seeds_interval(runs)}.")
    parts.append(element("p", " ".join(notes), class_="small soft") if notes else None)
    if more := list(settings.items())[SETTINGS:]:
        lines = [[name.replace("_", " "), *map(_setting, values)] for name, values in more]
        others = plain_table("Other settings that differ", ["Setting", *(run.name for run in runs)], lines, words=())
        parts.append(folded(f"{len(more)} more settings differ", others))
    return text(parts)


def _tokens(run: RunFiles) -> str:
    """The training tokens of a run: `205K to 307K` where members of a group have read less than others."""
    read = sorted(sum(phase.tokens for phase in member.phases) for member in run.members or (run,))
    return " to ".join(dict.fromkeys((count(read[0]), count(read[-1]))))


def _setting(value: object) -> str:
    if value is None:
        return "–"
    return shortened(f"{value:g}" if isinstance(value, float) else str(value), 40) or "–"


def _status(run: RunFiles) -> str:
    done, of = len(finished_members(run)), max(len(run.members), 1)
    if done == of:
        return "complete"
    return f"{done} of {of} seeds complete" if run.members else "not complete"


def _last_loss(run: RunFiles) -> object:
    """The last validation loss of a run; of a group the mean over its members that have finished, and of how many."""
    values = last_losses(run)
    if not values:
        return "–"
    found = over_seeds(values)
    words = short_number(found.mean)
    if not run.members:
        return words
    ends = f"{found.low:.3f}–{found.high:.3f}" if found.count > 1 else ""
    few = f"{found.count} of {len(run.members)} seeds" if found.count < len(run.members) else ""
    notes = [element("small", words) for words in (ends, few) if words]
    return text([words, *notes])


def _equal_settings(equal: dict[str, object]) -> Markup:
    """What is equal in all runs, once, folded."""
    if not equal:
        return Markup("")
    shown = json.dumps(equal, indent=1, ensure_ascii=False, default=str)
    return folded(f"{len(equal)} settings are equal in all runs", element("pre", shown))


def _score_comparison(runs: Sequence[RunFiles], of: Table) -> Markup:
    """One curve for each run against length: that of the variant that stands for it."""
    some, labels = stand_ins(runs, of)
    if len(labels) < 2:
        return Markup("")
    styles = {run.name: run_charts.run_style(index) for index, run in enumerate(runs)}
    words = ""
    if len(set(labels.values())) > 1 or len(of.rows) > len(labels):
        each = "; ".join(f"{name}: {label}" for name, label in labels.items())
        words = f"Drawn: {each if len(set(labels.values())) > 1 else f'{next(iter(labels.values()))} of each run'}."
    return score_chart(some, styles, f"{table_title(of, of.suite != 'needles')} against length", caption=words)


def _validation_charts(runs: Sequence[RunFiles]) -> list[object]:
    """Validation losses of all runs: of all sources together, and of each."""
    whole = run_charts.loss_comparison(runs, "validation_loss", "Validation loss")
    keys = list(dict.fromkeys(key for run in runs for key in run_charts.logged_keys(run, run_charts.SOURCE)))
    parts = [
        run_charts.loss_comparison(runs, key, f"Validation loss on {key.removeprefix(run_charts.SOURCE)}")
        for key in (keys if len(keys) > 1 else [])
    ]
    return [whole, folded("Validation loss, source by source", parts)]


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


def members_part(run: RunFiles, prefix: str, sections: Sequence[Markup]) -> Markup:
    """The runs of a group: a table with links, and their own sections, folded. "" of a single run."""
    if not run.members:
        return Markup("")
    rows = [
        [
            element("a", member.name, href=f"#{prefix}{index}"),
            seed_words(member),
            count(sum(phase.tokens for phase in member.phases)),
            _last_loss(member),
            duration(provenance.seconds(member)) if provenance.seconds(member) else "–",
            _status(member),
        ]
        for index, member in enumerate(run.members)
    ]
    head = ("Run", "Seed", "Tokens", "Last validation loss", "Time", "Status")
    table = plain_table(f"Runs of {run.name}", head, rows, words=())
    title = element("p", f"The {len(rows)} runs of this group", class_="title below")
    return text([title, table, folded("Each of them by itself", list(sections))])


def _signed(value: float, digits: int) -> str:
    """A difference with its sign; 0 has none."""
    shown = f"{value:+.{digits}f}"
    return shown.replace("-", "−") if float(shown) else shown[1:]


def paired_sentence(runs: Sequence[RunFiles]) -> str:
    """The differences of groups in the last validation loss, in pairs of seeds, in a sentence; "" without pairs."""
    found = paired_differences(runs, ())
    parts = []
    for one, p in zip(found, holm([one.difference.p for one in found]), strict=True):
        mean, low, high = (_signed(value, 3) for value in one.difference.numbers)
        parts.append(f"{one.name}: {mean} ({low} to {high}, p {_p(p, '= ')}, {one.difference.count} seeds)")
    corrected = f" (p corrected for {len(parts)} comparisons)" if len(parts) > 1 else ""
    return f"Last validation loss, in pairs of seeds{corrected}: {'; '.join(parts)}." if parts else ""


def _p(value: float, equals: str = "") -> str:
    return f"{equals}{value:.3f}" if value >= 0.001 else "< 0.001"


def _paired_table(found: Sequence[Paired]) -> Markup:
    """Differences between groups, seed by seed; "" without groups that have seeds in common."""
    if not found:
        return Markup("")
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for one in found:
        first.setdefault((one.name, one.what), one.labels)
    words = (
        "Each seed's run of the one group less that of the other: the mean over the seeds, with its 95% interval "
        "and p by Student's t test for pairs. Shares are in points; losses and perplexities in nats per token, where "
        "lower is better. The corrected p is by Holm's method, for the number of comparisons in its table."
    )
    parts: list[object] = [element("p", words, class_="small soft")]
    for name in dict.fromkeys(one.name for one in found):
        of_pair = [one for one in found if one.name == name]
        main = [one for one in of_pair if first[name, one.what] == one.labels]
        rest = [one for one in of_pair if first[name, one.what] != one.labels]
        parts.append(element("p", name, class_="title below"))
        parts.append(_differences(f"Differences, {name}", main))
        if rest:
            more = _differences(f"Differences of every variant, {name}", rest)
            parts.append(folded("Of every variant that both have", more))
    return element("div", element("h3", "Differences in pairs of seeds"), parts)


def _differences(name: str, found: Sequence[Paired]) -> Markup:
    head = [header("Measure", look="text")]
    head += [header(title) for title in ("Length", "Mean difference", "p", "p, corrected", "Seeds")]
    body = []
    for one, corrected in zip(found, holm([one.difference.p for one in found]), strict=True):
        scale, digits, unit = (100.0, 1, " points") if one.share else (1.0, 3, "")
        mean, low, high = (_signed(scale * value, digits) for value in one.difference.numbers)
        left, right = one.labels
        compared = left if left == right else f"{left} − {right}"
        measure = suite_title(one.what) if one.what in SCORED else one.what.capitalize()
        numbers = "|".join(f"{value:.6g}" for value in one.difference.numbers)
        ends = element("small", f"{low} to {high}")
        cells = [
            element("td", one.column.title if one.column else "–"),
            element("td", element("b", f"{mean}{unit}"), ends, data_csv=numbers),
            *(element("td", _p(p)) for p in (one.difference.p, corrected)),
            element("td", one.difference.count),
        ]
        body.append(row([measure, element("small", compared) if compared else None], cells))
    return table(name, head, body, "pairs-of-seeds", box="scroll fit")
