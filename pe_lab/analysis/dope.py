"""DoPE's sweep: heads chosen by their entropies and denoised, each model compared with the one without DoPE.

DoPE (Xiong et al. 2025), section 5 and Tables 1 to 4. `docs/dope.md` has the commands of each table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.head_entropy import INDICATORS, STAGES, check_name, checked_rank, measure_heads, rank_name
from pe_lab.analysis.sequences import Sequences, counted, text_windows
from pe_lab.analysis.session import AnalysisSession
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.command_line import parse_length
from pe_lab.evaluation.generation.prompted import SEED, Prompted
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.suite import PromptSuite, add_options, given_options
from pe_lab.evaluation.suites import SUITES, open_tasks, parse_suites
from pe_lab.evaluation.variants import Subject, Variant
from pe_lab.positional import DOPE, denoise_by
from pe_lab.positional.codec import numbers_and_ranges
from pe_lab.results.figures import Figure, HeatMaps, Line, LineCharts
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import SIGNIFICANT, Difference, with_holm
from pe_lab.results.table import Cell, Metric, Table, TextTable, by_sample, samples_cell
from pe_lab.terminal import any_seed, console, positive

ORDERS = ("ascending", "descending", "random")
PROMPT_SUITES = [suite for suite in SUITES.values() if isinstance(suite, PromptSuite)]
GRID = {  # key -> values, of which a sweep has every combination
    "method": ("all-nope", "parts-fast"),
    "indicator": ("key",),
    "stage": ("post_ntk",),
    "rank": ("1", "16", "full"),
    "heads": ("3",),
    "order": ORDERS[:2],
}


def parse_grid(text: str | None, heads: int) -> list[DopeCell]:
    """The cells of `key=a,b;key=c`; a key that is not named has its values of `GRID`.

    Args:
      heads: of the model, all layers together.

    Raises:
      ConfigError: an unknown key or value, or more heads than there are.
    """
    values: dict[str, tuple[str, ...]] = dict(GRID)
    named: set[str] = set()
    for part in filter(None, (part.strip() for part in (text or "").split(";"))):
        key, equals, listed = (x.strip() for x in part.partition("="))
        if not equals:
            raise ConfigError(f"--grid: '{part}' is not KEY=VALUE,VALUE. The keys are {', '.join(GRID)}.")
        check_name("--grid", key, list(GRID))
        if key in named:
            raise ConfigError(f"--grid: {key} is given twice; join its values with commas.")
        named.add(key)
        values[key] = tuple(dict.fromkeys(item.strip() for item in listed.split(",")))
    for key, allowed in (("method", tuple(DOPE)), ("indicator", INDICATORS), ("stage", STAGES), ("order", ORDERS)):
        for item in values[key]:
            check_name(f"--grid: {key}", item, allowed)
    ranks = dict.fromkeys(checked_rank("--grid: rank", rank, i) for rank in values["rank"] for i in values["indicator"])
    counts = dict.fromkeys(numbers_and_ranges(",".join(values["heads"]), "--grid: heads"))
    for count in counts:
        if not 1 <= count <= heads:
            raise ConfigError(f"--grid: heads={count} is impossible; the model has {heads} heads. Give 1 to {heads}.")
    kept = (values["method"], values["indicator"], values["stage"], ranks, counts, values["order"])
    return list(itertools.starmap(DopeCell, itertools.product(*kept)))


# ---------------------------------------------------------------------------------------------------------------------
# The sweep


@dataclasses.dataclass(frozen=True)
class DopeSweep:
    """What a command line asks for.

    Attributes:
      cells: of every variant.
      tasks: that the cells are measured on.
      length: tokens of their prompts.
      zero_shot: the task that many-shot learning is compared with; None: another suite.
    """

    session: AnalysisSession
    cells: list[DopeCell]
    tasks: list[PromptTask]
    length: int
    zero_shot: PromptTask | None

    @property
    def arguments(self) -> argparse.Namespace:
        return self.session.arguments

    def prompted(self, variants: Sequence[Variant], tasks: Sequence[PromptTask]) -> Prompted:
        """The variants on the prompts of tasks; answers are kept in the analysis's directory."""
        arguments, options = self.arguments, given_options(self.arguments, PROMPT_SUITES)
        seed, out = arguments.seed, self.session.out
        return Prompted(variants, tasks, [self.length], options, seed, out, arguments.again)

    def plan(self) -> str:
        """The number of models and of tokens, about, and what the comparison can find."""
        session = self.session
        baseline = self.prompted(session.variants, self.tasks)
        samples = [len(group.prompts.samples) for group in baseline.groups]
        for group, count in zip(baseline.groups, samples, strict=True):
            if count == 0:
                raise ConfigError(f"--suite={group.task.suite}:{group.task.name} has no samples.")
        models, each = len(self.cells), baseline.work
        count = models * len(samples)
        names = ", ".join(f"{task.suite}:{task.name}" for task in self.tasks)
        heads = self.arguments.sequences * self.heads_length(session.variants[0].subject) * len(session.variants) * 2
        needed = int(np.ceil(1 + np.log2(count / SIGNIFICANT)))
        lines = [
            f"{models} cells and the model without DoPE, for {counted(len(session.variants), 'variant')}, on {names}: "
            f"{min(samples):,} samples each at {self.length:,} tokens.",
            f"At most {each * (models + 1):,} tokens are read and written to answer them (cells that choose the same "
            f"heads are one model), and {heads:,} to choose heads.",
            f"{counted(count, 'comparison')}: if DoPE made no difference, up to {count * SIGNIFICANT / 2:.1f} would "
            f"look better at an uncorrected 5% by luck. After Holm's correction, {needed} samples must differ, all in "
            "one direction, for the first to count.",
        ]
        if min(samples) < needed:
            lines.append(f"With {min(samples)} samples no cell can be found better or worse: take more --samples.")
        return "\n".join(lines)

    def heads_length(self, subject: Subject) -> int:
        """Tokens of the sequences on which heads are chosen."""
        given = self.arguments.heads_length
        return self.length if given is None else parse_length("--heads-length", given, subject.training_length)

    def sequences(self, subject: Subject) -> Sequences:
        """The sequences on which heads are chosen: of a text, or prompts of another seed than those that are asked."""
        arguments, length = self.arguments, self.heads_length(subject)
        count = arguments.sequences
        if arguments.text is not None:
            return text_windows(arguments.text, subject, length, count)
        suite = arguments.heads_suite
        if suite is None:
            sized = [task for task in self.tasks if task.sized]
            if not sized:
                raise ConfigError("Name the sequences to choose heads on: --text=GLOB, or --heads-suite=niah:clean.")
            suite = f"{sized[0].suite}:{sized[0].name}"
        options = given_options(arguments, PROMPT_SUITES) | {"samples": count, "depths": None}
        tasks = open_tasks(parse_suites(suite), options)
        if len(tasks) != 1 or not tasks[0].sized:
            raise ConfigError(f"--heads-suite={suite}: name one task whose prompts are made to a length.")
        return prompt_sequences(tasks[0], subject, length, count, arguments.seed + 1)


