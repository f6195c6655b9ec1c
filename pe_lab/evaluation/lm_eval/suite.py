"""Tasks of lm-evaluation-harness as a suite: records beside those of the other suites, no task measured twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.evaluation.lm_eval.adapter import adapter
from pe_lab.evaluation.lm_eval.records import measure, rank, sample_records
from pe_lab.evaluation.lm_eval.requests import Journal
from pe_lab.evaluation.lm_eval.task_lists import TASK_LISTS, expand_tasks, fingerprint, harness_version, open_tasks
from pe_lab.evaluation.progress import describe_speed
from pe_lab.evaluation.variants import Variant, summary
from pe_lab.results.intervals import Z95, wilson
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, key
from pe_lab.terminal import console
from pe_lab.training.machine import versions


class Harness:
    """The harness's tasks, for variants one after another.

    The records of a task are written as it ends, to `lm_eval.jsonl`, and a sample record for every document to
    `samples/lm_eval.jsonl`. The answers to its requests are kept a batch at a time in `samples/lm_eval_requests`: an
    interrupted task goes on where it was, and its records are the same in the end.

    Args:
      names: of tasks, and of `TASK_LISTS`; none: DroPE's six.
      max_length: tokens to which the harness cuts contexts from the left; None: the training length. It is never more
        than a variant's `crop`.
      include: a folder with YAML files of tasks.
      limit: documents of each task.
      again: whether tasks that were measured before are measured again.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its dataset cannot be opened.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        names: Sequence[str],
        directory: Path,
        max_length: int | None = None,
        include: str | None = None,
        limit: int | None = None,
        num_fewshot: int | None = None,
        chat: bool = False,
        again: bool = False,
    ):
        names = expand_tasks(names or [next(iter(TASK_LISTS))])
        shared = {
            "limit": limit,
            "num_fewshot": num_fewshot,
            "chat": chat,
            "include": include and str(Path(include).resolve()),
            "contents": fingerprint(include, directory),
            "harness": harness_version(),
        }
        self._make_model = adapter()
        self._manager, self._tasks = open_tasks(names, include)
        self._file = RecordFile(directory / "lm_eval.jsonl")
        self._samples = SampleFile(directory / "samples" / "lm_eval.jsonl")
        self._again = again
        self._measurements = [
            Measurement(variant, name, max_length, shared, directory) for variant in variants for name in names
        ]

    def run(self) -> list[Record]:
        """The records of all tasks; those that do not exist yet are measured."""
        out, records = console(), []
        existing = [[] if self._again else one.found(self._file.records) for one in self._measurements]
        model, of = None, None
        for one, found in zip(self._measurements, existing, strict=True):
            if found:
                out.print(f"{one.name} was measured before for {one.variant.label} (--again: once more).")
                records += found
                continue
            out.print(f"lm_eval:{one.name} for {one.variant.label}")
            if of is not one.variant:
                model, of = None, one.variant  # frees its weights before others are placed
                model = self._make_model(one.variant.at(one.length), max_length=one.length)
            if self._again:
                one.requests.unlink(missing_ok=True)
            new = one.run(model, self._manager, self._tasks[one.name], self._samples)
            self._file.put(new)
            records += new
        return records


