"""Tasks of prompted suites: a task, its samples, and prompts made to a length: the largest size that fits."""

from __future__ import annotations

import hashlib
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError

Scores = dict[str, float]
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Sample:
    """One prompt and its right answers."""

    index: int  # its number in its task, at its length
    text: str  # the prompt
    tokens: Int32[np.ndarray, " n"]  # of the prompt, as the model reads them
    references: tuple[str, ...]  # the right answers; the task decides whether one or all are needed
    max_new_tokens: int  # the most tokens of an answer
    stop: tuple[str, ...] = ()  # strings that end an answer, beside the model's end of text
    stop_ids: tuple[int, ...] = ()  # tokens that do: the same characters within another token do not
    depth: tuple[float, ...] = ()  # for each needle that is asked for, how much of the context precedes it, per cent
    # JSON, written to the sample's record. `truncated` is counted; samples of equal `cluster` are not independent.
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A digest of the prompt's tokens, the references and the end of an answer."""
        asked = (self.references, self.max_new_tokens, self.stop, self.stop_ids)
        return hashlib.sha256(self.tokens.astype("<i4").tobytes() + repr(asked).encode()).hexdigest()[:16]


@runtime_checkable
class PromptTask(Protocol):
    """One task of a suite."""

    suite: str  # as in `--suite=suite:name`
    name: str
    metric: str  # the first key of `score`; summaries are means of it
    sized: bool  # whether prompts are made to a length; else they have their own lengths, and `length` is None
    # JSON; all that samples depend on beside length, index, seed and tokenizer. It is part of a result's identity:
    # results of another haystack are other results.
    settings: Mapping[str, Any]

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """`count` samples, or as many as exist; each is made when it is indexed.

        Sample i depends on (settings, tokenizer, length, seed, i) alone. `length` counts the tokens of prompt and
        answer together.

        Raises:
          ConfigError: `length` is too short for the shortest prompt.
          DataError: files are missing or damaged.
        """
        ...

    def score(self, sample: Sample, output: str) -> Scores:
        """Scores of an answer in 0..1, `metric` first."""
        ...


@dataclass(frozen=True)
class Lazy(Sequence[Sample]):
    """A sequence of `count` samples. `make(index)` is called on every access."""

    make: Callable[[int], Sample]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self.count)[index]
        return [self.make(i) for i in chosen] if isinstance(chosen, range) else self.make(chosen)


