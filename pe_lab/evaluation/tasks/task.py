"""What prompted suites have in common: a prompt and what it should be answered with, and a task that makes and scores
them. Who answers is `answering`'s business, and what is kept of it `prompted`'s."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer

Scores = dict[str, float]
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # JSON can escape it alone; UTF-8 has no bytes for it


@dataclass(frozen=True)
class Sample:
    """One prompt, and what is known of its right answer.

    Attributes:
      index: which of its task's, at its length.
      text: the prompt as text.
      tokens: [n] the prompt as the model reads it.
      references: the right answers; whether all are wanted, or any, is the task's business.
      max_new_tokens: how long an answer may be.
      stop: strings that end an answer, beside the model's own end of text.
      depth: per cent of the context before what is asked for, one for each needle, where there are needles.
      facts: what else belongs into the line of a result, as JSON; `truncated` is counted.
    """

    index: int
    text: str
    tokens: Int32[np.ndarray, " n"]
    references: tuple[str, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    depth: tuple[float, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Of the prompt's tokens and all that its answer is scored against: equal ones are the same question."""
        asked = (self.references, self.max_new_tokens, self.stop)
        return hashlib.sha256(self.tokens.astype("<i4").tobytes() + repr(asked).encode()).hexdigest()[:16]


@runtime_checkable
class Task(Protocol):
    """One task of a suite.

    Attributes:
      suite, name: as in `--suite=suite:name`.
      metric: the first key of `score`, which summaries are of.
      sized: whether prompts are made to a length; otherwise they have their own, and `length` is None throughout.
      settings: JSON; what the samples depend on beside (length, index, seed) and the tokenizer. Part of a result's
        identity: another haystack is another measurement.
    """

    suite: str
    name: str
    metric: str
    sized: bool
    settings: Mapping[str, Any]

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """`count` samples, or as many as there are, made one by one as they are asked for.

        Sample i is a function of (settings, tokenizer, length, seed, i) alone. `length` is in tokens and includes the
        answer: every prompt fits `length - max_new_tokens`.

        Raises:
          UserError: `length` has no room for the smallest prompt, or files are missing or not in the schema.
        """
        ...

    def score(self, sample: Sample, output: str) -> Scores:
        """Each in 0..1; `metric` first."""
        ...


@dataclass(frozen=True)
class Lazy(Sequence[Sample]):
    """A sequence of samples that makes one when it is asked for, and keeps none."""

    make: Any  # index -> Sample
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.count))]
        if not -self.count <= index < self.count:
            raise IndexError(index)
        return self.make(index % self.count)


def random_for(*what: Any) -> random.Random:
    """A generator for (task, seed, length, index ...): always the same for the same, independent for others."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def largest_fitting(
    tokens_at: Callable[[int], int], budget: int, smallest: int, guess: int, largest: int | None = None
) -> int | None:
    """The largest size, `smallest` to `largest`, whose prompt has at most `budget` tokens; None where none has.

    `tokens_at` grows with the size, nearly in proportion to it: a few calls are enough, each of which makes and
    tokenizes a prompt.
    """
    fits: tuple[int, int] | None = None  # (size, tokens) of the largest known to fit
    over: tuple[int, int] | None = None  # and of the smallest known not to
    at, turn = max(guess, smallest), 0
    while True:
        at = at if largest is None else min(at, largest)
        tokens = tokens_at(at)
        if tokens <= budget:
            fits = (at, tokens)
            if at == largest or (over and at + 1 == over[0]):
                return at
        else:
            over = (at, tokens)
            if at == smallest:
                return None
            if fits and fits[0] + 1 == at:
                return fits[0]
        turn += 1
        if fits and over:
            share = (budget - fits[1]) / max(over[1] - fits[1], 1)
            # Every third turn halves the interval: proportions alone may creep.
            at = fits[0] + round((over[0] - fits[0]) * (share if turn % 3 else 0.5))
            at = min(max(at, fits[0] + 1), over[0] - 1)
        else:
            # A little beyond where the budget should be met, so that the next turn has both sides.
            aim = at + (budget - tokens) * at / max(tokens, 1) * (1.02 if fits else 1.05)
            at = max(math.ceil(aim), at + 1) if fits else min(max(math.floor(aim), smallest), at - 1)
