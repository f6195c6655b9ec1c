"""`python -m pe_lab.analyze NAME`: an analysis's tables and figures, and the numbers behind them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pe_lab import storage
from pe_lab.errors import ConfigError, did_you_mean, redacted
from pe_lab.page import figure_files
from pe_lab.recipes import split_overrides
from pe_lab.results.findings import write_findings
from pe_lab.storage import AnyPath
from pe_lab.terminal import argument_parser, console, table, works_on

if TYPE_CHECKING:
    from pe_lab.analysis.analysis import Analysis

FORMATS = figure_files.FORMATS
# Of each analysis, one line for --help. Its module is imported when it is chosen: JAX takes seconds to import.
ANALYSES = {
    "schedule": "the positional encoding of every layer of a recipe, as a table that can be checked",
    "frequencies": "each rotary frequency under PI, NTK and YaRN, and the bytes of a rotary cache by length",
    "check": "whether encodings are what they say: causal, relative, exact under a cache, ...; and what they cost",
    "frequency_use": "which frequencies heads use: norms of each pair of channels, and its part in the logits",
    "heads": "what each head attends to, by distance and by kind: positional, sink, semantic, retrieval",
    "logit_bounds": "how close logits come to the product of the norms of query and key, and from which pairs",
    "head_entropy": "entropies of heads (DoPE): effective ranks of queries and keys, scores for surgery --mask-heads",
    "dope": "DoPE's sweep over methods, scores, numbers of heads and orders, against the model without it",
    "positional_bias": "bias of heads toward their own and the previous token, its gradients, and the prefix spread",
    "phase": "rotary phases: pairs outside their trained range, rounding errors, and the base that a precision allows",
    "coordinates": "whether activations keep their size as the model gets wider, as muP promises: a coordinate check",
    "theory": "constructions and bounds of the papers as numbers: each statement with its verdict",
    "layers": "what the encoding of each layer or head is worth: the loss without it, and without several",
    "knock_out": "whether needles are found by the heads that attend to them: the score with these heads masked",
}
ELSEWHERE = {"theory": "pe_lab.lab.theory.analysis"}  # modules outside pe_lab.analysis


def load_analysis(name: str) -> Analysis:
    """The analysis of a name in `ANALYSES`."""
    return importlib.import_module(ELSEWHERE.get(name, f"pe_lab.analysis.{name}")).ANALYSIS


def parser(name: str | None) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of one analysis."""
    listing = table(("analyses:", ""), [(f"  {name}", summary) for name, summary in ANALYSES.items()], words=2)
    description = f"Runs an analysis: prints its tables, writes its numbers, draws its figures.\n\n{listing}"
    epilog = "NAME --help lists the options of that analysis." if name is None else None
    p = argument_parser("analyze", description, epilog)
    p.allow_abbrev = False
    p.add_argument("analysis", metavar="NAME", help="one of the analyses above")
    where = "RUN/analysis/NAME for a model, else analysis/NAME"
    p.add_argument("--out", metavar="DIR", help=f"where the files go (default: {where})")
    p.add_argument("--format", default="pdf,svg", help="of the figures: some of pdf,svg,png (default: %(default)s)")
    if name is not None:
        analysis = load_analysis(name)
        if analysis.models:
            from pe_lab.analysis.session import add_arguments

            add_arguments(p)
        analysis.options(p)
    return p


def chosen_analysis(argv: Sequence[str]) -> str | None:
    """The analysis that a command line names, parsed before its options are known; None if it names none."""
    first = argument_parser("analyze", "", add_help=False, allow_abbrev=False)
    first.add_argument("analysis", nargs="?")
    name = first.parse_known_args(argv)[0].analysis
    if name is not None and name not in ANALYSES:
        raise ConfigError(f"There is no analysis '{name}'. {did_you_mean(name, list(ANALYSES))}")
    return name


def run_analysis(
    name: str, args: argparse.Namespace, out: AnyPath | None, formats: Sequence[str]
) -> tuple[list[AnyPath], bool]:
    """Runs an analysis, prints what it found, and writes its files; returns their paths, and whether a check failed."""
    from pe_lab.analysis.session import footprint, open_session
    from pe_lab.identity import machine, versions
    from pe_lab.parallel import on_first

    begun, analysis = time.monotonic(), load_analysis(name)
    if analysis.models:
        session = open_session(name, args, out)
        findings = analysis.run(session)
    else:
        findings = analysis.run(args)  # which may set `directory`, for the analysis of a run
    if findings is None:
        return [], False
    if analysis.models:
        directory, about = session.out, session.about()
    else:
        directory = out or getattr(args, "directory", Path("analysis") / name)
        about = {**footprint(begun), "machine": machine(), "versions": versions()}
    about = {"command": command_line(args.argv), "source": analysis.source, **about}
    shown = console()
    for one in findings.tables:
        shown.print(f"{one.title}\n{table(one.header, one.rows, one.words)}\n")
    for sentence in findings.sentences:
        shown.print(sentence)
    shown.print(f"{about['seconds']:,} s, peak memory {about['peak_memory_gib']} GiB")

    def write() -> list[AnyPath]:
        drawn = {
            f"{figure.name}.{form}": figure_files.render(figure, form)
            for figure in findings.figures
            for form in formats
        }
        whole = dataclasses.replace(findings, files={**findings.files, **drawn})
        return write_findings(directory, name, whole, about)  # all files or none

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
    args = parser(chosen_analysis(argv)).parse_args(argv)

    from pe_lab.analysis.analysis import items
    from pe_lab.parallel import one_program

    if overrides and not getattr(args, "config", None):
        raise ConfigError(f"--config.{next(iter(overrides))}: there is no --config here to override.")
    args.overrides, args.argv = overrides, given
    formats = tuple(dict.fromkeys(items("--format", args.format)))
    for form in formats:
        if form not in FORMATS:
            raise ConfigError(f"--format: '{form}' cannot be written. {did_you_mean(form, FORMATS)}")
    out = storage.path("--out", args.out) if args.out else None
    if out is not None:
        storage.check_place("--out", out)
    with one_program():
        written, failed = run_analysis(args.analysis, args, out, formats)
        if written:
            print("\nWrote:", *shown_paths(written), sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
