"""Which layers should lose their encoding: at equal tokens of recalibration."""

from pe_lab.lab.claims import Claim, Criterion, losses, scores, together

from .arms import BUT_FOURTH, CHEAPEST_HALF, DROPE, FOR_A_TENTH, FOUND, LENGTHS, NATS, ROPE, SLOW_HALF

LOSS = "validation prose"

ARMS = {
    "the cheapest half": CHEAPEST_HALF,
    "for 0.1 nats": FOR_A_TENTH,
    "all but every fourth": BUT_FOURTH,
    "the slow half of the pairs": SLOW_HALF,
}

CLAIM = Claim(
    sentence="Dropping some layers, chosen by what they cost, is better than dropping all: as good beyond the training "
    "length, and better within it.",
    paper="ours: SmolLM3 drops every fourth layer, p-RoPE the slow pairs",
    arms=(ROPE, DROPE, *ARMS.values()),
    criteria=(
        Criterion(
            "the cheapest half: lower loss on prose than all dropped",
            f"drop_cheapest_half: {LOSS}",
            (f"drope: {LOSS}",),
            lower=True,
            by=0.01,
            unit=NATS,
        ),
        *(
            Criterion(
                f"text at {x}x: the cheapest half is not worse than all dropped",
                f"drop_cheapest_half: text {x}x",
                (f"drope: text {x}x",),
                lower=True,
                tolerance=0.02,
                unit=NATS,
            )
            for x in LENGTHS
        ),
        *(
            Criterion(
                f"needles at {x}x: the cheapest half finds as many as all dropped",
                f"drop_cheapest_half: needles {x}x",
                (f"drope: needles {x}x",),
                tolerance=0.05,
                unit=FOUND,
            )
            for x in LENGTHS
        ),
    ),
    measure=together(scores, losses),
    curves={
        "text loss in nats, by length": {
            "all": "drope: text {x}x",
            **{label: f"{arm.name}: text {{x}}x" for label, arm in ARMS.items()},
            "RoPE + YaRN": "rope: text {x}x YaRN",
        },
        "needles found, by length": {
            "all": "drope: needles {x}x",
            **{label: f"{arm.name}: needles {{x}}x" for label, arm in ARMS.items()},
            "RoPE + YaRN": "rope: needles {x}x YaRN",
        },
    },
)
