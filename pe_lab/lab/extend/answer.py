"""Which method to take: the trained arms compared at the target, and what each costs at the training length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.lab.extend.arms import ExtensionArm
from pe_lab.lab.extend.methods import METHODS, SEARCHED, UNCHANGED
from pe_lab.lab.extend.numbers import (
    At,
    Number,
    Numbers,
    columns,
    difference,
    measure_of,
    numbers_json,
    score,
    score_difference,
    score_terms,
    shown_difference,
    shown_number,
)
from pe_lab.lab.extend.screening import Screening
from pe_lab.results.formatting import count, listing
from pe_lab.results.statistics import SIGNIFICANT, Difference, with_holm


@dataclass(frozen=True)
class Trained:
    """An arm with what was measured of it.

    Attributes:
      numbers: over seeds, see `numbers.over_seeds`.
      scales: the logit scale that was fitted at the target for the run of each seed; 1 where none was needed.
    """

    arm: ExtensionArm
    numbers: Numbers
    scales: tuple[float, ...]


@dataclass(frozen=True)
class Answer:
    """The comparison of the arms.

    Attributes:
      trained: the arms, the best at the target first.
      before: the numbers of the checkpoint as it was.
      terms: what the score is the sum of.
      against_best: {key: the difference of its score from the best arm's}, p corrected for all arms.
      prices: {key: the loss at the training length, less that of the checkpoint as it was}.
      correlation: of the ranks that the screening gave the arms with those after training; NaN of fewer than 3.
      target, training_length: in tokens.
      seeds: of each arm.
    """

    trained: tuple[Trained, ...]
    before: Numbers
    terms: tuple[At, ...]
    against_best: Mapping[str, Difference]
    prices: Mapping[str, Difference]
    correlation: float
    target: int
    training_length: int
    seeds: int

    @property
    def best(self) -> Trained:
        return self.trained[0]

    def score(self, key: str) -> float:
        """The score of an arm at the target, nats."""
        return next(score(one.numbers, self.terms) for one in self.trained if one.arm.key == key)

    @property
    def tied(self) -> list[str]:
        """The arms that cannot be distinguished from the best, itself first, then by their prices."""
        first = self.best.arm.key
        others = [key for key, one in self.against_best.items() if not one.corrected < SIGNIFICANT]
        return [first, *sorted(others, key=lambda key: self.prices[key].mean if key in self.prices else math.inf)]

    @property
    def chosen(self) -> str:
        """The arm to take: the best, or of those that cannot be distinguished from it the one of the least price."""
        known = [key for key in self.tied if key in self.prices]
        return min(known, key=lambda key: self.prices[key].mean) if known else self.best.arm.key

    def sentence(self) -> str:
        """The answer: which method, by how much, and at what price."""
        factor = f"{self.target / self.training_length:g}x"
        tied, arm = self.tied, next(one.arm for one in self.trained if one.arm.key == self.chosen)
        name = _name(self.chosen)
        spent = f"{arm.flops:.1e} FLOPs each" if len(tied) > 1 else f"{count(arm.tokens)} tokens of training"
        if len(tied) == len(self.trained) > 1:
            first = (
                f"No method is distinguishable at {self.target:,} tokens ({factor}) after {spent}; of all, {name} "
                "costs least in short contexts"
            )
        elif len(tied) > 1:
            first = (
                f"{listing([_name(key) for key in tied])} cannot be distinguished at {self.target:,} tokens ({factor}) "
                f"after {spent}{self._lead(f', and {_name(tied[0])} leads')}; take {name}, which costs least in short "
                "contexts"
            )
        else:
            first = f"Take {name}: at {self.target:,} tokens ({factor}), after {spent}{self._lead(', it leads')}"
        return f"{first[0].upper()}{first[1:]}{self._price()}."

    def _lead(self, words: str) -> str:
        """By how much the best arm leads the first one that can be distinguished from it; "" without such."""
        behind = {key: found for key, found in self.against_best.items() if key not in self.tied}
        if not behind:
            return ""
        key, found = min(behind.items(), key=lambda item: item[1].mean)
        return f"{words} {_name(key)} by {found.mean:.3f} nats{_interval(found)}"

    def _price(self) -> str:
        """The end of the sentence: the price at the training length."""
        if (price := self.prices.get(self.chosen)) is None:
            return ""
        amount = f"{abs(price.mean):.3f} nats{_interval(price)}"
        what = "it costs" if price.mean > 0 else "it gains"
        return f"; at {self.training_length:,} tokens {what} {amount} on text"


def _name(key: str) -> str:
    """In a sentence."""
    return {UNCHANGED: "no change of the encoding", SEARCHED: "the searched table"}.get(key, METHODS[key].name)


def _interval(found: Difference) -> str:
    """` (0.01 to 0.03)`, of sizes; "" without an interval."""
    if math.isnan(found.low):
        return ""
    low, high = sorted((abs(found.low), abs(found.high))) if found.low * found.high > 0 else (found.low, found.high)
    return f" ({low:.3f} to {high:.3f})"


def make_answer(
    trained: Sequence[Trained], before: Numbers, screening: Screening, target: int, training_length: int, seeds: int
) -> Answer:
    """The answer that the numbers of the arms give.

    Args:
      before: of the checkpoint as it was, at the same lengths, from the same documents and windows.
    """
    terms = score_terms([one.numbers for one in trained], target)
    ranked = sorted(trained, key=lambda one: score(one.numbers, terms))
    best = ranked[0]
    against = {one.arm.key: score_difference(one.numbers, best.numbers, terms) for one in ranked[1:]}
    at = At("text", training_length)
    prices = {}
    for one in ranked:
        if at in one.numbers and at in before:
            # The checkpoint has documents, runs have seeds: with several seeds its mean is a constant.
            mine, theirs = one.numbers[at], before[at]
            if seeds > 1:
                theirs = Number(theirs.mean, (theirs.mean,) * len(mine.units), by_seed=True)
            if (found := difference(mine, theirs, "text")) is not None:
                prices[one.arm.key] = found
    order = [key for key in screening.ranked() if key in {one.arm.key for one in ranked}]
    return Answer(
        tuple(ranked),
        before,
        terms,
        with_holm({key: found for key, found in against.items() if found is not None}),
        prices,
        rank_correlation(order, [one.arm.key for one in ranked if one.arm.key in order]),
        target,
        training_length,
        seeds,
    )


def rank_correlation(one: Sequence[str], other: Sequence[str]) -> float:
    """Spearman's correlation of two orders of the same methods; NaN of fewer than three."""
    if len(one) < 3:
        return math.nan
    n = len(one)
    return 1 - 6 * sum((one.index(key) - place) ** 2 for place, key in enumerate(other)) / (n * (n**2 - 1))


def answer_rows(answer: Answer) -> tuple[list[str], list[list[str]]]:
    """The table of the answer as texts: an arm a row, the best first, and the checkpoint as it was last."""
    lengths = (answer.training_length, answer.target, 2 * answer.target)
    shown = columns((one.numbers for one in answer.trained), lengths)
    header = ["trained", "tokens", "FLOPs", "against the best", f"price at {answer.training_length:,}"]
    header += [f"{measure_of(at.measure).title} {at.length / answer.training_length:g}x" for at in shown]
    rows = []
    for one in answer.trained:
        key, arm = one.arm.key, one.arm
        against, price = answer.against_best.get(key), answer.prices.get(key)
        cells = [arm.chosen.name, count(arm.tokens), f"{arm.flops:.2e}"]
        cells += [shown_difference(against), shown_difference(price)]
        rows.append(cells + [shown_number(one.numbers, at) for at in shown])
    rows.append(["before training", "0", "0", "", "", *(shown_number(answer.before, at) for at in shown)])
    return header, rows


def answer_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON."""

    def of(found: Difference) -> dict[str, Any]:
        return {"mean": found.mean, "low": found.low, "high": found.high, "pairs": found.count, "p": found.p}

    return {
        "answer": answer.sentence(),
        "chosen": answer.chosen,
        "tied": answer.tied,
        "target": answer.target,
        "training_length": answer.training_length,
        "seeds": answer.seeds,
        "score": [list(at) for at in answer.terms],
        "rank_correlation": answer.correlation,
        "arms": [
            {
                "variant": one.arm.key,
                "encoding": one.arm.chosen.text,
                "tokens": one.arm.tokens,
                "flops": one.arm.flops,
                "rate": one.arm.rate,
                "length": one.arm.length,
                "scales": list(one.scales),
                "score": score(one.numbers, answer.terms),
                "against_best": of(answer.against_best[one.arm.key]) if one.arm.key in answer.against_best else None,
                "price": of(answer.prices[one.arm.key]) if one.arm.key in answer.prices else None,
                "numbers": numbers_json(one.numbers),
            }
            for one in answer.trained
        ],
        "before": numbers_json(answer.before),
    }
