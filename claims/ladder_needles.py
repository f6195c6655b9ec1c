"""DroPE's main claim where it can be asked: needles that no model is trained on, on the rungs of the ladder, at 2x.

Each needle is a sentence of RULER in held-out text of the models' own corpus, beside others with other keys and values,
and each is asked for by itself, in RULER's words with DroPE's colon (suite passkeys with --distractors). An answer is
right if greedy decoding writes the value.

The number of distractors and the rungs that are judged are tuned on RoPE alone, on other needles than those that are
judged (--seed=1), before the other arms are evaluated:

  python -m pe_lab.evaluate --from=runs/claims/laptop/ladder128_rope__seed=0 --suite=passkeys --lengths=1x,2x \
    --variants=as-trained,yarn --distractors=3 --passkey-windows=512 --seed=1 --out=runs/needles_tuned

with 0, 1, 3 and 7 distractors and 2,048, 1,024, 512 and 256 windows, so that there are 2,048 questions. The number is
the one with which YaRN finds the share nearest to 50% at 2x, of those with which RoPE finds 95% at 1x; where there is
none, of those with distractors. The rungs are those where RoPE finds 95%; where there is none, the widest (`tried`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pe_lab.errors import DataError
from pe_lab.evaluate import main
from pe_lab.lab.claims import Claim, Criterion, Precondition, scores
from pe_lab.results.records import RecordFile

from .arms import FOUND, SCALINGS, can_differ, finds, near_rope
from .drop_needles import CLAIM as TRAINED_IN
from .ladder import CLAIM as LADDER
from .ladder import LOSS, RATES, RUNGS, of_runs, table, with_pilot

DISTRACTORS = 1
WIDTHS = (128,)
QUESTIONS = 2048
WINDOWS = QUESTIONS // (DISTRACTORS + 1)
ARMS = ("rope", "nope", "dropped", "rewarmed")
BARE = ("nope", "dropped")  # nothing rotates: nothing to scale or to crop
FACTOR = 2
ALTERNATIVES = {
    "as trained": "kept + beta",
    **{name: f"{name.lower()}:factor={{x}} + beta" for name in SCALINGS if name != "cropped"},
    "cropped": "cropped",
}


def needles(directory: Any) -> dict[str, float]:
    """Needles of a run at 1x and 2x, beside its losses: evaluated first, where its records are not there.

    At 2x each encoding has the logit scale that fits held-out text best, which may be the text around some needles; the
    needles are in none of it. A cropped context needs no scale.
    """
    if not any(f"ladder{width}_" in str(directory) for width in WIDTHS):
        return of_runs(directory)  # of the width whose rates muP carries
    for record in RecordFile(directory / "evaluation/passkeys.jsonl").records:
        drawn = record["seed"], record["settings"].get("distractors"), record["settings"]["passkey_windows"]
        if drawn != (0, DISTRACTORS, WINDOWS):
            raise DataError(
                f"'{directory}/evaluation/passkeys.jsonl' has records of other needles (seed, distractors, windows: "
                f"{drawn}), which cannot be told from the claim's by their names. Move it away."
            )
    asked = (f"--from={directory}", "--suite=passkeys", f"--distractors={DISTRACTORS}", f"--passkey-windows={WINDOWS}")
    scaled = [f"--positional={one.lower()}:factor={FACTOR}" for one in SCALINGS if one != "cropped"]
    if any(f"_{name}__" in str(directory) for name in BARE):
        scaled = []
    else:
        scaled.append("--variants=cropped")
    main([*asked, "--lengths=1x", "--variants=as-trained"])
    main([*asked, f"--lengths={FACTOR}x", "--positional=kept", "--fit-scale", *scaled])
    return of_runs(directory) | scores(directory)


def found(width: int, arm: str, alternative: str = "as trained", what: str = "passkeys") -> str:
    """The term of what an arm finds at {x}, a length."""
    return f"{RUNGS[width][arm].name}: {what} {{x}}x {ALTERNATIVES[alternative]}"


def at_twice(term: str) -> str:
    """The term at the length that is judged."""
    return term.replace("{x}", str(FACTOR))


def conditions(width: int) -> tuple[Precondition, ...]:
    """What has to be true at a width."""
    names = {arm: RUNGS[width][arm].name for arm in ARMS}
    asked = (
        finds(names["rope"], "RoPE", "passkeys 1x"),
        finds(names["rewarmed"], "RoPE that was warmed again", "passkeys 1x"),
        finds(names["dropped"], "the dropped model", "passkeys 1x"),
        can_differ(*(found(width, "rewarmed", one) for one in ALTERNATIVES))[0],
        near_rope(LOSS, names["nope"], names["rope"]),
    )
    return tuple(dataclasses.replace(one, text=f"at width {width} {one.text}") for one in asked)


def panel(what: str) -> dict[str, str]:
    """A line of the figure for each arm and alternative."""
    return {
        f"width {width}, {words}": at_twice(found(width, arm, alternative, what))
        for width in WIDTHS
        for arm, alternative, words in (
            *(("rewarmed", one, "RoPE" if one == "as trained" else one) for one in ALTERNATIVES),
            ("dropped", "as trained", "dropped"),
            ("nope", "as trained", "NoPE"),
        )
    }


CLAIM = Claim(
    sentence="A model that is dropped and recalibrated late in pretraining finds more needles that it was not trained "
    "on at twice the training length than RoPE under PI, NTK, YaRN or a cropped context, after as many tokens; each "
    "has the logit scale that fits text best.",
    quote=TRAINED_IN.quote,
    paper="DroPE, section 5.1 on Table 1, at 2x",
    arms=with_pilot([RUNGS[width][arm] for width in WIDTHS for arm in ARMS], ARMS),
    criteria=tuple(
        Criterion(
            f"needles at {FACTOR}x, width {width}: dropped above every alternative",
            at_twice(found(width, "dropped")),
            tuple(at_twice(found(width, "rewarmed", one)) for one in ALTERNATIVES),
            by=0.02,
            unit=FOUND,
        )
        for width in WIDTHS
    ),
    preconditions=(
        *(one for width in WIDTHS for one in conditions(width)),
        *(one for one in LADDER.preconditions if any(f"at width {width} " in one.text for width in WIDTHS)),
    ),
    rates=dataclasses.replace(RATES, arms=tuple(RUNGS[64][arm].name for arm in ARMS)),
    help="fitted",
    references={name: one for width in WIDTHS for name, one in table(width).items()},
    evaluation=None,
    measure=needles,
    tried="Tuned on RoPE of width 128, seed 0, before its dropped model was trained: with 0, 1, 3 and 7 distractors "
    "and 128 questions each, RoPE finds 9.4, 11.7, 5.5 and 4.7% at 1x, and YaRN 10.9, 11.7, 7.8 and 3.1% at 2x. The "
    "choice among the values is at chance. Before any rung was trained, a pilot of width 64 (RoPE, rate 0.008) was "
    "asked 64 questions each: it finds none at 1x, and none at 2x as trained or under YaRN. Its choice is at chance "
    "too, and its own key makes a value no likelier: -0.007 [-0.036, 0.021], -0.000 [-0.013, 0.012] and -0.001 "
    "[-0.011, 0.008] nats at 1x with 1, 3 and 7 distractors.",
    curves={
        f"needles found at {FACTOR}x": panel("passkeys"),
        f"likeliest of the values in the text, at {FACTOR}x": panel("passkeys choice"),
        f"nats by which its own key makes a value likelier, at {FACTOR}x": panel("passkeys key gain"),
    },
)
