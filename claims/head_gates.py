"""Which heads should lose their encoding: learned by a gate on each."""

from pe_lab.lab.claims import Arm, Claim, losses, scores, together

from .arms import DROPE, RECALIBRATE, RECIPE, ROPE, at_each_length, child, lower_loss

HALF, QUARTER = RECALIBRATE // 2, RECALIBRATE // 4
PRICE = "gated_rope:base=500,penalty_per_head=0.01"
GATED = child("gated", ROPE, f"method='{PRICE}',steps={HALF}")
CLOSED = child("gated_closed", GATED, f"method='{PRICE},polarize_per_head=0.1',steps={QUARTER}")
DROPPED = Arm(
    "drop_closed", f"{RECIPE}:from={{parent}},method=kept,qk_norm=head,steps={QUARTER}", CLOSED, surgery="--drop=gates"
)

CLAIM = Claim(
    sentence="Heads whose gates close under a price of 0.01 nats each can lose their encoding: at equal tokens the "
    "model predicts text better within its training length than one that is dropped whole, and finds as many needles.",
    paper="ours",
    arms=(ROPE, DROPE, DROPPED),
    criteria=(
        lower_loss("lower loss on prose", "drop_closed", "drope", by=0.01),
        *at_each_length(
            "needles at {x}x: as many as all dropped",
            "drop_closed: needles {x}x",
            "drope: needles {x}x",
            tolerance=0.05,
        ),
    ),
    measure=together(scores, losses),
    curves={
        "text loss in nats, by length": {
            "all dropped": "drope: text {x}x",
            "closed heads dropped": "drop_closed: text {x}x",
            "RoPE + YaRN": "rope: text {x}x YaRN",
        },
        "needles found, by length": {
            "all dropped": "drope: needles {x}x",
            "closed heads dropped": "drop_closed: needles {x}x",
            "RoPE + YaRN": "rope: needles {x}x YaRN",
        },
    },
    tried="Before gates were driven to an end, after 500 steps at that price, most were between 0.3 and 0.5; without "
    "those below 0.5 and with 500 more steps the verdict was refuted, by the needles (docs/log.md). Seed 0 of the "
    "second phase was seen before its arms were trained: 15 of 16 gates at 0 or 1.",
)
