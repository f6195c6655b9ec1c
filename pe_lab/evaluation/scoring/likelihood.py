"""Log-likelihoods of many continuations: sorted by length, padded to few lengths, sharded over the devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.evaluation.scoring import forward
from pe_lab.evaluation.scoring.forward import Forward, tensor_shards
from pe_lab.language_model import LanguageModel
from pe_lab.parallel import compute_devices, shared
from pe_lab.positional import Alibi

SHORTEST = 16  # the smallest padded length, in tokens
STEPS = 4  # forward passes of a batch; devices wait only between batches


class Likelihood(NamedTuple):
    """The sum of a continuation's log-probabilities, nats, and whether each of its tokens is the likeliest."""

    total: float
    greedy: bool


class _ScoredSequence(NamedTuple):
    """A sequence to read once, and the continuations that are scored in it."""

    tokens: tuple[int, ...]
    asked: list[tuple[int, int, tuple[int, ...]]]  # pair, position before its first target, targets

    @property
    def targets(self) -> int:
        return sum(len(wanted) for _, _, wanted in self.asked)


class LikelihoodBatch(NamedTuple):
    """Sequences that are read together. It depends on all pairs, not on which of them are known already."""

    sequences: list[_ScoredSequence]
    padded: int  # the padded number of tokens of each
    width: int  # the padded number of targets of each
    schedule_length: int | None

    @property
    def cost(self) -> int:
        """Its tokens, with those of padding."""
        return len(self.sequences) * self.padded

    @property
    def pairs(self) -> list[int]:
        """The pairs that are scored in it."""
        return [pair for sequence in self.sequences for pair, _, _ in sequence.asked]


class Likelihoods:
    """The likelihoods of continuations of contexts under a model.

    Args:
      lm: the model.
      per_device: the sequences in a forward pass on each device; None: as many as its memory is good for.
      devices: the devices to use; None: `compute_devices()`.

    Attributes:
      params: the weights, on the devices.
    """

    def __init__(self, lm: LanguageModel, per_device: int | None = None, devices: Sequence[Any] | None = None):
        self._lm, self._per_device = lm, per_device
        slopes = any(isinstance(layer.encoding, Alibi) for layer in lm.layers)
        devices = tuple(compute_devices() if devices is None else devices)
        self._forward = _forward(lm.config, slopes, devices, tensor=tensor_shards(lm.mesh))
        self._devices = len(devices)
        self.params = self._forward.place(lm.checkpoint.params)

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, Likelihood]]:
        """(index of a pair, its likelihood), the longest sequences first. Several processes share the batches.

        Args:
          pairs: (context, continuation) as token ids, at least one of each. Pairs that differ only in their last token
            are read once.

        Raises:
          ConfigError: a context or a continuation is empty.
        """
        batches = self.batches(pairs)

        def read(chosen: Iterable[LikelihoodBatch]) -> Iterator[list[tuple[int, Likelihood]]]:
            return (list(self.read(batch)) for batch in chosen)

        for found in shared(batches, read, [batch.cost for batch in batches]):
            yield from found

    def batches(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[LikelihoodBatch]:
        """The pairs in batches, the longest sequences first. Each batch may be read without the others."""
        fixed = self._lm.schedule_length
        follows_length = fixed is None and any(layer.follows_length for layer in self._lm.layers)
        found = []
        for (padded, length), sequences in _by_length(pairs, follows_length).items():
            width = 1 << (max(sequence.targets for sequence in sequences) - 1).bit_length()
            size = self._sequences_per_batch(padded)
            # The last batch takes the rest too: a small one would be compiled for fewer sequences.
            starts = [size * i for i in range(max(1, len(sequences) // size))]
            parts = [sequences[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
            found += [LikelihoodBatch(part, padded, width, length or fixed) for part in parts]
        return found

    def _sequences_per_batch(self, padded: int) -> int:
        if padded > forward.WHOLE:  # read in chunks
            return self._devices * max(1, forward.BATCH_TOKENS_ELSEWHERE // padded)
        tokens = forward.BATCH_TOKENS.get(jax.default_backend(), forward.BATCH_TOKENS_ELSEWHERE)
        per_device = self._per_device or 1 << (max(1, tokens // padded).bit_length() - 1)
        return STEPS * per_device * self._devices

    def read(self, batch: LikelihoodBatch) -> Iterator[tuple[int, Likelihood]]:
        """(index of a pair, its likelihood) for the pairs of a batch."""
        count = len(batch.sequences)
        tokens = np.zeros((count, batch.padded), np.int32)
        at, targets = (np.zeros((count, batch.width), np.int32) for _ in range(2))
        for i, sequence in enumerate(batch.sequences):
            tokens[i, : len(sequence.tokens)] = sequence.tokens
            targets[i, : sequence.targets] = np.concatenate([wanted for _, _, wanted in sequence.asked])
            positions = [np.arange(first, first + len(wanted)) for _, first, wanted in sequence.asked]
            at[i, : sequence.targets] = np.concatenate(positions)
        waiting = iter(batch.sequences)
        for scores, likeliest in self._forward.scores(
            self.params, tokens, at, targets, self._lm.layers, batch.schedule_length, self._per_device
        ):
            for of_sequence, are_likeliest in zip(scores.astype(np.float64), likeliest, strict=True):
                start = 0
                for pair, _, wanted in next(waiting).asked:
                    of_pair = slice(start, start + len(wanted))
                    yield pair, Likelihood(float(of_sequence[of_pair].sum()), bool(are_likeliest[of_pair].all()))
                    start = of_pair.stop


@functools.lru_cache(maxsize=4)
def _forward(config: ModelConfig, slopes: bool, devices: tuple[Any, ...], tensor: int) -> Forward:
    """One for all models of a shape, which share what it has compiled."""
    return Forward(config, slopes, devices, tensor=tensor)


def _by_length(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], follows_length: bool
) -> dict[tuple[int, int | None], list[_ScoredSequence]]:
    """The sequences to read, by (padded length, schedule length).

    The second is None if encodings do not follow the length: then padding on the right has no effect.
    """
    sequences: dict[tuple[int, ...], _ScoredSequence] = {}
    for pair, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            what = "context" if not len(context) else "continuation"
            raise ConfigError(f"Pair {pair} has no token in its {what}; there must be one to read and one to score.")
        whole = (*map(int, context), *map(int, continuation))
        sequence = sequences.setdefault(whole[:-1], _ScoredSequence(whole[:-1], []))
        sequence.asked.append((pair, len(context) - 1, whole[len(context) :]))
    groups: dict[tuple[int, int | None], list[_ScoredSequence]] = {}
    for sequence in sorted(sequences.values(), key=lambda sequence: (-len(sequence.tokens), sequence.tokens)):
        length = len(sequence.tokens)
        groups.setdefault((padded_length(length), length if follows_length else None), []).append(sequence)
    return groups


def padded_length(length: int) -> int:
    """The next power of two, or three quarters of it: two lengths an octave are compiled."""
    above = max(SHORTEST, 1 << (length - 1).bit_length())
    return above * 3 // 4 if above > SHORTEST and length <= above * 3 // 4 else above