def prompt_sequences(task: PromptTask, subject: Subject, length: int, count: int, seed: int) -> Sequences:
    """`count` prompts of a task, without answers.

    Raises:
      UserError: a length that holds no prompt, or a checkpoint without a tokenizer.
    """
    tokenizer = subject.lm.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{subject.path} came without a tokenizer, so prompts cannot be read.")
    rows = [sample.tokens for sample in task.samples(tokenizer, length, count, seed)]
    if not rows:
        raise ConfigError(f"{task.suite}:{task.name} has no samples to choose heads on.")
    tokens = np.stack([np.pad(row, (0, length - len(row)), mode="edge") for row in rows]).astype(np.int32)
    name = f"{counted(len(rows), 'prompt')} of {task.suite}:{task.name}, {length:,} tokens"
    return Sequences(name, tokens, np.array([len(row) for row in rows]))


def open_sweep(session: AnalysisSession) -> DopeSweep:
    """The sweep of a command line; `ConfigError` if it is impossible."""
    arguments = session.arguments
    subject = session.variants[0].subject
    length = parse_length("--length", arguments.length, subject.training_length)
    for variant, name in zip(session.variants, session.names, strict=True):
        schedule = variant.at(length).schedule_for(length)
        if not np.any(np.asarray(schedule.inv_freq) > 0):
            raise ConfigError(f"dope: no layer of {name} rotates, so no head has an encoding to denoise.")
    heads = min(variant.lm.config.layers * variant.lm.config.heads for variant in session.variants)
    cells = parse_grid(arguments.grid, heads)
    suites = parse_suites(arguments.suite)
    for suite in suites:
        if not isinstance(SUITES[suite], PromptSuite):
            known = ", ".join(one.name for one in PROMPT_SUITES)
            raise ConfigError(f"--suite={suite}: the sweep asks prompts: {known}.")
    options = given_options(arguments, PROMPT_SUITES)
    opened = open_tasks(suites, options, (length,))
    tasks = [task for task in opened if task.name != "zero_shot"]
    zero = open_tasks({"many_shot": ("zero_shot",)}, options) if "many_shot" in suites else [None]
    if not tasks:
        raise ConfigError(f"--suite={arguments.suite}: name a task that the cells are measured on.")
    return DopeSweep(session, cells, tasks, length, zero[0])


