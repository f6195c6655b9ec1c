"""`python -m pe_lab.analyze NAME`: an analysis's tables and figures, and the numbers behind them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pe_lab import storage
from pe_lab.analysis import (
    check,
    descriptions,
    dope,
    frequencies,
    frequency_use,
    head_entropy,
    heads,
    knock_out,
    layers,
    logit_bounds,
    phase,
    positional_bias,
)
from pe_lab.analysis.analysis import Analysis
from pe_lab.analysis.session import add_arguments, footprint, open_session
from pe_lab.errors import ConfigError, did_you_mean, redacted
from pe_lab.lab.theory import analysis as theory
from pe_lab.page import figure_files
from pe_lab.parallel import on_first, one_program
from pe_lab.positional import build_schedule, describe
from pe_lab.recipes import split_overrides
from pe_lab.results.findings import write_findings
from pe_lab.storage import AnyPath, write_files
from pe_lab.terminal import argument_parser, console, table, works_on
from pe_lab.training.machine import machine, versions

MODULES = (
    check,
    frequency_use,
    heads,
    logit_bounds,
    head_entropy,
    dope,
    positional_bias,
    phase,
    theory,
    layers,
    knock_out,
)
ANALYSES: dict[str, Analysis] = {module.ANALYSIS.name: module.ANALYSIS for module in MODULES}


class Description(NamedTuple):
    """An analysis of descriptions alone: one line for --help, its options, and a function that returns text and files."""

    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], tuple[str, dict[str, bytes]]]


# ---------------------------------------------------------------------------------------------------------------------
# Parsing of numbers


def number(option: str, text: str) -> float:
    """A number such as 2, 0.5 or 1e4."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: '{text}' is not a number.") from None


def whole(option: str, text: str) -> int:
    """A whole number such as 2048, 1e4 or 2k, which is 2048."""
    thousands = text.lower().endswith("k")
    value = number(option, text[:-1] if thousands else text) * (1024 if thousands else 1)
    if not value.is_integer():
        raise ConfigError(f"{option}: '{text}' is not a whole number.")
    return int(value)


def items(option: str, text: str) -> tuple[str, ...]:
    """The parts of `a,b,c`."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ConfigError(f"{option}: '{text}' has an empty place; separate the values with commas.")
    return parts


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of `1,0.5,1e4`."""
    return tuple(number(option, part) for part in items(option, text))


# ---------------------------------------------------------------------------------------------------------------------
# The analyses

FREQUENCIES = {  # option -> how its text is read, its default, and its help
    "--head-dim": (whole, "64", "channels of a head (default: %(default)s)"),
    "--base": (number, "1e4", "RoPE's base (default: %(default)s)"),
    "--length": (whole, "2048", "training length in tokens (default: %(default)s)"),
    "--factors": (numbers, "2,3,4", "scaling factors s (default: %(default)s); the first is also drawn alone"),
    "--methods": (items, "pi,ntk,yarn", f"of {', '.join(frequencies.METHODS)} (default: %(default)s)"),
    "--cache-head-dim": (whole, "256", "channels of a head, for the cache (default: %(default)s)"),
    "--fractions": (numbers, "0.01,0.1,0.25,0.5,0.75,1", "shares that rotate there (default: %(default)s)"),
}


def _frequencies_options(parser: argparse.ArgumentParser) -> None:
    for option, (_, default, help) in FREQUENCIES.items():
        parser.add_argument(option, default=default, help=help)


def _frequencies(args: argparse.Namespace, formats: Sequence[str]) -> tuple[str, dict[str, bytes]]:
    settings = {}
    for option, (parse, *_) in FREQUENCIES.items():
        name = option.removeprefix("--").replace("-", "_")
        settings[name] = parse(option, getattr(args, name))
    found = frequencies.analysis(frequencies.Settings(**settings))
    pictures = {
        f"{figure.name}.{form}": figure_files.render(figure, form)
        for figure in frequencies.figures(found)
        for form in formats
    }
    written = json.dumps(found.to_json(), allow_nan=False)
    return frequencies.tables(found), {**pictures, "frequencies.json": f"{written}\n".encode()}


def _schedule_options(parser: argparse.ArgumentParser) -> None:
    descriptions.add_arguments(parser)
    help = "tokens of the sequence, for schemes that depend on it (default: the training length)"
    parser.add_argument("--length", help=help)


def _schedule(args: argparse.Namespace, formats: Sequence[str]) -> tuple[str, dict[str, bytes]]:
    length = whole("--length", args.length) if args.length else None
    if bool(args.config) == bool(args.positional):
        raise ConfigError("schedule shows a recipe (--config=...) or layers (--positional=...): give one of them.")
    parts = []
    for one in descriptions.described(args):
        shape, at = one.model, length or one.length
        heads = f"{shape.heads} query heads on {shape.kv_heads} key heads of {shape.head_dim} channels"
        schedule = build_schedule(one.layers, shape.heads, shape.kv_heads, shape.head_dim, at)
        name = ", ".join(filter(None, [one.name, one.detail]))
        tokens = f", sequences of {at:,} tokens" if at else ""
        parts.append(f"{name}: {heads}{tokens}\n{describe(schedule, one.layers)}")
    return "\n\n".join(parts), {}


