"""The arms, the criteria and the preconditions that several claims share.

An arm is trained once for each seed, however many claims use it.
"""

from __future__ import annotations

from typing import Any

from pe_lab.lab.claims import Arm, Criterion, Precondition, Reference, trigram

RECIPE = "configs/claims.py"
STEPS, RECALIBRATE = 4000, 1000  # as the recipe has them
LENGTHS = (2, 4, 8)  # beyond the training length
SCALINGS = ("PI", "NTK", "YaRN", "cropped")


def trained(name: str, arguments: str) -> Arm:
    """An arm from random weights."""
    return Arm(name, f"{RECIPE}:{arguments}")


def child(name: str, parent: Arm, arguments: str) -> Arm:
    """An arm that starts from the last checkpoint of another one, or with `at=STEP` from an earlier one."""
    return Arm(name, f"{RECIPE}:from={{parent}},{arguments}", parent)


ROPE = trained("rope", "method=rope")
NOPE = trained("nope", "method=nope")
# Recalibrated for a quarter of the pretraining's steps.
DROPE = child("drope", ROPE, "method=nope,qk_norm=head")
# As many tokens as a pretraining, the last quarter of them after the drop.
LATE_DROP = child("drop_late", ROPE, f"method=nope,at={STEPS * 3 // 4},steps={STEPS - STEPS * 3 // 4}")

# As many more steps as those below have, with all of its encoding.
ROPE_LONGER = child("rope_longer", ROPE, "method=kept,qk_norm=head")
SLOW_HALF = child("p_rope_after", ROPE, "method='rope:base=500,fraction=0.5',qk_norm=head")


def edited(name: str, surgery: str) -> Arm:
    """RoPE's run after surgery, recalibrated as it then is."""
    return Arm(name, f"{RECIPE}:from={{parent}},method=kept,qk_norm=head", ROPE, surgery=surgery)


CHEAPEST_HALF = edited("drop_cheapest_half", "--drop=auto --budget=100 --most=4")
FOR_A_TENTH = edited("drop_for_0.1", "--drop=auto --budget=0.1")
BUT_FOURTH = edited("drop_but_fourth", "--drop --layers=0-2,4-6")


def scaled(metric: str) -> tuple[str, ...]:
    """RoPE as it was trained and under each scaling, the terms of a comparison."""
    return (f"rope: {metric}", *(f"rope: {metric} {name}" for name in SCALINGS))


TABLE_1 = {
    "rope": "configs/table1.py:method=rope",
    "drope": "configs/table1.py:method=drope",
    "nope": "configs/table1.py:method=nope",
}

TRIGRAM = {"trigram": Reference("rope", trigram)}
NATS, FOUND = "nats", "share of the needles"
LOSS = "validation prose"


def lower_loss(text: str, of: str, over: str, metric: str = LOSS, **margin: float) -> Criterion:
    """The loss of one arm, on prose, is below that of another one, by a margin of `Criterion`."""
    return Criterion(text, f"{of}: {metric}", (f"{over}: {metric}",), lower=True, unit=NATS, **margin)


def at_each_length(text: str, of: str, *over: str, **margin: float) -> tuple[Criterion, ...]:
    """A criterion on `text {x}x` or `needles {x}x` for each length beyond the training length, which stands for {x}."""
    about: dict[str, Any] = {"lower": True, "unit": NATS} if ": text " in of else {"unit": FOUND}

    def at(term: str, x: int) -> str:
        return term.replace("{x}", str(x))

    return tuple(Criterion(at(text, x), at(of, x), tuple(at(o, x) for o in over), **about, **margin) for x in LENGTHS)


def near_rope(metric: str, nope: str = "nope", rope: str = "rope") -> Precondition:
    """DroPE's models are trained to where positions are worth little: 23.77 against 21.72 in perplexity (Table 6)."""
    return Precondition(
        "NoPE from scratch is within 0.2 nats of RoPE at the training length (0.09 in DroPE)",
        f"{nope}: {metric} - {rope}: {metric}",
        most=0.2,
    )


def beats_trigram(arm: str, words: str) -> Precondition:
    """What a table of three tokens predicts as well says nothing about positions that are further away."""
    return Precondition(
        f"{words} predicts prose better than a trigram table of RoPE's training tokens, in nats",
        f"{arm}: validation prose - trigram: validation prose",
        most=0.0,
    )


def learned_order(arm: str, words: str) -> tuple[Precondition, Precondition]:
    """A model without positions that has learned order: the claim's measure has `previous_token_bias`."""
    return (
        beats_trigram(arm, words),
        Precondition(
            f"{words} has a head that attends to the previous token, with a bias above 0.3 (1 at most)",
            f"{arm}: previous-token bias",
            least=0.3,
        ),
    )


def finds(arm: str, words: str, metric: str = "needles 1x") -> Precondition:
    """A model that does not find the needles at its training length is no evidence beyond it."""
    return Precondition(f"{words} finds 95% of the needles at its training length", f"{arm}: {metric}", least=0.95)


def can_differ(*alternatives: str) -> tuple[Precondition, ...]:
    """At each length beyond the training length, for {x}, the best alternative is neither at the top nor the bottom."""
    return tuple(
        Precondition(
            f"the best alternative finds between 20 and 80% of the needles at {x}x",
            first,
            least=0.2,
            most=0.8,
            others=tuple(rest),
        )
        for x in LENGTHS
        for first, *rest in [[one.replace("{x}", str(x)) for one in alternatives]]
    )
