"""All hypotheses of the audit for a model."""

from __future__ import annotations

from pe_lab.checkpoints.audit.channel_faults import fractions, permutations
from pe_lab.checkpoints.audit.faults import AuditedModel, Hypothesis
from pe_lab.checkpoints.audit.frequency_faults import bases_and_scalings, lengths, yarn
from pe_lab.checkpoints.audit.layer_faults import encodings, windows
from pe_lab.checkpoints.audit.position_faults import positions

KINDS = (bases_and_scalings, yarn, lengths, fractions, permutations, encodings, windows, positions)


def hypotheses(at: AuditedModel) -> list[Hypothesis]:
    """Every hypothesis that needs no look at the runtime's logits, without those that change nothing."""
    return [one for kind in KINDS for one in kind(at) if one.layers]