DESCRIPTIONS = {
    "schedule": Description(
        "the positional encoding of every layer of a recipe, as a table that can be checked",
        _schedule_options,
        _schedule,
    ),
    "frequencies": Description(
        "each rotary frequency under PI, NTK and YaRN, and the bytes of a rotary cache by length",
        _frequencies_options,
        _frequencies,
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parser(name: str | None) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of one analysis."""
    known = {**{name: one.summary for name, one in DESCRIPTIONS.items()}, **{n: s.summary for n, s in ANALYSES.items()}}
    listing = table(("analyses:", ""), [(f"  {name}", summary) for name, summary in known.items()], words=2)
    description = f"Runs an analysis: prints its tables, writes its numbers, draws its figures.\n\n{listing}"
    epilog = "NAME --help lists the options of that analysis." if name is None else None
    p = argument_parser("analyze", description, epilog)
    p.allow_abbrev = False
    p.add_argument("analysis", metavar="NAME", help="one of the analyses above")
    where = "RUN/analysis/NAME for a model, else analysis/NAME"
    p.add_argument("--out", metavar="DIR", help=f"where the files go (default: {where})")
    default = "png" if name in DESCRIPTIONS else "pdf,svg"
    p.add_argument("--format", default=default, help="of the figures: some of pdf,svg,png (default: %(default)s)")
    if name in DESCRIPTIONS:
        DESCRIPTIONS[name].options(p)
    elif name is not None:
        analysis = ANALYSES[name]
        if analysis.models:
            add_arguments(p)
        analysis.options(p)
    return p


def chosen_analysis(argv: Sequence[str]) -> str | None:
    """The analysis that a command line names, parsed before its options are known; None if it names none."""
    first = argument_parser("analyze", "", add_help=False, allow_abbrev=False)
    first.add_argument("analysis", nargs="?")
    name = first.parse_known_args(argv)[0].analysis
    names = [*DESCRIPTIONS, *ANALYSES]
    if name is not None and name not in names:
        raise ConfigError(f"--analysis: there is no analysis '{name}'. {did_you_mean(name, names)}")
    return name


def run_analysis(
    analysis: Analysis, args: argparse.Namespace, out: AnyPath | None, formats: Sequence[str]
) -> tuple[list[AnyPath], bool]:
    """Runs an analysis, prints what it found, and writes its files; returns their paths, and whether a check failed."""
    begun = time.monotonic()
    if analysis.models:
        session = open_session(analysis.name, args, out)
        findings, directory = analysis.run(session), session.out
        if findings is None:  # a plan alone was asked for
            return [], False
        about = session.about()
    else:
        findings = analysis.run(args)  # which may set `directory`, for the analysis of a run
        directory = out or getattr(args, "directory", Path("analysis") / analysis.name)
        about = {**footprint(begun), "machine": machine(), "versions": versions()}
    about = {"command": command_line(args.argv), "source": analysis.source, **about}
    out = console()
    for one in findings.tables:
        out.print(f"{one.title}\n{table(one.header, one.rows, one.words)}\n")
    for sentence in findings.sentences:
        out.print(sentence)
    out.print(f"{about['seconds']:,} s, peak memory {about['peak_memory_gib']} GiB")

    def write() -> list[AnyPath]:
        written = write_findings(directory, analysis.name, findings, about)
        drawn = {
            directory / f"{figure.name}.{form}": figure_files.render(figure, form)
            for figure in findings.figures
            for form in formats
        }
        return written + write_files(drawn, "Give another --out.")

    return on_first(write), findings.failed


def shown_paths(paths: Sequence[AnyPath], most: int = 30) -> list[str]:
    """Paths for people: a directory with more than `most` of them is one line."""
    counts = Counter(path.parent for path in paths)
    lines = [f"{p.parent}: {counts[p.parent]} files" if counts[p.parent] > most else str(p) for p in paths]
    return list(dict.fromkeys(lines))


def command_line(argv: Sequence[str]) -> str:
    """The command, as a shell reads it."""
    return redacted(shlex.join(["python", "-m", "pe_lab.analyze", *argv]))


@works_on
def main(argv: Sequence[str]) -> int:
    given = list(argv)
    argv, overrides = split_overrides(argv)
    analysis = chosen_analysis(argv)
    args = parser(analysis).parse_args(argv)
    if overrides and not getattr(args, "config", None):
        raise ConfigError(f"--config.{next(iter(overrides))}: there is no --config here to override.")
    args.overrides, args.argv = overrides, given
    formats = tuple(dict.fromkeys(items("--format", args.format)))
    for form in formats:
        if form not in figure_files.FORMATS:
            raise ConfigError(f"--format: '{form}' cannot be written. {did_you_mean(form, figure_files.FORMATS)}")
    out = storage.path("--out", args.out) if args.out else None
    if out is not None:
        storage.check_place("--out", out)
    failed = False
    with one_program():
        if args.analysis in DESCRIPTIONS:
            text, files = DESCRIPTIONS[args.analysis].run(args, formats)
            out = out or Path("analysis") / args.analysis
            contents = {out / name: data for name, data in files.items()}
            written = on_first(lambda: write_files(contents, "Give another --out."))
            print(text)
        else:
            written, failed = run_analysis(ANALYSES[args.analysis], args, out, formats)
        if written:
            print("\nWrote:", *shown_paths(written), sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
