"""Mixes of RoPE and NoPE that are trained as they are, against a drop, with the same number of tokens."""

from pe_lab.studies import Criterion, Study, losses, scores, together

from .arms import LATE_DROP, LENGTHS, ROPE, trained

RNOPE = trained("rnope_swa", "method=rnope_swa")
SWAN = trained("swan", "method=swan")
SSMAX = trained("ssmax", "method=ssmax")
OTHERS = ("rnope_swa", "swan", "ssmax")

STUDY = Study(
    claim="At the same budget a dropped model is at least as good beyond the training length as RNoPE-SWA, SWAN and "
    "SSMax, which are trained with their encodings from the start.",
    paper="DroPE, Table 1, for RNoPE-SWA; SWAN-GPT and SSMax came after it",
    arms=(ROPE, LATE_DROP, RNOPE, SWAN, SSMAX),
    criteria=tuple(
        Criterion(
            f"needles at {x}x: dropped, with the paper's logit scale, above the best of them",
            f"{LATE_DROP.name}: needles {x}x paper beta",
            tuple(f"{name}: needles {x}x" for name in OTHERS),
            by=0.02,
        )
        for x in LENGTHS
    )
    + tuple(
        Criterion(
            f"text at {x}x: dropped below the best of them",
            f"{LATE_DROP.name}: text {x}x",
            tuple(f"{name}: text {x}x" for name in OTHERS),
            lower=True,
            by=0.01,
        )
        for x in LENGTHS
    ),
    measure=together(scores, losses),
    recipes={
        "rope": "configs/table1.py:method=rope",
        LATE_DROP.name: "configs/table1.py:method=drope",
        **{name: f"configs/table1.py:method={name}" for name in OTHERS},
    },
    curves={
        "needles found, by length": {
            "dropped, paper's scale": f"{LATE_DROP.name}: needles {{x}}x paper beta",
            **{name: f"{name}: needles {{x}}x" for name in OTHERS},
            "RoPE": "rope: needles {x}x",
        },
        "text loss in nats, by length": {
            "dropped": f"{LATE_DROP.name}: text {{x}}x",
            **{name: f"{name}: text {{x}}x" for name in OTHERS},
            "RoPE": "rope: text {x}x",
        },
    },
)
