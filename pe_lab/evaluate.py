"""`python -m pe_lab.evaluate --from=runs/NAME`: perplexity and needles by length, under every method that makes sense."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pe_lab.config import Config, DataConfig, EvaluationConfig, UserError, command, from_dict


def locate(given: Path) -> tuple[Path, list[Path]]:
    """The run directory that a path belongs to, and the checkpoints it means.

    A run directory means the last checkpoint of each phase; a phase, a directory made by surgery, or a single
    checkpoint mean that one.
    """
    from pe_lab.checkpoints import find_checkpoints, resolve

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
        raise UserError(f"{where} does not say what it was trained on; its data cannot be opened.")
    whole = {name: config[name] for name in ("data", "evaluation") if name in config}
    read = from_dict(Config, whole, f"config of {where}")
    return read.data, read.evaluation


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pe_lab.evaluate", description=__doc__)
    add = parser.add_argument
    add("--from", dest="source", type=Path, required=True, help="a run directory, a phase of it, or a checkpoint")
    add("--suite", help="of perplexity, needles, beta (default: all that are possible)")
    add("--lengths", help="such as 1x,2x,4x (of the training length) or 2k,4096 (default: the config's)")
    add("--methods", help="of as-trained, cropped, pi, ntk, yarn, beta (default: all that make sense)")
    add("--tokens", type=int, help="held-out tokens per perplexity")
    add("--fit-tokens", type=int, help="other held-out tokens, for the logit scale")
    add("--windows", type=int, help="windows per needle accuracy")
    add("--seed", type=int, help="which held-out needles")
    add("--out", type=Path, help="where the rows go (default: RUN/evaluation)")
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
    import dataclasses

    from pe_lab import evaluation as ev
    from pe_lab.checkpoints import open_checkpoint

    suites = ev.parse_suites(arguments.suite) if arguments.suite is not None else None
    chosen = ev.parse_methods(arguments.methods) if arguments.methods is not None else None
    root, paths = locate(arguments.source)
    name = run_name(root)
    subjects = [ev.Subject(open_checkpoint(path), name, os.path.relpath(path, root)) for path in paths]
    data, settings = saved_config(subjects[-1].checkpoint.metadata, paths[-1])
    given = {
        "tokens": arguments.tokens,
        "fit_tokens": arguments.fit_tokens,
        "needle_windows": arguments.windows,
        "seed": arguments.seed,
    }
    settings = dataclasses.replace(settings, **{k: v for k, v in given.items() if v is not None})
    lengths = arguments.lengths or ",".join(f"{factor}x" for factor in settings.factors)
    plan = ev.Plan(
        ev.parse_lengths(lengths, subjects[0].training_length), suites, chosen, settings, arguments.again
    )
    evaluation = ev.Evaluation(subjects, data, plan, arguments.out or root / "evaluation")
    rows = measure_with_progress(evaluation)
    print_tables(rows)
    return 0


def measure_with_progress(evaluation: Any) -> list[dict[str, Any]]:
    """Runs an evaluation under a progress bar; says what was left out and what was there already."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(soft_wrap=True, highlight=False)
    for sentence in evaluation.skipped:
        console.print(sentence)
    models = ", ".join(dict.fromkeys(f"{s.model} ({s.path})" for s in evaluation.subjects))
    console.print(f"{len(evaluation.units)} measurements of {models}")
    reused = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=evaluation.work)

        def measured(unit: Any, known: bool) -> None:
            nonlocal reused
            reused += known
            described = f"{unit.suite} {unit.length:,} {unit.subject.model} {unit.method}"
            bar.update(task, advance=evaluation.cost(unit), description=described)

        rows = evaluation.run(measured)
    if reused:
        console.print(f"{reused} of them were measured before (--again measures them again).")
    console.print(f"Rows: {next(iter(evaluation.files.values())).path.parent}")
    return rows


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Method by length, one table a suite and source."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["suite"] != "beta":
            groups.setdefault((row["suite"], row["source"]), []).append(row)
    for (suite, source), group in groups.items():
        best = max if suite == "needles" else min
        value = "accuracy" if suite == "needles" else "perplexity"
        lengths = sorted({row["length"] for row in group})
        title = "Needle accuracy" if suite == "needles" else "Perplexity"
        table = Table(title=f"{title} on {source} by length", title_justify="left")
        table.add_column("")
        for length in lengths:
            factor = next(row["factor"] for row in group if row["length"] == length)
            table.add_column(f"{length:,} ({factor:g}x)", justify="right")
        names = dict.fromkeys((row["label"], row["checkpoint"]) for row in group)
        labels = [label for label, _ in names]
        cells = {(row["label"], row["checkpoint"], row["length"]): row for row in group}
        for label, checkpoint in names:
            shown = []
            for length in lengths:
                row = cells.get((label, checkpoint, length))
                known = [r[value] for r in group if r["length"] == length and r[value] is not None]
                text = describe_cell(row)
                won = row is not None and known and row[value] == best(known)
                shown.append(f"[bold]{text}[/]" if won else text)
            table.add_row(label if labels.count(label) == 1 else f"{label} ({checkpoint.split('/')[0]})", *shown)
        console.print(table)


def describe_cell(row: dict[str, Any] | None) -> str:
    """A value with its standard error, and the logit scale where one was used."""
    if row is None:
        return "–"
    if row["suite"] == "needles":
        error = f" ±{100 * row['stderr']:.1f}" if row["stderr"] is not None else ""
        text = f"{100 * row['accuracy']:.1f}%{error}"
    else:
        text = "inf" if row["perplexity"] is None else f"{row['perplexity']:.4g}"
        text += f" ±{row['perplexity'] * row['stderr']:.2g}" if row["stderr"] and row["perplexity"] else ""
    return text + (f" (β {row['beta']:.2f})" if row["beta"] != 1 else "")


if __name__ == "__main__":
    sys.exit(main())
