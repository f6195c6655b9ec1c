"""Which heads should lose their encoding: learned by a gate on each."""

from pe_lab.studies import Arm, Criterion, Study, losses, scores, together

from .arms import DROPE, LENGTHS, RECALIBRATE, RECIPE, ROPE, child

LOSS = "validation prose"
HALF = RECALIBRATE // 2
GATED = child("gated", ROPE, f"method='gated_rope:base=500,penalty_per_head=0.01',steps={HALF}")
DROPPED = Arm(
    "drop_gated", f"{RECIPE}:from={{parent}},method=kept,qk_norm=head,steps={HALF}", GATED, surgery="--drop=gates"
)

STUDY = Study(
    claim="Heads whose gates close under a price of 0.01 nats each can lose their encoding: at equal tokens the model "
    "predicts text better within its training length than one that is dropped whole, and finds as many needles.",
    paper="none",
    arms=(ROPE, DROPE, GATED, DROPPED),
    criteria=(
        Criterion("lower loss on prose, in nats", f"drop_gated: {LOSS}", (f"drope: {LOSS}",), lower=True, by=0.01),
        *(
            Criterion(
                f"needles at {x}x: as many as all dropped, with the paper's logit scale",
                f"drop_gated: needles {x}x",
                (f"drope: needles {x}x paper beta",),
                tolerance=0.05,
            )
            for x in LENGTHS
        ),
    ),
    measure=together(scores, losses),
    curves={
        "text loss in nats, by length": {
            "all dropped": "drope: text {x}x",
            "closed heads dropped": "drop_gated: text {x}x",
            "RoPE + YaRN": "rope: text {x}x YaRN",
        },
        "needles found, by length": {
            "all dropped, paper's scale": "drope: needles {x}x paper beta",
            "closed heads dropped": "drop_gated: needles {x}x",
            "RoPE + YaRN": "rope: needles {x}x YaRN",
        },
    },
)
