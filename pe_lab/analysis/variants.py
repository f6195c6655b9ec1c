"""The variant that a result record measured: which model, changed how."""

from __future__ import annotations

from collections.abc import Mapping

from pe_lab.results.records import Record
from pe_lab.results.variants import SCALINGS, UNCHANGED_IN_TRAINING_LENGTH

# The variants that reports know, in the order of tables.
KINDS = (
    *("RoPE", "cropped", "PI", "NTK", "YaRN"),
    *("DroPE", "DroPE beta", "DroPE paper beta"),
    *("NoPE", "NoPE beta", "NoPE paper beta"),
)


def kind(record: Record) -> str:
    """The key of a record's variant in `KINDS`; "" if it is not one of them.

    A scaling with options, such as `yarn:factor=2`, is of that scaling's kind.
    """
    model, method = str(record.get("model", "")), str(record.get("method", ""))
    method = next((name for name in SCALINGS if method.lower().startswith(f"{name.lower()}:")), method)
    if is_dropped(record) or model == "NoPE":
        name = "DroPE" if is_dropped(record) else "NoPE"
        return {"as trained": name, "beta": f"{name} beta", "paper beta": f"{name} paper beta"}.get(method, "")
    if model == "RoPE":
        return "RoPE" if method == "as trained" else method if method in ("cropped", *SCALINGS) else ""
    return ""


def is_dropped(record: Record) -> bool:
    """Whether a record measured a model whose positional encoding was dropped."""
    return str(record.get("model", "")).lower() == "drope"


def is_rotary(record: Record) -> bool:
    """Whether a record measured a model that rotates (RoPE and its kin): an alternative to the dropped model."""
    return "rope" in str(record.get("model", "")).lower() and not is_dropped(record)


def is_unchanged(record: Record, factor: float | None) -> bool:
    """Whether a variant leaves the model as it was trained at a length of `factor` training lengths."""
    return factor is not None and factor <= 1 and record.get("method") in UNCHANGED_IN_TRAINING_LENGTH


def in_order(variants: Mapping[str, Record]) -> dict[str, Record]:
    """Variants (label -> one of its records) in the order of tables: `KINDS`, then the others by label."""

    def place(label: str) -> tuple[int, str]:
        name = kind(variants[label])
        return KINDS.index(name) if name in KINDS else len(KINDS), label

    return {label: variants[label] for label in sorted(variants, key=place)}
