"""What the audit prints: a table of hypotheses, the verdict, the error by position, and the table of the self-test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from pe_lab.checkpoints.audit.faults import ADVICE
from pe_lab.checkpoints.audit.observed import Observed
from pe_lab.checkpoints.audit.search import RELATED, Audit, Batch, Residual, Trial
from pe_lab.checkpoints.audit.self_test import Outcome
from pe_lab.positional import Layer
from pe_lab.terminal import table

SHOWN = 6  # hypotheses
CELLS = 64  # of the picture
HEIGHTS = "▁▂▃▄▅▆▇█"
SMALLEST = 1e-7  # of the picture's logarithmic scale, which ends at 1


def picture(residual: Residual) -> str:
    """The error by token, the largest one of each cell, on a logarithmic scale from 1e-7 to 1."""
    cells = np.array_split(residual.by_position, min(CELLS, len(residual.by_position)))
    heights = [np.log10(max(float(cell.max()), SMALLEST) / SMALLEST) / -np.log10(SMALLEST) for cell in cells]
    return "".join(HEIGHTS[min(int(height * len(HEIGHTS)), len(HEIGHTS) - 1)] for height in heights)


def _by_position(residual: Residual) -> str:
    last, begins = len(residual.by_position) - 1, residual.begins
    where = "" if begins is None else f", beyond rounding from token {begins:,} on"
    return f"Error of what the config says, from token 0 to {last:,}{where}:\n  {picture(residual)}"


def unseen(layers: Sequence[Layer], batches: Sequence[Batch]) -> list[str]:
    """What these batches cannot show of these layers."""
    found, longest = [], max(len(batch.positions) for batch in batches)
    windows = {layer.window for layer in layers if layer.window is not None and layer.window >= longest}
    if windows:
        needs = max(windows) + 1
        found.append(f"windows of {max(windows):,} tokens: --length={needs} or more shows them")
    farthest = max(batch.length for batch in batches)
    scalings = {getattr(layer.encoding, "scaling", None) for layer in layers}
    lengths = {one.original_length for one in scalings if one is not None and one.dynamic}
    if any(farthest <= length for length in lengths):
        found.append(f"what changes beyond {max(lengths):,} tokens: the sequences are not longer")
    if farthest <= 257:
        found.append("positions in bfloat16, which counts to 256")
    return found


def verdict(audit: Audit, runtime: str) -> str:
    """The answer in words."""
    own = audit.config.residual
    if audit.sound:
        bound = f"rounding allows {own.allowed.max():.1e}"
        if audit.rounding.stray:
            bound = (
                f"that of the first tokens, which no fault of positions changes, is {audit.first:.1e}. So the runtime "
                f"rounds to 16 bits or fewer, and a fault that changes logits by less than {own.allowed.max():.1e} is "
                "not seen"
            )
        return (
            f"Sound: {runtime} computes what the config says. The largest error is {own.largest:.1e} of the largest "
            f"logit; {bound}."
        )
    if audit.elsewhere:
        return (
            f"No fault of positions: {runtime} computes other logits for the first token already (error "
            f"{audit.first:.1e}), which attends to itself alone. Look at weights, norms, activations and their dtypes, "
            "or whether the runtime adds a token."
        )
    if (found := audit.found) is not None:
        lines = [f"Fault: {found.hypothesis.fault}. {_capital(found.hypothesis.sentence)}."]
        same = {one.sentence: None for one in found.same if one.sentence != found.hypothesis.sentence}
        lines += [f"Or, which computes the same of these tokens: {sentence}." for sentence in same]
        lines += [
            f"It may also be, with {one.ratio / found.ratio:.2g} times the error: {one.hypothesis.sentence}."
            for one in audit.equals
        ]
        return "\n".join([*lines, ADVICE[found.hypothesis.fault]])
    tried = f"{runtime} does not compute what the config says, and none of {len(audit.ranked)} hypotheses explains it."
    if not audit.ranked or audit.ranked[0].ratio > RELATED:
        return f"{tried} None leaves less than {RELATED:.0%} of the config's error: look for another kind of fault."
    best = audit.ranked[0]
    return f"{tried} Nearest, with {best.ratio:.0%} of the config's error left: {best.hypothesis.sentence}."


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def report(audit: Audit, observed: Observed) -> str:
    """The whole answer."""
    parts = []
    if audit.ranked:
        trials = [audit.config, *audit.ranked[:SHOWN]]
        rows = [
            (
                "what the config says" if one.hypothesis is None else one.hypothesis.sentence,
                f"{one.residual.largest:.1e}",
                f"{one.ratio:.2g}",
                "explains it" if one.explains else "refuted",
            )
            for one in trials
        ]
        parts.append(table(["hypothesis", "error", "of the config's", "verdict"], rows))
    parts.append(verdict(audit, observed.name))
    if not audit.sound:
        parts.append(_by_position(audit.config.residual))
    return "\n\n".join(parts)


def record(audit: Audit, observed: Observed, checkpoint: str) -> dict[str, Any]:
    """The answer as numbers, for JSON."""

    def trial(one: Trial) -> dict[str, Any]:
        hypothesis = one.hypothesis
        found = {"error": one.residual.largest, "rms": one.residual.rms, "ratio": one.ratio, "explains": one.explains}
        if hypothesis is None:
            return found
        return {"fault": hypothesis.fault, "sentence": hypothesis.sentence, "layers": list(hypothesis.layers), **found}

    found = audit.found
    return {
        "checkpoint": checkpoint,
        "runtime": observed.name,
        "verdict": "sound" if audit.sound else "elsewhere" if audit.elsewhere else "fault" if found else "unexplained",
        "fault": None if found is None else found.hypothesis.fault,
        "config": trial(audit.config),
        "first_tokens": audit.first,
        "error_by_token": _numbers(audit.config.residual.by_position),
        "allowed_by_token": _numbers(audit.config.residual.allowed),
        "hypotheses": [trial(one) for one in audit.ranked],
        "passes": audit.passes,
        "batches": [
            {"tokens": list(one.tokens.shape), "last_position": int(one.positions[-1])} for one in observed.batches
        ],
    }


def _numbers(array: Float[np.ndarray, " T"]) -> list[float]:
    return [float(f"{x:.4g}") for x in array]


def self_test_table(found: Sequence[Outcome]) -> str:
    """The faults by model, with the error that the right hypothesis leaves; and why some do not apply."""
    faulty = [one for one in found if one.fault is not None]
    names = list(dict.fromkeys(one.model for one in faulty))
    cells: dict[str, dict[str, str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in faulty:
        cells.setdefault(one.fault, {})[one.model] = _cell(one)
        if one.audit is None:
            reasons.setdefault((one.fault, one.why), []).append(one.model)
    rows = [(fault, *(by_model.get(name, "") for name in names)) for fault, by_model in cells.items()]
    parts = [table(["fault", *names], rows)] if rows else []
    parts += [f"does not apply: {fault}, to {', '.join(to)}: {why}" for (fault, why), to in reasons.items()]
    sound = [(one.model, f"{one.audit.config.residual.largest:.1e}", "sound" if one.passed else "FALSE ALARM")
             for one in found if one.fault is None]  # fmt: skip
    parts += ["", table(["no fault", "error", "verdict"], sound)] if sound else []
    return "\n".join(parts)


def _cell(one: Outcome) -> str:
    if one.audit is None:
        return "-"
    if not one.passed:
        return "MISSED"
    return f"{one.audit.found.residual.largest:.1e}"
