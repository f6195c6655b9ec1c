"""When to drop: the same number of tokens, of which the last part is without positions."""

from pe_lab.lab.claims import Claim, losses, previous_token_bias, scores, together

from .arms import LATE_DROP, LOSS, NOPE, ROPE, STEPS, TRIGRAM, child, learned_order, lower_loss, near_rope

HALF = child("drop_half", ROPE, f"method=nope,at={STEPS // 2},steps={STEPS - STEPS // 2}")

CLAIM = Claim(
    sentence="Of equally many tokens, a late drop is better than an early one, and both better than no positions from "
    "the start: RoPE's head start pays.",
    quote="Consistent with this, we observe that dropping the positional encoding only at the very end of pretraining "
    "(DroPE @ 16K) yields the best validation perplexity, while earlier dropping steadily degrades performance.",
    paper="DroPE, appendix D.1 on Table 6, whose 16K is RoPE, not dropped",
    arms=(ROPE, NOPE, HALF, LATE_DROP),
    criteria=(
        lower_loss("NoPE from scratch is worse than RoPE", "rope", "nope", by=0.01),
        lower_loss("dropped after half: better than NoPE", "drop_half", "nope", by=0.01),
        lower_loss("dropped after three quarters: better than after half", "drop_late", "drop_half", by=0.01),
    ),
    preconditions=(near_rope(LOSS), *learned_order("nope", "NoPE")),
    references=TRIGRAM,
    measure=together(scores, losses, previous_token_bias),
    recipes={
        "rope": "configs/drope_16b.py:drop=16000",
        "nope": "configs/drope_16b.py:drop=0",
        "drop_half": "configs/drope_16b.py:drop=8000",
        "drop_late": "configs/drope_16b.py:drop=14000",
    },
    curves={
        "loss on prose at the training length, nats": {
            "NoPE": f"nope: {LOSS}",
            "dropped after half": f"drop_half: {LOSS}",
            "after three quarters": f"drop_late: {LOSS}",
            "RoPE, not dropped": f"rope: {LOSS}",
        },
        "needles found, by length": {
            "NoPE": "nope: needles {x}x",
            "dropped after half": "drop_half: needles {x}x",
            "after three quarters": "drop_late: needles {x}x",
            "RoPE": "rope: needles {x}x",
        },
    },
)
