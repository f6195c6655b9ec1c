"""DroPE's claim on the measure that the paper does not report beyond the training length."""

from pe_lab.studies import Criterion, Study

from .arms import DROPE, LENGTHS, ROPE, scaled

STUDY = Study(
    claim="A model that is dropped and recalibrated predicts text beyond its training length better than the same "
    "model with RoPE under PI, NTK, YaRN or a cropped context.",
    paper="DroPE, Tables 1 and 10, on perplexity, which they leave out",
    arms=(ROPE, DROPE),
    criteria=tuple(
        Criterion(
            f"text at {x}x: dropped below the best alternative, in nats",
            of=f"drope: text {x}x",
            over=scaled(f"text {x}x"),
            lower=True,
            by=0.01,
        )
        for x in LENGTHS
    ),
    recipes={"rope": "configs/table1.py:method=rope", "drope": "configs/table1.py:method=drope"},
    curves={
        "text loss in nats, by length": {
            "RoPE": "rope: text {x}x",
            "PI": "rope: text {x}x PI",
            "NTK": "rope: text {x}x NTK",
            "YaRN": "rope: text {x}x YaRN",
            "cropped": "rope: text {x}x cropped",
            "dropped": "drope: text {x}x",
            "dropped, fitted scale": "drope: text {x}x beta",
        }
    },
)