def drawn_at_random(cell: DopeCell, shape: tuple[int, ...]) -> Float[np.ndarray, "N H"]:
    """Scores that choose heads at random, as a control: one draw for each indicator, stage and rank.

    The heads of a smaller number are among those of a larger one.
    """
    seed = zlib.crc32(f"{cell.criterion} {cell.rank}".encode())
    return np.random.default_rng(seed).permutation(int(np.prod(shape))).astype(float).reshape(shape)


def denoised(
    variant: Variant, cells: Sequence[DopeCell], scores: Mapping[DopeCell, np.ndarray], length: int
) -> Iterator[tuple[DopeCell, Variant]]:
    """Each cell with its model: one for all that make the same layers, `variant` itself where they change nothing."""
    made = {variant.fingerprint(length): variant}
    before = variant.layers_at(length)
    for cell in cells:
        random = cell.order == "random"
        ranked = drawn_at_random(cell, scores[cell].shape) if random else scores[cell]
        order = "ascending" if random else cell.order
        after = denoise_by(cell.method, before, ranked, cell.heads, order, training_length=variant.training_length)
        new_name, label = f"{variant.name}, DoPE {cell.name}", f"{variant.label}, {cell.name}"
        new = Variant(variant.subject, new_name, label, described=after)
        yield cell, made.setdefault(new.fingerprint(length), new)


def _run(session: AnalysisSession) -> Findings | None:
    sweep = open_sweep(session)
    out = console()
    out.print(sweep.plan())
    if session.arguments.dry_run:
        return None
    models: list[dict[DopeCell, Variant]] = []
    for variant, name in zip(session.variants, session.names, strict=True):
        session.sequences = sweep.sequences(variant.subject)
        alone = dataclasses.replace(session, variants=[variant], names=[name])
        (found,) = measure_heads(alone, session.sequences)
        session.reused = alone.reused
        scores = {cell: found[cell.criterion].score(cell.rank).astype(np.float64).mean(0) for cell in sweep.cells}
        models.append(dict(denoised(variant, sweep.cells, scores, sweep.length)))
    distinct = {id(one): one for one in (*session.variants, *(one for cells in models for one in cells.values()))}
    answers = sweep.prompted([*distinct.values()], sweep.tasks)
    answers.run()
    answered: dict[tuple[int, str], list[dict[str, Any]]] = {
        (id(group.variant), _task_name(group.task)): records for group, _, records in answers.answered()
    }
    zero = _zero_shot(sweep)
    tables = [
        _scores({BASE: variant, **cells}, sweep.tasks, answered)
        for variant, cells in zip(session.variants, models, strict=True)
    ]
    compared = with_holm(
        {
            (v, model, task): by_sample(tables[v].cells[cell, task], tables[v].cells[BASE, task])
            for v, variant in enumerate(session.variants)
            for task in map(_task_name, sweep.tasks)
            for model, cell in {id(one): cell for cell, one in models[v].items() if one is not variant}.items()
        }
    )
    results = []
    for v, (variant, name, cells) in enumerate(zip(session.variants, session.names, models, strict=True)):
        differences = {(model, task): one for (of, model, task), one in compared.items() if of == v}
        chosen = {cell: _edited(one, variant, sweep.length) for cell, one in cells.items()}
        model_of = {cell: id(one) for cell, one in {BASE: variant, **cells}.items()}
        shot = zero.get(variant.subject.id)
        results.append(DopeScores(name, tables[v], model_of, differences, shot and _mean(shot), chosen))
    return findings(results, list(map(_task_name, sweep.tasks)), sweep.length, session.arguments.seed)


