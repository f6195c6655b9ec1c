"""p-RoPE: which share of the frequencies should rotate."""

from pe_lab.lab.claims import Claim, losses, previous_token_bias, together

from .arms import LOSS, NOPE, ROPE, TRIGRAM, beats_trigram, learned_order, lower_loss, trained

P75 = trained("p_rope_75", "method=p_rope_75")
P25 = trained("p_rope_25", "method=p_rope_25")

CLAIM = Claim(
    sentence="RoPE without its slowest quarter of frequencies (0.75-RoPE) is as good as RoPE; 0.25-RoPE is worse than "
    "it, and better than NoPE.",
    quote="We can see how truncating the lowest frequencies not only maintains the same performance, but even seems to "
    "improve the validation perplexity, supporting our claims regarding the low frequencies acting as non-robust "
    "semantic channels in standard RoPE. Truncating even more of the frequencies ([0.25]-RoPE) harms performance, but "
    "with results still significantly better than with NoPE.",
    paper="p-RoPE, section 6.1 on Table 2",
    arms=(NOPE, P25, P75, ROPE),
    criteria=(
        lower_loss("0.75-RoPE is as good as RoPE", "p_rope_75", "rope", tolerance=0.01),
        lower_loss("0.25-RoPE is worse than 0.75-RoPE", "p_rope_75", "p_rope_25", by=0.005),
        lower_loss("0.25-RoPE is better than NoPE", "p_rope_25", "nope", by=0.005),
    ),
    preconditions=(beats_trigram("rope", "RoPE"), *learned_order("nope", "NoPE")),
    references=TRIGRAM,
    evaluation=None,
    measure=together(losses, previous_token_bias),
    recipes={
        "nope": "configs/p_rope.py:encoding=nope",
        "p_rope_25": "configs/p_rope.py:encoding=0.25",
        "p_rope_75": "configs/p_rope.py:encoding=0.75",
        "rope": "configs/p_rope.py:encoding=rope",
    },
    curves={
        "loss on prose, nats": {
            "NoPE": f"nope: {LOSS}",
            "0.25-RoPE": f"p_rope_25: {LOSS}",
            "0.75-RoPE": f"p_rope_75: {LOSS}",
            "RoPE": f"rope: {LOSS}",
        }
    },
)
