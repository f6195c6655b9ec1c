"""A drop over half of the recalibration against one at its beginning."""

from pe_lab.lab.claims import Claim, losses, scores, together

from .arms import DROPE, LOSS, ROPE, child, lower_loss

WAYS = ("scale", "pairs", "layers")
ARMS = {
    way: child(f"gradual_{way}", ROPE, f"method=nope,qk_norm=head,transition='until=0.5;how={way}'") for way in WAYS
}

CLAIM = Claim(
    sentence="At equal tokens, a gradual drop (frequencies shrink, pairs go one after another, or layers do) recovers "
    "further than a sudden one.",
    paper="ours",
    arms=(ROPE, DROPE, *ARMS.values()),
    criteria=tuple(lower_loss(f"{way}: lower loss on prose", f"gradual_{way}", "drope", by=0.005) for way in WAYS),
    measure=together(scores, losses),
    curves={
        "loss on prose, nats": {
            "sudden": f"drope: {LOSS}",
            **{way: f"gradual_{way}: {LOSS}" for way in WAYS},
        },
        "needles found, by length, each with its fitted scale": {
            "sudden": "drope: needles {x}x beta",
            **{way: f"gradual_{way}: needles {{x}}x beta" for way in WAYS},
        },
    },
)
