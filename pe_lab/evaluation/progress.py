"""How far an evaluation is: a bar in a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pe_lab.data.sources import Source
from pe_lab.evaluation.generation.prompted import Group, Prompted
from pe_lab.evaluation.measure import Evaluation
from pe_lab.evaluation.plan import Unit
from pe_lab.evaluation.readers import Reader
from pe_lab.evaluation.tasks.documents import measure_documents
from pe_lab.results.records import Record


class Meter:
    """Progress through `total` tokens; use as a context.

    Args:
      console: a rich console.
      total: tokens, about.
    """

    def __init__(self, console: Any, total: int):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
        self._console, self._total = console, max(total, 1)
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("compiling", total=self._total)
        self._next = time.monotonic() + 5
        self.done = 0

    def __enter__(self) -> Meter:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def at(self, done: int, what: str) -> None:
        """`done` tokens of all are behind us; `what` is under way."""
        self.done = min(done, self._total)
        self._bar.update(self._task, completed=self.done, description=what)
        if not self._console.is_terminal and time.monotonic() >= self._next:
            self._next = time.monotonic() + 10
            self._console.print(f"{100 * self.done / self._total:.0f}%  {what}")


def measure_with_progress(evaluation: Evaluation) -> list[Record]:
    """Runs an evaluation under a meter; says what was left out and what was there already."""
    console = plain_console()
    for sentence in evaluation.skipped:
        console.print(sentence)
    models = ", ".join(dict.fromkeys(f"{s.model} ({s.path})" for s in evaluation.subjects))
    console.print(f"{len(evaluation.units)} measurements of {models}")
    before, within, reused, units = 0, 0, 0, list(evaluation.units)
    start, read = time.monotonic(), 0

    with Meter(console, evaluation.work) as meter:

        def described() -> str:
            unit = units[0]
            return f"{unit.suite} {unit.length:,} {unit.subject.model} {unit.method}"

        def measured(unit: Unit, known: bool) -> None:
            nonlocal before, within, reused
            reused += known
            before, within = before + evaluation.cost(unit), 0
            if len(units) > 1:
                units.pop(0)
            meter.at(before, described())

        def heard(tokens: int) -> None:
            nonlocal within, read
            within, read = within + tokens, read + tokens
            meter.at(before + within, described())  # some methods read a text more than once

        rows = evaluation.run(measured, heard)
    if reused:
        console.print(f"{reused} of them were measured before (--again measures them again).")
    for sentence in evaluation.kept:
        console.print(sentence)
    if read:
        seconds = time.monotonic() - start
        console.print(f"Read {read:,} tokens in {seconds:.1f} s, compiling included: {read / seconds:,.1f} tokens/s")
    console.print(f"Rows: {next(iter(evaluation.files.values())).path.parent}")
    return rows


def answer_with_progress(prompted: Prompted) -> list[Record]:
    """Answers prompted tasks under a meter; says how fast it went, and where everything is."""
    console = plain_console()
    tasks = ", ".join(dict.fromkeys(f"{task.suite}:{task.name}" for task in prompted.tasks))
    labels = ", ".join(dict.fromkeys(f"{r.label} ({r.subject.path})" for r in prompted.readers))
    console.print(f"{tasks} for {labels}")
    if prompted.finished:
        console.print(f"{prompted.finished:,} of {prompted.total:,} samples were answered before (--again: once more).")
    done = 0
    with Meter(console, prompted.work) as meter:

        def heard(group: Group, tokens: int) -> None:
            nonlocal done
            done += tokens
            size = f" {group.length:,}" if group.length else ""
            meter.at(done, f"{group.task.suite}:{group.task.name}{size} {group.reader.label}")

        rows = prompted.run(heard)
    for row in rows:
        if row["truncated"]:
            console.print(
                f"{row['suite']}:{row['source']}, {row['label']}: {row['truncated']} of {row['samples']} prompts were "
                "cut in the middle, as the protocol has it."
            )
    if prompted.spent.read:
        console.print(prompted.spent.describe())
    console.print(f"Answers: {prompted.directory / 'samples'}")
    return rows


def documents_with_progress(
    readers: Sequence[Reader], source: Source, lengths: Sequence[int], out: Path, count: int | None, again: bool
) -> list[Record]:
    """Measures documents one by one, telling how many tokens were read: how many there are, nobody knows before."""
    console, start, read, following = plain_console(), time.monotonic(), 0, time.monotonic() + 5
    console.print(f"Documents of {source.name} for {', '.join(reader.label for reader in readers)}")

    def heard(tokens: int) -> None:
        nonlocal read, following
        read += tokens
        if time.monotonic() >= following:
            following = time.monotonic() + 10
            console.print(f"{read:,} tokens")

    rows = measure_documents(readers, source, lengths, out, count, again, heard)
    if read:
        seconds = time.monotonic() - start
        console.print(f"Read {read:,} tokens in {seconds:.1f} s, compiling included: {read / seconds:,.1f} tokens/s")
    console.print(f"Documents: {out / 'samples' / 'documents.jsonl'}")
    return rows


def plain_console() -> Any:
    """A rich console that changes nothing of what it is given."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False)
