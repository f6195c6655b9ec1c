"""Prompted suites: every sample of every task, answered by every model under every way of reading, a line each."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation import methods
from pe_lab.evaluation.generation.backend import Answerer, Model, Spent
from pe_lab.evaluation.readers import Reader
from pe_lab.evaluation.scoring.breakdowns import by_depth, by_length
from pe_lab.evaluation.tasks.suites import SUITES
from pe_lab.evaluation.tasks.task import Sample, Task
from pe_lab.results.intervals import mean_of
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, SampleRecord, key
from pe_lab.training.machine import versions


@dataclass(frozen=True)
class Group:
    """Samples of one task that one reader answers; `length` None: texts of their own lengths."""

    reader: Reader
    task: Task
    length: int | None


class Prompted:
    """Answers the samples of prompted tasks, and sums them up.

    Args:
      readers: models and ways of reading. All samples of one are answered before the next.
      tasks: what to ask.
      lengths: tokens, for tasks whose prompts are made to a length.
      count: samples a task and length, where there are so many. None: as many as the papers, or all that a file has.
      directory: `samples/SUITE.jsonl` and the summaries `SUITE.jsonl` go here.
      answerer: who answers for a reader at a length; by default its language model.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        tasks: Sequence[Task],
        lengths: Sequence[int],
        count: int | None,
        seed: int,
        directory: Path,
        again: bool = False,
        answerer: Callable[[Reader, int, Spent], Answerer] | None = None,
    ):
        self.readers, self.tasks, self.lengths = list(readers), list(tasks), list(lengths)
        self.count, self.seed, self.directory, self.again = count, seed, directory, again
        self.spent = Spent()
        self._samples: dict[Any, Sequence[Sample]] = {}
        self._counted: dict[Any, list[int]] = {}
        self._answerer = answerer or (lambda reader, length, spent: Model(reader.at(length), spent, reader.crop))
        suites = dict.fromkeys(task.suite for task in tasks)
        self.lines = {suite: SampleFile(directory / "samples" / f"{suite}.jsonl") for suite in suites}
        self.rows = {suite: RecordFile(directory / f"{suite}.jsonl") for suite in suites}
        for reader in self.readers:
            if reader.lm.tokenizer is None:
                raise UserError(
                    f"{reader.lm.checkpoint.path} came without a tokenizer, so prompts cannot be read. Use a "
                    "checkpoint that has one (pe_lab.convert brings it along)."
                )
        self.groups = [
            Group(reader, task, length)
            for reader in self.readers
            for task in self.tasks
            for length in (self.lengths if task.sized else [None])
        ]
        # A length without room is known before anything is measured.
        for group in {(id(g.reader.lm.tokenizer), id(g.task), g.length): g for g in self.groups}.values():
            if len(samples := self.samples(group)):
                self._check_room(group, samples[0])
        for group in self.groups:
            if group.reader.crop is not None and len(samples := self.samples(group)):
                self._check_crop(group, samples[0])
        self.work = sum(self.cost(group) for group in self.groups)
        done = [(len(keys), sum(k in self.lines[g.task.suite].records for k in keys)) for g, keys in self._all_keys()]
        self.total, self.finished = sum(total for total, _ in done), 0 if again else sum(found for _, found in done)

    def tokenizer(self, group: Group) -> Tokenizer:
        tokenizer = group.reader.lm.tokenizer
        assert tokenizer is not None
        return tokenizer

    def samples(self, group: Group) -> Sequence[Sample]:
        """The group's samples; the same whoever answers, and whenever."""
        tokenizer = self.tokenizer(group)
        known = (id(group.task), tokenizer.fingerprint, group.length)
        if known not in self._samples:
            task = group.task
            usual = SUITES[task.suite].samples.get(task.name, sys.maxsize)
            count = self.count or usual
            self._samples[known] = task.samples(tokenizer, group.length, count, self.seed)
        return self._samples[known]

    def cost(self, group: Group) -> int:
        """Tokens of a group, about, for a progress bar."""
        if group.length is not None:
            return group.length * len(self.samples(group))
        return sum(self._sizes(group))

    def run(self, heard: Callable[[Group, int], None] = lambda group, tokens: None) -> list[Record]:
        """Answers what is not answered yet; the summaries of all groups, which are also written.

        `heard` is told of tokens, of `cost` altogether, as a group goes on.
        """
        rows = []
        for group in self.groups:
            lines = self._answer(group, lambda tokens, group=group: heard(group, tokens))
            row = self._summary(group, lines)
            self.rows[group.task.suite].put([row])
            rows.append(row)
        return rows

    def answered(self) -> Iterator[tuple[Group, Sequence[Sample], list[SampleRecord]]]:
        """Every group with its samples and, in their order, the lines that answer them; after `run`."""
        for group, keys in self._all_keys():
            yield group, self.samples(group), [self.lines[group.task.suite].records[k] for k in keys]

    # --------------------------------------------------------------------------------------------------------
    # Answering

    def _answer(self, group: Group, heard: Callable[[int], None]) -> list[SampleRecord]:
        """The lines of a group, in the order of its samples."""
        file, samples, keys = self.lines[group.task.suite], self.samples(group), self._keys(group)
        if self.again:
            file.forget(keys)
        done = [k in file.records for k in keys]
        heard(int(self.cost(group) * sum(done) / max(len(keys), 1)))
        for length, indices in self._alike(group):
            if all(done[i] for i in indices):
                continue
            answerer = self._answerer(group.reader, length, self.spent)
            longest = length if group.length else max(self._sizes(group)[i] for i in indices)
            for batch in batches(indices, answerer.rows(longest)):
                if all(done[i] for i in batch.indices):
                    continue
                # A batch that was begun is answered whole: alone, a sample might be summed up in another order.
                asked = {i: samples[i] for i in batch.indices}
                for sample in asked.values():
                    self._check_room(group, sample)
                new = [asked[i] for i in batch.indices if not done[i]]
                rest = Rest(sum(group.length or len(s.tokens) + s.max_new_tokens for s in new), heard)
                answerer.heard, start = rest.take, time.perf_counter()
                answers = answerer([asked[i] for i in batch.filled])[: len(batch.indices)]
                seconds = (time.perf_counter() - start) / len(batch.indices)
                file.add(
                    [
                        self._line(group, sample, answer, length, seconds)
                        for sample, answer in zip(asked.values(), answers, strict=True)
                    ]
                )
                rest.take(rest.tokens)
        return [file.records[k] for k in keys]

    def _keys(self, group: Group) -> list[tuple[Any, ...]]:
        """Of the lines that answer the group's samples, in their order."""
        lengths = self._lengths(group)
        settings = self._settings(group)
        readings = {length: group.reader.fingerprint(length) for length in set(lengths)}
        return [key(self._identity(group, i, readings[n], settings)) for i, n in enumerate(lengths)]

    def _all_keys(self) -> Iterator[tuple[Group, list[tuple[Any, ...]]]]:
        for group in self.groups:
            yield group, self._keys(group)

    def _sizes(self, group: Group) -> list[int]:
        """Tokens of each sample and its answer; made and counted once, as texts may be long and many."""
        known = (id(group.task), self.tokenizer(group).fingerprint)
        if known not in self._counted:
            self._counted[known] = [len(sample.tokens) + sample.max_new_tokens for sample in self.samples(group)]
        return self._counted[known]

    def _lengths(self, group: Group) -> list[int]:
        """The length that each sample is read as."""
        if group.length is not None:
            return [group.length] * len(self.samples(group))
        return [read_length(tokens, group.reader.training_length) for tokens in self._sizes(group)]

    def _alike(self, group: Group) -> Iterator[tuple[int, list[int]]]:
        """Samples that are read as one length, short ones first; within, by their own, so that batches are even."""
        lengths = self._lengths(group)
        for length in sorted(set(lengths)):
            chosen = [i for i, one in enumerate(lengths) if one == length]
            if group.length is None:
                chosen.sort(key=self._sizes(group).__getitem__)
            yield length, chosen

    def _check_room(self, group: Group, sample: Sample) -> None:
        needed = len(sample.tokens) + sample.max_new_tokens
        if group.length is not None and needed > group.length:
            raise UserError(
                f"{group.task.suite}:{group.task.name}, sample {sample.index}: its prompt of {len(sample.tokens):,} "
                f"tokens and {sample.max_new_tokens} new ones do not fit {group.length:,}; nothing is ever cut off a "
                "prompt here. Give a larger --lengths."
            )

    def _check_crop(self, group: Group, sample: Sample) -> None:
        crop, new = group.reader.crop, sample.max_new_tokens
        if crop is not None and crop < 2 * new and len(sample.tokens) + new > crop:
            raise UserError(
                f"--methods=cropped: of {crop:,} tokens, which is all that the model was trained on, "
                f"{group.task.suite}:{group.task.name} keeps {new:,} for its answer, which leaves next to no prompt. "
                "Leave cropped out."
            )

    def _identity(self, group: Group, index: int, reading: str, settings: str) -> SampleRecord:
        task = group.task
        return {
            "checkpoint_id": group.reader.subject.id,
            "reading": reading,
            "suite": task.suite,
            "task": task.name,
            "length": group.length,
            "seed": self.seed,
            "settings": settings,
            "index": index,
        }

    def _settings(self, group: Group) -> str:
        """A fingerprint of what else the samples depend on."""
        task = group.task
        text = json.dumps([dict(task.settings), self.tokenizer(group).fingerprint], sort_keys=True, default=str)
        return f"{task.suite}-{SUITES[task.suite].protocol}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def _line(self, group: Group, sample: Sample, output: str, length: int, seconds: float) -> SampleRecord:
        task, reader = group.task, group.reader
        scores = task.score(sample, output)
        found = getattr(task, "found", None)
        identity = self._identity(group, sample.index, reader.fingerprint(length), self._settings(group))
        line = identity | {
            "prompt": sample.fingerprint,
            "tokens": len(sample.tokens),
            "depth": list(sample.depth),
            "references": list(sample.references),
            "output": output,
            "score": scores[task.metric],
            "scores": scores,
            "found": found(sample, output) if found else None,
            "facts": dict(sample.metadata),
            "run": reader.subject.run,
            "checkpoint": reader.subject.path,
            "label": reader.label,
            "positional": methods.summary(reader.layers_at(length)),
            "read_as": length,
            "lineage": reader.lineage,
            "protocol": f"{task.suite}-{SUITES[task.suite].protocol}",
            "seconds": seconds,
        }
        return finite(line)

    # --------------------------------------------------------------------------------------------------------
    # Summing up

    def _summary(self, group: Group, lines: Sequence[SampleRecord]) -> Record:
        task, reader, subject = group.task, group.reader, group.reader.subject
        # Questions about one problem or one paragraph are no independent ones.
        clusters = [line["facts"].get("cluster", line["index"]) for line in lines]
        mean = mean_of([line["score"] for line in lines], clusters)
        if mean is None:
            raise UserError(f"{task.suite}:{task.name} has no samples.")
        length = group.length or task.settings.get("max_length")  # what prompts were cut to, where the protocol cuts
        factor = None if length is None else length / reader.training_length
        row: Record = {
            "suite": task.suite,
            "source": task.name,
            "run": subject.run,
            "phase": subject.checkpoint.metadata.get("phase", ""),
            "checkpoint": subject.path,
            "checkpoint_id": subject.id,
            "step": subject.checkpoint.step,
            "model": subject.model,
            "method": reader.method,
            "label": reader.label,
            "positional": lines[-1]["positional"],
            "length": length,
            "factor": int(factor) if factor is not None and factor.is_integer() else factor,
            "seed": self.seed,
            "metric": task.metric,
            "score": mean.score,
            "stderr": mean.stderr,
            "low": mean.low,
            "high": mean.high,
            "samples": mean.count,
            "scores": {
                name: math.fsum(line["scores"][name] for line in lines) / len(lines) for name in lines[0]["scores"]
            },
            "truncated": sum(bool(line["facts"].get("truncated")) for line in lines),
            "longest": max(line["tokens"] for line in lines),
            "settings": lines[0]["settings"],
            "higher_is_better": True,
            "seconds": math.fsum(line["seconds"] for line in lines),
            "protocol": lines[0]["protocol"],
            "versions": versions(),
            "devices": len(jax.local_devices()),
        }
        if any(line["depth"] for line in lines):
            row["by_depth"] = by_depth(lines)
        if group.length is None:
            row["by_length"] = by_length(lines, getattr(task, "edges_by_record_length", None))
        return finite(row)


@dataclass
class Rest:
    """Tokens of a batch that progress has not been told of yet: all of them in the end, however early texts end."""

    tokens: int
    heard: Callable[[int], None]

    def take(self, tokens: int) -> None:
        taken = min(tokens, self.tokens)
        self.tokens -= taken
        self.heard(taken)


def read_length(tokens: int, training_length: int) -> int:
    """The length that a text of `tokens` is read as where texts have their own lengths: the training length, or twice
    it, or four times ... Texts of one such class share a schedule, and so a batch."""
    length = training_length
    while length < tokens:
        length *= 2
    return length


@dataclass(frozen=True)
class Batch:
    """Samples answered together; `filled` repeats the last one, so that all batches of a group have as many rows."""

    indices: list[int]
    filled: list[int]


def batches(indices: Sequence[int], rows: int) -> list[Batch]:
    """So few batches as rows allow, of one size, which is compiled once; the last one may be filled up."""
    number = -(-len(indices) // rows)
    size = -(-len(indices) // number)
    cut = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
    return [Batch(part, part + [part[-1]] * (size - len(part))) for part in cut]
