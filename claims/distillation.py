"""What heals a dropped model fastest for the same FLOPs, the teacher's forward pass counted."""

from pe_lab.lab.claims import Claim, Criterion, losses, scores, together

from .arms import DROPE, FOUND, LOSS, RECALIBRATE, ROPE, child, lower_loss

STEPS = RECALIBRATE * 3 // 4  # a step with a teacher costs 4/3 of one without
PARTS = {
    "logits": "logits=1",
    "logits_alone": "logits=1;cross_entropy=0",
    "hidden": "logits=1;hidden=1",
    "attention": "logits=1;hidden=1;attention=1",
}
ARMS = {
    name: child(f"distil_{name}", ROPE, f"method=nope,qk_norm=head,steps={STEPS},distill='{parts}'")
    for name, parts in PARTS.items()
}

CLAIM = Claim(
    sentence="At equal FLOPs, the teacher's counted, a dropped model recovers further when the model before the drop "
    "teaches it than by cross-entropy alone.",
    paper="ours",
    arms=(ROPE, DROPE, *ARMS.values()),
    criteria=(
        lower_loss("logits: lower loss on prose", "distil_logits", "drope", by=0.005),
        lower_loss("logits and hidden states: lower loss on prose", "distil_hidden", "drope", by=0.005),
        Criterion(
            "logits and hidden states: as many needles at 4x",
            "distil_hidden: needles 4x",
            ("drope: needles 4x",),
            tolerance=0.05,
            unit=FOUND,
        ),
    ),
    measure=together(scores, losses),
    curves={
        "loss on prose, nats": {
            "cross-entropy": f"drope: {LOSS}",
            **{name.replace("_", " "): f"distil_{name}: {LOSS}" for name in PARTS},
            "RoPE": f"rope: {LOSS}",
        },
        "text loss in nats, by length": {
            "cross-entropy": "drope: text {x}x",
            **{name.replace("_", " "): f"distil_{name}: text {{x}}x" for name in PARTS},
        },
    },
)
