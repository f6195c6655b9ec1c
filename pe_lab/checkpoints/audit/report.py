"""What the audit prints and writes: a table of hypotheses, the verdict, the error by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from pe_lab.checkpoints.audit.faults import FAULTS
from pe_lab.checkpoints.audit.observed import Observed
from pe_lab.checkpoints.audit.search import RELATED, Audit, Batch, Residual, Trial
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
    if all(batch.compared[0] > 0 for batch in batches):
        found.append(
            "how much the runtime rounds: the logits of token 0 are not among those given, and show it. --tolerance "
            "sets a bound"
        )
    return found


def verdict(audit: Audit, runtime: str) -> str:
    """The answer in words."""
    own = audit.config.residual
    if audit.sound:
        bound = f"rounding allows {own.allowed.max():.1e}"
        if audit.rounding.stray:
            bound = (
                f"that of the first tokens, which no fault of positions changes, is {audit.first:.1e}. So the runtime "
                f"rounds, and a fault that changes logits by less than {own.allowed.max():.1e} is not seen"
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
        hypothesis = found.hypothesis
        # Two together may be found in both orders; of one fault, the first sentence is the plainest.
        same = {_capital(one.sentence): None for one in found.same if set(one.faults) != set(hypothesis.faults)}
        return "\n".join(
            [
                f"Fault: {' and '.join(hypothesis.faults)}. {_capital(hypothesis.sentence)}.",
                *(f"Or, which computes the same of these tokens: {sentence}." for sentence in same),
                *(
                    f"It may also be, with {one.ratio / found.ratio:.2g} times the error: {one.hypothesis.sentence}."
                    for one in audit.equals
                ),
                *(FAULTS[name].advice for name in hypothesis.faults),
            ]
        )
    tried = (
        f"{runtime} differs from what the config says, and no known fault explains it: none of {len(audit.ranked)} "
        "hypotheses."
    )
    if not audit.ranked or audit.ranked[0].ratio > RELATED:
        nearest = f"None leaves less than {RELATED:.0%} of the config's error."
    else:
        best = audit.ranked[0]
        nearest = f"Nearest, with {best.ratio:.0%} of the config's error left: {best.hypothesis.sentence}."
    if audit.first > audit.rounding.tolerance:
        where = f"The first token differs, too (error {audit.first:.1e}): look also at weights, norms and activations."
    else:
        where = (
            "The first token is right, so the fault is in what tokens see of each other: look also at what is not "
            "among the hypotheses, the scale of attention, its soft cap, a mask of documents."
        )
    return f"{tried} {nearest}\n{where}"


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def report(audit: Audit, observed: Observed) -> str:
    """The whole answer."""
    parts = []
    if audit.ranked:
        lines = [
            (
                "what the config says" if one.hypothesis is None else one.hypothesis.sentence,
                f"{one.residual.largest:.1e}",
                f"{one.ratio:.2g}",
                "explains it" if one.explains else "refuted",
            )
            for one in (audit.config, *audit.ranked[:SHOWN])
        ]
        parts.append(table(["hypothesis", "error", "of the config's", "verdict"], lines))
    parts.append(verdict(audit, observed.name))
    if not audit.sound:
        own = audit.config.residual
        begins = "" if own.begins is None else f", beyond rounding from token {own.begins:,} on"
        where = f"from token {own.tokens[0]:,} to {own.tokens[-1]:,}{begins}"
        parts.append(f"Error of what the config says, {where}:\n  {picture(own)}")
    return "\n\n".join(parts)


def record(audit: Audit, observed: Observed, checkpoint: str) -> dict[str, Any]:
    """The answer as numbers, for JSON."""

    def trial(one: Trial) -> dict[str, Any]:
        hypothesis = one.hypothesis
        found = {"error": one.residual.largest, "rms": one.residual.rms, "ratio": one.ratio, "explains": one.explains}
        if hypothesis is None:
            return found
        return {
            "faults": list(hypothesis.faults),
            "sentence": hypothesis.sentence,
            "layers": list(hypothesis.layers),
            **found,
        }

    found, own = audit.found, audit.config.residual
    return {
        "checkpoint": checkpoint,
        "runtime": observed.name,
        "verdict": "sound" if audit.sound else "elsewhere" if audit.elsewhere else "fault" if found else "unexplained",
        "faults": [] if found is None else list(found.hypothesis.faults),
        "config": trial(audit.config),
        "first_tokens": audit.first,
        "tokens": own.tokens.tolist(),
        "error_by_token": _numbers(own.by_position),
        "allowed_by_token": _numbers(own.allowed),
        "hypotheses": [trial(one) for one in audit.ranked],
        "passes": audit.passes,
        "batches": [
            {"tokens": list(one.tokens.shape), "last_position": int(one.positions[-1])} for one in observed.batches
        ],
    }


def _numbers(array: Float[np.ndarray, " P"]) -> list[float]:
    return [float(f"{x:.4g}") for x in array]
