"""Which channels of a head a rotation pairs: a property of a checkpoint, undone once, when weights are read.

Inside pe_lab pair r is channels r and r + K / 2 of the whole head, and of a partial rotary head the first pairs
rotate. Others agree on the rotation and not on the channels, and a wrong guess runs without an error:

| pairs | rotated | found in |
|---|---|---|
| half | all | transformers' Llama, Qwen, Gemma and most others |
| half | the first r | GPT-NeoX, Phi: pairs r and r + r/2 among those r channels |
| interleaved | all | Cohere2; llama-family q and k in GGUF files, which llama.cpp's converter permutes |
| interleaved | the first r | GPT-J |

A permutation of channels that queries and keys share leaves every score as it is. So it can be moved into whatever
makes queries and keys: the output channels of their projections, the biases, the scales of a per-head norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int, Shaped

from pe_lab.errors import UserError


@dataclass(frozen=True)
class Layout:
    """How a checkpoint's heads pair channels.

    Attributes:
      pairs: among the r channels that rotate, "half" pairs i with i + r / 2, and "interleaved" 2i with 2i + 1.
      rotated: r, the first channels of a head; the others pass through. None: all of them.
    """

    pairs: Literal["half", "interleaved"] = "half"
    rotated: int | None = None

    def __post_init__(self) -> None:
        if self.pairs not in ("half", "interleaved"):
            raise UserError(f"Layout.pairs is {self.pairs!r}; it must be half or interleaved.")
        rotated = self.rotated
        if rotated is not None and (rotated < 0 or rotated % 2):
            raise UserError(f"Layout.rotated is {rotated}; give an even number of channels, or None for all of them.")


CANONICAL = Layout()


def channel_order(layout: Layout, head_dim: int) -> Int[np.ndarray, "K"]:
    """For each channel of ours, the channel of theirs that it holds: `ours = theirs[..., order]`.

    Channels that do not rotate keep their order, half of them behind each half of the rotated ones.

    Raises:
      UserError: an odd head_dim, or more rotated channels than it has.
    """
    if head_dim <= 0 or head_dim % 2:
        raise UserError(f"head_dim is {head_dim}; it must be even and positive.")
    rotated = head_dim if layout.rotated is None else layout.rotated
    if rotated > head_dim:
        raise UserError(f"Layout.rotated is {rotated}, more than the {head_dim} channels of a head.")
    turning, passing = np.arange(rotated), np.arange(rotated, head_dim)
    if layout.pairs == "interleaved":
        first, second = turning[0::2], turning[1::2]
    else:
        first, second = np.split(turning, 2)
    rest_first, rest_second = np.split(passing, 2)
    return np.concatenate([first, rest_first, second, rest_second])


def to_canonical(array: Shaped[np.ndarray, "..."], layout: Layout, axis: int = -1) -> Shaped[np.ndarray, "..."]:
    """A checkpoint's array in our channel order; `axis` holds the K channels of one head.

    For query and key projections [D, H, K], their biases [H, K] and the scales of a per-head norm [K].
    """
    return np.take(array, channel_order(layout, np.shape(array)[axis]), axis)


def from_canonical(array: Shaped[np.ndarray, "..."], layout: Layout, axis: int = -1) -> Shaped[np.ndarray, "..."]:
    """The exact inverse of `to_canonical`: our array in a checkpoint's channel order."""
    return np.take(array, np.argsort(channel_order(layout, np.shape(array)[axis])), axis)
