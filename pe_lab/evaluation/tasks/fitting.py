"""Prompts made to a length: the largest size (of filler, lists, documents) whose prompt fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError
from pe_lab.evaluation.tasks.task import Sample


@dataclass(frozen=True)
class Draft:
    """A sample of undecided size.

    Attributes:
      render: the prompt of a size; its tokens are about proportional to the size.
      references: the right answers, equal at all sizes.
      unit: the name of what the size counts.
      smallest, largest: the possible sizes; None: no largest.
      exhausted: advice for a length that the largest size does not fill.
      metadata: as in `Sample`.
    """

    render: Callable[[int], str]
    references: tuple[str, ...]
    unit: str
    smallest: int
    largest: int | None = None
    exhausted: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def tokens(self, tokenizer: Tokenizer, size: int) -> int:
        """Tokens of the prompt of a size."""
        return len(tokenizer.encode_prompt(self.render(size)))

    def size_within(self, tokenizer: Tokenizer, budget: int) -> tuple[int | None, int]:
        """The largest size whose prompt has at most `budget` tokens, or None; and the tokens of the smallest prompt."""
        known: dict[int, int] = {}

        def count(size: int) -> int:
            if size not in known:
                known[size] = self.tokens(tokenizer, size)
            return known[size]

        smallest, largest = self.smallest, self.largest
        if count(smallest) > budget:
            return None, known[smallest]
        low, high, size = smallest, None, 2 * smallest + 16
        for _ in range(12):
            size = size if largest is None else min(size, largest)
            if size in known:
                break
            rate = (count(size) - known[smallest]) / (size - smallest)
            low, high = (size, high) if known[size] <= budget else (low, size)
            nearest = min(known, key=lambda at: abs(known[at] - budget))
            size = max(nearest + int((budget - known[nearest]) / max(rate, 1e-3)), low + 1)
            size = size if high is None else min(size, high - 1)
        return largest_fitting(count, budget, smallest, low, largest if high is None else high), known[smallest]

    def sample(
        self,
        task: Any,
        tokenizer: Tokenizer,
        budget: int,
        index: int,
        stop: tuple[str, ...] = (),
        depth: tuple[float, ...] = (),
    ) -> Sample:
        """The sample of the largest size whose prompt has at most `budget` tokens.

        Raises:
          ConfigError: the smallest size does not fit.
        """
        size, least = self.size_within(tokenizer, budget)
        new = task.max_new_tokens
        if size is None:
            raise ConfigError(
                f"--lengths: sample {index} of {task.suite}:{task.name} and its answer of {new} tokens do not fit "
                f"{budget + new:,} tokens; the shortest take {least + new:,}."
            )
        text = self.render(size)
        metadata = {self.unit: size} | self.metadata
        return Sample(index, text, tokenizer.encode_prompt(text), self.references, new, stop, depth, metadata)

    def most_tokens(self, tokenizer: Tokenizer, enough: float) -> int:
        """Tokens of the largest prompt; or of a smaller one, which is rendered sooner, if that has `enough`."""
        assert self.largest is not None
        tokens = 0
        for size in (max(self.largest // 16, self.smallest), self.largest):
            tokens = self.tokens(tokenizer, size)
            if tokens >= enough:
                break
        return tokens


def largest_fitting(
    tokens_at: Callable[[int], int], budget: int, smallest: int, guess: int, largest: int | None = None
) -> int | None:
    """The largest size in `smallest`..`largest` whose prompt has at most `budget` tokens; None if none has.

    `tokens_at` must grow with the size, about in proportion. It is called a few times, as each call renders and
    tokenizes a prompt.
    """
    fits: tuple[int, int] | None = None  # (size, tokens) of the largest size known to fit
    over: tuple[int, int] | None = None  # and of the smallest size known not to fit
    at, calls = max(guess, smallest), 0
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
        calls += 1
        if fits and over:
            share = (budget - fits[1]) / max(over[1] - fits[1], 1)
            # Interpolation alone may converge slowly: every third call bisects.
            at = fits[0] + round((over[0] - fits[0]) * (share if calls % 3 else 0.5))
            at = min(max(at, fits[0] + 1), over[0] - 1)
        else:
            # A little past the extrapolated size, so that the next call bounds it from the other side.
            aim = at + (budget - tokens) * at / max(tokens, 1) * (1.02 if fits else 1.05)
            at = max(math.ceil(aim), at + 1) if fits else min(max(math.floor(aim), smallest), at - 1)


def check_length(task: Any, length: int, count: int, least: Callable[[int], int], margin: int = 0) -> None:
    """Checks that the shortest prompts of a task's samples and their answers fit a length.

    Args:
      task: has `suite`, `name` and `max_new_tokens`.
      least: sample index -> tokens of its shortest prompt and its answer.
      margin: by how many tokens other samples may exceed the first. All samples are rendered only if the first, with
        this margin, takes more than half of the length.

    Raises:
      ConfigError: a sample does not fit.
    """
    longest = least(0)
    if length < 2 * (longest + margin):
        longest = max([longest, *map(least, range(1, count))])
    if longest > length:
        raise ConfigError(
            f"--lengths: {length:,} tokens do not hold all {count:,} samples of {task.suite}:{task.name} with answers "
            f"of {task.max_new_tokens}; the shortest take {longest:,}."
        )


def first_fitting(
    task: Any, length: int, count: int, candidates: Iterable[int], least: Callable[[int], int], advice: str = ""
) -> list[int]:
    """The first `count` candidates whose shortest prompt and answer, `least(candidate)` tokens, fit a length.

    Raises:
      ConfigError: no candidate fits.
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
            f"--lengths: no sample of {task.suite}:{task.name} with an answer of {task.max_new_tokens} fits {length:,} "
            f"tokens; the shortest take {min(needed):,}. {advice}".rstrip()
        )
    return chosen
