"""What zero-shot YaRN does with tokens beyond the training length."""

from pe_lab.lab.claims import Claim, Criterion, losses, scores, together

from .arms import FOUND, NATS, ROPE, TRIGRAM, beats_trigram, can_differ, finds

CLAIM = Claim(
    sentence="At twice the training length zero-shot YaRN finds as many needles as a model that reads only the last "
    "training length of tokens, and predicts text as well.",
    quote="As illustrated in Figure 5, YaRN’s zero-shot behavior closely matches that of simply cropping the sequence "
    "length to the pretraining context, maintaining constant perplexity but ignoring information present outside the "
    "cropped window.",
    paper="DroPE, section 4 on Figure 5",
    arms=(ROPE,),
    criteria=(
        Criterion(
            "needles at 2x: as many with the cropped context as with YaRN",
            "rope: needles 2x cropped",
            ("rope: needles 2x YaRN",),
            within=0.03,
            unit=FOUND,
        ),
        Criterion(
            "text at 2x: as good with the cropped context as with YaRN",
            "rope: text 2x cropped",
            ("rope: text 2x YaRN",),
            lower=True,
            within=0.02,
            unit=NATS,
        ),
    ),
    preconditions=(can_differ("rope: needles {x}x YaRN")[0], finds("rope", "RoPE"), beats_trigram("rope", "RoPE")),
    references=TRIGRAM,
    measure=together(scores, losses),
    tried="The model is trained on these needles, as the paper's are not. The first rule asked at 4x and 8x as well, "
    "where the paper does not.",
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
