"""DoPE's sweep: heads chosen by their entropies and denoised, each model compared with the one without DoPE.

DoPE (Xiong et al. 2025), section 5 and Tables 1 to 4. `docs/dope.md` has the commands of each table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.dope_results import BASE, DopeCell, DopeScores, findings
from pe_lab.analysis.head_entropy import measure_heads
from pe_lab.analysis.head_spectra import INDICATORS, STAGES, check_name, checked_rank
from pe_lab.analysis.sequences import Sequences, counted, text_windows
from pe_lab.analysis.session import Session
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.generation.prompted import Prompted
from pe_lab.evaluation.plan import parse_length
from pe_lab.evaluation.tasks.suites import HARNESS, MEASURED, SEED, SUITES, open_tasks, parse_suites
from pe_lab.evaluation.tasks.task import Task
from pe_lab.evaluation.variants import Subject, Variant
from pe_lab.positional import DOPE, denoise_by
from pe_lab.positional.codec import numbers_and_ranges
from pe_lab.results.findings import Findings
from pe_lab.results.statistics import SIGNIFICANT, with_holm
from pe_lab.results.table import Cell, Metric, Table, by_sample, samples_cell
from pe_lab.terminal import any_seed, console, positive

ORDERS = ("ascending", "descending")
GRID = {  # key -> values, of which a sweep has every combination
    "method": ("all-nope", "parts-fast"),
    "indicator": ("key",),
    "stage": ("post_ntk",),
    "rank": ("1", "16", "full"),
    "heads": ("3",),
    "order": ORDERS,
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
class Sweep:
    """What a command line asks for.

    Attributes:
      cells: of every variant.
      tasks: that the cells are measured on.
      length: tokens of their prompts.
      zero_shot: the task that many-shot learning is compared with; None: another suite.
    """

    session: Session
    cells: list[DopeCell]
    tasks: list[Task]
    length: int
    zero_shot: Task | None

    @property
    def arguments(self) -> argparse.Namespace:
        return self.session.arguments

    def prompted(self, variants: Sequence[Variant], tasks: Sequence[Task]) -> Prompted:
        """The variants on the prompts of tasks; answers are kept in the analysis's directory."""
        arguments = self.arguments
        seed, out = arguments.seed, self.session.out
        return Prompted(variants, tasks, [self.length], arguments.samples, seed, out, arguments.again)

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
        tasks = open_tasks(
            parse_suites(suite), argparse.Namespace(**vars(arguments) | {"samples": count, "depths": None})
        )
        if len(tasks) != 1 or not tasks[0].sized:
            raise ConfigError(f"--heads-suite={suite}: name one task whose prompts are made to a length.")
        return prompt_sequences(tasks[0], subject, length, count, arguments.seed + 1)


def prompt_sequences(task: Task, subject: Subject, length: int, count: int, seed: int) -> Sequences:
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


def open_sweep(session: Session) -> Sweep:
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
        if suite in MEASURED or suite == HARNESS:
            raise ConfigError(f"--suite={suite}: the sweep asks prompts: niah, ruler, longbench or many_shot.")
    opened = open_tasks(suites, arguments, (length,))
    tasks = [task for task in opened if task.name != "zero_shot"]
    zero = open_tasks({"many_shot": ("zero_shot",)}, arguments) if "many_shot" in suites else [None]
    if not tasks:
        raise ConfigError(f"--suite={arguments.suite}: name a task that the cells are measured on.")
    return Sweep(session, cells, tasks, length, zero[0])


def denoised(
    variant: Variant, cells: Sequence[DopeCell], scores: Mapping[DopeCell, np.ndarray], length: int
) -> Iterator[tuple[DopeCell, Variant]]:
    """Each cell with its model: one for all that make the same layers, `variant` itself where they change nothing."""
    made = {variant.fingerprint(length): variant}
    before = variant.layers_at(length)
    for cell in cells:
        after = denoise_by(
            cell.method, before, scores[cell], cell.heads, cell.order, training_length=variant.training_length
        )
        method, label = f"{variant.method}, DoPE {cell.name}", f"{variant.label}, {cell.name}"
        new = Variant(variant.subject, method, label, described=after)
        yield cell, made.setdefault(new.fingerprint(length), new)


def _run(session: Session) -> Findings | None:
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
    models: Mapping[Any, Variant], tasks: Sequence[Task], answered: Mapping[tuple[int, str], list[dict[str, Any]]]
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


def _zero_shot(sweep: Sweep) -> dict[str, list[dict[str, Any]]]:
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


def _task_name(task: Task) -> str:
    return f"{task.suite}:{task.name}"


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suite", default="niah:noisy,clean", help="what is asked, as in pe_lab.evaluate (default: %(default)s)")
    add("--length", default="2x", help="tokens of a prompt and its answer (default: %(default)s the training length)")
    defaults = "; ".join(f"{key}={','.join(values)}" for key, values in GRID.items())
    add("--grid", metavar="KEY=A,B;KEY=C", help=f"the cells, by default {defaults}")
    add("--samples", "--limit", type=positive, metavar="N", help="a task (default: 500, or as many as its file has)")
    add("--seed", type=any_seed, default=SEED, help="which prompts (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the number of cells and of tokens, and end")
    add(
        "--sequences",
        type=positive,
        default=4,
        metavar="N",
        help="to choose heads on (default: %(default)s)",
    )
    add(
        "--heads-suite", metavar="SUITE:TASK", help="prompts to choose heads on (default: of the first task of --suite)"
    )
    add("--heads-length", help="tokens of these sequences (default: --length), as in Table 3")
    add("--text", metavar="SOURCE", help="a text to choose heads on, instead of prompts")
    add("--haystack", default="essays", help="essays, noise, needles, or a glob of text files (niah, ruler)")
    add("--chat", action="store_true", help="prompts as messages of a chat (longbench)")
    for suite in SUITES.values():
        if suite.open is not None:
            for flag, options in suite.flags.items():
                add(flag, **options)


ANALYSIS = Analysis(
    "dope",
    "DoPE's sweep over methods, scores, numbers of heads and orders, against the model without it",
    "DoPE, section 5, Tables 1 to 4",
    _options,
    _run,
)
