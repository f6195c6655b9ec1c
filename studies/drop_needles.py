"""DroPE's main claim, on its own measure."""

from pe_lab.studies import Criterion, Study

from .arms import DROPE, LENGTHS, ROPE, scaled

STUDY = Study(
    claim="A model that is dropped and recalibrated finds more needles beyond its training length than the same model "
    "with RoPE under PI, NTK, YaRN or a cropped context.",
    paper="DroPE, Tables 1 and 10",
    arms=(ROPE, DROPE),
    criteria=tuple(
        Criterion(
            f"needles at {x}x: dropped, with the paper's logit scale, above the best alternative",
            of=f"drope: needles {x}x paper beta",
            over=scaled(f"needles {x}x"),
            by=0.02,
        )
        for x in LENGTHS
    ),
    recipes={"rope": "configs/table1.py:method=rope", "drope": "configs/table1.py:method=drope"},
    curves={
        "needles found, by length": {
            "RoPE": "rope: needles {x}x",
            "PI": "rope: needles {x}x PI",
            "NTK": "rope: needles {x}x NTK",
            "YaRN": "rope: needles {x}x YaRN",
            "cropped": "rope: needles {x}x cropped",
            "dropped": "drope: needles {x}x",
            "dropped, paper's scale": "drope: needles {x}x paper beta",
        }
    },
)
