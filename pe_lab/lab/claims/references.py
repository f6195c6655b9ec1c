"""Numbers that need no run, of an arm's config: its shape, and what a table of its training tokens predicts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from pe_lab.config import Config
from pe_lab.data.held_out import validation_batches
from pe_lab.data.pipeline import build_pipeline
from pe_lab.positional import frequencies, layers

TOKENS = 5_000_000  # of training, at most: at the papers' sizes the table reads fewer tokens than the model


def shape(config: Config) -> dict[str, float]:
    """The heads of all layers, and the pairs of a head that rotate where most do."""
    model = config.model
    head_dim = model.head_dim or model.d_model // model.heads
    described = layers(config.phases[-1].positional, model.layers)
    rotated = [np.count_nonzero(frequencies(one.encoding, head_dim)[0]) for one in described]
    return {"heads": float(model.layers * model.heads), "rotated pairs": float(max(rotated))}


def trigram(config: Config) -> dict[str, float]:
    """The validation losses of an interpolated trigram table of the training tokens, named as those of `losses`.

    It is interpolated by Witten and Bell's rule, which has nothing to tune: a context of c tokens, of which u differ,
    leaves u / (c + u) to the shorter context; the shortest leaves it to the uniform distribution. It reads the windows
    that the phases train on, and the held-out windows that the last phase is validated on.
    """
    vocabulary, seen, read = 0, [], 0
    for index, phase in enumerate(config.phases):
        pipeline = build_pipeline(
            config.data,
            sequence_length=phase.sequence_length,
            batch_size=phase.batch_size,
            seed=config.data.seed + index,
            weights=phase.weights,
        )
        vocabulary = pipeline.vocab_size
        for _ in range(min(phase.steps, (TOKENS - read) // (phase.batch_size * phase.sequence_length))):
            batch = next(pipeline)
            seen.append(np.concatenate([batch["tokens"], batch["targets"][:, -1:]], 1))
            read += batch["tokens"].size
    table = Table(seen, vocabulary)
    last = config.phases[-1]
    held_out = validation_batches(
        config.data,
        sequence_length=last.sequence_length,
        batch_size=last.batch_size // last.accumulate,
        count=config.log.validation_batches,
    )
    needles = {source.name or source.source for source in config.data.sources if source.source == "needles"}
    found = {}
    for name, batches in held_out.items():
        if name in needles:
            continue  # a table says nothing about what is asked of the context
        lost = [(table.losses(one["tokens"], one["targets"]) * one["weights"]).sum() for one in batches]
        loss = float(sum(lost) / sum(one["weights"].sum() for one in batches))
        found["validation" if len(held_out) == 1 else f"validation {name}"] = loss
    return found


class Table:
    """Counts of one, two and three tokens in windows of several lengths."""

    def __init__(self, windows: list[Int[np.ndarray, "n T"]], vocabulary: int):
        self._vocabulary = vocabulary
        self._counts = []  # of n-grams: their codes, ascending, and how often each was seen
        for n in (1, 2, 3):
            codes = np.concatenate([self._codes(one, n).ravel() for one in windows])
            self._counts.append(np.unique(codes, return_counts=True))
        self._contexts = []  # of n-grams without their last token: codes, tokens that followed, different ones
        for codes, counts in self._counts:
            contexts, first, different = np.unique(codes // vocabulary, return_index=True, return_counts=True)
            self._contexts.append((contexts, np.add.reduceat(counts, first), different))

    def _codes(self, windows: Int[np.ndarray, "n T"], n: int) -> Int[np.ndarray, "n t"]:
        """Every n tokens in a row as one number."""
        length = windows.shape[1] - n + 1
        codes = np.zeros((len(windows), length), np.int64)
        for i in range(n):
            codes = codes * self._vocabulary + windows[:, i : i + length]
        return codes

    def losses(self, tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"]) -> np.ndarray:
        """Minus the logarithm of each target's probability, in nats; the first of a window has a context of one."""
        windows = np.concatenate([tokens, targets[:, -1:]], 1)
        chance = np.full(targets.shape, 1 / self._vocabulary)
        for n in (1, 2, 3):
            codes = self._codes(windows, n)[:, -targets.shape[1] :]
            start = targets.shape[1] - codes.shape[1]
            contexts, followed, different = self._contexts[n - 1]
            seen = _looked_up(contexts, followed, codes // self._vocabulary)
            left = _looked_up(contexts, different, codes // self._vocabulary)
            counts = _looked_up(*self._counts[n - 1], codes)
            shorter = chance[:, start:]
            known = np.maximum(seen + left, 1)
            chance[:, start:] = np.where(seen > 0, (counts + left * shorter) / known, shorter)
        return -np.log(chance)


def _looked_up(
    keys: Int[np.ndarray, " k"], values: Int[np.ndarray, " k"], wanted: Int[np.ndarray, "B t"]
) -> Int[np.ndarray, "B t"]:
    """The value of each key, 0 of one that is not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
