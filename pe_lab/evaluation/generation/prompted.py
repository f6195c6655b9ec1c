"""Prompted suites: every variant answers every sample of every task; each answer is a sample record."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.evaluation.generation.backend import ModelBackend
from pe_lab.evaluation.generation.tasks import PromptTask, Sample
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.suite import PromptSuite, read_settings
from pe_lab.evaluation.suites import SUITES, open_tasks
from pe_lab.evaluation.variants import Variant
from pe_lab.identity import versions
from pe_lab.model import GenerationStatistics
from pe_lab.parallel import compute_devices, shared
from pe_lab.results.records import Record, RecordFile, SampleFile, SampleRecord, announced, digest, finite, sample_key
from pe_lab.results.statistics import mean_of
from pe_lab.storage import AnyPath
from pe_lab.terminal import console

if TYPE_CHECKING:
    from pe_lab.evaluation.session import EvaluationSession

SEED = 42  # of prompts; RULER's


class Prompts:
    """The samples of a task for a tokenizer, which all variants answer.

    Attributes:
      length: tokens of a prompt and its answer; None: prompts of their own lengths.
      settings: a fingerprint of the task's settings and the tokenizer, which the samples depend on.
    """

    def __init__(self, task: PromptTask, tokenizer: Tokenizer, length: int | None, count: int | None, seed: int):
        suite = SUITES[task.suite]
        self.task, self.length, self.seed = task, length, seed
        self.samples = task.samples(tokenizer, length, count or suite.samples.get(task.name, sys.maxsize), seed)
        self.protocol = f"{task.suite}-{suite.protocol}"
        self.settings = f"{self.protocol}-{digest([dict(task.settings), tokenizer.fingerprint])}"

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each sample and its answer; counted once, as making the samples may take long."""
        return [len(sample.tokens) + sample.max_new_tokens for sample in self.samples]

    @property
    def cost(self) -> int:
        """Tokens of all samples, about, for a progress bar."""
        return sum(self.sizes) if self.length is None else self.length * len(self.samples)

    def check_fits(self, sample: Sample) -> None:
        needed = len(sample.tokens) + sample.max_new_tokens
        if self.length is not None and needed > self.length:
            raise ConfigError(
                f"{self.task.suite}:{self.task.name}, sample {sample.index}: its prompt of {len(sample.tokens):,} "
                f"tokens and {sample.max_new_tokens} new ones do not fit {self.length:,}; prompts are never cut here. "
                "Give a larger --lengths."
            )


@dataclass(frozen=True)
class PromptGroup:
    """The samples of one task at one length, for one variant."""

    variant: Variant
    prompts: Prompts

    @property
    def task(self) -> PromptTask:
        return self.prompts.task

    @property
    def length(self) -> int | None:
        return self.prompts.length

    @property
    def name(self) -> str:
        """The name of the group in a progress bar."""
        size = f" {self.length:,}" if self.length else ""
        return f"{self.task.suite}:{self.task.name}{size} {self.variant.label}"

    @cached_property
    def lengths(self) -> list[int]:
        """The length whose schedule each sample is read with."""
        if self.length is not None:
            return [self.length] * len(self.prompts.samples)
        return [schedule_length(tokens, self.variant.training_length) for tokens in self.prompts.sizes]

    @cached_property
    def identities(self) -> list[SampleRecord]:
        """The keys of each sample's record that make it the answer to one question and to no other."""
        fingerprints = {length: self.variant.fingerprint(length) for length in set(self.lengths)}
        return [
            {
                "checkpoint_id": self.variant.subject.id,
                "fingerprint": fingerprints[length],
                "suite": self.task.suite,
                "task": self.task.name,
                "length": self.length,
                "seed": self.prompts.seed,
                "settings": self.prompts.settings,
                "index": index,
            }
            for index, length in enumerate(self.lengths)
        ]

    def by_length(self) -> Iterator[tuple[int, list[int]]]:
        """Indices of samples by the length of their schedule, the shortest first; of their own lengths, too."""
        for length in sorted(set(self.lengths)):
            chosen = [i for i, one in enumerate(self.lengths) if one == length]
            if self.length is None:
                chosen.sort(key=self.prompts.sizes.__getitem__)
            yield length, chosen

    def check_crop(self) -> None:
        """Raises `ConfigError` where a cropped variant would leave next to no prompt."""
        crop = self.variant.crop
        if crop is None or not len(self.prompts.samples):
            return
        sample = self.prompts.samples[0]
        new = sample.max_new_tokens
        if crop < 2 * new and len(sample.tokens) + new > crop:
            raise ConfigError(
                f"--variants=cropped: of {crop:,} tokens, the training length, {self.task.suite}:{self.task.name} "
                f"keeps {new:,} for its answer, which leaves next to no prompt. Leave cropped out."
            )


