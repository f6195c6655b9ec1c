"""Some layers dropped and YaRN on the others, against YaRN on all: both beyond the training length."""

from pe_lab.lab.claims import Claim, losses, scores, together

from .arms import BUT_FOURTH, CHEAPEST_HALF, FOR_A_TENTH, ROPE_LONGER, at_each_length

ARMS = {"for 0.1 nats": FOR_A_TENTH, "the cheapest half": CHEAPEST_HALF, "all but every fourth": BUT_FOURTH}

CLAIM = Claim(
    sentence="A model whose cheapest layers are dropped, and whose others YaRN rescales, is better beyond the training "
    "length than YaRN on all layers, after the same number of tokens.",
    paper="ours: SmolLM3 has no encoding on every fourth layer, and YaRN on the others",
    arms=(ROPE_LONGER, *ARMS.values()),
    criteria=(
        *at_each_length(
            "text at {x}x: layers dropped for 0.1 nats, the others under YaRN",
            "drop_for_0.1: text {x}x YaRN",
            "rope_longer: text {x}x YaRN",
            by=0.01,
        ),
        *at_each_length(
            "needles at {x}x: as many",
            "drop_for_0.1: needles {x}x YaRN",
            "rope_longer: needles {x}x YaRN",
            tolerance=0.05,
        ),
    ),
    measure=together(scores, losses),
    curves={
        f"{name}, by length{under}": {
            "all layers": f"rope_longer: {metric} {{x}}x{end}",
            **{label: f"{arm.name}: {metric} {{x}}x{end}" for label, arm in ARMS.items()},
        }
        for under, end in ((", under YaRN", " YaRN"), (", not rescaled", ""))
        for name, metric in (("text loss in nats", "text"), ("needles found", "needles"))
    },
    tried="The rule was written when seed 0 of drop_for_0.1, drop_cheapest_half and drop_but_fourth had been seen, and "
    "rope without the further steps: text at 8x under YaRN 3.276, 3.309, 3.426 and 3.309.",
)
