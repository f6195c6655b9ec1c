"""The record of one claim of a paper, and the run of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Number = float | list[float]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper and what this run measured.

    A claim that fails as printed and holds in a corrected form is two records; `statement` says which is which.

    Attributes:
      source: the paper and the number of the statement or equation.
      statement: what is claimed.
      measured: the result of this run, with numbers.
      holds: whether the numbers agree with the statement.
      numbers: every number in `measured`, and the curves of figures, by name.
      note: where the paper errs, or what a test would need in order to be able to fail.
    """

    source: str
    statement: str
    measured: str
    holds: bool
    numbers: Mapping[str, Number]
    note: str = ""

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else "fails"


def claim(
    source: str,
    statement: str,
    measured: str,
    holds: bool | np.bool_,
    numbers: Mapping[str, Any],
    note: str = "",
) -> Claim:
    """The record, with `numbers` (floats, sequences, arrays of one axis) as plain floats and lists."""
    plain = {name: np.asarray(value, np.float64).tolist() for name, value in numbers.items()}
    return Claim(source, statement, measured, bool(holds), plain, note)


def claims(seed: int = 0, progress: Callable[[str], None] = lambda line: None) -> list[Claim]:
    """Every claim, in the order of the papers.

    Args:
      seed: of all random inputs; not negative.
      progress: receives one line per claim as soon as it is measured.
    """
    # The papers' modules import this one.
    from pe_lab.analysis.theory import dope, drope, notebook, p_rope

    found = []
    for paper in (p_rope, drope, dope, notebook):
        for measured in paper.claims(seed):
            progress(f"{measured.source}: {measured.verdict}")
            found.append(measured)
    return found