def newline_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token of a line end, as LongBench takes it: the last one of a line end alone."""
    return (int(tokenizer.encode_prompt("\n", add_special_tokens=False)[-1]),)


def random_for(*identity: Any) -> random.Random:
    """A random generator seeded with all of (suite, task, seed, index, ...)."""
    digest = hashlib.blake2b("/".join(map(str, identity)).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def half_pair(texts: Iterable[str]) -> str:
    """Describes half of a surrogate pair in texts, which JSON can escape and UTF-8 cannot encode; "" if none."""
    for text in texts:
        if half := _HALF_PAIR.search(text):
            excerpt = ascii(text[max(half.start() - 30, 0) : half.end() + 30])
            return f"half of a surrogate pair, which is no character, in {excerpt}"
    return ""


@dataclass(frozen=True)
class Draft:
    """A sample of undecided size."""

    render: Callable[[int], str]  # the prompt of a size; its tokens grow with the size, about in proportion
    references: tuple[str, ...]  # the right answers, equal at all sizes
    unit: str  # the name of what the size counts
    smallest: int
    largest: int | None = None
    exhausted: str = ""  # advice for a length that the largest size does not fill
    depth: Callable[[int], tuple[float, ...]] = lambda size: ()  # of a size, as in `Sample`
    metadata: Mapping[str, Any] = field(default_factory=dict)  # as in `Sample`

    def size_within(self, budget: int, count: Callable[[str], int]) -> int | None:
        """The largest size whose prompt has at most `budget` tokens, which `count` counts; None if none has."""
        least = count(self.render(self.smallest))
        if least > budget:
            return None
        fits = self.smallest  # the largest size known to fit
        most = math.inf if self.largest is None else self.largest  # the largest that may fit
        size, calls = 2 * self.smallest + 16, 0
        while fits < most:
            size = min(max(size, fits + 1), most)
            tokens = count(self.render(size))
            if tokens <= budget:
                fits = size
            else:
                most = size - 1
            calls += 1
            rate = (tokens - least) / (size - self.smallest)
            size += math.floor((budget - tokens) / max(rate, 1e-3))
            if calls % 8 == 0 and most < math.inf:  # the estimate alone may converge slowly
                size = (fits + most) // 2
        return fits


class SizedTask(ABC):
    """A task whose prompts are made to a length: every sample is a draft of the largest size that fits."""

    suite: str
    name: str
    metric: str
    max_new_tokens: int
    sized = True
    stop: tuple[str, ...] = ()
    one_line: bool = False  # whether the newline's token ends an answer
    margin = 0  # by how many tokens the shortest prompt of another sample may exceed that of the first

    @abstractmethod
    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        """Draft `index`. What it draws at random does not depend on the length."""

    def encode(self, tokenizer: Tokenizer, text: str) -> Int32[np.ndarray, " n"]:
        """The tokens of a rendered prompt."""
        return tokenizer.encode_prompt(text)

    def reserved(self, tokenizer: Tokenizer, index: int) -> int:
        """The tokens of the length that draft `index` leaves to the answer."""
        return self.max_new_tokens

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Any]:
        """See `PromptTask`. A prompt of the next larger size would not fit."""
        if length is None:
            raise ValueError(f"{self.name} needs a length")
        chosen = self.choose(tokenizer, length, count, seed)
        return Lazy(lambda index: self._sample(tokenizer, length, index, seed, chosen[index]), len(chosen))

    def choose(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> Sequence[int]:
        """The draft of each of `count` samples: the first ones, which must all fit.

        All are rendered only if the first, with the margin, takes more than half of the length.

        Raises:
          ConfigError: a draft does not fit, or the largest prompts are much shorter than the length.
        """
        first = self.draft(tokenizer, length, 0, seed)

        def tokens(draft: Draft, size: int) -> int:
            return len(self.encode(tokenizer, draft.render(size))) + self.max_new_tokens

        longest = tokens(first, first.smallest)
        if length < 2 * (longest + self.margin):
            for index in range(1, count):
                draft = self.draft(tokenizer, length, index, seed)
                longest = max(longest, tokens(draft, draft.smallest))
        if longest > length:
            raise ConfigError(
                f"--lengths: {length:,} tokens do not hold all {count:,} samples of {self.suite}:{self.name} with "
                f"answers of {self.max_new_tokens}; the shortest take {longest:,}."
            )
        if first.largest is not None:
            most = tokens(first, first.largest) - self.max_new_tokens
            if most < 0.9 * (length - self.max_new_tokens):
                raise ConfigError(
                    f"--lengths: prompts of {self.suite}:{self.name} have at most {most:,} tokens; {length:,} are "
                    f"asked for. {first.exhausted}"
                )
        return range(count)

    def first_fitting(
        self, length: int, count: int, candidates: Iterable[int], least: Callable[[int], int], advice: str = ""
    ) -> list[int]:
        """The first `count` candidates whose shortest prompt and answer, `least(candidate)` tokens, fit a length.

        `ConfigError` if there is none.
        """
        chosen, needed = [], []
        for candidate in candidates:
            if len(chosen) == count:
                break
            needed.append(least(candidate))
            if needed[-1] <= length:
                chosen.append(candidate)
        if count and not chosen:
            raise ConfigError(
                f"--lengths: no sample of {self.suite}:{self.name} with an answer of {self.max_new_tokens} fits "
                f"{length:,} tokens; the shortest take {min(needed):,}. {advice}".rstrip()
            )
        return chosen

    def _sample(self, tokenizer: Tokenizer, length: int, index: int, seed: int, drafted: int) -> Sample:
        """Sample `index`, made of the draft `drafted`."""
        draft, new = self.draft(tokenizer, length, drafted, seed), self.max_new_tokens
        budget = length - self.reserved(tokenizer, drafted)
        size = draft.size_within(budget, lambda text: len(self.encode(tokenizer, text)))
        if size is None:
            least = len(self.encode(tokenizer, draft.render(draft.smallest)))
            raise ConfigError(
                f"--lengths: sample {index} of {self.suite}:{self.name} and its answer of {new} tokens do not fit "
                f"{budget + new:,} tokens; the shortest take {least + new:,}."
            )
        text = draft.render(size)
        tokens, metadata = self.encode(tokenizer, text), {draft.unit: size} | draft.metadata
        depth, stop_ids = draft.depth(size), newline_ids(tokenizer) if self.one_line else ()
        return Sample(index, text, tokens, draft.references, new, self.stop, stop_ids, depth, metadata)
