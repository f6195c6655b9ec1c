"""What is learned from runs and models: scores, verdicts, and the studies of `pe_lab.analyze`.

Each study's measurement is a function of a loaded model that returns arrays: `pe_lab.analysis.heads(lm, tokens)`. They
are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "frequency_use": "channel_pairs",
    "heads": "head_attention",
    "logit_bounds": "channel_pairs",
    "head_entropy": "head_spectra",
    "positional_bias": "bias_gradients",
    "layer_costs": "studies.layers",
    "greedy_order": "studies.layers",
    "retrieval_scores": "studies.knock_out",
    "needle_scores": "studies.knock_out",
    "claims": "theory.claims",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
