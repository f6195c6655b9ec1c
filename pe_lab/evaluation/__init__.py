"""What models do with sequences longer than their training: perplexity, prompts, and lm-eval tasks."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "generation.prompted": "Prompted",
    "lm_eval.suite": "check_harness run_harness",
    "measure": "Evaluation",
    "methods": "METHODS label methods_of model_name parse_methods read_with",
    "plan": "SUITES Plan Subject Unit parse_length parse_lengths",
    "progress": "answer_with_progress documents_with_progress measure_with_progress",
    "readers": "Reader all_readers load_all read_as",
    "targets": "Place locate locate_all",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # On first use: a report and `evaluate --help` import the table of suites, which needs no JAX.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
