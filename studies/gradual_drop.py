"""A drop over half of the recalibration against one at its beginning."""

from pe_lab.studies import Criterion, Study, losses, scores, together

from .arms import DROPE, ROPE, child

LOSS = "validation prose"
WAYS = ("scale", "pairs", "layers")
ARMS = {way: child(f"gradual_{way}", ROPE, f"method=nope,qk_norm=head,path='until=0.5;how={way}'") for way in WAYS}

STUDY = Study(
    claim="At equal tokens, a gradual drop (frequencies shrink, pairs go one after another, or layers do) recovers "
    "further than a sudden one.",
    paper="none",
    arms=(ROPE, DROPE, *ARMS.values()),
    criteria=tuple(
        Criterion(
            f"{way}: lower loss on prose, in nats", f"gradual_{way}: {LOSS}", (f"drope: {LOSS}",), lower=True, by=0.005
        )
        for way in WAYS
    ),
    measure=together(scores, losses),
    curves={
        "loss on prose, nats": {
            "sudden": f"drope: {LOSS}",
            **{way: f"gradual_{way}: {LOSS}" for way in WAYS},
        },
        "needles found, by length, paper's scale": {
            "sudden": "drope: needles {x}x paper beta",
            **{way: f"gradual_{way}: needles {{x}}x paper beta" for way in WAYS},
        },
    },
)