@dataclass
class UnreportedTokens:
    """Tokens of a batch that were not reported yet; all are in the end, however early the answers end."""

    tokens: int
    on_tokens: Callable[[int], None]

    def take(self, tokens: int) -> None:
        taken = min(tokens, self.tokens)
        self.tokens -= taken
        self.on_tokens(taken)


@dataclass(eq=False)
class PromptBatch:
    """Samples that are answered together.

    Attributes:
      length: of the schedule.
      backend: a `ModelBackend`.
      indices: of the samples.
      filled: the same, with the last one repeated up to the size of all batches of the group.
      tokens: of the samples without an answer, about.
      rest: of these tokens, those that were not reported yet; None: another process answers.
    """

    group: PromptGroup
    length: int
    backend: Callable[[Sequence[Sample], GenerationStatistics], list[str]]
    indices: list[int]
    filled: list[int]
    tokens: int
    rest: UnreportedTokens | None = None

    @property
    def cost(self) -> int:
        """All tokens, about."""
        longest = self.group.length or max(self.group.prompts.sizes[i] for i in self.indices)
        return len(self.filled) * longest


def schedule_length(tokens: int, training_length: int) -> int:
    """The length whose schedule a sequence of `tokens` of its own length is read with.

    It is the training length times the smallest sufficient power of two, so that sequences share schedules and batches.
    """
    length = training_length
    while length < tokens:
        length *= 2
    return length


