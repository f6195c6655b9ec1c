"""p-RoPE: which share of the frequencies should rotate."""

from pe_lab.lab.claims import Claim, Criterion, losses

from .arms import NATS, NOPE, ROPE, TRIGRAM, beats_trigram, trained

P75 = trained("p_rope_75", "method=p_rope_75")
P25 = trained("p_rope_25", "method=p_rope_25")
LOSS = "validation prose"

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
        Criterion(
            "0.75-RoPE is as good as RoPE",
            f"p_rope_75: {LOSS}",
            (f"rope: {LOSS}",),
            lower=True,
            tolerance=0.01,
            unit=NATS,
        ),
        Criterion(
            "0.25-RoPE is worse than 0.75-RoPE",
            f"p_rope_75: {LOSS}",
            (f"p_rope_25: {LOSS}",),
            lower=True,
            by=0.005,
            unit=NATS,
        ),
        Criterion(
            "0.25-RoPE is better than NoPE",
            f"p_rope_25: {LOSS}",
            (f"nope: {LOSS}",),
            lower=True,
            by=0.005,
            unit=NATS,
        ),
    ),
    preconditions=(beats_trigram("rope", "RoPE"),),
    references=TRIGRAM,
    evaluation=None,
    measure=losses,
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
