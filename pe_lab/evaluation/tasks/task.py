"""What the suites share: a suite's description, a task, its samples, and checks of their texts."""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer

Scores = dict[str, float]
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Suite:
    """A suite of `python -m pe_lab.evaluate`."""

    name: str  # as in `--suite=name`
    title: str  # in tables and reports
    protocol: int = 1  # counted up when prompts or scores change; what an older protocol measured is measured again
    about: str = ""  # a sentence or two for reports
    terms: Mapping[str, str] = field(default_factory=dict)  # entries of a report's glossary
    average_of: int | None = None  # how many tasks the mean over tasks is of (0: of any number); None: no mean
    tasks: Collection[str] = ()  # the names that `--suite=name:...` takes, for a suite of prompts
    # How many samples a task has by default, by its name; a task without an entry has all of its file.
    samples: Mapping[str, int] = field(default_factory=dict)
    # The suite's own flags of the command line, each with its arguments of `add_argument`.
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # (names, arguments, limits) -> tasks, for a suite of prompts. The names are of `tasks`, none meaning the default
    # ones; `limits` are the tokens that prompts of files and their answers may take together (None: no limit). Raises
    # `ConfigError` for a flag that is missing or wrong, `DataError` for files that are missing or damaged.
    open: Callable[[Sequence[str], argparse.Namespace, Sequence[int | None]], list[Any]] | None = None


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
class Task(Protocol):
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
