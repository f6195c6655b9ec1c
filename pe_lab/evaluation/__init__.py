"""What a model does with texts longer than its training: perplexity, needles, the fitted logit scale."""

from pe_lab.evaluation.measure import Evaluation
from pe_lab.evaluation.methods import METHODS, label, methods_of, model_name, parse_methods, read_with
from pe_lab.evaluation.plan import SUITES, Plan, Subject, Unit, parse_length, parse_lengths, parse_suites

__all__ = [
    "METHODS",
    "SUITES",
    "Evaluation",
    "Plan",
    "Subject",
    "Unit",
    "label",
    "methods_of",
    "model_name",
    "parse_length",
    "parse_lengths",
    "parse_methods",
    "parse_suites",
    "read_with",
]
