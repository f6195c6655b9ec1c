"""Windows of T + 1 tokens of a split, and batches made from them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int, Int32

from pe_lab.data.record_stream import RecordStream
from pe_lab.data.token_stream import TokenStream


class TokenWindows:
    """Random access to the windows of T + 1 tokens of a stream: window i is tokens[i*T : i*T + T + 1].

    Consecutive windows share one token, the last target of one and the first input of the next: every token but the
    first is a target exactly once. The last targets, fewer than T, are left out.
    """

    def __init__(self, stream: TokenStream | RecordStream, length: int):
        self._stream, self.length = stream, length

    def __len__(self) -> int:
        return max(0, (self._stream.tokens - 1) // self.length)

    def read(self, indices: Int[np.ndarray, " n"]) -> tuple[Int32[np.ndarray, "n W"], Float32[np.ndarray, "n T"]]:
        """Windows and loss weights (all 1)."""
        windows = self._stream.gather(np.asarray(indices) * self.length, self.length + 1).astype(np.int32)
        return windows, np.ones((len(windows), self.length), np.float32)


def make_batch(
    windows: Int32[np.ndarray, "B W"], weights: Float32[np.ndarray, "B T"], *, segments: bool, eos_id: int
) -> dict[str, np.ndarray]:
    """Tokens, next-token targets and weights; with `segments` also the document of each token and its position there.

    Segments count from 1 in each window, positions from 0 in each segment. Where the target is the first token of
    the next document, the weight is 0.
    """
    tokens, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    batch = {"tokens": tokens, "targets": targets, "weights": weights}
    if segments:
        batch["segments"], batch["positions"] = segment_ids(tokens, eos_id)
        batch["weights"] = np.where(tokens == eos_id, np.float32(0), weights)
    return batch


def segment_ids(
    tokens: Int32[np.ndarray, "B T"], eos_id: int
) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """The segment (from 1) and the position in it (from 0) of each token; EOS is the last token of its segment."""
    first = np.zeros(tokens.shape, bool)
    first[:, 1:] = tokens[:, :-1] == eos_id
    segments = 1 + np.cumsum(first, axis=1, dtype=np.int32)
    place = np.arange(tokens.shape[1], dtype=np.int32)
    positions = place - np.maximum.accumulate(np.where(first, place, 0), axis=1).astype(np.int32)
    return segments, positions
