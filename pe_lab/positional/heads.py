"""Heads of a layer with another encoding than the layer's, or denoised by one of DoPE's three methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pe_lab.config import OMIT_DEFAULT
from pe_lab.errors import ConfigError
from pe_lab.positional.encodings import ENCODINGS, Alibi, Encoding, NotebookBias, NotebookYarn, frequencies
from pe_lab.positional.scalings import Checked, require


@dataclass(frozen=True)
class Bands(Checked):
    """DoPE-by-parts (eq. 32 to 34): the pairs on one side of a threshold are removed from queries and keys.

    Equation 32 keeps pairs of at most `threshold` radians a position ("slow"); its text, and the aim of the method,
    keep the faster ones ("fast"). The paper's threshold is 2 pi / training length (eq. 33).
    """

    threshold: float
    keep: Literal["slow", "fast"] = "fast"


@dataclass(frozen=True)
class Uniform:
    """DoPE-by-all as eq. 35 is printed: queries and keys are zero, and the head's attention is uniform."""


@dataclass(frozen=True)
class Gaussian(Checked):
    """DoPE-by-Gaussian (eq. 36, 37): queries and keys of the head are noise.

    Attributes:
      seed: in [1, 2^32); the noise is a function of it and of a token's position.
      sigma: the noise's standard deviation, one for all noisy heads of a layer. None: that of the other heads'
        rotated components, as the paper's body has it; its appendix A.2 has 1.0.
    """

    seed: int
    sigma: float | None = field(default=None, metadata=OMIT_DEFAULT)


HeadKind = Encoding | Bands | Uniform | Gaussian
HEAD_KINDS: dict[str, type] = {**ENCODINGS, "bands": Bands, "uniform": Uniform, "gaussian": Gaussian}


@dataclass(frozen=True)
class HeadEdit:
    """Some query heads of a layer, and the encoding or the denoising that replaces the layer's.

    `NoPE()` removes a head's encoding (the prose of DoPE-by-all), another encoding replaces it, and `Bands`, `Uniform`
    and `Gaussian` denoise it. Query heads that share a key head may differ.
    """

    heads: tuple[int, ...]
    to: HeadKind

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(int(h) for h in self.heads))
        require(bool(self.heads), "HeadEdit.heads is empty; name at least one query head.")
        require(
            isinstance(self.to, HeadKind) and not isinstance(self.to, NotebookYarn | NotebookBias),
            f"HeadEdit.to is {self.to!r}; a head can have an encoding (the notebook's are whole layers'), Bands, "
            "Uniform or Gaussian.",
        )


@dataclass
class HeadArrays:
    """One layer's part of a schedule while it is built, per query head."""

    inv_freq: np.ndarray  # [H, R]
    gain: np.ndarray  # [H, R]
    slope: np.ndarray  # [H]
    noise: np.ndarray  # [H] uint32 seeds; 0 = none
    sigma: np.ndarray  # [H] of the noise; 0 = as large as the other heads' components


def edit_heads(
    arrays: HeadArrays, edits: Sequence[HeadEdit], slopes: np.ndarray, length: int | None, where: str
) -> None:
    """Applies edits to the arrays of one layer, in order.

    Args:
      arrays: changed in place.
      edits: of the layer.
      slopes: [H] of ALiBi.
      length: tokens of the sequence, for encodings that depend on it.
      where: the layer, for messages.

    Raises:
      ConfigError: no such head, an encoding that does not fit the head, two sigmas in the layer.
    """
    count, pairs = arrays.inv_freq.shape
    for edit in edits:
        for head in edit.heads:
            if not 0 <= head < count:
                raise ConfigError(f"{where}: there is no query head {head}; the heads are 0 to {count - 1}.")
        at = list(edit.heads)
        if isinstance(edit.to, Bands):
            slow = arrays.inv_freq[at] <= edit.to.threshold
            arrays.gain[at] = np.where(slow == (edit.to.keep == "slow"), arrays.gain[at], 0.0)
        elif isinstance(edit.to, Uniform):
            arrays.gain[at] = 0.0
        elif isinstance(edit.to, Gaussian):
            arrays.noise[at], arrays.sigma[at] = edit.to.seed, edit.to.sigma or 0.0
        else:
            arrays.inv_freq[at], arrays.gain[at] = frequencies(edit.to, 2 * pairs, length)
            arrays.slope[at] = slopes[at] if isinstance(edit.to, Alibi) else 0.0
            arrays.noise[at] = 0
    if len(np.unique(arrays.sigma[arrays.noise != 0])) > 1:
        raise ConfigError(f"{where}: its Gaussian heads have different sigmas; a layer can have one.")
