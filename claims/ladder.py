"""What a late drop costs by the size of the model: rungs at several widths, and what larger ones will show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.lab.claims import (
    Arm,
    Claim,
    Criterion,
    Precondition,
    Rates,
    Reference,
    losses,
    onset,
    previous_token_bias,
    together,
    trigram,
)
from pe_lab.lab.claims.laws import Size, predictions
from pe_lab.lab.claims.values import Values

from .arms import NATS

RECIPE, LOSS = "configs/ladder.py", "validation"
SEEDS = {64: 0, 96: 3, 128: 3}  # 0: all of the claim's
LAYERS, PER_PARAMETER, SHARE = 8, 20, 0.125
LATER = (192, 256)  # predicted before they are run
PAPER = (357_826_560.0, 2.1e9)  # DroPE's model of 494M without its embedding, and the tokens of its recalibration
GRID = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
BEST = dict.fromkeys(("rope", "nope", "dropped", "dropped_half", "rewarmed", "half"), 1.6e-2)


def parameters(width: int) -> int:
    """Of the matrices of the layers."""
    return 10 * LAYERS * width**2


def rung(width: int, seeds: int) -> dict[str, Arm]:
    """The arms of a width: trained from random weights, and what they become in the last eighth of their steps."""

    def arm(name: str, arguments: str, parent: Arm | None = None, at: float = 0) -> Arm:
        start = f",from={{parent}},at={at:g}" if parent else ""
        recipe = f"{RECIPE}:width={width},{arguments},rate={BEST[name]:g}{start}"
        return Arm(f"ladder{width}_{name}", recipe, parent, seeds=seeds)

    rope = arm("rope", "method=rope")
    late = 1 - SHARE
    return {
        "rope": rope,
        "nope": arm("nope", "method=nope"),
        "dropped": arm("dropped", "method=nope", rope, late),
        "dropped_half": arm("dropped_half", "method=nope", rope, 0.5),
        "rewarmed": arm("rewarmed", "method=rope", rope, late),
        "half": arm("half", "method=half", rope, late),
    }


RUNGS = {width: rung(width, seeds) for width, seeds in SEEDS.items()}


def gap(width: int, of: str = "dropped", over: str = "rewarmed") -> str:
    """G, what a drop costs beyond as many more steps with RoPE, or the difference of two other arms."""
    arms = RUNGS[width]
    return f"{arms[of].name}: {LOSS} - {arms[over].name}: {LOSS}"


def size(values: Values, width: int) -> Size:
    """What the laws need of a rung."""
    arms = RUNGS[width]
    dropped, control = (values[arms[name].name][LOSS] for name in ("dropped", "rewarmed"))
    gaps = tuple(dropped[seed] - control[seed] for seed in sorted(dropped) if seed in control)
    onsets = values[arms["nope"].name].get("onset", {})
    return Size(
        parameters(width),
        SHARE * PER_PARAMETER * parameters(width),
        gaps,
        tuple(onsets[seed] for seed in sorted(onsets)),
    )


def laws(values: Values) -> Mapping[str, Any]:
    """Both laws on the rungs of this machine, and what they say of those that are not run yet."""
    sizes = [size(values, width) for width in SEEDS]
    wanted = {str(width): (float(parameters(width)), SHARE * PER_PARAMETER * parameters(width)) for width in LATER}
    return predictions(sizes, wanted | {"494M": PAPER}, seeds=3)


def of_runs(directory: Any) -> dict[str, float]:
    """Losses by window, the bias toward the previous token, and of a model without positions its onset."""
    found = together(losses, previous_token_bias)(directory)
    return found | (onset(directory) if "_nope__" in str(directory) else {})


ORDER: Sequence[int] = tuple(SEEDS)
CLAIM = Claim(
    sentence="The larger the model, the less a late drop and its recalibration cost at the training length, beyond "
    "what as many more steps with RoPE give.",
    quote="Consistent with this, we observe that dropping the positional encoding only at the very end of pretraining "
    "(DroPE @ 16K) yields the best validation perplexity, while earlier dropping steadily degrades performance.",
    paper="ours, on DroPE, appendix D.1: its model of 494M has a perplexity of 21.73 when dropped after 87.5% of the "
    "steps, 21.72 without a drop, and 23.77 without positions from the start",
    arms=tuple(arm for width in ORDER for arm in RUNGS[width].values()),
    criteria=tuple(
        Criterion(
            f"the gap at width {wider} is below that at width {width}", gap(wider), (gap(width),), lower=True, by=0.01,
            unit=NATS,
        )
        for width, wider in zip(ORDER, ORDER[1:], strict=False)
    ),
    preconditions=tuple(
        one
        for width in ORDER
        for name in [RUNGS[width]["nope"].name]
        for one in (
            Precondition(
                f"at width {width} NoPE predicts text better than a trigram table of its training tokens, in nats",
                f"{name}: {LOSS} - trigram{width}: {LOSS}",
                most=0.0,
            ),
            Precondition(
                f"at width {width} NoPE has a head with a bias toward the previous token above 0.3 (1 at most)",
                f"{name}: previous-token bias",
                least=0.3,
            ),
        )
    ),
    rates=Rates(GRID, of=LOSS, arms=tuple(arm.name for arm in RUNGS[64].values())),
    references={f"trigram{width}": Reference(RUNGS[width]["nope"].name, trigram) for width in ORDER},
    evaluation=None,
    measure=of_runs,
    fits=laws,
    curves={
        "what remains of each arm's loss over RoPE's, nats": {
            f"width {width}, {words}": gap(width, name, "rope")
            for width in ORDER
            for name, words in (
                ("nope", "NoPE"), ("dropped_half", "dropped after half"), ("dropped", "dropped after 87.5%"),
                ("half", "slow half dropped after 87.5%"), ("rewarmed", "RoPE, rewarmed"),
            )
        },
    },
)  # fmt: skip
