"""The record of one claim of a paper, and the run of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pe_lab.lab.theory.quotes import QUOTES

Number = float | list[float]
CORRECTED = ", corrected"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper and what this run measured.

    Where a formula or a constant of the paper fails and a neighbouring one holds, the latter is a record of its own,
    whose source ends with ", corrected". It is no claim of the paper.

    Attributes:
      source: the paper and the number of the statement or equation.
      statement: what is claimed.
      measured: the result of this run, with numbers.
      holds: whether the numbers agree with the statement.
      numbers: every number in `measured`, and the curves of figures, by name.
      note: what limits the result, or what a test would need in order to be able to fail.
      quote: the paper's own words (`QUOTES`); every claim that fails has them, and every note that names an error.
    """

    source: str
    statement: str
    measured: str
    holds: bool
    numbers: Mapping[str, Number]
    note: str = ""
    quote: str = ""

    @property
    def corrected(self) -> bool:
        """Whether this is a form that replaces what a paper has."""
        return self.source.endswith(CORRECTED)

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
    quote = QUOTES.get(source.removesuffix(CORRECTED), "")
    return Claim(source, statement, measured, bool(holds), plain, note, quote)


def claims(seed: int = 0, progress: Callable[[str], None] = lambda line: None) -> list[Claim]:
    """Every claim, in the order of the papers.

    Args:
      seed: of all random inputs; not negative.
      progress: receives one line per claim as soon as it is measured.
    """
    # The papers' modules import this one.
    from pe_lab.lab.theory import dope, drope, notebook, p_rope

    found = []
    for paper in (p_rope, drope, dope, notebook):
        for measured in paper.claims(seed):
            progress(f"{measured.source}: {measured.verdict}")
            found.append(measured)
    return found