class Measurement:
    """One variant on one name: a task, a group or a tag.

    Attributes:
      length: tokens that contexts are cut to.
      requests: the file that keeps the answers.
    """

    def __init__(self, variant: Variant, name: str, max_length: int | None, shared: Mapping[str, Any], directory: Path):
        self.variant, self.name, self.shared = variant, name, shared
        length = max_length or variant.training_length
        self.length = min(length, variant.crop or length)
        self.reading = variant.fingerprint(self.length)
        settings = {**shared, "max_length": self.length, "reading": self.reading}
        text = json.dumps(settings, sort_keys=True)
        self.mine = {
            "checkpoint_id": variant.subject.id,
            "settings": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
        place = hashlib.sha256(json.dumps([name, self.mine], sort_keys=True).encode()).hexdigest()[:12]
        shown = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80]
        self.requests = directory / "samples" / "lm_eval_requests" / f"{shown}-{place}.jsonl"

    def found(self, records: Sequence[Record]) -> list[Record]:
        """Its records if all of them exist; another measurement may have replaced one."""
        subject = self.variant.subject
        who = {"run": subject.run, "checkpoint": subject.path, "method": self.variant.method}
        wanted = {"asked": self.name, **who, **self.mine}
        mine = {record["source"]: record for record in records if wanted.items() <= record.items()}
        written = next(iter(mine.values())).get("asked_tasks", []) if mine else []
        return [mine[task] for task in written] if set(written) == set(mine) else []

    def run(self, model: Any, manager: Any, loaded: Sequence[Any], samples: SampleFile) -> list[Record]:
        """Measures it, and writes the sample records; its records."""
        shared, out = self.shared, console()
        fields = {"reading": self.reading, "suite": "lm_eval", "task": "", "length": None, "seed": None}
        identity = {**self.mine, **fields, "index": 0}
        model.journal = Journal(self.requests, identity | {"task": self.name})
        model.used.clear()
        how = shared["limit"], shared["num_fewshot"], shared["chat"]
        measured, logged = measure(model, manager, loaded, *how)
        more = self.variant.sample_record(self.length) | {"protocol": f"lm_eval-{shared['harness']}"}
        documents = sample_records(logged, model.used, identity, more)
        samples.forget([key(record) for record in documents])
        samples.add(documents)
        if kept := model.journal.found:
            out.print(f"{kept:,} requests of {self.name} were answered before.")
        if not (by_task := _by_task(measured)):
            out.print(f"{self.name} gives no number; its answers are in {samples.path}.")
            return []
        read, seconds = measured[0]["tokens"], measured[0]["seconds"]
        out.print(describe_speed(read, seconds))
        written = {"asked_tasks": [metrics[0]["task"] for metrics in by_task]}
        records = [finite(self._record(metrics) | self.mine | written) for metrics in by_task]
        if cut := sum(record["truncated"] for record in records):
            out.print(
                f"{cut} contexts of {self.name} were cut from the left to {self.length:,} tokens, as the harness does."
            )
        return records

    def _record(self, metrics: Sequence[Mapping[str, Any]]) -> Record:
        """The record of a task; `metrics` has its main one first."""
        variant, main = self.variant, metrics[0]
        score, stderr, count = main["score"], main["stderr"], main["samples"]
        higher = main["higher_is_better"] is not False
        if stderr:
            low, high = score - Z95 * stderr, score + Z95 * stderr
            if higher and 0 <= score <= 1:
                low, high = max(low, 0.0), min(high, 1.0)
        else:  # equal answers, or a metric without a formula for its error
            low, high = wilson(score, count) if higher and count and 0 <= score <= 1 else (None, None)
        return {
            "suite": "lm_eval",
            "source": main["task"],
            "asked": self.name,
            **variant.record(None),
            "positional": summary(variant.layers_at(self.length)),
            "metric": main["metric"],
            "score": score,
            "stderr": stderr,
            "low": low,
            "high": high,
            "samples": count,
            "scores": {one["metric"]: one["score"] for one in metrics},
            "stderrs": {one["metric"]: one["stderr"] for one in metrics},
            "higher_is_better": higher,
            "num_fewshot": main["num_fewshot"],
            "max_length": self.length,
            "truncated": main["truncated"],
            "tokens": main["tokens"],
            "seconds": main["seconds"],
            "lineage": variant.subject.lineage,
            "task_version": main["version"],
            "versions": versions() | {"lm_eval": main["harness"]},
        }


def _by_task(measured: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The metrics of each task, the main one first; those without a number are left out."""
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for record in measured:
        if isinstance(record["score"], float):
            tasks.setdefault(record["task"], []).append(record)
    return [sorted(metrics, key=lambda one: rank(one["metric"])) for metrics in tasks.values()]
