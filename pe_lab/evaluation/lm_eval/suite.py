"""lm-evaluation-harness' tasks as a suite: rows beside those of the others, a task at a time, none measured twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.evaluation import methods
from pe_lab.evaluation.lm_eval.adapter import adapter
from pe_lab.evaluation.lm_eval.records import measure
from pe_lab.evaluation.lm_eval.requests import Journal
from pe_lab.evaluation.lm_eval.samples import document_lines, rank
from pe_lab.evaluation.lm_eval.task_lists import TASK_LISTS, expand_tasks, fingerprint, harness_version, open_tasks
from pe_lab.evaluation.readers import Reader
from pe_lab.results.intervals import Z95, wilson
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, key
from pe_lab.training.machine import versions


@dataclass(frozen=True)
class Opened:
    """Tasks with their data, by name, as the harness loads them."""

    manager: Any
    tasks: Mapping[str, Sequence[Any]]


def check_harness(names: Sequence[str], include: str | None = None) -> Opened:
    """Opens tasks, so that what cannot be measured is known before anything is; `run_harness` takes what is returned.

    Args:
      names, include: as in `run_harness`.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its dataset cannot be had.
    """
    adapter()
    return Opened(*open_tasks(_expanded(names), include))


def run_harness(
    readers: Sequence[Reader],
    names: Sequence[str],
    directory: Path,
    max_length: int | None = None,
    include: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    again: bool = False,
    said: Callable[[str], None] = print,
    opened: Opened | None = None,
) -> list[Record]:
    """Measures readers on tasks, one after another.

    Each task's rows are written as it ends, to `lm_eval.jsonl`, and a line for every document, to
    `samples/lm_eval.jsonl`. The answers to its requests are kept a batch at a time in `samples/lm_eval_requests`:
    a task that was interrupted goes on where it was, and ends as if it had not been.

    Args:
      names: of tasks, and of `TASK_LISTS`; none is DroPE's six.
      max_length: tokens beyond which the harness cuts contexts from the left; None is the training length. A reader
        that crops sees no more than it crops to.
      include: a folder with YAML files of tasks.
      limit: documents of each task.
      opened: what `check_harness` gave for these names; by default they are opened here, before the first is measured.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its dataset cannot be had.
    """
    asked = _expanded(names)
    shared = {
        "limit": limit,
        "num_fewshot": num_fewshot,
        "chat": chat,
        "include": include and str(Path(include).resolve()),
        "contents": fingerprint(include, directory),
        "harness": harness_version(),
    }
    measurements = [Measurement(reader, name, max_length, shared, directory) for reader in readers for name in asked]
    file = RecordFile(directory / "lm_eval.jsonl")
    left = [one for one in measurements if again or not one.found(file.records)]
    if left and opened is None:
        opened = check_harness(list(dict.fromkeys(one.name for one in left)), include)
    samples = SampleFile(directory / "samples" / "lm_eval.jsonl") if left else None
    rows: list[Record] = []
    model, of = None, None
    for one in measurements:
        if one not in left:
            said(f"{one.name} was measured before for {one.reader.label} (--again: once more).")
            rows += one.found(file.records)
            continue
        assert opened is not None and samples is not None
        said(f"lm_eval:{one.name} for {one.reader.label}")
        if of is not one.reader:
            model, of = None, one.reader  # its weights go before others come
            model = adapter()(one.reader.at(one.length), max_length=one.length)
        if again:
            one.requests.unlink(missing_ok=True)
        new = one.run(model, opened, samples, said)
        file.put(new)
        rows += new
    return rows


def _expanded(names: Sequence[str]) -> list[str]:
    return expand_tasks(names or [next(iter(TASK_LISTS))])


class Measurement:
    """One reader on what one name stands for.

    Attributes:
      length: tokens that contexts are cut to.
      requests: the file that keeps the answers.
    """

    def __init__(self, reader: Reader, name: str, max_length: int | None, shared: Mapping[str, Any], directory: Path):
        self.reader, self.name, self.shared = reader, name, shared
        length = max_length or reader.training_length
        self.length = min(length, reader.crop or length)
        self.reading = reader.fingerprint(self.length)
        settings = {**shared, "max_length": self.length, "reading": self.reading}
        text = json.dumps(settings, sort_keys=True)
        self.mine = {
            "checkpoint_id": reader.subject.id,
            "settings": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
        place = hashlib.sha256(json.dumps([name, self.mine], sort_keys=True).encode()).hexdigest()[:12]
        shown = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80]
        self.requests = directory / "samples" / "lm_eval_requests" / f"{shown}-{place}.jsonl"

    def found(self, rows: Sequence[Record]) -> list[Record]:
        """Its rows, where all that it wrote are still there: another measurement may have taken the place of one."""
        subject = self.reader.subject
        who = {"run": subject.run, "checkpoint": subject.path, "method": self.reader.method}
        wanted = {"asked": self.name, **who, **self.mine}
        mine = {row["source"]: row for row in rows if wanted.items() <= row.items()}
        wrote = next(iter(mine.values())).get("asked_tasks", []) if mine else []
        return [mine[task] for task in wrote] if set(wrote) == set(mine) else []

    def run(self, model: Any, opened: Opened, samples: SampleFile, said: Callable[[str], None]) -> list[Record]:
        """Its rows; the lines of its documents are written."""
        shared, loaded = self.shared, opened.tasks[self.name]
        identity = self._identity()
        model.journal = Journal(self.requests, identity | {"task": self.name})
        model.used.clear()
        measured, logged = measure(
            model,
            opened.manager,
            loaded,
            shared["limit"],
            shared["num_fewshot"],
            apply_chat_template=shared["chat"],
            log_samples=True,
        )
        lines = document_lines(logged, model.used, identity, self._more())
        samples.forget([key(line) for line in lines])
        samples.add(lines)
        if kept := model.journal.found:
            said(f"{kept:,} requests of {self.name} were answered before.")
        if not (by_task := _by_task(measured)):
            said(f"{self.name} gives no number; what was answered is in {samples.path}.")
            return []
        read, seconds = measured[0]["tokens"], measured[0]["seconds"]
        said(f"Read {read:,} tokens in {seconds:.1f} s, compiling included: {read / seconds:,.1f} tokens/s")
        wrote = {"asked_tasks": [metrics[0]["task"] for metrics in by_task]}
        rows = [finite(_row(self.reader, self.length, self.name, each) | self.mine | wrote) for each in by_task]
        if cut := sum(row["truncated"] for row in rows):
            said(f"{cut} contexts of {self.name} were cut from the left to {self.length:,} tokens, as the harness "
                 "has it.")  # fmt: skip
        return rows

    def _identity(self) -> dict[str, Any]:
        fields = {"reading": self.reading, "suite": "lm_eval", "task": "", "length": None, "seed": None}
        return {"checkpoint_id": self.mine["checkpoint_id"], **fields, "settings": self.mine["settings"], "index": 0}

    def _more(self) -> dict[str, Any]:
        reader = self.reader
        return {
            "run": reader.subject.run,
            "checkpoint": reader.subject.path,
            "label": reader.label,
            "positional": methods.summary(reader.layers_at(self.length)),
            "read_as": self.length,
            "lineage": reader.lineage,
            "protocol": f"lm_eval-{self.shared['harness']}",
        }


def _by_task(measured: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The metrics of each task, the one that is reported first; those without a number are left out."""
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in measured:
        if isinstance(row["score"], float):
            tasks.setdefault(row["task"], []).append(row)
    return [sorted(rows, key=lambda row: rank(row["metric"])) for rows in tasks.values()]