def _scores(
    models: Mapping[Any, Variant], tasks: Sequence[PromptTask], answered: Mapping[tuple[int, str], list[dict[str, Any]]]
) -> Table:
    """The table of the answered samples of models by task."""
    names = list(map(_task_name, tasks))
    cells = {(row, task): _mean(answered[id(one), task]) for row, one in models.items() for task in names}
    return Table(tuple(map(Metric, names)), models, cells)


def _mean(records: Sequence[Mapping[str, Any]]) -> Cell:
    """The mean score of answered samples, of which those of a cluster count as one."""
    clusters = [record["metadata"].get("cluster", record["index"]) for record in records]
    found = samples_cell([record["score"] for record in records], clusters)
    assert found is not None  # samples were counted before anything was measured
    return found


def _zero_shot(sweep: DopeSweep) -> dict[str, list[dict[str, Any]]]:
    """Checkpoint id -> sample records of the model as trained, asked without solved problems."""
    if sweep.zero_shot is None:
        return {}
    subjects = {variant.subject.id: variant.subject for variant in sweep.session.variants}
    asked = sweep.prompted([Variant(s, "as trained", s.model) for s in subjects.values()], [sweep.zero_shot])
    asked.run()
    return {group.variant.subject.id: records for group, _, records in asked.answered()}


def _edited(one: Variant, variant: Variant, length: int) -> list[list[int]]:
    """[layer, head] of every head that a denoised model changes."""
    pairs = zip(one.layers_at(length), variant.layers_at(length), strict=True)
    added = [(n, edit) for n, (after, before) in enumerate(pairs) for edit in after.heads[len(before.heads) :]]
    return sorted([n, head] for n, edit in added for head in edit.heads)


def _task_name(task: PromptTask) -> str:
    return f"{task.suite}:{task.name}"


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suite", default="niah:noisy,clean", help="what is asked, as in pe_lab.evaluate (default: %(default)s)")
    add("--length", default="2x", help="tokens of a prompt and its answer (default: %(default)s the training length)")
    defaults = "; ".join(f"{key}={','.join(values)}" for key, values in GRID.items())
    add("--grid", metavar="KEY=A,B;KEY=C", help=f"the cells, by default {defaults}")
    add("--seed", type=any_seed, default=SEED, help="which prompts (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the number of cells and of tokens, and end")
    add("--sequences", type=positive, default=4, metavar="N", help="to choose heads on (default: %(default)s)")
    add(
        "--heads-suite", metavar="SUITE:TASK", help="prompts to choose heads on (default: of the first task of --suite)"
    )
    add("--heads-length", help="tokens of these sequences (default: --length), as in Table 3")
    add("--text", metavar="SOURCE", help="a text to choose heads on, instead of prompts")
    add_options(parser, PROMPT_SUITES)


# ---------------------------------------------------------------------------------------------------------------------
# The results: one sorted table a variant, with the model without DoPE in it, and figures

ORDER_NAMES = {"ascending": "ASC", "descending": "DESC", "random": "random"}
BASE = "no DoPE"  # the row of the model without it


class DopeCell(NamedTuple):
    """One combination of a sweep: how heads are denoised, and by what score which of them are chosen."""

    method: str
    indicator: str
    stage: str
    rank: str
    heads: int
    order: str

    @property
    def criterion(self) -> str:
        return f"{self.stage}_{self.indicator}"

    @property
    def name(self) -> str:
        return f"{self.method} {self.criterion} {rank_name(self.rank)} {self.heads} {self.order}"


class DopeScores(NamedTuple):
    """All that was measured of one variant.

    Attributes:
      name: of the variant.
      table: scores by cell of the sweep, and of `BASE`, and by task. Cells that choose the same heads are one model.
      models: the model of each cell; cells whose model is that of `BASE` change nothing.
      differences: {(model, task): from the model without DoPE on the same samples}, p corrected for the whole sweep.
      zero_shot: of the zero-shot task; None: not asked.
      heads: [layer, head] of those that each cell denoises.
    """

    name: str
    table: Table
    models: Mapping[DopeCell | str, int]
    differences: Mapping[tuple[int, str], Difference]
    zero_shot: Cell | None
    heads: Mapping[DopeCell, list[list[int]]]

    @property
    def cells(self) -> list[DopeCell]:
        return [cell for cell in self.table.rows if cell != BASE]

    def score(self, cell: DopeCell | str, task: str) -> Cell:
        return self.table.cells[cell, task]

    def difference(self, cell: DopeCell, task: str) -> Difference | None:
        """The difference that a cell makes; None if it changes nothing."""
        return self.differences.get((self.models[cell], task))


