"""Runs evaluations with a progress bar, and prints what was left out, reused and written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pe_lab.data.sources import Source
from pe_lab.evaluation.generation.prompted import Group, Prompted
from pe_lab.evaluation.measure import Evaluation
from pe_lab.evaluation.plan import Unit
from pe_lab.evaluation.tasks.documents import measure_documents
from pe_lab.evaluation.variants import Variant
from pe_lab.results.formatting import percent
from pe_lab.results.records import Record
from pe_lab.terminal import Progress, console


class TokenCounter:
    """Counts the tokens that are read, and shows them in a progress bar.

    Args:
      progress: the bar.
      total: tokens in all, about; None: not known.
    """

    def __init__(self, progress: Progress, total: int | None = None):
        self._progress, self._total, self._start = progress, total, time.monotonic()
        self.read = 0

    def add(self, tokens: int, done: int | None = None, name: str | None = None) -> None:
        """Adds tokens; `done` of the total are done (default: the tokens read), `name` is measured."""
        self.read += tokens
        done = self.read if done is None else done
        text = f"{done:,} tokens" if self._total is None else percent(min(done / max(self._total, 1), 1))
        self._progress.update(done, text, name)

    def speed(self) -> str:
        """One line for the end of an evaluation."""
        seconds = time.monotonic() - self._start
        return f"Read {self.read:,} tokens in {seconds:.1f} s, compiling included: {self.read / seconds:,.1f} tokens/s"


def run_evaluation(evaluation: Evaluation) -> list[Record]:
    """The records of an evaluation of perplexity, needles and the logit scale."""
    out = console()
    for sentence in evaluation.skipped:
        out.print(sentence)
    models = ", ".join(dict.fromkeys(f"{s.model} ({s.path})" for s in evaluation.subjects))
    out.print(f"{len(evaluation.units)} measurements of {models}")
    finished = within = reused = 0  # tokens of finished units, tokens of the current one, reused records
    waiting = list(evaluation.units)

    def name() -> str:
        unit = waiting[0]
        return f"{unit.suite} {unit.length:,} {unit.variant.label}"

    with Progress(out, "compiling", evaluation.work) as progress:
        counter = TokenCounter(progress, evaluation.work)

        def measured(unit: Unit, existed: bool) -> None:
            nonlocal finished, within, reused
            finished, within, reused = finished + evaluation.cost(unit), 0, reused + existed
            if len(waiting) > 1:
                waiting.pop(0)
            counter.add(0, finished, name())

        def on_tokens(tokens: int) -> None:
            nonlocal within
            within += tokens
            counter.add(tokens, min(finished + within, evaluation.work), name())

        records = evaluation.run(measured, on_tokens)
    if reused:
        out.print(f"{reused} of them were measured before (--again measures them again).")
    for sentence in evaluation.kept:
        out.print(sentence)
    if counter.read:
        out.print(counter.speed())
    out.print(f"Records: {next(iter(evaluation.files.values())).path.parent}")
    return records


def run_prompted(prompted: Prompted) -> list[Record]:
    """The summaries of prompted tasks."""
    out = console()
    tasks = ", ".join(dict.fromkeys(f"{task.suite}:{task.name}" for task in prompted.tasks))
    labels = ", ".join(dict.fromkeys(f"{v.label} ({v.subject.path})" for v in prompted.variants))
    out.print(f"{tasks} for {labels}")
    if prompted.finished:
        out.print(f"{prompted.finished:,} of {prompted.total:,} samples were answered before (--again: once more).")
    with Progress(out, "compiling", prompted.work) as progress:
        counter = TokenCounter(progress, prompted.work)

        def on_tokens(group: Group, tokens: int) -> None:
            size = f" {group.length:,}" if group.length else ""
            counter.add(tokens, name=f"{group.task.suite}:{group.task.name}{size} {group.variant.label}")

        records = prompted.run(on_tokens)
    for record in records:
        if record["truncated"]:
            out.print(
                f"{record['suite']}:{record['source']}, {record['label']}: {record['truncated']} of "
                f"{record['samples']} prompts were cut in the middle, as the protocol requires."
            )
    if prompted.spent.read:
        out.print(prompted.spent.describe())
    out.print(f"Answers: {prompted.directory / 'samples'}")
    return records


def run_documents(
    variants: Sequence[Variant], source: Source, lengths: Sequence[int], out: Path, count: int | None, again: bool
) -> list[Record]:
    """The perplexity of each document of a source."""
    screen = console()
    screen.print(f"Documents of {source.name} for {', '.join(variant.label for variant in variants)}")
    with Progress(screen, "documents", None) as progress:
        counter = TokenCounter(progress)
        records = measure_documents(variants, source, lengths, out, count, again, counter.add)
    if counter.read:
        screen.print(counter.speed())
    screen.print(f"Documents: {out / 'samples' / 'documents.jsonl'}")
    return records