def batches(indices: Sequence[int], most: int) -> list[tuple[list[int], list[int]]]:
    """The smallest number of batches of at most `most`, all of one size, which is compiled once.

    Each is (its indices, its indices with the last one repeated up to that size).
    """
    number = -(-len(indices) // most)
    size = -(-len(indices) // number)
    parts = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
    return [(part, part + [part[-1]] * (size - len(part))) for part in parts]


class Prompted:
    """Answers the samples of prompted tasks, and summarizes their scores.

    Args:
      variants: all samples of one are answered before those of the next.
      lengths: tokens, for tasks whose prompts are made to a length.
      options: of the suites, by name; `samples` a task and length at most, by default as many as in the papers, or as
        the task's file has.
      directory: for `samples/SUITE.jsonl` (sample records) and `SUITE.jsonl` (summaries).
      again: whether answered samples are answered again.
      backend: makes the generation backend of a variant at a length.
      run: the name of the run, for the suites' `finish`.
      prompts: opened tasks, which are added to; those that share them open each once.
      quiet: whether nothing is printed.

    Attributes:
      statistics, seconds: the cost of the answers so far; `seconds` has those of compiling.
      work: tokens of all groups, about.
      total, finished: all samples, and those that an earlier process answered.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        tasks: Sequence[PromptTask],
        lengths: Sequence[int],
        options: Mapping[str, Any],
        seed: int,
        directory: AnyPath,
        again: bool = False,
        backend: Callable[[Variant, int], ModelBackend] = ModelBackend.of,
        run: str = "",
        prompts: dict[Any, Prompts] | None = None,
        quiet: bool = False,
    ):
        self.directory, self.again, self._options, self._run = directory, again, options, run
        self._out = console(quiet)
        self.statistics, self.seconds, self._backend = GenerationStatistics(), 0.0, backend
        suites = dict.fromkeys(task.suite for task in tasks)
        self._sample_files = {suite: SampleFile(directory / "samples" / f"{suite}.jsonl") for suite in suites}
        self._record_files = {suite: RecordFile(directory / f"{suite}.jsonl") for suite in suites}
        prompts = {} if prompts is None else prompts
        self.groups: list[PromptGroup] = []
        for variant in variants:
            tokenizer = variant.lm.tokenizer
            if tokenizer is None:
                raise CheckpointError(
                    f"{variant.lm.checkpoint.path} came without a tokenizer, so prompts cannot be read. Use a "
                    "checkpoint that has one (pe_lab.convert copies it)."
                )
            for task in tasks:
                for length in lengths if task.sized else [None]:
                    known = (id(task), tokenizer.fingerprint, length)
                    if known not in prompts:
                        prompts[known] = Prompts(task, tokenizer, length, options.get("samples"), seed)
                    self.groups.append(PromptGroup(variant, prompts[known]))
        # A length that is too short is refused before anything is measured.
        for one in prompts.values():
            for sample in one.samples[:1]:
                one.check_fits(sample)
        for group in self.groups:
            group.check_crop()
        self.work = sum(group.prompts.cost for group in self.groups)
        known = {suite: file.records for suite, file in self._sample_files.items()}
        answered = [sample_key(one) in known[g.task.suite] for g in self.groups for one in g.identities]
        self.total, self.finished = len(answered), 0 if again else sum(answered)

    def run(self) -> list[Record]:
        """Answers the samples that have no answer yet; returns and writes the summaries of all groups."""
        out = self._out
        tasks = ", ".join(dict.fromkeys(f"{g.task.suite}:{g.task.name}" for g in self.groups))
        labels = ", ".join(dict.fromkeys(f"{g.variant.label} ({g.variant.subject.path})" for g in self.groups))
        out.print(f"{tasks} for {labels}")
        if self.finished:
            out.print(f"{self.finished:,} of {self.total:,} samples were answered before (--again: once more).")
        records = []
        planned = announced(self.directory, list(map(_name, self.groups)))
        with planned, TokenProgress("compiling", self.work, out) as progress:
            batches = self._batches()
            answers = shared(batches, functools.partial(self._answers, progress), [batch.cost for batch in batches])
            for group in self.groups:
                mine = [batch for batch in batches if batch.group is group]
                answered = self._answer(group, mine, answers, functools.partial(progress.add, name=group.name))
                records.append(self._summary(group, answered))
                self._record_files[group.task.suite].put(records[-1:])
        for record in records:
            if record["truncated"]:
                out.print(
                    f"{record['suite']}:{record['source']}, {record['label']}: {record['truncated']} of "
                    f"{record['samples']} prompts were cut, as the protocol requires."
                )
        if self.statistics.prompt_tokens:
            out.print(self._describe_cost())
        out.print(f"Answers: {self.directory / 'samples'}")
        for name in self._record_files:
            suite = SUITES[name]
            mine = [found for found in self.answered() if found[0].task.suite == name]
            suite.finish(read_settings(suite, self._options), mine, self._run)
        return records

    def answered(self) -> Iterator[tuple[PromptGroup, Sequence[Sample], list[SampleRecord]]]:
        """Every group with its samples and, in their order, their sample records; after `run`."""
        for group in self.groups:
            found = self._sample_files[group.task.suite].records
            yield group, group.prompts.samples, [found[sample_key(one)] for one in group.identities]

    # --------------------------------------------------------------------------------------------------------
    # Answers

    def _describe_cost(self) -> str:
        read, written = self.statistics.prompt_tokens, self.statistics.new_tokens
        compiling = self.statistics.compile_seconds
        seconds = max(self.seconds - compiling, 1e-9)
        rate = (read + written) / seconds
        return (
            f"Read {read:,} tokens and wrote {written:,} in {seconds:.1f} s: {rate:,.1f} tokens/s "
            f"({compiling:.1f} s of compiling not counted)"
        )

    def _batches(self) -> list[PromptBatch]:
        """The batches that have a sample without an answer, in the order of the groups."""
        found, planned = [], set()
        for group in self.groups:
            stored = () if self.again else self._sample_files[group.task.suite].records
            keys = [sample_key(one) for one in group.identities]
            done = [key in stored or key in planned for key in keys]
            planned |= set() if self.again else set(keys)  # variants that are one model at a length are asked once
            for length, indices in group.by_length():
                if all(done[i] for i in indices):
                    continue
                backend = self._backend(group.variant, length)
                longest = length if group.length else max(group.prompts.sizes[i] for i in indices)
                for batch, filled in batches(indices, backend.batch_size(longest)):
                    # A batch that was begun is answered whole: in another batch, sums may be rounded otherwise.
                    if new := [i for i in batch if not done[i]]:
                        tokens = sum(group.length or group.prompts.sizes[i] for i in new)
                        found.append(PromptBatch(group, length, backend, batch, filled, tokens))
        return found

    def _answers(self, progress: TokenProgress, asked: Iterable[PromptBatch]) -> Iterator[AnsweredBatch]:
        """The answers to each batch."""
        for batch in asked:
            samples = batch.group.prompts.samples
            for i in batch.indices:
                batch.group.prompts.check_fits(samples[i])
            batch.rest = UnreportedTokens(batch.tokens, functools.partial(progress.add, name=batch.group.name))
            statistics, start = GenerationStatistics(on_tokens=batch.rest.take), time.perf_counter()
            answers = batch.backend([samples[i] for i in batch.filled], statistics)[: len(batch.indices)]
            statistics.on_tokens = None  # other processes get the rest
            yield AnsweredBatch(answers, time.perf_counter() - start, statistics)

    def _answer(
        self,
        group: PromptGroup,
        asked: Sequence[PromptBatch],
        answers: Iterator[AnsweredBatch],
        on_tokens: Callable[[int], None],
    ) -> list[SampleRecord]:
        """The sample records of a group, in the order of its samples; those of each batch are written as it ends."""
        file, prompts = self._sample_files[group.task.suite], group.prompts
        keys = [sample_key(one) for one in group.identities]
        if self.again:
            file.forget(keys)
        on_tokens(int(prompts.cost * sum(key in file.records for key in keys) / max(len(keys), 1)))
        for batch, answered in zip(asked, answers, strict=False):
            seconds = answered.seconds / len(batch.indices)
            file.add(
                [
                    self._sample_record(group, prompts.samples[i], text, batch.length, seconds)
                    for i, text in zip(batch.indices, answered.texts, strict=True)
                ]
            )
            if batch.rest is None:  # another process has answered it
                batch.rest = UnreportedTokens(batch.tokens, on_tokens)
            batch.rest.take(batch.rest.tokens)
            self.statistics.add(answered.statistics)
            self.seconds += answered.seconds
        return [file.records[key] for key in keys]

    def _sample_record(
        self, group: PromptGroup, sample: Sample, output: str, length: int, seconds: float
    ) -> SampleRecord:
        scores = group.task.score(sample, output)
        found = getattr(group.task, "found", None)
        record = group.identities[sample.index] | {
            "prompt": sample.fingerprint,
            "tokens": len(sample.tokens),
            "depth": list(sample.depth),
            "references": list(sample.references),
            "output": output,
            "score": scores[group.task.metric],
            "scores": scores,
            "found": found(sample, output) if found else None,
            "metadata": dict(sample.metadata),
            **group.variant.sample_record(length),
            "protocol": group.prompts.protocol,
            "seconds": seconds,
        }
        return finite(record)

    # --------------------------------------------------------------------------------------------------------
    # Summaries

    def _summary(self, group: PromptGroup, answered: Sequence[SampleRecord]) -> Record:
        """The result record of a group."""
        task, first = group.task, answered[0] if answered else {}
        # Questions about one problem or one paragraph are not independent.
        clusters = [record["metadata"].get("cluster", record["index"]) for record in answered]
        mean = mean_of([record["score"] for record in answered], clusters)
        if mean is None:
            raise DataError(f"{task.suite}:{task.name} has no samples.")
        record: Record = {
            **_name(group),
            "positional": answered[-1]["positional"],
            "seed": group.prompts.seed,
            "metric": task.metric,
            "score": mean.mean,
            "stderr": mean.stderr,
            "low": mean.low,
            "high": mean.high,
            "samples": mean.count,
            "scores": {
                name: math.fsum(record["scores"][name] for record in answered) / len(answered)
                for name in first["scores"]
            },
            "truncated": sum(bool(record["metadata"].get("truncated")) for record in answered),
            "longest": max(record["tokens"] for record in answered),
            "settings": first["settings"],
            "higher_is_better": True,
            "seconds": math.fsum(record["seconds"] for record in answered),
            "protocol": first["protocol"],
            "versions": versions(),
            "devices": len(compute_devices()),
        }
        if any(record["depth"] for record in answered):
            record["by_depth"] = by_depth(answered)
        if group.length is None:
            record["by_length"] = by_length(answered, getattr(task, "edges_by_record_length", None))
        return finite(record)


def _name(group: PromptGroup) -> Record:
    """The keys of a group's result record that tell what it measures: suite, task, checkpoint, variant and length."""
    task = group.task
    length = group.length or task.settings.get("max_length")  # which prompts were cut to, where the protocol cuts
    return {"suite": task.suite, "source": task.name, **group.variant.record(length)}


class AnsweredBatch(NamedTuple):
    """The texts that answer the samples of a batch, and their cost."""

    texts: list[str]
    seconds: float
    statistics: GenerationStatistics


def open_prompted(chosen: Mapping[PromptSuite, Sequence[str]], session: EvaluationSession) -> Prompted:
    """The answers to the suites' prompts, as a session asks for them; see `Suite.runner`."""
    arguments, plan = session.arguments, session.plan
    tasks = open_tasks({suite.name: names for suite, names in chosen.items()}, plan.options, session.limits)
    seed = SEED if arguments.seed is None else arguments.seed
    name, out = session.target.display_name, session.out
    return Prompted(session.variants, tasks, plan.lengths, plan.options, seed, out, plan.again, run=name)


def by_depth(records: Sequence[SampleRecord]) -> dict[str, list[Any]]:
    """The share of needles found at each depth: of the records' own depths, or in steps of ten per cent if over 11."""
    pairs = [(depth, hit) for record in records for depth, hit in zip(record["depth"], record["found"], strict=True)]
    asked = sorted({depth for depth, _ in pairs})
    places = asked if len(asked) <= 11 else [float(place) for place in range(0, 101, 10)]
    hits: dict[float, list[float]] = {place: [] for place in places}
    for depth, hit in pairs:
        hits[min(places, key=lambda place: abs(place - depth))].append(hit)
    return {
        "depth": places,
        "score": [math.fsum(found) / len(found) if found else None for found in hits.values()],
        "count": [len(found) for found in hits.values()],
    }


LENGTH_EDGES = (0, 4096, 8192, 16384, 32768, 65536, 131072)  # DroPE, Tables 8 and 9, extended


def by_length(records: Sequence[SampleRecord], record_edges: Sequence[int] | None = None) -> dict[str, Any]:
    """Mean scores by the tokens of the prompt before truncation; each bucket excludes its upper edge.

    Args:
      record_edges: edges by the `record_length` of the source's records instead (LongBench-E: words, or characters).
    """
    if record_edges is None:
        sizes, known = [r["metadata"].get("tokens_before_truncation") or r["tokens"] for r in records], LENGTH_EDGES
    else:
        sizes, known = [r["metadata"]["record_length"] for r in records], tuple(record_edges)
    edges = list(known[: max(2, sum(edge <= max(sizes) for edge in known) + 1)])
    if max(sizes) >= edges[-1]:
        edges.append(max(sizes) + 1)
    parts = [
        mean_of([r["score"] for r, n in zip(records, sizes, strict=True) if low <= n < high])
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    return {
        "edges": edges,
        "of": "tokens" if record_edges is None else "words",
        "score": [part.mean if part else None for part in parts],
        "low": [part.low if part else None for part in parts],
        "high": [part.high if part else None for part in parts],
        "count": [part.count if part else 0 for part in parts],
    }
