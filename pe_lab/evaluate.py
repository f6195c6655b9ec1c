"""`python -m pe_lab.evaluate --from=runs/NAME`: perplexity and needles by length, under each method."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pe_lab.config import Config, DataConfig, EvaluationConfig, SourceConfig, UserError, command, from_dict


def locate(given: Path) -> tuple[Path, list[Path]]:
    """The run directory that a path belongs to, and the checkpoints it means.

    A run directory means the last checkpoint of each phase; a phase, a directory made by surgery, or a single
    checkpoint mean that one.
    """
    from pe_lab.checkpoints import find_checkpoints, is_foreign, resolve

    if is_foreign(given):
        raise UserError(
            f"--from '{given}' is no checkpoint of pe_lab. Bring it in first: python -m pe_lab.convert --from={given} "
            "--to=runs/NAME"
        )
    if not given.is_dir():
        raise UserError(f"--from '{given}' is not a directory. Give a run, a phase of it, or a checkpoint.")
    given = given.resolve()
    if (given / "run.json").is_file():
        found = find_checkpoints(given)
        if not found:
            raise UserError(f"--from '{given}' has no checkpoint yet. Train it first (python -m pe_lab.train).")
        return given, found
    directory, step = resolve(given)
    directory = directory.resolve()
    above = [directory, *list(directory.parents)[:2]]  # checkpoints, phase, run
    root = next((path for path in above if (path / "run.json").is_file()), directory.parent)
    return root, [directory / str(step)]


def run_name(root: Path) -> str:
    """What the run is called: by its run.json, else its directory."""
    try:
        return str(json.loads((root / "run.json").read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return root.name


def saved_config(metadata: dict[str, Any], where: Path) -> tuple[DataConfig, EvaluationConfig]:
    """What a checkpoint's own config says of its data and of evaluation."""
    config = metadata.get("config")
    if not config:
        raise UserError(
            f"{where} does not say what it was trained on (it was converted). Measure it on text of yours: --text=GLOB."
        )
    whole = {name: config[name] for name in ("data", "evaluation") if name in config}
    read = from_dict(Config, whole, f"config of {where}")
    return read.data, read.evaluation


