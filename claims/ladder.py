"""What a late drop costs by the size of the model: rungs at several widths, and what larger ones will show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.errors import DataError
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
from pe_lab.lab.claims.laws import Predicted, Size, predictions
from pe_lab.lab.claims.results import results_directory, values_of
from pe_lab.lab.claims.values import Values
from pe_lab.results.statistics import student
from pe_lab.storage import read_json

from .arms import NATS

RECIPE, LOSS = "configs/ladder.py", "validation"
SEEDS = {64: 0, 96: 3, 128: 3}  # 0: all of the claim's
LAYERS, PER_PARAMETER, SHARE = 8, 20, 0.125
LATER = (192, 256, 384)  # predicted before they are run
LATER_SEEDS = 3
PAPER = (357_826_560.0, 2.1e9)  # DroPE's model of 494M without its embedding, and the tokens of its recalibration
GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
BEST = {"rope": 1.6e-2, "nope": 8e-3, "dropped": 2e-3, "dropped_half": 4e-3, "rewarmed": 1e-3, "half": 1e-3}


def parameters(width: int) -> int:
    """Of the matrices of the layers."""
    return 10 * LAYERS * width**2


def of_width(
    width: int, name: str, arguments: str, rate: float, parent: Arm | None = None, start: str = "", seeds: int = 0
) -> Arm:
    """An arm of a width, from random weights, or from `start` of its parent: at=SHARE, or more=SHARE beyond the end."""
    after = f",from={{parent}},{start}" if parent else ""
    return Arm(f"ladder{width}_{name}", f"{RECIPE}:width={width},{arguments},rate={rate:g}{after}", parent, seeds=seeds)


def rung(width: int, seeds: int, device: str = "") -> dict[str, Arm]:
    """The arms of a width: trained from random weights, and what they become in the last eighth of their steps."""

    def arm(name: str, arguments: str, parent: Arm | None = None, at: float = 0) -> Arm:
        return of_width(width, name, arguments + device, BEST[name], parent, f"at={at:g}", seeds)

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
# Widths at which NoPE does not reach its onset with 20 tokens a parameter: the onset law is of these longer runs.
LONGER = {
    width: of_width(width, "nope_longer", f"method=nope,per_parameter={each}", BEST["nope"], seeds=1)
    for width, each in {64: 80, 96: 60}.items()
}
RATES = Rates(GRID, of=LOSS, within=0.001, arms=tuple(arm.name for arm in RUNGS[64].values()))


def with_pilot(arms: Sequence[Arm], of: Sequence[str] = ("rope", "nope")) -> tuple[Arm, ...]:
    """Arms, with those of the smallest width at which the pilot tries the rates that muP carries to other widths."""
    return tuple(dict.fromkeys((*arms, *(RUNGS[64][name] for name in of))))


def beats_trigram(width: int, arm: str, words: str) -> Precondition:
    """What a table of three tokens predicts as well says nothing about positions that are further away."""
    return Precondition(
        f"at width {width} {words} predicts text better than a trigram table of its training tokens, in nats",
        f"{arm}: {LOSS} - trigram{width}: {LOSS}",
        most=0.0,
    )


def learned_order(width: int, arm: str = "", words: str = "NoPE") -> tuple[Precondition, Precondition]:
    """A model without positions, NoPE from scratch or another arm, that has learned order at a width."""
    arm = arm or f"ladder{width}_nope"
    bias = Precondition(
        f"at width {width} {words} has a head with a bias toward the previous token above 0.3 (1 at most)",
        f"{arm}: previous-token bias",
        least=0.3,
    )
    return beats_trigram(width, arm, words), bias


def table(width: int, arm: str = "") -> dict[str, Reference]:
    """The trigram table of the tokens that an arm from random weights reads, which are those of all arms of a width."""
    return {f"trigram{width}": Reference(arm or RUNGS[width]["nope"].name, trigram)}


def gap(width: int | str, of: str = "dropped", over: str = "rewarmed") -> str:
    """G, what a drop costs beyond as many more steps with RoPE, or the difference of two other arms."""
    return f"ladder{width}_{of}: {LOSS} - ladder{width}_{over}: {LOSS}"


def size(values: Values, width: int) -> Size:
    """What the laws need of a rung."""
    dropped, control = (values[f"ladder{width}_{name}"][LOSS] for name in ("dropped", "rewarmed"))
    gaps = tuple(dropped[seed] - control[seed] for seed in sorted(dropped) if seed in control)
    onsets = values[LONGER[width].name if width in LONGER else f"ladder{width}_nope"].get("onset", {})
    return Size(
        parameters(width),
        SHARE * PER_PARAMETER * parameters(width),
        gaps,
        tuple(onsets[seed] for seed in sorted(onsets)),
    )


def laws(values: Values) -> Mapping[str, Any]:
    """Both laws on the first rungs, and what they say of those that are not run yet."""
    wanted = {str(width): (float(parameters(width)), SHARE * PER_PARAMETER * parameters(width)) for width in LATER}
    return predictions([size(values, width) for width in SEEDS], wanted, LATER_SEEDS)


def of_runs(directory: Any) -> dict[str, float]:
    """Losses by window, the bias toward the previous token, and of a model without positions its onset."""
    found = together(losses, previous_token_bias)(directory)
    return found | (onset(directory) if re.search("_nope(_longer)?__", str(directory)) else {})


ARMS = {"nope": "NoPE", "dropped_half": "dropped after half", "dropped": "dropped after 87.5%"} | {
    "half": "slow half dropped after 87.5%",
    "rewarmed": "RoPE, rewarmed",
}
REMAINS = "what remains of each arm's loss over RoPE's, nats"


def later(width: int) -> Claim:
    """A rung that was predicted before it is run: claims/results/ladder.json has the intervals."""
    arms, published = rung(width, 0, ",attention=auto"), f"published{width}"

    def result() -> Mapping[str, Any]:
        path = results_directory() / "ladder.json"
        if not path.is_file():
            raise DataError(
                f"'{path}' is missing, which has the prediction: run `python -m pe_lab.claims ladder` first."
            )
        return read_json(path)

    def ends(config: Any) -> Mapping[str, float]:
        interval = result()["fits"]["power law"]["gaps"][str(width)]
        return {"lowest": interval["low"], "highest": interval["high"]}

    def compared(values: Values) -> Mapping[str, Any]:
        """The gap beside each law's interval; with a second rung inside, the laws of all rungs at the paper's size."""
        gaps = student(size(values, width).gaps)
        found: dict[str, Any] = {"gap": Predicted(*gaps.numbers).json()}
        for law in ("power law", "onset law"):
            if known := result()["fits"].get(law):
                interval = Predicted(**known["gaps"][str(width)])
                found[law] = {"published": interval.json(), "the gap lies inside": interval.holds(gaps.mean)}
        smaller = [one for one in LATER if one < width]
        if not smaller:
            return found
        before = [read_json(results_directory() / f"ladder_{one}.json") for one in smaller]
        if not all(one["power law"]["the gap lies inside"] for one in (found, *(one["fits"] for one in before))):
            return found | {"at 494M": "not extrapolated: a gap lies outside of its interval"}
        rungs = [size(values_of(result()), one) for one in SEEDS]
        rungs += [size(values_of(one), at) for one, at in zip(before, smaller, strict=True)]
        return found | {"of all rungs": predictions([*rungs, size(values, width)], {"494M": PAPER}, seeds=1)}

    def within(text: str, end: str, lower: bool) -> Criterion:
        return Criterion(text, gap(width), (f"{published}: {end}",), lower=lower, tolerance=0.001, unit=NATS)

    return Claim(
        sentence=f"What a late drop costs at width {width} is what the power law of the widths {ORDER[0]} to "
        f"{ORDER[-1]} predicts.",
        paper="ours, on DroPE, appendix D.1",
        arms=tuple(arms.values()),
        criteria=(
            within("the gap is not above the published interval", "highest", lower=True),
            within("the gap is not below the published interval", "lowest", lower=False),
        ),
        preconditions=learned_order(width),
        rates=Rates(apart=f"the rates are those of width {ORDER[0]}, by muP"),
        references={
            f"trigram{width}": Reference(arms["nope"].name, trigram),
            published: Reference(arms["rope"].name, ends),
        },
        evaluation=None,
        measure=of_runs,
        fits=compared,
        curves={REMAINS: {words: gap(width, name, "rope") for name, words in ARMS.items()}},
    )


ORDER: Sequence[int] = tuple(SEEDS)
CLAIM = Claim(
    sentence="The larger the model, the less a late drop and its recalibration cost at the training length, beyond "
    "what as many more steps with RoPE give.",
    quote="Consistent with this, we observe that dropping the positional encoding only at the very end of pretraining "
    "(DroPE @ 16K) yields the best validation perplexity, while earlier dropping steadily degrades performance.",
    paper="ours, on DroPE, appendix D.1: its model of 494M has a perplexity of 21.73 when dropped after 87.5% of the "
    "steps, 21.72 without a drop, and 23.77 without positions from the start",
    arms=(*(arm for width in ORDER for arm in RUNGS[width].values()), *LONGER.values()),
    criteria=tuple(
        Criterion(
            f"the gap at width {wider} is below that at width {width}", gap(wider), (gap(width),), lower=True, by=0.01,
            unit=NATS,
        )
        for width, wider in zip(ORDER, ORDER[1:], strict=False)
    ),
    # The smaller ones may lie before the onset, which is what the laws are about.
    preconditions=learned_order(ORDER[-1]),
    rates=RATES,
    references={name: one for width in ORDER for name, one in table(width).items()},
    evaluation=None,
    measure=of_runs,
    fits=laws,
    curves={
        REMAINS: {
            f"width {width}, {words}": gap(width, name, "rope") for width in ORDER for name, words in ARMS.items()
        },
        "gap after a drop by width, nats": {
            "measured": gap("{x}"),
            "power law": "fits: power law: gaps: {x}",
            "onset law": "fits: onset law: gaps: {x}",
        },
    },
)  # fmt: skip
