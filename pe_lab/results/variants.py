"""The variants of a model that evaluation measures and reports know, by the key `method` of a result record."""

from __future__ import annotations

import math

# In the order of tables. The first is always possible. Under `--positional` the key has the description instead.
VARIANTS = ("as trained", "cropped", "PI", "NTK", "YaRN", "beta", "paper beta", "dropped")
SCALINGS = ("PI", "NTK", "YaRN")
# Up to the training length these leave a model as it was trained.
UNCHANGED_IN_TRAINING_LENGTH = ("cropped", *SCALINGS, "beta", "paper beta")
# DroPE, appendix C.2: c of beta(s) = 1 + c ln s, fitted for a model trained from scratch (494M), and for SmolLM-DroPE,
# which was dropped after an external pretraining.
PAPER_COEFFICIENT = 0.412
PAPER_COEFFICIENT_EXTERNAL = 0.103


def paper_beta(coefficient: float, factor: float) -> float:
    """beta(s) = 1 + c ln s of DroPE at s = length / training length; 1 up to the training length."""
    return 1 + coefficient * math.log(max(factor, 1.0))


def label(model: str, method: str, coefficient: float = PAPER_COEFFICIENT) -> str:
    """The label of a model under a method; `coefficient` is the c of `paper beta`."""
    if method in SCALINGS:
        return f"{model} + {method}"
    return {
        "as trained": model,
        "cropped": f"{model}, cropped context",
        "beta": f"{model}, β",
        "paper beta": f"{model}, paper's β (c = {coefficient:g})",
        "dropped": f"{model}, dropped and not recalibrated",
    }[method]
