"""Heads of a layer that differ from the others: another encoding, or one of DoPE's three ways of denoising a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pe_lab.errors import UserError
from pe_lab.positional.encodings import ENCODINGS, Alibi, Encoding, NotebookBias, NotebookYarn, frequencies
from pe_lab.positional.scalings import require


@dataclass(frozen=True)
class Bands:
    """DoPE-by-parts: pairs on one side of a threshold are removed, rotated queries and keys alike (eq. 32 to 34).

    Equation 32 keeps what turns at most `threshold` radians a position ("slow"); the text around it, and its aim, keep
    what turns faster ("fast"). The paper's threshold is 2 pi / training length (eq. 33).
    """

    threshold: float
    keep: Literal["slow", "fast"] = "fast"

    def __post_init__(self) -> None:
        require(
            0 < self.threshold < math.inf,
            f"Bands.threshold is {self.threshold}; give radians per position, such as 2 pi / training length.",
        )
        require(self.keep in ("slow", "fast"), f"Bands.keep is '{self.keep}'; it must be slow or fast.")


@dataclass(frozen=True)
class Uniform:
    """DoPE-by-all as eq. 35 says it: queries and keys are zero, so that the head averages what it sees."""


@dataclass(frozen=True)
class Gaussian:
    """DoPE-by-Gaussian (eq. 36, 37): queries and keys of the head are noise, as large as the other heads' are.

    `seed` is the head's own, in [1, 2^32); the noise is a function of it and of a token's position.
    """

    seed: int

    def __post_init__(self) -> None:
        require(
            0 < self.seed < 2**32 and self.seed == int(self.seed),
            f"Gaussian.seed is {self.seed}; give a whole number in [1, 2^32).",
        )


HeadKind = Encoding | Bands | Uniform | Gaussian
HEAD_KINDS: dict[str, type] = {**ENCODINGS, "bands": Bands, "uniform": Uniform, "gaussian": Gaussian}


@dataclass(frozen=True)
class HeadEdit:
    """Some query heads of a layer, and what they have instead of the layer's encoding.

    `NoPE()` takes a head's encoding away (what DoPE-by-all's prose says), another encoding replaces it, and `Bands`,
    `Uniform` and `Gaussian` change what it is. Query heads that share a key head may differ.
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
    """One layer's part of a schedule, while it is built: one row a query head."""

    inv_freq: np.ndarray  # [H, R]
    gain: np.ndarray  # [H, R]
    slope: np.ndarray  # [H]
    noise: np.ndarray  # [H] uint32; 0 = none


def edit_heads(
    arrays: HeadArrays,
    edits: Sequence[HeadEdit],
    slopes: np.ndarray,
    length: int | None,
    where: str,
) -> None:
    """Writes `edits` into the arrays of one layer, in order.

    Args:
      arrays: changed in place.
      edits: what to write.
      slopes: [H] ALiBi's, for heads that get it.
      length: tokens about to be read, for encodings that follow it.
      where: the layer, for messages.

    Raises:
      UserError: a head that is not there, an encoding that does not fit the head.
    """
    count, pairs = arrays.inv_freq.shape
    for edit in edits:
        for head in edit.heads:
            if not 0 <= head < count:
                raise UserError(f"{where}: there is no query head {head}; the heads are 0 to {count - 1}.")
        at = list(edit.heads)
        if isinstance(edit.to, Bands):
            slow = arrays.inv_freq[at] <= edit.to.threshold
            arrays.gain[at] = np.where(slow == (edit.to.keep == "slow"), arrays.gain[at], 0.0)
        elif isinstance(edit.to, Uniform):
            arrays.gain[at] = 0.0
        elif isinstance(edit.to, Gaussian):
            arrays.noise[at] = edit.to.seed
        else:
            arrays.inv_freq[at], arrays.gain[at] = frequencies(edit.to, 2 * pairs, length)
            arrays.slope[at] = slopes[at] if isinstance(edit.to, Alibi) else 0.0
            arrays.noise[at] = 0
