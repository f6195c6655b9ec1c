"""What a drop does to text beyond the training length, which DroPE does not report of a dropped model."""

from pe_lab.lab.claims import Claim, Precondition, losses, previous_token_bias, scores, together

from .arms import DROPE, NOPE, ROPE, TABLE_1, TRIGRAM, at_each_length, learned_order, near_rope, scaled

CLAIM = Claim(
    sentence="A model that is dropped and recalibrated predicts text beyond its training length better than the same "
    "model with RoPE under PI, NTK, YaRN or a cropped context.",
    paper="ours: DroPE's Figure 5 has that YaRN and cropping keep their perplexity, and no claim that a drop lowers it",
    arms=(ROPE, DROPE, NOPE),
    criteria=at_each_length(
        "text at {x}x: dropped below every alternative", "drope: text {x}x", *scaled("text {x}x"), by=0.01
    ),
    preconditions=(
        Precondition(
            "the dropped model is recalibrated: within 0.1 nats of RoPE at the training length",
            "drope: text 1x - rope: text 1x",
            most=0.1,
        ),
        near_rope("text 1x"),
        *learned_order("nope", "NoPE"),
    ),
    references=TRIGRAM,
    measure=together(scores, losses, previous_token_bias),
    recipes=TABLE_1,
    curves={
        "text loss in nats, by length": {
            "RoPE": "rope: text {x}x",
            "PI": "rope: text {x}x PI",
            "NTK": "rope: text {x}x NTK",
            "YaRN": "rope: text {x}x YaRN",
            "cropped": "rope: text {x}x cropped",
            "dropped": "drope: text {x}x",
        }
    },
)
