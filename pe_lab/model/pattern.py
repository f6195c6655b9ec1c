"""Cuts a stack of layers into runs that a scan can repeat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Layers `start` .. `start + period * repeats`, whose structure repeats with `period`."""

    start: int
    period: int
    repeats: int


def runs(structure: Sequence[Hashable]) -> list[Run]:
    """The runs of a stack, each the repetition of a pattern: what is compiled is the sum of the periods.

    Greedy from the bottom: at each layer, the pattern that saves most layers wins, the shorter one among equals.
    3 windowed + 1 full, repeated, is one run of period 4; 12 rotary layers under 12 without are two runs of period 1.
    """
    found, start, total = [], 0, len(structure)
    while start < total:
        best = Run(start, 1, 1)
        for period in range(1, (total - start) // 2 + 1):
            repeats = 1
            while (
                start + period * (repeats + 1) <= total
                and structure[start + period * repeats : start + period * (repeats + 1)]
                == structure[start : start + period]
            ):
                repeats += 1
            if period * (repeats - 1) > best.period * (best.repeats - 1):
                best = Run(start, period, repeats)
        found.append(best)
        start += best.period * best.repeats
    return found
