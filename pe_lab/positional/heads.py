"""Heads of a layer with another encoding than the layer's, or denoised by one of DoPE's three methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pe_lab.config import OMIT_DEFAULT
from pe_lab.positional.encodings import ENCODINGS, Encoding, NotebookBias, NotebookYarn
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
