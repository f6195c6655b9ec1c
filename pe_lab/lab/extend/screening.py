"""Methods compared on a checkpoint without training: every method with the logit scale that fits it best."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.config import DataConfig
from pe_lab.data.mixture import open_mixture
from pe_lab.evaluation.measure import Evaluation, EvaluationPlan
from pe_lab.evaluation.suites.passkeys import TOKENS_EACH
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.extend.methods import METHODS, YARN, Chosen
from pe_lab.lab.extend.numbers import (
    At,
    Numbers,
    columns,
    measure_of,
    numbers_of,
    score,
    score_difference,
    score_terms,
    shown_difference,
    shown_number,
)
from pe_lab.results.records import Record
from pe_lab.results.statistics import Difference
from pe_lab.storage import AnyPath


@dataclass(frozen=True)
class Screening:
    """The numbers of methods at several lengths, without training.

    Attributes:
      numbers: {key of a method: its numbers}.
      scales: {key: {length: the fitted logit scale}}.
      target, trained: lengths in tokens.
    """

    numbers: Mapping[str, Numbers]
    scales: Mapping[str, Mapping[int, float]]
    target: int
    trained: int

    @functools.cached_property
    def terms(self) -> tuple[At, ...]:
        """What the score is the sum of, at the target."""
        return score_terms(list(self.numbers.values()), self.target)

    def score(self, key: str) -> float:
        """The score of a method at the target, nats; lower is better."""
        return score(self.numbers[key], self.terms)

    def against(self, key: str, baseline: str) -> Difference | None:
        """The difference of a method's score from another one's, in pairs; None where one of them was not measured."""
        if key not in self.numbers or baseline not in self.numbers:
            return None
        return score_difference(self.numbers[key], self.numbers[baseline], self.terms)

    def ranked(self) -> list[str]:
        """The methods, the best first."""
        return sorted(self.numbers, key=self.score)


def suites_for(data: DataConfig, shortest: int) -> tuple[str, ...]:
    """The suites of a screening: documents, and the needles that the model was trained with, or passkeys in text.

    Sequences of fewer than `TOKENS_EACH` tokens have no space for passkeys.
    """
    if any(source.needles is not None for source in open_mixture(data).sources):
        return ("long_range", "needles")
    return ("long_range", "passkeys") if shortest >= TOKENS_EACH else ("long_range",)


def screen(
    subject: Subject,
    data: DataConfig,
    chosen: Sequence[Chosen],
    lengths: Sequence[int],
    directory: AnyPath,
    options: Mapping[str, Any],
    seed: int = 0,
) -> Screening:
    """Measures methods on held-out data at several lengths, the last of which is the target.

    The records are those of `pe_lab.evaluate --positional=NAME:ENCODING --fit-scale`; what `directory` has of them is
    not measured again.

    Raises:
      UserError: as `Evaluation`.
    """
    descriptions = tuple(f"{one.name}:{one.text}" for one in chosen)
    plan = EvaluationPlan(
        tuple(lengths),
        suites_for(data, min(lengths)),
        descriptions=descriptions,
        options=options,
        seed=seed,
        fit_scale=True,
    )
    evaluation = Evaluation([subject], data, plan, directory)
    return collect(chosen, evaluation.run(), max(lengths), subject.training_length)


def collect(chosen: Sequence[Chosen], records: Sequence[Record], target: int, trained: int) -> Screening:
    """The screening that records say."""
    by_variant: dict[str, list[Record]] = {}
    for record in records:
        by_variant.setdefault(str(record["variant"]), []).append(record)
    mine = {one.key: by_variant.get(f"{one.text} + beta", []) for one in chosen}
    scales = {
        key: {int(one["length"]): float(one["beta"]) for one in found if "beta" in one} for key, found in mine.items()
    }
    return Screening({key: numbers_of(found) for key, found in mine.items()}, scales, target, trained)


def text_rows(screening: Screening) -> tuple[list[str], list[list[str]]]:
    """The table of a screening as texts: a method a row, the best first, each with its difference from YaRN."""
    shown = columns(screening.numbers.values(), (screening.trained, screening.target))
    header = ["method", "β", "score", "against YaRN"]
    header += [f"{measure_of(at.measure).title} {at.length / screening.trained:g}x" for at in shown]
    rows = []
    for key in screening.ranked():
        numbers, scale = screening.numbers[key], screening.scales[key].get(screening.target)
        found = screening.against(key, YARN) if key != YARN else None
        rows.append(
            [METHODS[key].name, "" if scale is None else f"{scale:.2f}", f"{screening.score(key):.3f}"]
            + [shown_difference(found)]
            + [shown_number(numbers, at) for at in shown]
        )
    return header, rows
