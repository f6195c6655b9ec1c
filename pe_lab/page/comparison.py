"""Several runs side by side: settings that differ, common tables and charts, differences in pairs of seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pe_lab.page import provenance, run_charts
from pe_lab.page.markup import Markup, element, folded, note, text
from pe_lab.page.run_section import suite_parts
from pe_lab.page.score_charts import score_chart
from pe_lab.page.tables import header, marks, plain_table, row, score_table, seeds_interval, swatch, table
from pe_lab.page.variants import SCORED, comparison_styles, suite_title, table_title, task_suites
from pe_lab.results.comparison import Paired, differing, finished_members, last_losses, paired_differences, stand_ins
from pe_lab.results.formatting import count, duration, short_number, shortened
from pe_lab.results.groups import seed_words
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables
from pe_lab.results.standing import not_compared
from pe_lab.results.statistics import holm, over_seeds
from pe_lab.results.table import Table

MOST = 5  # columns of settings; the others are folded


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
    shown = {name.replace("_", " ").capitalize(): values for name, values in [*settings.items()][:MOST]}
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
    if more := list(settings.items())[MOST:]:
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
