"""Mixes of RoPE and NoPE that are trained as they are, against a drop, with the same number of tokens."""

from pe_lab.lab.claims import Claim, losses, previous_token_bias, scores, together

from .arms import LATE_DROP, NOPE, ROPE, TRIGRAM, at_each_length, can_differ, finds, learned_order, near_rope, trained

RNOPE = trained("rnope_swa", "method=rnope_swa")
SWAN = trained("swan", "method=swan")
SSMAX = trained("ssmax", "method=ssmax")
OTHERS = {"rnope_swa": "RNoPE-SWA", "swan": "SWAN", "ssmax": "SSMax"}


def others(metric: str) -> tuple[str, ...]:
    """The number of each of them; SSMax rotates in all layers, and is rescaled as RoPE is."""
    return (*(f"{name}: {metric}" for name in OTHERS), f"ssmax: {metric} YaRN")


CLAIM = Claim(
    sentence="At the same budget a dropped model is at least as good beyond the training length, on needles and on "
    "text, as RNoPE-SWA, SWAN, SSMax and SSMax under YaRN; no logit scale is fitted, and YaRN and SSMax have their "
    "own.",
    paper="ours: DroPE's Table 1 has RNoPE-SWA, on needles at 2x; the others came after it",
    arms=(ROPE, NOPE, LATE_DROP, RNOPE, SWAN, SSMAX),
    criteria=tuple(
        criterion
        for metric, tolerance in (("needles {x}x", 0.02), ("text {x}x", 0.01))
        for criterion in at_each_length(
            f"{metric.replace(' ', ' at ')}: dropped as good as each of them",
            f"{LATE_DROP.name}: {metric}",
            *others(metric),
            tolerance=tolerance,
        )
    ),
    preconditions=(
        *(finds(name, words) for name, words in OTHERS.items()),
        finds(LATE_DROP.name, "the dropped model"),
        near_rope("validation prose"),
        *learned_order("nope", "NoPE"),
        *can_differ(*others("needles {x}x")),
    ),
    references=TRIGRAM,
    measure=together(scores, losses, previous_token_bias),
    recipes={
        "rope": "configs/table1.py:method=rope",
        "nope": "configs/table1.py:method=nope",
        LATE_DROP.name: "configs/table1.py:method=drope",
        **{name: f"configs/table1.py:method={name}" for name in OTHERS},
    },
    curves={
        "needles found, by length": {
            "dropped": f"{LATE_DROP.name}: needles {{x}}x",
            **{name: f"{name}: needles {{x}}x" for name in OTHERS},
            "ssmax, YaRN": "ssmax: needles {x}x YaRN",
            "RoPE, YaRN": "rope: needles {x}x YaRN",
        },
        "text loss in nats, by length": {
            "dropped": f"{LATE_DROP.name}: text {{x}}x",
            **{name: f"{name}: text {{x}}x" for name in OTHERS},
            "ssmax, YaRN": "ssmax: text {x}x YaRN",
            "RoPE, YaRN": "rope: text {x}x YaRN",
        },
    },
    tried="By DroPE's procedure, a logit scale fitted on other text, the dropped model finds 99.9, 97.7 and 67.3% of "
    "the needles at 2x, 4x and 8x. The first rule gave it the constant that DroPE fitted to another model, compared "
    "SSMax without YaRN, and asked for more needles and a lower loss where the claim has at least as good.",
)
