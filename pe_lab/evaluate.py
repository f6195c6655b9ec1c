"""`python -m pe_lab.evaluate --from=runs/NAME`: what models do with long texts, by suite, length and way of reading."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_lab.config import Config, DataConfig, EvaluationConfig, SourceConfig, from_dict
from pe_lab.errors import UserError
from pe_lab.evaluation.tasks import suites as suite_table
from pe_lab.terminal import command

if TYPE_CHECKING:
    from pe_lab.evaluation import Place, Prompted, Subject
    from pe_lab.language_model import LanguageModel

Record = dict[str, Any]
TEXT_KINDS = ("text", "jsonl", "parquet", "tfds", "stdlib")


def saved_config(metadata: Record, where: str) -> tuple[DataConfig | None, EvaluationConfig]:
    """What a checkpoint's own config says of its data (None: it came from elsewhere) and of evaluation."""
    config = metadata.get("config")
    if not config:
        return None, EvaluationConfig()
    whole = {name: config[name] for name in ("data", "evaluation") if name in config}
    read = from_dict(Config, whole, f"config of {where}")
    return read.data, read.evaluation


def own_text(given: str, tokenizer: str, where: str) -> DataConfig:
    """A source of text to measure on, all of it, instead of what a checkpoint's data holds out."""
    if not tokenizer:
        raise UserError(f"--text: {where} came without a tokenizer, so text cannot be read.")
    source = given if given.partition(":")[0] in TEXT_KINDS else f"text:{given}"
    return DataConfig(sources=(SourceConfig(source=source),), tokenizer=tokenizer, validation_fraction=1.0)


