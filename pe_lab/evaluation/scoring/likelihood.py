"""Log-likelihoods of continuations, many at once: sorted by length, padded to few lengths, spread over the devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring import forward
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.language_model import LanguageModel
from pe_lab.positional import Alibi

SHORTEST = 16  # tokens that a text is padded to at least
STEPS = 4  # forward passes of a batch: devices wait between batches, not between its passes


class Likelihood(NamedTuple):
    """Of one continuation: the sum of its tokens' log-probabilities, in nats; whether each of them is the likeliest."""

    total: float
    greedy: bool


class _Text(NamedTuple):
    """A text to read once, and what of it is asked for."""

    tokens: tuple[int, ...]
    asked: list[tuple[int, int, tuple[int, ...]]]  # pair, position before its first target, targets


class Batch(NamedTuple):
    """Texts that are read together. A function of all pairs: it is the same, whichever of them are known already."""

    texts: list[_Text]
    padded: int  # tokens that each is padded to
    width: int  # targets that each is padded to
    read_as: int | None

    @property
    def pairs(self) -> list[int]:
        """The pairs that it answers."""
        return [pair for text in self.texts for pair, _, _ in text.asked]


class Likelihoods:
    """What a model gives to continuations of contexts.

    Args:
      lm: the model.
      rows: texts read at once on each device; None is what its memory is good for.
      devices: texts are spread over these (all local ones).

    Attributes:
      params: the weights, on every device.
    """

    def __init__(self, lm: LanguageModel, rows: int | None = None, devices: Sequence[Any] | None = None):
        self._lm, self._rows = lm, rows
        slopes = any(isinstance(layer.encoding, Alibi) for layer in lm.layers)
        self._forward = _forward(lm.config, slopes, None if devices is None else tuple(devices))
        self._devices = len(jax.local_devices() if devices is None else devices)
        self.params = self._forward.place(lm.checkpoint.params)

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, Likelihood]]:
        """(index of a pair, its likelihood) as they are known, the longest texts first.

        Args:
          pairs: (context, continuation) as token ids, at least one of each. Pairs that differ in their last token
            alone are read once.
        """
        for batch in self.batches(pairs):
            yield from self.read(batch)

    def batches(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Batch]:
        """The pairs in batches, the longest texts first. Each may be read without the others."""
        found = []
        for (padded, read_as), texts in _by_length(pairs, self._follows_length()).items():
            width = max(map(_width, texts))
            width = 1 << (width - 1).bit_length()
            size = self._texts_per_batch(padded)
            # The last one is the larger: a small one would be compiled for fewer rows.
            starts = [size * i for i in range(max(1, len(texts) // size))]
            parts = [texts[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
            found += [Batch(part, padded, width, read_as or self._lm.fixed_length) for part in parts]
        return found

    def _texts_per_batch(self, padded: int) -> int:
        if padded > forward.WHOLE:  # chunk by chunk, one after another
            return self._devices * max(1, forward.BATCH_TOKENS_ELSEWHERE // padded)
        tokens = forward.BATCH_TOKENS.get(jax.default_backend(), forward.BATCH_TOKENS_ELSEWHERE)
        rows = self._rows or 1 << (max(1, tokens // padded).bit_length() - 1)
        return STEPS * rows * self._devices

    def _follows_length(self) -> bool:
        return self._lm.fixed_length is None and any(layer.follows_length for layer in self._lm.layers)

    def read(self, batch: Batch) -> Iterator[tuple[int, Likelihood]]:
        """(index of a pair, its likelihood) for the pairs of a batch."""
        rows = len(batch.texts)
        tokens = np.zeros((rows, batch.padded), np.int32)
        at, targets = (np.zeros((rows, batch.width), np.int32) for _ in range(2))
        for row, text in enumerate(batch.texts):
            tokens[row, : len(text.tokens)] = text.tokens
            targets[row, : _width(text)] = np.concatenate([wanted for _, _, wanted in text.asked])
            places = [np.arange(first, first + len(wanted)) for _, first, wanted in text.asked]
            at[row, : _width(text)] = np.concatenate(places)
        waiting = iter(batch.texts)
        for scores, likeliest in self._forward.scores(
            self.params, tokens, at, targets, self._lm.layers, batch.read_as, self._rows
        ):
            for row_scores, row_likeliest in zip(scores.astype(np.float64), likeliest, strict=True):
                start = 0
                for pair, _, wanted in next(waiting).asked:
                    of_pair = slice(start, start + len(wanted))
                    yield pair, Likelihood(float(row_scores[of_pair].sum()), bool(row_likeliest[of_pair].all()))
                    start = of_pair.stop


def _width(text: _Text) -> int:
    return sum(len(wanted) for _, _, wanted in text.asked)


@functools.lru_cache(maxsize=4)
def _forward(config: ModelConfig, slopes: bool, devices: tuple[Any, ...] | None) -> Forward:
    """One for all models of a shape: what it has compiled serves the next one too."""
    return Forward(config, slopes, devices)


def _by_length(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], follows_length: bool
) -> dict[tuple[int, int | None], list[_Text]]:
    """The texts to read by (the length they are padded to, the length whose schedule they are read with).

    The second is None where encodings do not follow the length: padding on the right changes nothing then.
    """
    texts: dict[tuple[int, ...], _Text] = {}
    for pair, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            what = "context" if not len(context) else "continuation"
            raise UserError(f"Pair {pair} has no token in its {what}; there must be one to read and one to score.")
        whole = (*map(int, context), *map(int, continuation))
        text = texts.setdefault(whole[:-1], _Text(whole[:-1], []))
        text.asked.append((pair, len(context) - 1, whole[len(context) :]))
    groups: dict[tuple[int, int | None], list[_Text]] = {}
    for text in sorted(texts.values(), key=lambda text: (-len(text.tokens), text.tokens)):
        length = len(text.tokens)
        groups.setdefault((padded_length(length), length if follows_length else None), []).append(text)
    return groups


def padded_length(length: int) -> int:
    """The next power of two, or the middle between two of them: two lengths an octave to compile for."""
    above = max(SHORTEST, 1 << (length - 1).bit_length())
    return above * 3 // 4 if above > SHORTEST and length <= above * 3 // 4 else above
