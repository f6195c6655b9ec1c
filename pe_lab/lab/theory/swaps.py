"""Theorem 6.1 of the paper on p-RoPE: with one frequency, swaps of tokens move the largest logit off its target.

A token's key has a strength and a phase, and at position p of N its logit with the last query is
strength * cos(phase + p * w): moving a key by one position rotates it by w.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pe_lab.lab.theory.claims import Claim, claim

Case = Literal["negative", "positive", "two swaps"]
CASES: tuple[Case, ...] = ("negative", "positive", "two swaps")


class Sequence(NamedTuple):
    """A sequence with one key per token; `target` is the position that the last query attends to."""

    strength: Float[np.ndarray, " N"]
    phase: Float[np.ndarray, " N"]
    omega: float
    target: int

    def logits(self, order: Int[np.ndarray, " N"] | None = None) -> Float[np.ndarray, " N"]:
        """The logit at every position, with token order[p] at position p."""
        at = np.arange(len(self.phase))
        order = at if order is None else order
        return self.strength[order] * np.cos(self.phase[order] + at * self.omega)

    def swapped(self, *swaps: tuple[int, int]) -> Sequence:
        """The sequence with tokens swapped; the target's position follows its token."""
        order = np.arange(len(self.phase))
        for a, b in swaps:
            order[[a, b]] = order[[b, a]]
        return self._replace(
            strength=self.strength[order], phase=self.phase[order], target=int(np.flatnonzero(order == self.target)[0])
        )

    def weight(self) -> float:
        """The attention weight of the target."""
        logits = self.logits()
        return float(1 / np.exp(logits - logits[self.target]).sum())

    def attended(self) -> bool:
        """Whether the target has the largest logit."""
        return int(self.logits().argmax()) == self.target


def attending_sequence(omega: float, tokens: int, case: Case, epsilon: float = 0.01) -> Sequence:
    """A sequence of N tokens whose target has weight 1 - epsilon (or more), for a case of the proof.

    Every token's key is chosen for its position. "negative": all logits are below 0. "positive": the target's logit is
    above 0. "two swaps": it is, and after a swap with the target by a third of a rotation it is still the largest.
    """
    needed = math.log((tokens - 1) * (1 - epsilon) / epsilon)  # the target's logit less the others'
    at = np.arange(tokens)
    if case == "negative":
        target, strength, offset = tokens // 2, np.full(tokens, 1 + needed), np.full(tokens, math.pi)
        strength[target] = 1.0
    else:
        target, strength = 0, np.full(tokens, needed)
        offset = np.full(tokens, math.pi if case == "positive" else 4 * math.pi / 3)
        if case == "two swaps":
            strength = 1 + 2 * strength  # logits of -1/2 - needed
        strength[target], offset[target] = 1.0, 0.0
    return Sequence(strength, offset - at * omega, omega, target)


def first_swap(sequence: Sequence, first: int) -> tuple[int, int] | None:
    """The swap of position `first` with the nearest later one after which the target is not the argmax, or None.

    The last position is left alone: it is the query's.
    """
    strength, phase, omega, target = sequence
    logits = sequence.logits()
    later = np.arange(first + 1, len(phase) - 1)
    second = later[later != target]
    moved_up = strength[first] * np.cos(phase[first] + second * omega)
    moved_down = strength[second] * np.cos(phase[second] + first * omega)
    others = logits.copy()
    others[[target, first]] = -np.inf
    best, next_best = np.argsort(others)[[-1, -2]]
    unmoved = np.where(second == best, others[next_best], others[best])
    if first == target:
        broken = np.maximum(unmoved, moved_down) > moved_up
    else:
        broken = np.maximum(unmoved, np.maximum(moved_up, moved_down)) > logits[target]
    return (first, int(second[broken.argmax()])) if broken.any() else None


def _third(omega: float) -> int:
    """The distance in tokens after which a key is rotated by a third of a full rotation."""
    return round(2 * math.pi / 3 / omega)


