"""Tasks of lm-evaluation-harness as a suite: records beside those of the other suites, no task measured twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.evaluation.lm_eval.adapter import adapter
from pe_lab.evaluation.lm_eval.records import measure, sample_records
from pe_lab.evaluation.lm_eval.requests import Journal
from pe_lab.evaluation.lm_eval.task_lists import TASK_LISTS, expand_tasks, fingerprint, harness_version, open_tasks
from pe_lab.evaluation.progress import describe_speed
from pe_lab.evaluation.variants import Variant
from pe_lab.identity import versions
from pe_lab.parallel import on_first
from pe_lab.positional import label_layers
from pe_lab.results.records import Record, RecordFile, SampleFile, announced, digest, finite, sample_key
from pe_lab.storage import AnyPath
from pe_lab.terminal import console


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
      limit: documents of each task; None: all.
      num_fewshot: examples before each question; None: the task's own number.
      chat: whether questions are put as a user's messages.
      again: whether tasks that were measured before are measured again.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its dataset cannot be opened.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        names: Sequence[str],
        directory: AnyPath,
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
        self._directory, self._again = directory, again
        self._measurements = [
            Measurement(variant, name, max_length, shared, directory) for variant in variants for name in names
        ]

    def run(self) -> list[Record]:
        """The records of all tasks; those that do not exist yet are measured."""
        out, records = console(), []
        file = RecordFile(self._directory / "lm_eval.jsonl")
        samples = SampleFile(self._directory / "samples" / "lm_eval.jsonl")
        existing = [[] if self._again else one.found(file.records) for one in self._measurements]
        planned = [{"suite": "lm_eval", **one.variant.record(None), "source": one.name} for one in self._measurements]
        model, of = None, None
        with announced(self._directory, planned):
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
                    on_first(lambda path=one.requests: path.unlink(missing_ok=True))
                new = one.run(model, self._manager, self._tasks[one.name], samples)
                file.put(new)
                records += new
        return records


class Measurement:
    """One variant on one name: a task, a group or a tag.

    Attributes:
      length: tokens that contexts are cut to.
      requests: the file that keeps the answers.
    """

    def __init__(
        self, variant: Variant, name: str, max_length: int | None, shared: Mapping[str, Any], directory: AnyPath
    ):
        self.variant, self.name, self.shared = variant, name, shared
        length = max_length or variant.training_length
        self.length = min(length, variant.crop or length)
        self.fingerprint = variant.fingerprint(self.length)
        settings = {**shared, "max_length": self.length, "fingerprint": self.fingerprint}
        self.mine = {"checkpoint_id": variant.subject.id, "settings": digest(settings, 16)}
        shown = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80]
        self.requests = directory / "samples" / "lm_eval_requests" / f"{shown}-{digest([name, self.mine])}.jsonl"

    def found(self, records: Sequence[Record]) -> list[Record]:
        """Its records if all of them exist; another measurement may have replaced one."""
        subject = self.variant.subject
        who = {"run": subject.run, "checkpoint": subject.path, "variant": self.variant.method}
        wanted = {"asked": self.name, **who, **self.mine}
        mine = {record["source"]: record for record in records if wanted.items() <= record.items()}
        written = next(iter(mine.values())).get("asked_tasks", []) if mine else []
        return [mine[task] for task in written] if set(written) == set(mine) else []

    def run(self, model: Any, manager: Any, loaded: Sequence[Any], samples: SampleFile) -> list[Record]:
        """Measures it, and writes the sample records; its records."""
        shared, out = self.shared, console()
        fields = {"fingerprint": self.fingerprint, "suite": "lm_eval", "task": "", "length": None, "seed": None}
        identity = {**self.mine, **fields, "index": 0}
        model.journal = Journal(SampleFile(self.requests), identity | {"task": self.name})
        model.used.clear()
        measured, logged = measure(model, manager, loaded, shared["limit"], shared["num_fewshot"], shared["chat"])
        more = self.variant.sample_record(self.length) | {"protocol": f"lm_eval-{shared['harness']}"}
        documents = sample_records(logged, model.used, identity, more)
        samples.forget([sample_key(record) for record in documents])
        samples.add(documents)
        if kept := model.journal.found:
            out.print(f"{kept:,} requests of {self.name} were answered before.")
        if not measured:
            out.print(f"{self.name} gives no number; its answers are in {samples.path}.")
            return []
        out.print(describe_speed(measured[0]["tokens"], measured[0]["seconds"]))
        if cut := sum(record["truncated"] for record in measured):
            out.print(
                f"{cut} contexts of {self.name} were cut from the left to {self.length:,} tokens, as the harness does."
            )
        shared_keys = {
            "suite": "lm_eval",
            "asked": self.name,
            **self.variant.record(None),
            "positional": label_layers(self.variant.layers_at(self.length)),
            "lineage": self.variant.subject.lineage,
            "versions": versions() | {"lm_eval": shared["harness"]},
            **self.mine,
            "asked_tasks": [record["source"] for record in measured],
        }
        return [finite(shared_keys | record) for record in measured]
