"""A text cut over devices along its length: who holds which tokens."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from pe_lab.errors import UserError


def balanced_order(length: int, parts: int) -> Int[np.ndarray, " length"]:
    """Which token stands at each place of a text that `parts` devices hold equal slices of.

    Under causality a later token sees more, so contiguous slices would leave the first device idle most of the time.
    Cut into 2 * parts chunks, device i gets chunk i and chunk 2 * parts - 1 - i: an early and a late one (zig-zag, as
    in Llama 3's training, arXiv:2407.21783, 3.3.2). Within a chunk tokens follow each other.

    Raises:
      UserError: a length that does not divide into 2 * parts chunks.
    """
    if parts == 1:
        return np.arange(length)
    if length % (2 * parts):
        raise UserError(
            f"A text of {length} tokens does not divide into {2 * parts} chunks, two for each of the {parts} devices "
            f"of mesh axis 'context'. Choose a length that is a multiple of {2 * parts}, or another mesh.context."
        )
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[i, 2 * parts - 1 - i]].reshape(-1) for i in range(parts)])


def padded_length(length: int, parts: int) -> int:
    """The least length from `length` on that `balanced_order` takes."""
    return length if parts == 1 else -(-length // (2 * parts)) * 2 * parts