def findings(results: Sequence[DopeScores], tasks: Sequence[str], length: int, seed: int) -> Findings:
    """The tables, figures, sentences and `cells.json` of a sweep."""
    compared = [one for result in results for one in result.differences.values()]
    luck = len(compared) * SIGNIFICANT / 2
    looks = sum(one.p < SIGNIFICANT and one.mean > 0 for one in compared)
    counts = {word: sum(one.verdict == word for one in compared) for word in ("better", "worse", "tie")}
    sentences = [
        f"{len(compared)} comparisons with the model without DoPE, on the same prompts: {counts['better']} better, "
        f"{counts['worse']} worse, {counts['tie']} ties after Holm's correction at {SIGNIFICANT:.0%}.",
        f"Without the correction {looks} would look better; by luck alone up to {luck:.1f} of {len(compared)} would.",
    ]
    tables, figures = [], []
    numbers: dict[str, np.ndarray] = {}
    written = []
    for v, result in enumerate(results):
        suffix, of = (f"_{v}", f" of {result.name}") if len(results) > 1 else ("", "")
        title = (
            f"DoPE on {result.name} at {length:,} tokens, sorted by {tasks[0]} (95% intervals). Of {len(compared)} "
            f"comparisons up to {luck:.1f} would look better by luck; the verdicts are after Holm's correction"
        )
        tables.append(_table(result, tasks, title))
        figures += _figures(result, tasks, suffix, of)
        sentences += _sentences(result, tasks, seed)
        shape = (len(result.cells), len(tasks))
        for key, of_pair in (("score", _score), ("difference", _difference), ("corrected_p", _corrected)):
            values = [[of_pair(result, cell, task) for task in tasks] for cell in result.cells]
            numbers[f"{key}{suffix}"] = np.array(values, np.float64).reshape(shape)
        written += [_record(result, cell, task) for cell in result.cells for task in tasks]
    shapes = {name: "[C, T] cell as in cells.json, task" for name in ("score", "difference", "corrected_p")}
    files = {"cells.json": (json.dumps(written, indent=1, allow_nan=False) + "\n").encode()}
    return Findings(tuple(sentences), tuple(tables), tuple(figures), numbers, shapes, files=files)


def _score(result: DopeScores, cell: DopeCell, task: str) -> float:
    return result.score(cell, task).value


def _difference(result: DopeScores, cell: DopeCell, task: str) -> float:
    found = result.difference(cell, task)
    return 0.0 if found is None else found.mean


def _corrected(result: DopeScores, cell: DopeCell, task: str) -> float:
    found = result.difference(cell, task)
    return 1.0 if found is None else found.corrected


def _percent(cell: Cell) -> str:
    low, high = cell.ends
    return f"{100 * cell.value:.1f}% ({100 * low:.0f}–{100 * high:.0f})"


def _points(difference: Difference) -> str:
    low, high = (f"{100 * x:+.1f}" for x in (difference.low, difference.high))
    return f"{100 * difference.mean:+.1f} ({low} to {high})"


def _table(result: DopeScores, tasks: Sequence[str], title: str) -> TextTable:
    header = ["method", "criterion", "entropy", "order", "heads"]
    for task in tasks:
        header += [task, "points from none", "after Holm"]
    rows = []  # (score, place among equal ones, texts)
    for cell in result.cells:
        row = [cell.method, cell.criterion, rank_name(cell.rank), ORDER_NAMES[cell.order], str(cell.heads)]
        for task in tasks:
            found = result.difference(cell, task)
            row += [_percent(result.score(cell, task)), *_compared(found)]
        rows.append((_score(result, cell, tasks[0]), 1, row))
    none = [BASE, "", "", "", ""]
    for task in tasks:
        none += [_percent(result.score(BASE, task)), "", ""]
    rows.append((result.score(BASE, tasks[0]).value, 0, none))
    if result.zero_shot is not None:
        row = ["zero-shot, as trained", "", "", "", ""]
        for task in tasks:
            row += [_percent(result.zero_shot) if task.startswith("many_shot:") else "", "", ""]
        rows.append((result.zero_shot.value, 0, row))
    rows.sort(key=lambda row: (-row[0], row[1]))
    return TextTable(title, tuple(header), tuple(tuple(row) for *_, row in rows), words=4)


