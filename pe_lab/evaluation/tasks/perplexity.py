"""Perplexity by length and by position, every length and method on the same held-out tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int32

from pe_lab.config import DataConfig
from pe_lab.data.pipeline import held_out_tokens
from pe_lab.data.windows import make_batch
from pe_lab.errors import UserError

Batch = Mapping[str, np.ndarray]
POOL = 64  # tiles are spread over this many times the tokens that are asked for


@dataclass(frozen=True)
class HeldOut:
    """Held-out text of one source, in tiles of the longest length + 1 tokens, spread evenly over it.

    Every length cuts the same tiles into windows: all lengths that divide the longest score the same tokens.
    Tiles do not overlap: what is fitted on is never scored.

    Attributes:
      source: the source's name.
      score: [n, W] tiles that are scored.
      fit: [m, W] tiles that logit scales are fitted on; none where there was one tile only.
      score_index, fit_index: which tiles of the held-out text these are.
      segments, eos_id: whether attention stays within documents, and the token that ends one.
    """

    source: str
    score: Int32[np.ndarray, "n W"]
    fit: Int32[np.ndarray, "m W"]
    score_index: tuple[int, ...]
    fit_index: tuple[int, ...]
    segments: bool = False
    eos_id: int = 0

    @property
    def longest(self) -> int:
        return self.score.shape[1] - 1


def held_out(
    data: DataConfig, index: int, name: str, longest: int, tokens: int, fit_tokens: int, eos_id: int
) -> HeldOut:
    """Tiles of a text source's held-out text: `tokens` to score, `fit_tokens` to fit on, or as many as exist.

    Tiles to fit on are set aside whether or not anything is fitted: what is scored does not depend on it.

    Raises:
      UserError: the held-out text is shorter than the longest length.
    """
    wanted = max(1, tokens // longest), max(1, fit_tokens // longest)
    size = longest + 1
    text = held_out_tokens(data, index, POOL * sum(wanted) * size)
    tiles = len(text) // size
    if not tiles:
        raise UserError(
            f"data source {name!r} has {len(text):,} held-out tokens, too few for a text of {longest:,} + 1. "
            "Ask for shorter --lengths, or hold out more (data.validation_fraction)."
        )
    score, fit = choose_tiles(tiles, *wanted)
    cut = text[: tiles * size].reshape(tiles, size)
    return HeldOut(name, cut[list(score)], cut[list(fit)], score, fit, data.segments, eos_id)


def choose_tiles(tiles: int, score: int, fit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which of `tiles` tiles are scored and which are fitted on, both spread evenly; disjoint.

    Where there are fewer than asked for, both shrink alike, and each keeps one if there are two.
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


def cut(tiles: Int[np.ndarray, "n W"], length: int) -> Int[np.ndarray, "m length_and_1"]:
    """Windows of length + 1 tokens that fill every tile, neighbours sharing one token; a rest is not read."""
    per_tile = (tiles.shape[1] - 1) // length
    return np.concatenate([tiles[:, None, i * length : (i + 1) * length + 1] for i in range(per_tile)], 1).reshape(
        -1, length + 1
    )


def as_batch(text: HeldOut, windows: Int[np.ndarray, "n W"]) -> dict[str, np.ndarray]:
    """Windows as the model was trained to read them: with a document mask if it had one."""
    weights = np.ones((len(windows), windows.shape[1] - 1), np.float32)
    return make_batch(windows, weights, segments=text.segments, eos_id=text.eos_id)


Losses = Callable[[Batch], Float[np.ndarray, "n T"]]


def window_losses(
    text: HeldOut, length: int, losses: Losses
) -> tuple[Float[np.ndarray, "n T"], Float[np.ndarray, "n T"]]:
    """The loss of every target of every window of `length`, and its weight (0: not counted)."""
    batch = as_batch(text, cut(text.score, length))
    return losses(batch), batch["weights"]


class Cropped:
    """Losses of a model that sees no more than `size` tokens at once: of windows that slide over the text.

    The token after t is predicted from tokens t - size + 1 .. t at most. Exactly `size` tokens for each would take a
    forward pass a token: windows advance by `stride` tokens, and each gives the losses of its last `stride`
    targets, which so see size - stride + 1 to `size` tokens. The first window of a text gives all of its own.

    With the training length as `size` this is the cropped baseline of DroPE, Fig. 5.
    """

    def __init__(self, text: HeldOut, size: int, stride: int, losses: Losses):
        if not 1 <= stride <= size:
            raise UserError(f"The cropped context advances by {stride} tokens; it must be 1 to {size}.")
        self._text, self._size, self._stride, self._losses = text, size, stride, losses
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # offset in the tile -> losses, weights [n, T]

    def __call__(self, length: int) -> tuple[Float[np.ndarray, "n T"], Float[np.ndarray, "n T"]]:
        """What `window_losses` returns, under cropping."""
        if length <= self._size:
            return window_losses(self._text, length, self._losses)
        ends = [*range(self._size, length, self._stride), length]
        starts = range(0, self._text.longest - length + 1, length)
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
        tiles = self._text.score
        crops = np.concatenate([tiles[:, offset : offset + self._size + 1] for offset in new])
        batch = as_batch(self._text, crops)
        losses = self._losses(batch).reshape(len(new), len(tiles), self._size)
        weights = batch["weights"].reshape(losses.shape)
        self._known.update({offset: (losses[i], weights[i]) for i, offset in enumerate(new)})


def position_edges(length: int) -> list[int]:
    """Borders of the bins of positions 0 .. length - 1: four an octave from 32 tokens on, wider before."""
    edges = [0, 4, 8, 16]
    edges += [round(2 ** (i / 4)) for i in range(20, math.ceil(4 * math.log2(max(length, 2))) + 1)]
    return [edge for edge in edges if edge < length] + [length]


def summarize(losses: Float[np.ndarray, "n T"], weights: Float[np.ndarray, "n T"], tiles: int) -> dict[str, Any]:
    """The numbers of a row: mean, perplexity, standard error over windows, means by position and by tile.

    `nll_by_tile` is over the same text for all methods, and all lengths that divide the longest: for
    comparisons in pairs.
    """
    losses, weights = losses.astype(np.float64), weights.astype(np.float64)
    total = weights.sum()
    mean = float((losses * weights).sum() / total)
    edges = position_edges(losses.shape[1])
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
    """The standard error of a mean from each window's summed deviations from it; None for a single window."""
    n = len(deviations)
    return float(np.sqrt((deviations**2).sum() * n / (n - 1)) / total) if n > 1 else None