def parser() -> argparse.ArgumentParser:
    """The command line of this verb."""
    made = argparse.ArgumentParser(prog="python -m pe_lab.evaluate", description=__doc__)
    add = made.add_argument
    add("--from", dest="source", metavar="RUN[,RUN...]", help="what pe_lab.load reads: runs, phases, checkpoints, ...")
    add(
        "--suite",
        help="of perplexity, needles, beta (default: these, as far as possible), niah, ruler, longbench, many_shot, "
        "lm_eval; niah:standard,multi_key names tasks",
    )
    add("--lengths", help="such as 1x,2x,4x (of the training length) or 2k,4096 (default: the config's)")
    add(
        "--methods",
        help="of as-trained, cropped, pi, ntk, yarn, beta, paper-beta (default: all that make sense; for prompted "
        "suites as-trained), dropped",
    )
    add(
        "--positional",
        action="append",
        default=[],
        metavar="ENCODING",
        help="read the weights under another encoding, such as yarn:factor=2 (of what is there); repeatable",
    )
    add("--seed", type=int, help="which held-out needles (default 0), which prompts (default 42; lm_eval has its own)")
    add("--out", type=Path, help="where the rows go (default: RUN/evaluation)")
    add("--attention", metavar="NAME", help="how to attend: a name that python -m pe_lab.attention lists")
    add("--again", action="store_true", help="measure again what is measured already")
    suite_table.add_arguments(made)
    return made


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser().parse_args(argv)
    for name in ("tokens", "fit_tokens", "windows", "samples", "stride", "max_new_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if arguments.per_document and arguments.suite not in (None, "perplexity"):
        raise UserError("--per-document measures perplexity alone: leave --suite out, or ask in a call of its own.")
    if not arguments.source and not arguments.predictions:
        raise UserError("--from is missing: which run, checkpoint, hf:DIR or gguf:FILE is to be evaluated?")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the verb."""
    arguments = parse_arguments(argv)
    from pe_lab import evaluation as ev
    from pe_lab.evaluation import terminal
    from pe_lab.parallel import hide_absent_tpu

    if arguments.predictions:
        terminal.print_rows(score_files(Path(arguments.predictions)))
        return 0
    suites = suite_table.parse_suites(arguments.suite) if arguments.suite is not None else None
    chosen = ev.parse_methods(arguments.methods) if arguments.methods is not None else None
    hide_absent_tpu()
    places = ev.locate_all(arguments.source)
    rows: list[Record] = []
    for place in places:
        if len(places) > 1:
            terminal.say(f"{place.shown}:")
        rows += [{**row, "run": place.shown} for row in evaluate(place, arguments, suites, chosen, len(places) > 1)]
    terminal.print_rows(rows)
    if arguments.by_position:
        terminal.print_by_position(rows)
    return 0


def score_files(directory: Path) -> list[Record]:
    """RULER's prediction files, scored by its formula, as rows of a table; what lies above the length is the run."""
    from pe_lab.evaluation.tasks.ruler.files import score_predictions

    rows = []
    for found in score_predictions(directory):
        inside = Path(found["directory"]).resolve().relative_to(directory.resolve()).parts
        above = itertools.takewhile(lambda part: not part.isdecimal() and part != "pred", inside)
        rows.append(
            {
                "suite": "ruler",
                "source": found["task"],
                "run": directory.name,
                "label": "/".join(above) or "predictions",
                "metric": "string_match",
                "length": found["length"],
                "score": found["score"] / 100,
                "low": found["mean"].low,
                "high": found["mean"].high,
                "samples": found["samples"],
            }
        )
    return rows


def write_files(prompted: Prompted, directory: Path, run: str) -> None:
    """Answers to RULER's tasks as its prediction files, `RUN-CHECKPOINT-READER/LENGTH/pred/TASK.jsonl`, and the prompts
    beside them."""
    from pe_lab.evaluation import terminal
    from pe_lab.evaluation.tasks.ruler.files import write_predictions, write_prompts

    for group, samples, lines in prompted.answered():
        if group.task.suite == "ruler":
            name = f"{run}-{group.reader.subject.path}-{group.reader.label}"
            name = re.sub(r"\W+", "-", name).strip("-")
            where = directory / name / str(group.length)
            write_predictions(where / "pred" / f"{group.task.name}.jsonl", group.task.name, lines)
            write_prompts(where / "data" / group.task.name / "validation.jsonl", group.task.name, samples)
    terminal.say(f"RULER's files: {directory}")


def evaluate(
    place: Place,
    arguments: argparse.Namespace,
    suites: dict[str, tuple[str, ...]] | None,
    chosen: tuple[str, ...] | None,
    several: bool,
) -> list[Record]:
    """All suites that are asked for, on what one path means."""
    from pe_lab import evaluation as ev

    out = arguments.out or place.root / "evaluation"
    if several and arguments.out:
        out = arguments.out / place.shown
    models = ev.load_all(place.paths)
    subjects = [
        ev.Subject(lm.checkpoint, place.run, os.path.relpath(path, place.root) if Path(path).is_absolute() else path)
        for lm, path in zip(models, place.paths, strict=True)
    ]
    data, settings = saved_config(subjects[-1].checkpoint.metadata, place.paths[-1])
    if arguments.text is not None:
        settings = EvaluationConfig()
        data = own_text(arguments.text, subjects[-1].checkpoint.tokenizer, place.paths[-1])
    lengths = arguments.lengths
    if lengths is None:
        lengths = ",".join(f"{factor}x" for factor in settings.factors)
    asked = ev.parse_lengths(lengths, subjects[0].training_length)
    measured = None if suites is None else tuple(suite for suite in suites if suite in ev.SUITES)
    if data is None and (measured is None or measured):
        raise UserError(
            f"{place.paths[-1]} does not say what it was trained on (it came from elsewhere). Measure it on text of "
            "yours: --text=GLOB."
        )

    def open_asked() -> Callable[[], list[Record]] | None:
        return ask(models, subjects, arguments, suites, chosen, asked, out, place.shown) if suites else None

    # What prompted suites cannot do is known before anything is measured; but a scale may have to be fitted first.
    late = bool(measured) and "beta" in (*measured, *(chosen or ()))
    prompted = None if late else open_asked()
    if not arguments.out:
        place.mark()
    rows: list[Record] = []
    if measured is None or measured:
        assert data is not None
        if arguments.per_document:
            rows += read_documents(models, subjects, arguments, data, chosen, asked, out)
        else:
            rows += measure(subjects, data, settings, arguments, measured, chosen, asked, out)
    prompted = open_asked() if late else prompted
    return rows + (prompted() if prompted else [])


def measure(
    subjects: Sequence[Subject],
    data: DataConfig,
    settings: EvaluationConfig,
    arguments: argparse.Namespace,
    suites: tuple[str, ...] | None,
    chosen: tuple[str, ...] | None,
    lengths: tuple[int, ...],
    out: Path,
) -> list[Record]:
    """Suites that read text and need no answers: perplexity, needles, beta."""
    from pe_lab import evaluation as ev

    given = {
        "tokens": arguments.tokens,
        "fit_tokens": arguments.fit_tokens,
        "needle_windows": arguments.windows,
        "seed": arguments.seed,
    }
    settings = dataclasses.replace(settings, **{k: v for k, v in given.items() if v is not None})
    plan = ev.Plan(lengths, suites, chosen, settings, arguments.again, arguments.stride)
    read = [ev.read_as(subject, text) for subject in subjects for text in arguments.positional]
    if read and suites and "beta" in suites:
        raise UserError(
            "--suite=beta fits the scale of a checkpoint as it is, and --positional reads another. Make that a child "
            "first (python -m pe_lab.surgery), or leave --positional out."
        )
    # Methods are ways of reading what is there; a description is read as it is.
    parts = [(subjects, plan)] if chosen or not read else []
    parts += [(read, dataclasses.replace(plan, methods=("as trained",)))] if read else []
    opened = [ev.Evaluation(those, data, how, out, attention=arguments.attention) for those, how in parts]
    return [row for evaluation in opened for row in ev.measure_with_progress(evaluation)]


def read_documents(
    models: Sequence[LanguageModel],
    subjects: Sequence[Subject],
    arguments: argparse.Namespace,
    data: DataConfig,
    chosen: tuple[str, ...] | None,
    lengths: tuple[int, ...],
    out: Path,
) -> list[Record]:
    """Perplexity of each document of a text by itself."""
    from pe_lab import evaluation as ev
    from pe_lab.data.sources import open_source

    if arguments.text is None:
        raise UserError("--per-document needs a text whose documents are read: --text=SOURCE.")
    readers = ev.all_readers(models, subjects, chosen, arguments.positional, arguments.attention)
    source = open_source(data.sources[0])
    return ev.documents_with_progress(readers, source, lengths, out, arguments.samples, arguments.again)


def ask(
    models: Sequence[LanguageModel],
    subjects: Sequence[Subject],
    arguments: argparse.Namespace,
    suites: dict[str, tuple[str, ...]],
    chosen: tuple[str, ...] | None,
    lengths: tuple[int, ...],
    out: Path,
    run: str,
) -> Callable[[], list[Record]] | None:
    """Opens the suites that ask for answers: needles in text, RULER, LongBench, many shots, and the harness' tasks.

    Returns:
      What asks them; None where none is wanted.
    """
    from pe_lab import evaluation as ev

    if not set(suites) - set(ev.SUITES):
        return None
    readers = ev.all_readers(models, subjects, chosen, arguments.positional, arguments.attention)
    prompted = None
    limits = lengths if arguments.lengths else (None,)
    if tasks := suite_table.open_tasks(suites, arguments, limits):
        seed = suite_table.SEED if arguments.seed is None else arguments.seed
        prompted = ev.Prompted(readers, tasks, lengths, arguments.samples, seed, out, arguments.again)
    names = suites.get(suite_table.HARNESS)
    opened = None if names is None else ev.check_harness(names, arguments.lm_eval_tasks)

    def asked() -> list[Record]:
        rows: list[Record] = []
        if prompted is not None:
            rows += ev.answer_with_progress(prompted)
            if arguments.ruler_files:
                write_files(prompted, Path(arguments.ruler_files), run)
        if names is not None:
            rows += ev.run_harness(
                readers,
                names,
                out,
                max_length=max(lengths) if arguments.lengths else None,
                include=arguments.lm_eval_tasks,
                limit=arguments.samples,
                num_fewshot=arguments.num_fewshot,
                chat=arguments.chat,
                again=arguments.again,
                opened=opened,
            )
        return rows

    return asked


if __name__ == "__main__":
    sys.exit(main())
