"""Which channels of a head a rotation pairs: a property of a checkpoint, made canonical when its weights are read.

Inside pe_lab pair r is channels r and r + K / 2 of the whole head, and in a partial rotary head the first pairs
rotate. Other code bases use the same rotation on other channels, and a wrong layout raises no error:

| pairs | rotated | found in |
|---|---|---|
| half | all | transformers' Llama, Qwen, Gemma and most others |
| half | the first r | GPT-NeoX, Phi: pairs i and i + r/2 among those r channels |
| interleaved | all | Cohere2; llama-family q and k in GGUF files, which llama.cpp's converter permutes |
| interleaved | the first r | GPT-J |

A permutation of channels that queries and keys share changes no score. So it can be applied to the parameters that
produce queries and keys: the output channels of their projections, the biases, the scales of a per-head norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Shaped

from pe_lab.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How a checkpoint's heads pair channels.

    Attributes:
      pairs: among the r channels that rotate, "half" pairs i with i + r / 2, and "interleaved" 2i with 2i + 1.
      rotated: r, the number of first channels that rotate. None: all of them.
    """

    pairs: Literal["half", "interleaved"] = "half"
    rotated: int | None = None

    def __post_init__(self) -> None:
        if self.pairs not in ("half", "interleaved"):
            raise ConfigError(f"Layout.pairs is {self.pairs!r}; it must be half or interleaved.")
        rotated = self.rotated
        if rotated is not None and (rotated < 0 or rotated % 2):
            raise ConfigError(f"Layout.rotated is {rotated}; give an even number of channels, or None for all of them.")


CANONICAL = Layout()


def channel_order(layout: Layout, head_dim: int) -> Int[np.ndarray, "K"]:
    """The permutation of a head's channels that makes a layout canonical: `canonical = array[..., order]`.

    Unrotated channels keep their order, half of them after each half of the rotated ones.

    Raises:
      ConfigError: an odd head_dim, or more rotated channels than it has.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; it must be even and positive.")
    rotated = head_dim if layout.rotated is None else layout.rotated
    if rotated > head_dim:
        raise ConfigError(f"Layout.rotated is {rotated}, more than the {head_dim} channels of a head.")
    rotating, passing = np.arange(rotated), np.arange(rotated, head_dim)
    if layout.pairs == "interleaved":
        first, second = rotating[0::2], rotating[1::2]
    else:
        first, second = np.split(rotating, 2)
    rest_first, rest_second = np.split(passing, 2)
    return np.concatenate([first, rest_first, second, rest_second])


def to_canonical(array: Shaped[Any, "..."], layout: Layout) -> Shaped[Any, "..."]:
    """A checkpoint's array in canonical channel order; its last axis has the K channels of one head.

    For query and key projections [D, H, K], their biases [H, K] and the scales of a per-head norm [K].
    """
    order = channel_order(layout, array.shape[-1])
    return array if layout == CANONICAL else array[..., order]


def from_canonical(array: Shaped[Any, "..."], layout: Layout) -> Shaped[Any, "..."]:
    """The exact inverse of `to_canonical`."""
    return array if layout == CANONICAL else array[..., np.argsort(channel_order(layout, array.shape[-1]))]
