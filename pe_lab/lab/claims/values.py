"""The numbers of a claim: by arm, metric and seed, and of windows of text; and the terms that name them in a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from pe_lab.errors import ConfigError

MINUS = " - "  # between the two numbers of a difference
Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # {arm: {metric: {seed: value}}}


class WindowMean(float):
    """A mean over windows of text, a float that knows the value in each window.

    Attributes:
      windows: the values, in the order of the windows.
      text: a digest of what the windows hold; numbers with one digest are of the same windows.
    """

    windows: tuple[float, ...]
    text: str

    def __new__(cls, mean: float, windows: Iterable[float], text: str) -> WindowMean:
        made = super().__new__(cls, mean)
        made.windows, made.text = tuple(map(float, windows)), text
        return made

    def __getnewargs__(self) -> tuple[float, tuple[float, ...], str]:
        return float(self), self.windows, self.text


def arm_of(term: str) -> str:
    """The arm of "ARM: METRIC"."""
    return term.partition(": ")[0]


def check_terms(where: str, terms: Sequence[str]) -> None:
    """Raises `ConfigError` for a term that is not "ARM: METRIC"."""
    for term in terms:
        if not all(part.strip() for part in term.partition(": ")[::2]):
            raise ConfigError(f"{where}: {term!r} must be 'ARM: METRIC'.")


def number(values: Values, term: str) -> Mapping[int, float]:
    """{seed: value} of "ARM: METRIC", or of the difference "ARM: METRIC - ARM: METRIC" on the seeds of both.

    Raises:
      ConfigError: there is no such number; the message names those that the arm has.
    """
    if MINUS in term:
        first, second = (number(values, one) for one in term.split(MINUS, 1))
        return {seed: first[seed] - second[seed] for seed in first if seed in second}
    arm, _, metric = term.partition(": ")
    if arm not in values:
        raise ConfigError(f"'{term}': no arm is called '{arm}'. Arms: {', '.join(values)}.")
    found = values[arm].get(metric)
    if found is None:
        raise ConfigError(f"'{term}': '{arm}' has no number '{metric}'. It has: {', '.join(values[arm]) or 'none'}.")
    return found


def by_window(values: Values, term: str, against: str, seeds: Sequence[int]) -> Float[np.ndarray, "S W"] | None:
    """The difference of two terms, or a term for `against` "", for each seed and window.

    None: some number has no windows, fewer than two, or not the same ones in all seeds and arms.
    """
    total: Float[np.ndarray, "S W"] | float = 0.0
    texts = set()
    for sign, one in [*_signed(term), *((-sign, one) for sign, one in _signed(against))]:
        found = [number(values, one)[seed] for seed in seeds]
        if not all(isinstance(value, WindowMean) for value in found):
            return None
        texts |= {(value.text, len(value.windows)) for value in found}  # type: ignore[attr-defined]
        if len(texts) > 1:
            return None
        total = total + sign * np.asarray([value.windows for value in found])  # type: ignore[attr-defined]
    return total if isinstance(total, np.ndarray) and total.shape[1] > 1 else None


def _signed(whole: str) -> list[tuple[float, str]]:
    """The terms of a number with their signs."""
    return [((-1.0) ** n, term) for n, term in enumerate(whole.split(MINUS))] if whole else []