def _compared(difference: Difference | None) -> list[str]:
    return ["", "same model"] if difference is None else [_points(difference), difference.verdict]


def _sentences(result: DopeScores, tasks: Sequence[str], seed: int) -> list[str]:
    written = []
    models, same = set(result.models.values()), sum(result.models[c] == result.models[BASE] for c in result.cells)
    if len(models) - 1 + same < len(result.cells):
        written.append(
            f"{result.name}: {len(result.cells)} cells are {len(models) - 1} different models; others choose the same "
            "heads."
        )
    for task in tasks:
        ranked = sorted(result.cells, key=lambda cell: -_score(result, cell, tasks[0]))
        best = max(ranked, key=lambda cell: _score(result, cell, task))
        base, text = result.score(BASE, task), ""
        if found := result.difference(best, task):
            text = f", {_points(found)} points, p = {found.corrected:.2g} after Holm ({found.verdict})"
        written.append(
            f"{result.name}, {task}: {_percent(base)} without DoPE; the best cell, {best.name}, has "
            f"{_percent(result.score(best, task))}{text}. The best of many is partly luck: measure it again on other "
            f"prompts (--seed={seed + 2})."
        )
    return written


def _record(result: DopeScores, cell: DopeCell, task: str) -> dict[str, Any]:
    """One cell on one task, for `cells.json`."""
    of = result.score(cell, task)
    low, high = of.ends
    record = {"variant": result.name, "task": task, **cell._asdict(), "chosen": result.heads[cell]}
    record |= {"score": of.value, "low": low, "high": high, "samples": of.record["samples"]}
    record["baseline"] = result.score(BASE, task).value
    if found := result.difference(cell, task):
        numbers = {name: getattr(found, name) for name in ("mean", "low", "high", "p", "count")}
        record |= {"difference": numbers, "corrected_p": found.corrected, "verdict": found.verdict}
    return record


def _figures(result: DopeScores, tasks: Sequence[str], suffix: str, of: str) -> list[Figure]:
    cells = result.cells
    panels = list(dict.fromkeys((c.method, c.criterion) for c in cells))
    rows = list(dict.fromkeys((c.rank, c.order) for c in cells))
    columns = list(dict.fromkeys(c.heads for c in cells))
    drawn: list[Figure] = []
    for task in tasks:
        name = task.replace(":", "_")
        values = np.full((len(panels), len(rows), len(columns)), np.nan)
        for c in cells:
            at = panels.index((c.method, c.criterion)), rows.index((c.rank, c.order)), columns.index(c.heads)
            values[at] = 100 * _difference(result, c, task)
        drawn.append(
            HeatMaps(
                f"difference_{name}{suffix}",
                f"DoPE against none{of}, {task}",
                "Points of score that a cell gains over the model without DoPE on the same prompts. Single cells are "
                "partly luck; the table has intervals and tests.",
                values,
                tuple(f"{method}, {criterion}" for method, criterion in panels),
                tuple(f"{rank_name(rank)} {ORDER_NAMES[order]}" for rank, order in rows),
                tuple(map(str, columns)),
                "method and criterion",
                "entropy and order",
                "heads",
                "points",
                "diverging",
            )
        )
        ranked = sorted((result.score(cell, task) for cell in cells), key=lambda one: -one.value)
        base, x = result.score(BASE, task), np.arange(len(ranked), dtype=float)
        lines = (
            Line("DoPE", x, *np.array([(one.value, *one.ends) for one in ranked]).T),
            Line("without DoPE", x, *(np.full(len(x), y) for y in (base.value, *base.ends))),
        )
        drawn.append(
            LineCharts(
                f"sorted_{name}{suffix}",
                f"Scores of all cells{of}, {task}, sorted",
                "95% intervals of each cell by itself, and of the model without DoPE.",
                ((task, lines),),
                "cells, from the best to the worst",
                "score",
            )
        )
    return drawn


ANALYSIS = Analysis("DoPE, section 5, Tables 1 to 4", _options, _run)
