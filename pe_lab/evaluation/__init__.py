"""Evaluation of models on sequences longer than their training: perplexity, needles, RULER, LongBench, lm_eval."""

from pe_lab.evaluation.generation.prompted import Prompted
from pe_lab.evaluation.lm_eval.suite import check_harness, run_harness
from pe_lab.evaluation.measure import Evaluation
from pe_lab.evaluation.plan import SUITES, Plan, parse_length, parse_lengths
from pe_lab.evaluation.progress import run_documents, run_evaluation, run_prompted
from pe_lab.evaluation.targets import Target, load_subjects, locate, locate_all, parse_steps
from pe_lab.evaluation.tasks import suites
from pe_lab.evaluation.variants import Subject, all_variants, layers_under, parse_methods

__all__ = [
    "SUITES",
    "Evaluation",
    "Plan",
    "Prompted",
    "Subject",
    "Target",
    "all_variants",
    "check_harness",
    "layers_under",
    "load_subjects",
    "locate",
    "locate_all",
    "parse_length",
    "parse_lengths",
    "parse_methods",
    "parse_steps",
    "run_documents",
    "run_evaluation",
    "run_harness",
    "run_prompted",
    "suites",
]
