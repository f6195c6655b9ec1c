"""The variants of a model, which evaluation measures and reports know: the key `variant` of a record."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pe_lab.results.records import Record

# In the order of tables. The first is always possible. Under `--positional` the key has the description instead.
VARIANTS = ("as trained", "cropped", "PI", "NTK", "YaRN", "beta", "paper beta", "dropped")
SCALINGS = ("PI", "NTK", "YaRN")
# Up to the training length these leave a model as it was trained.
UNCHANGED_IN_TRAINING_LENGTH = ("cropped", *SCALINGS, "beta", "paper beta")
# DroPE, appendix C.2: c of beta(s) = 1 + c ln s, fitted for a model trained from scratch (494M), and for SmolLM-DroPE,
# which was dropped after an external pretraining.
PAPER_COEFFICIENT = 0.412
PAPER_COEFFICIENT_EXTERNAL = 0.103
EXTERNAL = ("converted from ", "read from ")  # how the lineage of an externally pretrained checkpoint begins
# The variants that reports know, in the order of tables.
KINDS = (
    *("RoPE", "cropped", "PI", "NTK", "YaRN"),
    *("DroPE", "DroPE beta", "DroPE paper beta"),
    *("NoPE", "NoPE beta", "NoPE paper beta"),
)
# The first one measured stands for the dropped model. The paper fits the scale to each model: its constants are those
# of others.
DROPPED = ("DroPE beta", "DroPE", "DroPE paper beta")


def paper_beta(coefficient: float, factor: float) -> float:
    """beta(s) = 1 + c ln s of DroPE at s = length / training length; 1 up to the training length."""
    return 1 + coefficient * math.log(max(factor, 1.0))


def label(model: str, variant: str, coefficient: float = PAPER_COEFFICIENT) -> str:
    """The label of a model under a variant's encoding; `coefficient` is the c of `paper beta`."""
    if variant in SCALINGS:
        return f"{model} + {variant}"
    return {
        "as trained": model,
        "cropped": f"{model}, cropped context",
        "beta": f"{model}, β",
        "paper beta": f"{model}, paper's β (c = {coefficient:g})",
        "dropped": f"{model}, dropped and not recalibrated",
    }[variant]


def kind(record: Record) -> str:
    """The key of a record's variant in `KINDS`; "" if it is not one of them.

    A scaling with options, such as `yarn:factor=2`, is of that scaling's kind.
    """
    model, variant = str(record.get("model", "")), str(record.get("variant", ""))
    variant = next((name for name in SCALINGS if variant.lower().startswith(f"{name.lower()}:")), variant)
    if is_dropped(record) or model == "NoPE":
        name = "DroPE" if is_dropped(record) else "NoPE"
        return {"as trained": name, "beta": f"{name} beta", "paper beta": f"{name} paper beta"}.get(variant, "")
    if model == "RoPE":
        return "RoPE" if variant == "as trained" else variant if variant in ("cropped", *SCALINGS) else ""
    return ""


def is_dropped(record: Record) -> bool:
    """Whether a record measured a model whose positional encoding was dropped."""
    return str(record.get("model", "")).lower() == "drope"


def is_rotary(record: Record) -> bool:
    """Whether a record measured a model that rotates (RoPE and its kin): an alternative to the dropped model."""
    return "rope" in str(record.get("model", "")).lower() and not is_dropped(record)


def is_unchanged(record: Record, factor: float | None) -> bool:
    """Whether a variant leaves the model as it was trained at a length of `factor` training lengths."""
    return factor is not None and factor <= 1 and record.get("variant") in UNCHANGED_IN_TRAINING_LENGTH


def in_order(variants: Mapping[str, Record]) -> dict[str, Record]:
    """Variants (label -> one of its records) in the order of tables: `KINDS`, then the others by label."""

    def place(label: str) -> tuple[int, str]:
        name = kind(variants[label])
        return KINDS.index(name) if name in KINDS else len(KINDS), label

    return {label: variants[label] for label in sorted(variants, key=place)}
