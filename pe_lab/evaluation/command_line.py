"""The command line of `pe_lab.evaluate`, which a sweep gives to it too. Importing this does not import JAX."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.evaluation.suite import add_options
from pe_lab.evaluation.suites import SUITES, parse_suites
from pe_lab.results.variants import VARIANTS
from pe_lab.terminal import any_seed, argument_parser


def parser() -> argparse.ArgumentParser:
    """The command line of pe_lab.evaluate."""
    made = argument_parser(
        "evaluate",
        "`python -m pe_lab.evaluate --from=runs/NAME`: scores beyond the training length, by suite and variant.",
    )
    add = made.add_argument
    add("--from", dest="source", metavar="RUN[,RUN...]", help="runs, phases, checkpoints, hf:DIR, gguf:FILE")
    default = ", ".join(suite.name for suite in SUITES.values() if suite.by_default)
    others = ", ".join(suite.name for suite in SUITES.values() if not suite.by_default)
    add(
        "--suite",
        help=f"of {default} (default: these, as far as possible), {others}; niah:standard,multi_key names tasks; "
        "FILE.py:SUITE is one of your own",
    )
    add("--lengths", help="such as 1x,2x,4x (of the training length) or 2k,4096 (default: the config's)")
    add(
        "--variants",
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
        "--fit-scale",
        action="store_true",
        help="give each --positional the logit scale that fits held-out text best, at each length (suite beta)",
    )
    add(
        "--seed",
        type=any_seed,
        help="which held-out needles (default 0), which prompts (default 42; lm_eval has its own)",
    )
    add(
        "--text",
        metavar="SOURCE",
        help="text to measure on: a glob, jsonl:, parquet:, arrow:, hf:, tfds:, stdlib (default: the held-out data)",
    )
    add("--out", help="the directory of the results (default: RUN/evaluation)")
    add("--attention", metavar="NAME", help="an implementation of attention that python -m pe_lab.attention lists")
    add("--again", action="store_true", help="measure existing results again")
    add("--by-position", action="store_true", help="also print perplexity by position in the sequence")
    add(
        "--together",
        action="store_true",
        help="all processes measure every sample together, with sequences and weights sharded over their devices "
        "(default: each measures samples of its own)",
    )
    add_options(made.add_argument_group("options of suites"), SUITES.values())
    return made


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of pe_lab.evaluate; `ConfigError` for those that cannot be.

    A suite of one's own in `--suite` is loaded first, so that its options are known.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--suite", nargs="?")
    suite = early.parse_known_args(argv)[0].suite
    if suite and ".py:" in suite:
        parse_suites(suite)
    return parser().parse_args(argv)


def parse_variants(text: str) -> tuple[str, ...]:
    """Names of variants from a comma-separated list, in any capitals; `as-trained` for `as trained`."""
    known = {as_flag(name).lower(): name for name in VARIANTS}
    chosen = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name = item.lower().replace(" ", "-").replace("_", "-")
        if name not in known:
            raise ConfigError(f"--variants: no variant is called '{item}'. {did_you_mean(name, list(known))}")
        chosen.append(known[name])
    if not chosen:
        raise ConfigError(f"--variants is empty. Allowed: {', '.join(known)}.")
    return tuple(dict.fromkeys(chosen))


def as_flag(variant: str) -> str:
    """A variant as `--variants` takes it."""
    return variant.replace(" ", "-")


def parse_length(option: str, text: str, training_length: int = 0) -> int:
    """Tokens from `131072`, `128k` (1k = 1024), `1m`, or `2x` times the training length, where there is one."""
    item = text.strip().lower()
    units = {"k": 2**10, "m": 2**20} | ({"x": training_length} if training_length else {})
    unit = units.get(item[-1:], 1)
    examples = "2x, 4096, 8k or 1m" if training_length else "8192, 128k or 1m"
    try:
        tokens = float(item[:-1] if item[-1:] in units else item) * unit
    except ValueError:
        raise ConfigError(f"{option}: '{item}' is no length. Write {examples}.") from None
    if not tokens.is_integer() or not 2 <= tokens < 2**31:
        trained = f" (the training length is {training_length})" if training_length else ""
        raise ConfigError(f"{option}: '{item}' is {tokens:g} tokens; give a whole number from 2 to 2^31 - 1{trained}.")
    return int(tokens)


def parse_lengths(text: str, training_length: int) -> tuple[int, ...]:
    """Lengths in tokens, ascending, from a comma-separated list; see `parse_length`."""
    found = {parse_length("--lengths", item, training_length) for item in text.split(",") if item.strip()}
    if not found:
        raise ConfigError("--lengths is empty. Write for example 1x,2x,4x.")
    return tuple(sorted(found))
