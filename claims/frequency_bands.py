"""What fast and slow rotations are for: the bands of a trained model, taken away one at a time."""

import numpy as np

import pe_lab
from pe_lab.analysis import frequency_use, positional_bias
from pe_lab.analysis.losses import Streams
from pe_lab.analysis.sequences import text_windows
from pe_lab.evaluation.variants import Subject
from pe_lab.lab.claims import Claim, Criterion, losses, previous_token_bias
from pe_lab.positional import dope_by_parts

from .arms import NATS, ROPE, TRIGRAM, beats_trigram

WINDOWS, FACTOR = 16, 4


def bands(directory) -> dict[str, float]:
    """The previous-token bias without the fast or slow half of the pairs; norms; losses without slow rotations."""
    lm = pe_lab.load(directory)
    base = lm.layers[0].encoding.base
    subject = Subject(lm, "rope", str(directory))
    text = text_windows(None, subject, lm.training_length, WINDOWS)
    everywhere = [(n, h) for n in range(len(lm.layers)) for h in range(lm.config.heads)]
    length_of_middle = round(2 * np.pi * base**0.5)  # the wavelength that half of the pairs are below
    found = {}
    for name, keep in (("fast", "slow"), ("slow", "fast")):
        edited = lm.with_positional(dope_by_parts(lm.layers, everywhere, length_of_middle, keep))
        bias = positional_bias.measure(edited, text.tokens).bias.mean(0)[
            ..., positional_bias.PATTERNS.index("previous token")
        ]
        found[f"previous-token bias without {name}"] = float(bias.max())
    used = frequency_use.measure(lm, text.tokens)
    norms = np.log10(used.query.mean((0, 1, 2)) * used.key.mean((0, 1, 2)))  # [R], from the fastest pair
    quarter = len(norms) // 4
    found |= {"norm fast": float(norms[:quarter].mean()), "norm slow": float(norms[-quarter:].mean())}
    for factor in (1, FACTOR):
        at = text_windows(None, subject, factor * lm.training_length, WINDOWS)
        for name, fraction in (("all", 1.0), ("without slow", 0.75)):
            rotated = lm.with_positional(f"rope:base={base:g},fraction={fraction}")
            each = Streams(rotated, at.tokens).losses(at.targets)
            beyond = each[:, lm.training_length :] if factor > 1 else each
            found[f"text {factor}x {name}"] = float(beyond.mean())
    return found | previous_token_bias(directory) | losses(directory)


CLAIM = Claim(
    sentence="Fast rotations make positional heads, and queries and keys have larger norms in slow pairs. Ours, where "
    "the paper expects it of training without them: beyond the training length a model is better without slow "
    "rotations.",
    quote="We find that Gemma learns to use RoPE to construct robust ‘positional’ attention patterns by exploiting the "
    "highest frequencies. We also find that, in general, Gemma greatly prefers to use the lowest frequencies of RoPE, "
    "which we suspect are used to carry semantic information.",
    paper="p-RoPE, abstract, on sections 4 to 6",
    arms=(ROPE,),
    criteria=(
        Criterion(
            "the most previous-token head loses more without the fast half of the pairs than without the slow half",
            "rope: previous-token bias without slow",
            ("rope: previous-token bias without fast",),
            by=0.05,
            unit="positional bias",
        ),
        Criterion(
            "norms of queries and keys are larger in the slowest quarter than in the fastest",
            "rope: norm slow",
            ("rope: norm fast",),
            by=0.05,
            unit="log10 of the norms' product",
        ),
        Criterion(
            "text beyond the training length, to 4x: lower loss without the rotation of the slowest quarter",
            f"rope: text {FACTOR}x without slow",
            (f"rope: text {FACTOR}x all",),
            lower=True,
            by=0.02,
            unit=NATS,
        ),
    ),
    preconditions=(beats_trigram("rope", "RoPE"),),
    references=TRIGRAM,
    evaluation=None,
    recipes={"rope": "configs/p_rope.py:encoding=rope"},
    measure=bands,
    curves={
        "previous-token bias of the most previous-token head": {
            "all pairs": "rope: previous-token bias",
            "without fast": "rope: previous-token bias without fast",
            "without slow": "rope: previous-token bias without slow",
        },
        "text loss, nats": {
            "1x": "rope: text 1x all",
            "1x, slow unrotated": "rope: text 1x without slow",
            "beyond, to 4x": "rope: text 4x all",
            "beyond, slow unrotated": "rope: text 4x without slow",
        },
    },
)
