"""The order of a sequence's tokens on devices that shard it along its length."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from pe_lab.errors import ConfigError


def balanced_order(length: int, parts: int) -> Int[np.ndarray, " length"]:
    """The position in the sequence of the token in each slot, where `parts` devices hold equal slices of the slots.

    Under a causal mask a later token attends to more keys, so contiguous slices would leave the first device idle
    most of the time. The sequence is split into 2 * parts chunks, and device i gets the chunks i and
    2 * parts - 1 - i, an early and a late one (zig-zag, as in Llama 3's training, arXiv:2407.21783, section 3.3.2).
    Tokens of a chunk stay in order.

    Raises:
      ConfigError: the length does not divide into 2 * parts chunks.
    """
    if parts == 1:
        return np.arange(length)
    if length % (2 * parts):
        raise ConfigError(
            f"A sequence of {length} tokens does not divide into {2 * parts} chunks, two for each of the {parts} "
            f"devices of mesh axis 'context'. Choose a length that is a multiple of {2 * parts}, or another "
            "mesh.context."
        )
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[i, 2 * parts - 1 - i]].reshape(-1) for i in range(parts)])


def padded_length(length: int, parts: int) -> int:
    """The smallest length of at least `length` that `balanced_order` accepts."""
    return length if parts == 1 else -(-length // (2 * parts)) * 2 * parts
