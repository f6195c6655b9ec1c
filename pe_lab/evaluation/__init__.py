"""What models do with texts longer than their training: perplexity, needles, RULER, LongBench, and others' harness."""

from pe_lab.evaluation.generation.prompted import Prompted
from pe_lab.evaluation.lm_eval.suite import check_harness, run_harness
from pe_lab.evaluation.measure import Evaluation
from pe_lab.evaluation.methods import METHODS, label, methods_of, model_name, parse_methods, read_with
from pe_lab.evaluation.plan import SUITES, Plan, Subject, Unit, parse_length, parse_lengths
from pe_lab.evaluation.progress import answer_with_progress, documents_with_progress, measure_with_progress
from pe_lab.evaluation.readers import Reader, all_readers, load_all, read_as
from pe_lab.evaluation.targets import Place, locate, locate_all
from pe_lab.evaluation.tasks import suites

__all__ = [
    "METHODS",
    "SUITES",
    "Evaluation",
    "Place",
    "Plan",
    "Prompted",
    "Reader",
    "Subject",
    "Unit",
    "all_readers",
    "answer_with_progress",
    "check_harness",
    "documents_with_progress",
    "label",
    "load_all",
    "locate",
    "locate_all",
    "measure_with_progress",
    "methods_of",
    "model_name",
    "parse_length",
    "parse_lengths",
    "parse_methods",
    "read_as",
    "read_with",
    "run_harness",
    "suites",
]
