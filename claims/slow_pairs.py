"""The slow half of the pairs dropped after pretraining, against YaRN on all: each with its best logit scale."""

import functools

from pe_lab.lab.claims import Claim, helped

from .arms import DROPE, LENGTHS, ROPE_LONGER, SLOW_HALF, at_each_length

CLAIM = Claim(
    sentence="A model that has lost the slow half of its pairs after pretraining, and rescales none, is better on text "
    "beyond the training length than YaRN on all pairs, after the same number of tokens, and finds as many needles. "
    "Both have the logit scale that fits other text best.",
    paper="ours: p-RoPE drops the slow pairs before pretraining",
    arms=(ROPE_LONGER, SLOW_HALF, DROPE),
    criteria=(
        *at_each_length(
            "text at {x}x: lower loss than under YaRN",
            "p_rope_after: text {x}x as trained, fitted",
            "rope_longer: text {x}x YaRN, fitted",
            by=0.01,
        ),
        *at_each_length(
            "needles at {x}x: as many as under YaRN",
            "p_rope_after: needles {x}x as trained, fitted",
            "rope_longer: needles {x}x YaRN, fitted",
            tolerance=0.05,
        ),
    ),
    help="fitted",
    evaluation=None,
    measure=functools.partial(helped, factors=LENGTHS),
    curves={
        f"{name}, by length": {
            "all pairs, YaRN": f"rope_longer: {metric} {{x}}x YaRN, fitted",
            "slow half dropped": f"p_rope_after: {metric} {{x}}x as trained, fitted",
            "slow half dropped, YaRN": f"p_rope_after: {metric} {{x}}x YaRN, fitted",
            "all pairs dropped": f"drope: {metric} {{x}}x as trained, fitted",
        }
        for name, metric in (("text loss in nats", "text"), ("needles found", "needles"))
    },
    tried="The rule was written when all seeds of p_rope_after, rope and drope had been evaluated without a fitted "
    "scale (which_layers), and seed 0 at 8x on essays with scales 1 + c ln 8: 4.324, 4.306, 4.300, 4.301 nats with "
    "c = 0, 0.05, 0.1, 0.2; rope under YaRN, without the further steps, had 4.349.",
)
