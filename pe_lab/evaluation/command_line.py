"""The command line of `pe_lab.evaluate`, which a sweep gives to it too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pe_lab.errors import ConfigError
from pe_lab.evaluation.tasks.suites import add_arguments
from pe_lab.terminal import any_seed, argument_parser


def parser() -> argparse.ArgumentParser:
    """The command line of pe_lab.evaluate."""
    made = argument_parser(
        "evaluate",
        "`python -m pe_lab.evaluate --from=runs/NAME`: scores beyond the training length, by suite and variant.",
    )
    add = made.add_argument
    add("--from", dest="source", metavar="RUN[,RUN...]", help="runs, phases, checkpoints, hf:DIR, gguf:FILE")
    add(
        "--suite",
        help="of perplexity, needles, beta (default: these, as far as possible), niah, ruler, longbench, many_shot, "
        "lm_eval; niah:standard,multi_key names tasks",
    )
    add("--lengths", help="such as 1x,2x,4x (of the training length) or 2k,4096 (default: the config's)")
    add(
        "--methods",
        help="of as-trained, cropped, pi, ntk, yarn, beta, paper-beta; all, which is all that make sense (the default, "
        "but of prompted suites as-trained); dropped",
    )
    add("--steps", help="checkpoints of each phase: all that are kept, or of steps 8000,14000 (default: the last)")
    add(
        "--positional",
        action="append",
        default=[],
        metavar="[NAME:]ENCODING",
        help="the weights under another encoding, such as yarn:factor=2, or one a layer, as half:rope+nope+...; tables "
        "call it NAME, by default the encoding or layer ranges (rope 0; nope 1); repeatable",
    )
    add(
        "--seed",
        type=any_seed,
        help="which held-out needles (default 0), which prompts (default 42; lm_eval has its own)",
    )
    add("--out", help="the directory of the results (default: RUN/evaluation)")
    add("--attention", metavar="NAME", help="an implementation of attention that python -m pe_lab.attention lists")
    add("--again", action="store_true", help="measure existing results again")
    add(
        "--together",
        action="store_true",
        help="all processes measure every sample together, with sequences and weights sharded over their devices "
        "(default: each measures samples of its own)",
    )
    add_arguments(made)
    return made


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of pe_lab.evaluate; `ConfigError` for those that cannot be."""
    arguments = parser().parse_args(argv)
    if arguments.per_document and arguments.suite not in (None, "perplexity"):
        raise ConfigError("--per-document measures perplexity alone: leave --suite out, or ask in a call of its own.")
    if arguments.per_document and arguments.text is None:
        raise ConfigError("--per-document needs a text with documents: --text=SOURCE.")
    if not arguments.source and not arguments.predictions:
        raise ConfigError("--from is missing: which run, checkpoint, hf:DIR or gguf:FILE is to be evaluated?")
    return arguments
