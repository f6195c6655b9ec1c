"""Which layers should lose their encoding: at equal tokens of recalibration."""

from pe_lab.lab.claims import Claim, losses, scores, together

from .arms import BUT_FOURTH, CHEAPEST_HALF, DROPE, FOR_A_TENTH, ROPE, SLOW_HALF, at_each_length, lower_loss

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
        lower_loss("the cheapest half: lower loss on prose than all dropped", "drop_cheapest_half", "drope", by=0.01),
        *at_each_length(
            "text at {x}x: the cheapest half is not worse than all dropped",
            "drop_cheapest_half: text {x}x",
            "drope: text {x}x",
            tolerance=0.02,
        ),
        *at_each_length(
            "needles at {x}x: the cheapest half finds as many as all dropped",
            "drop_cheapest_half: needles {x}x",
            "drope: needles {x}x",
            tolerance=0.05,
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
