"""QK-norm and the learning rate of recalibration."""

from pe_lab.lab.claims import Arm, Claim, Criterion, Precondition, Rates, losses

from .arms import DROPE, LOSS, NATS, ROPE, child, lower_loss

RATES = {"low": "3e-4", "mid": "3e-3", "high": "3e-2"}  # the paper's are 3e-5, 3e-4 and 1e-3, of a larger model
PAPER = {"low": "3e-5", "mid": "3e-4", "high": "1e-3"}


def arm(rate: str, norm: str) -> Arm:
    """The recalibration at a rate, with or without the norm."""
    if (rate, norm) == ("mid", "head"):
        return DROPE
    return child(f"drope_{rate}_{norm}", ROPE, f"method=nope,qk_norm={norm},rate={RATES[rate]}")


WITH = {rate: arm(rate, "head") for rate in RATES}
WITHOUT = {rate: arm(rate, "none") for rate in RATES}

CLAIM = Claim(
    sentence="QK-norm lets recalibration use a high learning rate, at which a model without it becomes unstable, and "
    "so reaches the best loss.",
    quote="At the highest learning rate, the model without QKNorm becomes unstable (loss spikes, gradient explosions), "
    "leading to poor convergence (final loss 6.334). In contrast, adding QKNorm stabilizes training and allows us to "
    "leverage the higher learning rate to achieve the best overall performance (final loss 2.496).",
    paper="DroPE, appendix D.3 on Table 11",
    arms=(*WITH.values(), *WITHOUT.values()),
    criteria=(
        lower_loss(
            "at the high rate, the loss with QK-norm is lower", WITH["high"].name, WITHOUT["high"].name, by=0.02
        ),
        Criterion(
            "with QK-norm, the high rate is the best",
            f"{WITH['high'].name}: {LOSS}",
            tuple(f"{WITH[rate].name}: {LOSS}" for rate in ("low", "mid")),
            lower=True,
            by=0.005,
            unit=NATS,
        ),
        Criterion(
            "it is better than the best without QK-norm",
            f"{WITH['high'].name}: {LOSS}",
            tuple(f"{arm.name}: {LOSS}" for arm in WITHOUT.values()),
            lower=True,
            by=0.005,
            unit=NATS,
        ),
    ),
    preconditions=(
        Precondition(
            "without QK-norm the high rate is unstable: it ends at least 1 nat above the middle one (3.80 in DroPE)",
            f"{WITHOUT['high'].name}: {LOSS} - {WITHOUT['mid'].name}: {LOSS}",
            least=1.0,
        ),
    ),
    rates=Rates(apart="the rate is what the claim compares"),
    evaluation=None,
    measure=losses,
    recipes={
        arm.name: f"configs/table11.py:lr={PAPER[rate]},qk_norm={norm}"
        for norm, arms in (("head", WITH), ("none", WITHOUT))
        for rate, arm in arms.items()
    },
    curves={
        "loss on prose after recalibration, nats": {
            **{f"{rate}, with": f"{WITH[rate].name}: {LOSS}" for rate in RATES},
            **{f"{rate}, without": f"{WITHOUT[rate].name}: {LOSS}" for rate in RATES},
        }
    },
)