def _row(reader: Reader, length: int, asked: str, metrics: Sequence[Mapping[str, Any]]) -> Record:
    subject, main = reader.subject, metrics[0]
    score, stderr, count = main["score"], main["stderr"], main["samples"]
    higher = main["higher_is_better"] is not False
    if stderr:
        low, high = score - Z95 * stderr, score + Z95 * stderr
        if higher and 0 <= score <= 1:
            low, high = max(low, 0.0), min(high, 1.0)
    else:  # of equal answers, or of a metric without a formula
        low, high = wilson(score, count) if higher and count and 0 <= score <= 1 else (None, None)
    return {
        "suite": "lm_eval",
        "source": main["task"],
        "asked": asked,
        "run": subject.run,
        "phase": subject.checkpoint.metadata.get("phase", ""),
        "checkpoint": subject.path,
        "step": subject.checkpoint.step,
        "model": subject.model,
        "method": reader.method,
        "label": reader.label,
        "positional": methods.summary(reader.layers_at(length)),
        "length": None,
        "factor": None,
        "metric": main["metric"],
        "score": score,
        "stderr": stderr,
        "low": low,
        "high": high,
        "samples": count,
        "scores": {row["metric"]: row["score"] for row in metrics},
        "stderrs": {row["metric"]: row["stderr"] for row in metrics},
        "higher_is_better": higher,
        "num_fewshot": main["num_fewshot"],
        "max_length": length,
        "truncated": main["truncated"],
        "tokens": main["tokens"],
        "seconds": main["seconds"],
        "lineage": reader.lineage,
        "task_version": main["version"],
        "versions": versions() | {"lm_eval": main["harness"]},
    }
