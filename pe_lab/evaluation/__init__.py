"""Evaluation of models on sequences longer than their training: perplexity, needles, RULER, LongBench, lm_eval."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "generation.prompted": "Prompted",
    "lm_eval.suite": "check_harness run_harness",
    "measure": "Evaluation",
    "plan": "SUITES Plan parse_length parse_lengths",
    "progress": "run_documents run_evaluation run_prompted",
    "targets": "Target load_subjects locate locate_all parse_steps",
    "variants": "Subject all_variants layers_under parse_methods",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # On first use: a report and `evaluate --help` import the table of suites, which needs no JAX.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
