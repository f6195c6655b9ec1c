"""What zero-shot YaRN does with tokens beyond the training length."""

from pe_lab.studies import Criterion, Study

from .arms import LENGTHS, ROPE

STUDY = Study(
    claim="Zero-shot YaRN is cropping in disguise: beyond the training length it finds no more than a model that reads "
    "only the last training length of tokens.",
    paper="DroPE, Figure 5",
    arms=(ROPE,),
    criteria=tuple(
        Criterion(
            f"needles at {x}x: the cropped context finds as many as YaRN",
            f"rope: needles {x}x cropped",
            (f"rope: needles {x}x YaRN",),
            tolerance=0.03,
        )
        for x in LENGTHS
    )
    + tuple(
        Criterion(
            f"text at {x}x: the cropped context is as good as YaRN",
            f"rope: text {x}x cropped",
            (f"rope: text {x}x YaRN",),
            lower=True,
            tolerance=0.02,
        )
        for x in LENGTHS
    ),
    recipes={"rope": "configs/table1.py:method=rope"},
    curves={
        "needles found, by length": {
            "YaRN": "rope: needles {x}x YaRN",
            "cropped": "rope: needles {x}x cropped",
            "RoPE": "rope: needles {x}x",
        },
        "text loss in nats, by length": {
            "YaRN": "rope: text {x}x YaRN",
            "cropped": "rope: text {x}x cropped",
            "RoPE": "rope: text {x}x",
        },
    },
)
