"""Requests of the harness: batches of texts to generate, and the answers, kept on disk a batch at a time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pe_lab.evaluation.generation.backend import ModelBackend
from pe_lab.language_model import LanguageModel
from pe_lab.parallel import shared
from pe_lab.results.records import SampleFile, SampleRecord, sample_key

Batch = TypeVar("Batch")


class HarnessGeneration(NamedTuple):
    """A request to generate a text."""

    prompt: list[int]
    prompt_limit: int  # tokens of the prompt that are read
    until: list[str]
    new_tokens: int
    sampling: dict[str, Any]
    seed: int  # of its draws
    truncation: str = "left"  # of the prompt: `left` or `middle`


def cut_context(tokens: list[int], limit: int, truncation: str) -> list[int]:
    """At most `limit` tokens: the last ones, or the first and last halves."""
    if len(tokens) <= limit:
        return tokens
    first = limit // 2 if truncation == "middle" else 0
    return tokens[:first] + tokens[len(tokens) - (limit - first) :]


def seed_of(seed: int, index: int) -> int:
    """The seed of one request's draws; requests of one seed, or of neighbouring seeds, have different ones."""
    return int(np.random.SeedSequence((seed % 2**32, index)).generate_state(1)[0])


def generation_batches(
    lm: LanguageModel, batch_size: int | None, asked: Mapping[int, HarnessGeneration], indices: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Batches of requests that differ only in prompts and seeds: (indices, indices filled up to a power of two).

    The longest prompts come first. A request is alone in its batch where a layer follows the length, or where tokens
    are drawn: a draw depends on the place in the batch.
    """
    order = sorted(indices, key=lambda index: -len(asked[index].prompt))
    first = asked[order[0]]
    follows = any(layer.follows_length for layer in lm.layers) and lm.schedule_length is None
    alone = follows or bool(first.sampling.get("temperature"))
    start = 0
    while start < len(order):
        longest = min(len(asked[order[start]].prompt), first.prompt_limit) + first.new_tokens
        size = 1 if alone else batch_size * lm.devices if batch_size else ModelBackend(lm).batch_size(longest)
        some = order[start : start + size]
        # Powers of two: few programs are compiled.
        fill = min(size, 1 << (len(some) - 1).bit_length()) - len(some)
        yield some, [*some, *some[-1:] * fill]
        start += len(some)


def generate(lm: LanguageModel, batch: Sequence[HarnessGeneration]) -> list[str]:
    """The text that continues each prompt."""
    first = batch[0]
    prompts = [cut_context(one.prompt, one.prompt_limit, one.truncation) for one in batch]
    return lm.generate(prompts, first.new_tokens, stop=first.until, text=True, seed=first.seed, **first.sampling)


@dataclass
class Used:
    """The cost of one document's requests: tokens of the longest, after and before cuts; seconds of all."""

    tokens: int = 0
    tokens_before_truncation: int = 0
    seconds: float = 0.0

    def add(self, other: Used) -> None:
        self.tokens = max(self.tokens, other.tokens)
        self.tokens_before_truncation = max(self.tokens_before_truncation, other.tokens_before_truncation)
        self.seconds += other.seconds


@dataclass
class Journal:
    """The file that keeps the answers of one measurement: of one variant, on one task, group or tag.

    Attributes:
      file: None keeps nothing.
      identity: what the answers depend on besides the requests: checkpoint_id, fingerprint, suite, task, settings ...
      found: the number of answers by an earlier process.
      seconds: the time that these took.
    """

    file: SampleFile | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    found: int = 0
    seconds: float = 0.0


class RequestAnswers:
    """The answers to the requests of a call, by place, as far as they are known.

    The batches follow from all requests, and so may the last digits of an answer: an answer that the journal keeps
    counts only for a request at the same place among the same requests.

    Args:
      kind: the method that was called, such as `generate_until`.
      requests: as they are given to the model: tokens, stop strings, the seed of draws; compared by their `repr`.

    Attributes:
      seconds: the time that each took.
    """

    def __init__(self, journal: Journal, kind: str, requests: Sequence[Any]):
        self._file, self._identity = journal.file, {**journal.identity, "kind": kind}
        self._digests = [hashlib.sha256(repr(request).encode()).hexdigest()[:16] for request in requests]
        self._whole = hashlib.sha256("".join([kind, *self._digests]).encode()).hexdigest()[:16]
        self._known: dict[int, Any] = {}
        self.seconds: dict[int, float] = {}
        for place in range(len(requests)) if self._file is not None and self._file.records else ():
            if (kept := self._file.records.get(sample_key(self._record(place)))) is not None:
                self._known[place], self.seconds[place] = kept["answer"], kept["seconds"]
        journal.found += len(self._known)
        journal.seconds += sum(self.seconds.values())

    def _record(self, place: int) -> SampleRecord:
        return {**self._identity, "request": self._digests[place], "index": f"{self._whole}:{place}"}

    def __getitem__(self, place: int) -> Any:
        return self._known[place]

    def has(self, places: Iterable[int]) -> bool:
        """Whether all of them are known."""
        return all(place in self._known for place in places)

    def complete(
        self,
        batches: Sequence[Batch],
        places: Callable[[Batch], Sequence[int]],
        answer: Callable[[Batch], Mapping[int, Any]],
        cost: Callable[[Batch], float],
    ) -> Iterator[Batch]:
        """The batches in order, each as soon as all its answers are known. Several processes share the batches.

        Args:
          places: of the requests of a batch.
          answer: answers a batch, by place.
          cost: of a batch, in any unit.
        """

        def timed(chosen: Iterable[Batch]) -> Iterator[tuple[Mapping[int, Any], float]]:
            for batch in chosen:
                start = time.perf_counter()
                yield answer(batch), time.perf_counter() - start

        missing = [batch for batch in batches if not self.has(places(batch))]
        answered = shared(missing, timed, list(map(cost, missing)))
        for batch in batches:
            if not self.has(places(batch)):
                self.put(*next(answered))
            yield batch

    def put(self, answers: Mapping[int, Any], seconds: float) -> None:
        """Adds the answers of a batch, which took `seconds`; they are on disk on return. Existing answers stay."""
        new = {place: answer for place, answer in answers.items() if place not in self._known}
        self._known |= new
        self.seconds |= dict.fromkeys(new, seconds / len(answers))
        if self._file is not None:
            self._file.add(
                [
                    self._record(place) | {"answer": answer, "seconds": self.seconds[place]}
                    for place, answer in new.items()
                ]
            )
