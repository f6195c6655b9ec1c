"""Perplexity by length and by position. All variants score the same held-out tokens, and all lengths where they can."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Shaped

from pe_lab.config import DataConfig
from pe_lab.data.held_out import CHAT_TOKEN, held_out_batch, held_out_tokens
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.suite import SuiteMetric, TokenSuite, option
from pe_lab.terminal import positive

if TYPE_CHECKING:
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.results.records import Record

Batch = Mapping[str, np.ndarray]
POOL = 64  # tiles are chosen from this many times the tokens that are asked for


@dataclass(frozen=True)
class HeldOut:
    """Held-out tokens of one source, in tiles of `tile` + 1 tokens at even distances.

    Each length splits the same tiles into windows, so that all lengths that divide `tile` score the same tokens. Tiles
    do not overlap, so that no token is both fitted on and scored.
    """

    source: str
    score: Shaped[np.ndarray, "n W"]  # tiles to score
    fit: Shaped[np.ndarray, "m W"]  # tiles to fit logit scales on; none if there is only one tile
    score_index: tuple[int, ...]  # the tiles' numbers among all held-out tiles
    fit_index: tuple[int, ...]
    segments: bool = False  # whether attention stays within documents
    eos_id: int = 0

    @property
    def tile(self) -> int:
        return self.score.shape[1] - 1

    def missing(self, lengths: Sequence[int], tokens: int) -> list[str]:
        """Sentences: how many of `tokens` there are not, and which lengths leave tokens of a tile out."""
        found, got = [], len(self.score) * self.tile
        if got < tokens - self.tile:
            found.append(f"{self.source}: {got:,} held-out tokens scored, not {tokens:,}: there are no more.")
        if parts := [f"{self.tile % n:,} at {n:,}" for n in lengths if self.tile % n]:
            found.append(
                f"{self.source}: not all lengths score the same tokens. Of each {self.tile:,} tokens, "
                f"{' and '.join(parts)} are not scored. Lengths that are multiples of each other have the same."
            )
        return found


def tile_of(lengths: Sequence[int], tokens: int) -> int:
    """The tokens of a tile: the least common multiple of the lengths if two such tiles have no more than `tokens`.

    Else the longest length.
    """
    common = math.lcm(*lengths)
    return common if 2 * common <= tokens else max(lengths)


def held_out(
    data: DataConfig, index: int, name: str, lengths: Sequence[int], tokens: int, fit_tokens: int, eos_id: int
) -> HeldOut:
    """Held-out tiles of source `index`: about `tokens` to score and `fit_tokens` to fit on, or as many as exist.

    The tiles to score do not depend on whether anything is fitted. A source without two tiles of `tile_of` tokens has
    tiles of the longest length.

    Raises:
      DataError: the source has fewer held-out tokens than the longest length, or they are chats without an answer.
    """
    longest = max(lengths)
    for tile in dict.fromkeys((tile_of(lengths, tokens), longest)):
        wanted = max(1, tokens // tile), max(1, fit_tokens // tile)
        size = tile + 1
        stream = held_out_tokens(data, index, POOL * sum(wanted) * size)
        tiles = len(stream) // size
        if tiles >= 2:
            break
    if not tiles:
        raise DataError(
            f"data source {name!r} has {len(stream):,} held-out tokens, too few for a sequence of {longest:,} + 1. "
            "Ask for shorter --lengths, or hold out more (data.validation_fraction)."
        )
    score, fit = choose_tiles(tiles, *wanted)
    all_tiles = stream[: tiles * size].reshape(tiles, size)
    for chosen in filter(None, (score, fit)) if stream.dtype == CHAT_TOKEN else ():
        if not all_tiles[list(chosen)]["counts"][:, 1:].any():
            raise DataError(
                f"data source {name!r} has no answer in {len(chosen) * tile:,} of its held-out tokens. Ask for more "
                "--tokens, or hold out more (data.validation_fraction)."
            )
    return HeldOut(name, all_tiles[list(score)], all_tiles[list(fit)], score, fit, data.segments, eos_id)


def choose_tiles(tiles: int, score: int, fit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the tiles to score and of those to fit on, both at even distances, of `tiles` tiles.

    If there are too few, both shrink in proportion; each keeps one if there are two.
    """
    total = min(tiles, score + fit)
    if total == 1:
        return (0,), ()
    fit = min(max(1, total * fit // (score + fit)), total - 1)
    chosen = [int((i + 0.5) * tiles / total) for i in range(total)]
    kept = {int((j + 0.5) * total / fit) for j in range(fit)}
    return (
        tuple(c for i, c in enumerate(chosen) if i not in kept),
        tuple(c for i, c in enumerate(chosen) if i in kept),
    )


def cut(tiles: Shaped[np.ndarray, "n W"], length: int) -> Shaped[np.ndarray, "m length_and_1"]:
    """The tiles as windows of length + 1 tokens, neighbours sharing one token; the rest of a tile is left out."""
    per_tile = (tiles.shape[1] - 1) // length
    return np.concatenate([tiles[:, None, i * length : (i + 1) * length + 1] for i in range(per_tile)], 1).reshape(
        -1, length + 1
    )


def as_batch(held_out: HeldOut, windows: Shaped[np.ndarray, "n W"]) -> dict[str, np.ndarray]:
    """Windows as a batch, with segments if the model was trained with them."""
    return held_out_batch(windows, segments=held_out.segments, eos_id=held_out.eos_id)


Losses = Callable[[Batch], Float[np.ndarray, "n T"]]


def window_losses(
    held_out: HeldOut, length: int, losses: Losses
) -> tuple[Float[np.ndarray, "n T"], Float[np.ndarray, "n T"]]:
    """The loss of every target of every window of `length`, and its weight (0: not counted)."""
    batch = as_batch(held_out, cut(held_out.score, length))
    return losses(batch), batch["weights"]


class Cropped:
    """Losses of a model whose context is at most `size` tokens, by windows that slide over the tiles.

    A context of exactly `size` tokens for every target would take a forward pass for each. Windows therefore advance by
    `stride` tokens, and each gives the losses of its last `stride` targets, whose contexts have size - stride + 1 to
    `size` tokens. The first window of a sequence gives the losses of all its targets.

    With the training length as `size` this is the cropped baseline of DroPE, Fig. 5.

    Raises:
      ConfigError: the stride is not in 1 .. size.
    """

    def __init__(self, held_out: HeldOut, size: int, stride: int, losses: Losses):
        if not 1 <= stride <= size:
            raise ConfigError(f"The cropped context advances by {stride} tokens; it must be 1 to {size}.")
        self._held_out, self._size, self._stride, self._losses = held_out, size, stride, losses
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # offset in the tile -> losses, weights [n, T]

    def __call__(self, length: int) -> tuple[Float[np.ndarray, "n T"], Float[np.ndarray, "n T"]]:
        """Losses and weights as `window_losses` returns them."""
        if length <= self._size:
            return window_losses(self._held_out, length, self._losses)
        ends = [*range(self._size, length, self._stride), length]
        starts = range(0, self._held_out.tile - length + 1, length)
        self._measure(sorted({start + end - self._size for start in starts for end in ends}))
        parts = []
        for start in starts:
            pieces, done = [], 0
            for end in ends:
                loss, weight = self._known[start + end - self._size]
                pieces.append((loss[:, done - end :], weight[:, done - end :]))
                done = end
            parts.append([np.concatenate(piece, axis=1) for piece in zip(*pieces, strict=True)])
        loss, weight = (np.stack(part, 1).reshape(-1, length) for part in zip(*parts, strict=True))
        return loss, weight

    def _measure(self, offsets: Sequence[int]) -> None:
        new = [offset for offset in offsets if offset not in self._known]
        if not new:
            return
        tiles = self._held_out.score
        crops = np.concatenate([tiles[:, offset : offset + self._size + 1] for offset in new])
        batch = as_batch(self._held_out, crops)
        losses = self._losses(batch).reshape(len(new), len(tiles), self._size)
        weights = batch["weights"].reshape(losses.shape)
        self._known.update({offset: (losses[i], weights[i]) for i, offset in enumerate(new)})


def bin_edges(first: list[int], octave: int, length: int) -> list[int]:
    """Edges of bins from 0 or 1 to `length`: `first`, and from twice its last on `octave` bins an octave."""
    start, end = octave * math.log2(2 * first[-1]), octave * math.log2(max(length, 2))
    edges = first + [round(2 ** (i / octave)) for i in range(round(start), math.ceil(end) + 1)]
    return [edge for edge in edges if edge < length] + [length]


def summarize(losses: Float[np.ndarray, "n T"], weights: Float[np.ndarray, "n T"], tiles: int) -> dict[str, Any]:
    """The values of a result record: mean loss, perplexity, standard error over windows, means by position and by tile.

    `nll_by_tile` allows comparisons in pairs: a tile has the same tokens for all variants, and for all lengths that
    divide it.
    """
    losses, weights = losses.astype(np.float64), weights.astype(np.float64)
    total = weights.sum()
    mean = float((losses * weights).sum() / total)
    edges = bin_edges([0, 4, 8, 16], 4, losses.shape[1])
    by_position = np.add.reduceat((losses * weights).sum(0), edges[:-1])
    counted = np.add.reduceat(weights.sum(0), edges[:-1])
    return {
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "stderr": standard_error(((losses - mean) * weights).sum(1), total),
        "tokens": int(total),
        "windows": len(losses),
        "position_edges": edges,
        "nll_by_position": _ratios(by_position, counted),
        "nll_by_tile": _ratios((losses * weights).reshape(tiles, -1).sum(1), weights.reshape(tiles, -1).sum(1)),
    }


def _ratios(sums: Float[np.ndarray, " n"], counts: Float[np.ndarray, " n"]) -> list[float | None]:
    return [s / c if c else None for s, c in zip(sums.tolist(), counts.tolist(), strict=True)]


def standard_error(deviations: Float[np.ndarray, " n"], total: float) -> float | None:
    """The standard error of a mean, from the sum of deviations from it in each window; None for a single window."""
    n = len(deviations)
    return float(np.sqrt((deviations**2).sum() * n / (n - 1)) / total) if n > 1 else None


# --------------------------------------------------------------------------------------------------------------------
# The suite


@dataclass(frozen=True)
class HeldOutSettings:
    """What chooses the held-out tokens: those that are scored, and those that a logit scale is fitted on."""

    tokens: int = option(65536, "held-out tokens per perplexity", positive)
    fit_tokens: int = option(16384, "other held-out tokens, for a logit scale", positive)


@dataclass(frozen=True)
class PerplexitySettings(HeldOutSettings):
    stride: int | None = option(None, "perplexity by sliding windows that advance by so many tokens", positive)
    crop_steps: int = option(4, "the cropped context advances by the training length / crop_steps", positive)


class Perplexity(TokenSuite):
    name = "perplexity"
    title = "Perplexity"
    metrics = (SuiteMetric("perplexity", "perplexity", higher_is_better=False, interval="log"),)
    judged = by_default = True
    settings = PerplexitySettings

    def impossible(self, evaluation: Evaluation) -> str:
        return "" if evaluation.text_sources else f"its data ({evaluation.source_names}) holds out no text"

    def check(self, evaluation: Evaluation) -> list[str]:
        stride = evaluation.settings(self).stride
        if stride and stride > min(evaluation.lengths):
            raise ConfigError(
                f"--stride={stride} is more than the shortest length, {min(evaluation.lengths)}: windows would leave "
                "tokens out. Give a smaller one."
            )
        return missing_tokens(evaluation)

    def cost(self, settings: PerplexitySettings, length: int) -> int:
        return settings.tokens

    def source_name(self, evaluation: Evaluation, unit: MeasurementUnit) -> str | None:
        stride = evaluation.settings(self).stride
        more = f", windows sliding by {stride}" if stride else ""
        return f"{super().source_name(evaluation, unit)}{more}"

    def identity(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        given = {}
        if unit.variant.crop is not None or evaluation.settings(self).stride:
            given["stride"] = self._stride(evaluation, unit)
        return given | text_identity(evaluation, [unit.source])

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The mean loss of the tiles in windows, sliding windows, or crops of the training length."""
        variant, text = unit.variant, text_of(evaluation, unit.source)
        layers, subject = variant.layers_at(unit.length), variant.subject
        losses = evaluation.losses(variant, layers)
        size = min(unit.length, variant.crop or unit.length)
        stride = evaluation.settings(self).stride
        if stride:
            kind, length = "sliding", text.tile
            read = Cropped(text, size, min(stride, size), losses)
        elif size < unit.length:
            kind, length = "cropped", unit.length
            crops = functools.partial(Cropped, text, size, self._stride(evaluation, unit), losses)
            read = evaluation.remember(("crops", subject.id, unit.source), crops)
        else:
            kind, length = "windows", unit.length
            read = functools.partial(window_losses, text, losses=losses)
        found = evaluation.remember(
            (kind, evaluation.encoding_key(variant, layers, size), size, length, unit.source),
            lambda: summarize(*read(length), len(text.score)),
        )
        return {**found, "tiles": list(text.score_index)}

    def _stride(self, evaluation: Evaluation, unit: MeasurementUnit) -> int:
        settings = evaluation.settings(self)
        return settings.stride or max(1, unit.variant.training_length // settings.crop_steps)


SUITE = Perplexity()


def text_of(evaluation: Evaluation, source: int) -> HeldOut:
    """The held-out tiles of a source of text, opened once."""
    settings = evaluation.settings(SUITE)
    return evaluation.remember_data(
        ("text", source),
        lambda: held_out(
            evaluation.data,
            source,
            evaluation.mixture.sources[source].name,
            evaluation.lengths,
            settings.tokens,
            settings.fit_tokens,
            evaluation.mixture.tokenizer.eos_id,
        ),
    )


def text_identity(evaluation: Evaluation, sources: Sequence[int]) -> Record:
    """What chooses the tokens to score and those to fit on, of these sources of text."""
    settings = evaluation.settings(SUITE)
    return {
        "tile": [text_of(evaluation, i).tile for i in sources],
        "tokens": settings.tokens,
        "fit_tokens": settings.fit_tokens,
        "data": [evaluation.fingerprint(i) for i in sources],
    }


def missing_tokens(evaluation: Evaluation) -> list[str]:
    """Opens all text; sentences about tokens that there are not, or that lengths leave out."""
    tokens = evaluation.settings(SUITE).tokens
    return [
        sentence
        for source in evaluation.text_sources
        for sentence in text_of(evaluation, source).missing(evaluation.lengths, tokens)
    ]