def breaking_swaps(sequence: Sequence, case: Case) -> list[tuple[int, int]]:
    """The swaps of the proof; the last one is the nearest that moves the largest logit off the target."""
    if case == "negative":  # two tokens, neither of them the target
        swap = first_swap(sequence, 0)
        return [swap] if swap else []
    if case == "positive":
        swap = first_swap(sequence, sequence.target)
        return [swap] if swap else []
    third = (sequence.target, sequence.target + _third(sequence.omega))
    after = sequence.swapped(third)
    swap = first_swap(after, after.target + 1)
    return [third, swap] if after.attended() and swap else []


def predicted_distance(sequence: Sequence, case: Case) -> int:
    """The distance in tokens of the breaking swap: where the moved key's logit passes the target's.

    "negative": -b cos(r w) > -a for logits -b and -a. "positive": a cos(r w) < -b cos(r w). "two swaps":
    b cos(4 pi / 3 + r w) > a cos(g w), with g the distance of the first swap.
    """
    largest = sequence.strength.max()
    if case == "negative":
        angle = math.acos(1 / largest)
    elif case == "positive":
        angle = math.pi / 2
    else:
        angle = 2 * math.pi / 3 - math.acos(math.cos(_third(sequence.omega) * sequence.omega) / largest)
    return math.floor(angle / sequence.omega) + 1


def theorem_6_1(inv_freq: Float[np.ndarray, " R"], chosen: tuple[int, ...] = (0, 8, 16, 24, 31)) -> Claim:
    """Swaps that break a head of one frequency, and the sequences that it does attend in."""
    rows = []
    for pair in chosen:
        omega = float(inv_freq[pair])
        tokens = math.ceil(2 * math.pi / omega) + 16
        for case in CASES:
            before = attending_sequence(omega, tokens, case)
            swaps = breaking_swaps(before, case)
            after = before.swapped(*swaps)
            distance = swaps[-1][1] - swaps[-1][0] if swaps else 0
            same = before._replace(omega=0.0, phase=before.phase + np.arange(tokens) * omega)  # the same logits, NoPE
            unmoved = abs(same.swapped(*swaps).weight() - same.weight())
            rows.append((case, omega, tokens, before, after, distance, predicted_distance(before, case), unmoved))
    cases, omegas, tokens, before, after, distances, predicted, unmoved = zip(*rows, strict=True)
    broken = [b.attended() and not a.attended() for b, a in zip(before, after, strict=True)]
    by_case = {case: [d for c, d in zip(cases, distances, strict=True) if c == case] for case in CASES}
    weights_before, weights_after = [s.weight() for s in before], [s.weight() for s in after]
    return claim(
        "p-RoPE, Theorem 6.1",
        "A head with one RoPE frequency cannot attend to a target token robustly: in every sequence that is long "
        "enough, one or two swaps of tokens move the largest logit to another token, and the target's weight below "
        "1/2.",
        f"With weights on the target of at least {min(weights_before):.3f} before, swaps were found for all of "
        f"{len(chosen)} frequencies and 3 cases ({sum(broken)} of {len(rows)}); the weight after is at most "
        f"{max(weights_after):.3f}. The nearest swap is over "
        f"{', '.join(map(str, by_case['positive']))} tokens if the target's logit is positive (a quarter of the "
        f"wavelength), {', '.join(map(str, by_case['negative']))} if all logits are negative, and "
        f"{', '.join(map(str, by_case['two swaps']))} for the second of two swaps.",
        all(broken) and max(weights_after) <= 0.5 and max(unmoved) < 1e-9 and distances == predicted,
        {
            "frequency": omegas,
            "tokens": tokens,
            "distance": distances,
            "predicted_distance": predicted,
            "weight_before": weights_before,
            "weight_after": weights_after,
            "smallest_weight_before": min(weights_before),
            "largest_weight_after": max(weights_after),
            "broken": sum(broken),
            "largest_change_without_encoding": max(unmoved),
            **{f"distance_{case.replace(' ', '_')}": by_case[case] for case in CASES},
        },
        "Without encoding the same swaps change no weight. Every case needs a swap over about a quarter of the "
        f"wavelength or more: {min(by_case['negative'][-1], by_case['positive'][-1]):,} tokens for the slowest pair of "
        f"{2 * len(inv_freq)} channels at base 10,000. The theorem is about a head that must attend in every order of "
        f"the tokens, as its proof does: in one given order, sequences of any length (here {min(tokens)} to "
        f"{max(tokens)} tokens) have keys with which it attends.",
    )