def own_text(pattern: str, tokenizer: str, where: Path) -> tuple[DataConfig, EvaluationConfig]:
    """Text files to measure on, all of them, instead of what a checkpoint's data holds out."""
    if not tokenizer:
        raise UserError(f"--text: {where} came without a tokenizer, so text cannot be read.")
    sources = (SourceConfig(source=f"text:{pattern}"),)
    return DataConfig(sources=sources, tokenizer=tokenizer, validation_fraction=1.0), EvaluationConfig()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pe_lab.evaluate", description=__doc__)
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        type=Path,
        required=True,
        help="a run directory, a phase of it, or a checkpoint",
    )
    add("--text", metavar="GLOB", help="text files to measure on (default: what the run's data holds out)")
    add("--suite", help="of perplexity, needles, beta (default: all that are possible)")
    add("--lengths", help="such as 1x,2x,4x (of the training length) or 2k,4096 (default: the config's)")
    add(
        "--methods",
        help="of as-trained, cropped, pi, ntk, yarn, beta, paper-beta (default: all that make sense), dropped",
    )
    add("--tokens", type=int, help="held-out tokens per perplexity")
    add("--fit-tokens", type=int, help="other held-out tokens, for the logit scale")
    add("--windows", type=int, help="windows per needle accuracy")
    add("--seed", type=int, help="which held-out needles")
    add("--out", type=Path, help="where the rows go (default: RUN/evaluation)")
    add("--attention", metavar="NAME", help="how to attend: a name that python -m pe_lab.attention lists")
    add("--by-position", action="store_true", help="also print perplexity by position within the text")
    add("--again", action="store_true", help="measure again what is measured already")
    arguments = parser.parse_args(argv)
    for name in ("tokens", "fit_tokens", "windows"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the verb."""
    arguments = parse_arguments(argv)
    from pe_lab import evaluation as ev
    from pe_lab.checkpoints import open_checkpoint
    from pe_lab.parallel import hide_absent_tpu

    suites = ev.parse_suites(arguments.suite) if arguments.suite is not None else None
    chosen = ev.parse_methods(arguments.methods) if arguments.methods is not None else None
    hide_absent_tpu()
    root, paths = locate(arguments.source)
    name = run_name(root)
    subjects = [ev.Subject(open_checkpoint(path), name, os.path.relpath(path, root)) for path in paths]
    if arguments.text is None:
        data, settings = saved_config(subjects[-1].checkpoint.metadata, paths[-1])
    else:
        data, settings = own_text(arguments.text, subjects[-1].checkpoint.tokenizer, paths[-1])
    given = {
        "tokens": arguments.tokens,
        "fit_tokens": arguments.fit_tokens,
        "needle_windows": arguments.windows,
        "seed": arguments.seed,
    }
    settings = dataclasses.replace(settings, **{k: v for k, v in given.items() if v is not None})
    lengths = ",".join(f"{factor}x" for factor in settings.factors)
    if arguments.lengths is not None:
        lengths = arguments.lengths
    plan = ev.Plan(ev.parse_lengths(lengths, subjects[0].training_length), suites, chosen, settings, arguments.again)
    out = arguments.out or root / "evaluation"
    evaluation = ev.Evaluation(subjects, data, plan, out, attention=arguments.attention)
    rows = measure_with_progress(evaluation)
    print_tables(rows)
    if arguments.by_position:
        print_by_position(rows)
    return 0


def describe(unit: Any) -> str:
    """What is being measured, for a line of progress."""
    return f"{unit.suite} {unit.length:,} {unit.subject.model} {unit.method}"


def measure_with_progress(evaluation: Any) -> list[dict[str, Any]]:
    """Runs an evaluation under a progress bar; says what was left out and what was there already."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for sentence in evaluation.skipped:
        console.print(sentence)
    models = ", ".join(dict.fromkeys(f"{s.model} ({s.path})" for s in evaluation.subjects))
    console.print(f"{len(evaluation.units)} measurements of {models}")
    reused, next_line = 0, time.monotonic() + 5
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("compiling", total=evaluation.work)
        done, described = 0, describe(evaluation.units[0]) if evaluation.units else ""
        upcoming = iter(evaluation.units[1:])

        def tell(advanced: int) -> None:
            nonlocal next_line
            bar.update(task, completed=done + advanced, description=described)
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + 10
                console.print(f"{bar.tasks[0].percentage:.0f}%  {described}")

        def measured(unit: Any, known: bool) -> None:
            nonlocal reused, done, described, within
            reused += known
            following = next(upcoming, unit)
            described = describe(following)
            done, within = done + evaluation.cost(unit), 0
            tell(0)

        within = 0  # tokens read of what is being measured

        def heard(tokens: int) -> None:
            nonlocal within
            within += tokens
            # Some methods read a text more than once.
            tell(min(within, evaluation.work - done))

        rows = evaluation.run(measured, heard)
    if reused:
        console.print(f"{reused} of them were measured before (--again measures them again).")
    console.print(f"Rows: {next(iter(evaluation.files.values())).path.parent}")
    return rows


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Method by length, one table a suite and source, the best of a length in bold; and the scales."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)  # a log has no width of its own; 80 would break the labels
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["suite"] != "beta":
            groups.setdefault((row["suite"], row["source"]), []).append(row)
    for (suite, source), group in groups.items():
        console.print(score_table(suite, source, group))
    for row in rows:
        if row["suite"] == "beta":
            console.print(
                f"{row['label']} at {row['length']:,}: β = {row['beta']:.3f}, c = {row['c']:.3f}, "
                f"held-out loss {row['nll_before']:.4f} -> {row['nll_after']:.4f}",
                soft_wrap=True,
            )


def print_by_position(rows: Sequence[dict[str, Any]]) -> None:
    """Perplexity of the tokens between two positions, by octaves: where in a long text a method fails."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    measured = [row for row in rows if row["suite"] == "perplexity"]
    for length in sorted({row["length"] for row in measured}):
        table = Table(title=f"Perplexity by position in texts of {length:,} tokens", title_justify="left")
        table.add_column("")
        edges = [0, *(2**n for n in range(9, 40) if 2**n < length), length]
        for first, last in zip(edges, edges[1:], strict=False):
            table.add_column(f"{first:,} .. {last:,}", justify="right", no_wrap=True)
        for row in measured:
            if row["length"] == length:
                table.add_row(row["label"], *octave_perplexities(row, edges))
        console.print(table)


def octave_perplexities(row: dict[str, Any], edges: Sequence[int]) -> list[str]:
    """Perplexity between each two of `edges`, from a row's finer bins of positions."""
    fine, losses = row["position_edges"], row["nll_by_position"]
    bins = [(a, b, nll) for a, b, nll in zip(fine, fine[1:], losses, strict=False) if nll is not None]
    found = []
    for first, last in zip(edges, edges[1:], strict=False):
        inside = [(b - a, nll) for a, b, nll in bins if first <= a and b <= last]
        total = sum(width for width, _ in inside)
        mean = sum(width * nll for width, nll in inside) / total if total else None
        found.append("–" if mean is None or mean > 700 else f"{math.exp(mean):.4g}")
    return found


def score_table(suite: str, source: str, rows: Sequence[dict[str, Any]]) -> Any:
    """One suite on one source as a rich table."""
    from rich.markup import escape
    from rich.table import Table

    value, best = ("accuracy", max) if suite == "needles" else ("perplexity", min)
    title = "Needle accuracy" if suite == "needles" else "Perplexity"
    table = Table(title=escape(f"{title} on {source} by length, ± standard error"), title_justify="left")
    if suite == "needles":
        # What tells the values of a window from all others, and not one from another, already scores this much.
        table.caption = f"picking any value that was stated and not yet asked for: {rows[0]['guessing']:.0%}"
    table.add_column("")
    winners = {}
    for length in sorted({row["length"] for row in rows}):
        at_length = [row for row in rows if row["length"] == length]
        winners[length] = best((row[value] for row in at_length if row[value] is not None), default=None)
        table.add_column(f"{length:,} ({at_length[0]['factor']:g}x)", justify="right", no_wrap=True)
    cells = {(row["label"], row["checkpoint"], row["length"]): row for row in rows}
    names = list(dict.fromkeys((row["label"], row["checkpoint"]) for row in rows))
    for label, checkpoint in names:
        shown = []
        for length, winner in winners.items():
            row = cells.get((label, checkpoint, length))
            text = describe_cell(row)
            shown.append(f"[bold]{text}[/]" if row and row[value] is not None and row[value] == winner else text)
        twice = [name for name, _ in names].count(label) > 1
        table.add_row(escape(f"{label} ({checkpoint})" if twice else label), *shown)
    return table


def describe_cell(row: dict[str, Any] | None) -> str:
    """A value with its standard error."""
    if row is None:
        return "–"
    if row["suite"] == "needles":
        error = f" ±{100 * row['stderr']:.1f}" if row["stderr"] is not None else ""
        return f"{100 * row['accuracy']:.1f}%{error}"
    if row["perplexity"] is None:
        return "not a number"
    # A relative error of perplexity is an absolute one of the loss.
    return f"{row['perplexity']:.4g}" + (f" ±{row['perplexity'] * row['stderr']:.2g}" if row["stderr"] else "")


if __name__ == "__main__":
    sys.exit(main())
