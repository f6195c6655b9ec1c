"""How soon the loss is back after a drop."""

from pe_lab.lab.claims import Claim, losses, previous_token_bias, together

from .arms import DROPE, LOSS, NOPE, RECALIBRATE, ROPE, STEPS, TRIGRAM, child, learned_order, lower_loss, near_rope

PAPER_STEPS = 16_000  # of the pretraining, at the paper's size
BY_STEPS = {
    steps: child(f"drope_{steps}", ROPE, f"method=nope,qk_norm=head,steps={steps}")
    for steps in (STEPS // 16, STEPS // 8, STEPS // 2, STEPS)
} | {RECALIBRATE: DROPE}

CLAIM = Claim(
    sentence="After a drop, a small share of the pretraining's tokens brings the loss at the training length back to "
    "that of the model with RoPE, and below that of NoPE from scratch.",
    quote="Positional embeddings can be removed after pretraining, allowing LMs to generalize zero-shot to unseen "
    "sequence lengths without compromising their in-context performance after short recalibration on a fraction of the "
    "training tokens at the original context size.",
    paper="DroPE, Observation 3; for NoPE, Figure 2",
    arms=(ROPE, *BY_STEPS.values(), NOPE),
    criteria=(
        lower_loss("a fifth of the tokens brings the loss within 0.05 nats of RoPE's", "drope", "rope", tolerance=0.05),
        lower_loss("and below that of NoPE from scratch", "drope", "nope", by=0.01),
    ),
    preconditions=(near_rope(LOSS), *learned_order("nope", "NoPE")),
    references=TRIGRAM,
    evaluation=None,
    measure=together(losses, previous_token_bias),
    recipes={
        "rope": f"configs/drope_16b.py:drop={PAPER_STEPS}",
        "nope": "configs/drope_16b.py:drop=0",
        **{
            arm.name: f"configs/drope_16b.py:drop={PAPER_STEPS},more={PAPER_STEPS * steps // STEPS},from={{parent}}"
            for steps, arm in BY_STEPS.items()
        },
    },
    curves={
        "loss on prose, nats": {
            "RoPE": f"rope: {LOSS}",
            **{f"after {100 * n / STEPS:.3g}% more": f"{BY_STEPS[n].name}: {LOSS}" for n in sorted(BY_STEPS)},
            "NoPE": f"nope: {LOSS}",
        },
    },
)
