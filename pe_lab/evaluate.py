"""`python -m pe_lab.evaluate --from=runs/NAME`: scores beyond the training length, by suite and variant."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_lab.config import Config, DataConfig, EvaluationConfig, SourceConfig, from_dict
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.tasks import suites as suite_table
from pe_lab.terminal import command, console

if TYPE_CHECKING:
    from pe_lab.evaluation import Prompted, Subject, Target

Record = dict[str, Any]
Suites = dict[str, tuple[str, ...]]  # suite -> tasks; none: all that are meant by default
TEXT_KINDS = ("text", "jsonl", "parquet", "tfds", "stdlib")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m pe_lab.evaluate", description=__doc__)
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
        help="of as-trained, cropped, pi, ntk, yarn, beta, paper-beta (default: all that make sense; for prompted "
        "suites as-trained), dropped",
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
    add("--seed", type=int, help="which held-out needles (default 0), which prompts (default 42; lm_eval has its own)")
    add("--out", type=Path, help="the directory of the results (default: RUN/evaluation)")
    add("--attention", metavar="NAME", help="an implementation of attention that python -m pe_lab.attention lists")
    add("--again", action="store_true", help="measure existing results again")
    suite_table.add_arguments(made)
    return made


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser().parse_args(argv)
    for name in ("tokens", "fit_tokens", "windows", "samples", "stride", "max_new_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    if arguments.per_document and arguments.suite not in (None, "perplexity"):
        raise ConfigError("--per-document measures perplexity alone: leave --suite out, or ask in a call of its own.")
    if not arguments.source and not arguments.predictions:
        raise ConfigError("--from is missing: which run, checkpoint, hf:DIR or gguf:FILE is to be evaluated?")
    return arguments


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    arguments = parse_arguments(argv)
    from pe_lab import evaluation as ev
    from pe_lab.evaluation import tables
    from pe_lab.parallel import hide_absent_tpu

    if arguments.predictions:
        tables.print_records(score_files(Path(arguments.predictions)))
        return 0
    suites = suite_table.parse_suites(arguments.suite) if arguments.suite is not None else None
    methods = ev.parse_methods(arguments.methods) if arguments.methods is not None else None
    hide_absent_tpu()
    steps = None if arguments.steps is None else ev.parse_steps(arguments.steps)
    targets = ev.locate_all(arguments.source, steps)
    records: list[Record] = []
    for target in targets:
        out = arguments.out or target.root / "evaluation"
        if len(targets) > 1:
            console().print(f"{target.display_name}:")
            out = arguments.out / target.display_name if arguments.out else out
        session = Session(target, arguments, suites, methods, out)
        records += [{**record, "run": target.display_name} for record in session.run()]
    tables.print_records(records)
    if arguments.by_position:
        tables.print_by_position(records)
    return 0


def score_files(directory: Path) -> list[Record]:
    """RULER's prediction files, scored by its formula, as records; the directories above the length are the label."""
    from pe_lab.evaluation.tasks.ruler.files import score_predictions

    records = []
    for found in score_predictions(directory):
        inside = Path(found["directory"]).resolve().relative_to(directory.resolve()).parts
        above = itertools.takewhile(lambda part: not part.isdecimal() and part != "pred", inside)
        records.append(
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
    return records


def write_ruler_files(prompted: Prompted, directory: Path, run: str) -> None:
    """Writes the answers to RULER's tasks as its prediction files, `RUN-CHECKPOINT-LABEL/LENGTH/pred/TASK.jsonl`, and
    the prompts beside them."""
    from pe_lab.evaluation.tasks.ruler.files import write_predictions, write_prompts

    for group, samples, answered in prompted.answered():
        if group.task.suite == "ruler":
            name = f"{run}-{group.variant.subject.path}-{group.variant.label}"
            name = re.sub(r"\W+", "-", name).strip("-")
            where = directory / name / str(group.length)
            write_predictions(where / "pred" / f"{group.task.name}.jsonl", group.task.name, answered)
            write_prompts(where / "data" / group.task.name / "validation.jsonl", group.task.name, samples)
    console().print(f"RULER's files: {directory}")


def saved_config(subject: Subject) -> tuple[DataConfig | None, EvaluationConfig]:
    """The data (None: an external checkpoint does not tell it) and the evaluation of a checkpoint's config."""
    config = subject.checkpoint.metadata.get("config")
    if not config:
        return None, EvaluationConfig()
    whole = {name: config[name] for name in ("data", "evaluation") if name in config}
    read = from_dict(Config, whole, f"config of {subject.path}")
    return read.data, read.evaluation


def text_source(given: str, subject: Subject) -> DataConfig:
    """The data of `--text`: all of it is for measuring."""
    tokenizer = subject.checkpoint.tokenizer
    if not tokenizer:
        raise CheckpointError(f"--text: {subject.path} came without a tokenizer, so text cannot be read.")
    source = given if given.partition(":")[0] in TEXT_KINDS else f"text:{given}"
    return DataConfig(sources=(SourceConfig(source=source),), tokenizer=tokenizer, validation_fraction=1.0)


@dataclasses.dataclass
class Session:
    """One target of the command line: its checkpoints, measured with the suites and methods that are asked for.

    Attributes:
      out: the directory of the results.
      forwards: compiled forward passes, which checkpoints of one shape share.
    """

    target: Target
    arguments: argparse.Namespace
    suites: Suites | None
    methods: tuple[str, ...] | None
    out: Path
    forwards: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def run(self) -> list[Record]:
        """The records of all suites. With `--steps` checkpoints are loaded and measured one after another."""
        if self.arguments.steps is None:
            return self.evaluate(self.target.paths)
        records = [record for path in self.target.paths for record in self.evaluate([path])]
        if not records:
            raise ConfigError("--steps: none of the checkpoints can be measured with these --suite and --methods.")
        return records

    def evaluate(self, paths: Sequence[str]) -> list[Record]:
        """The records of some of the checkpoints."""
        from pe_lab import evaluation as ev

        subjects = ev.load_subjects(self.target, paths)
        session = self if self.arguments.steps is None else self.suitable(subjects[0])
        if session is None:
            console().print(f"{subjects[0].path} left out: nothing that is asked for is possible for it.")
            return []
        return session.measure_all(subjects)

    def suitable(self, subject: Subject) -> Session | None:
        """The session without the suites and methods that are impossible for one checkpoint; None: nothing is left."""
        possible = subject.methods
        suites = self.suites and {k: v for k, v in self.suites.items() if k != "beta" or "beta" in possible}
        methods = self.methods and tuple(method for method in self.methods if method in possible)
        if suites == {} or (methods == () and not self.arguments.positional):
            return None
        return dataclasses.replace(self, suites=suites, methods=methods)

    def measure_all(self, subjects: Sequence[Subject]) -> list[Record]:
        """The records of loaded checkpoints."""
        from pe_lab import evaluation as ev

        arguments, last = self.arguments, subjects[-1]
        data, settings = saved_config(last)
        if arguments.text is not None:
            data, settings = text_source(arguments.text, last), EvaluationConfig()
        text = arguments.lengths
        if text is None:
            text = ",".join(f"{factor}x" for factor in settings.factors)
        lengths = ev.parse_lengths(text, subjects[0].training_length)
        measured = None if self.suites is None else tuple(suite for suite in self.suites if suite in ev.SUITES)
        if data is None and (measured is None or measured):
            raise ConfigError(
                f"{self.target.paths[-1]} does not tell its training data (it is external). Measure it on a text: "
                "--text=GLOB."
            )
        # Errors of prompted suites come before anything is measured; but a scale may have to be fitted first.
        late = bool(measured) and "beta" in (*measured, *(self.methods or ()))
        prompted = None if late else self.open_prompted(subjects, lengths)
        if not arguments.out:
            self.target.write_marker()
        records: list[Record] = []
        if measured is None or measured:
            assert data is not None
            if arguments.per_document:
                records += self.measure_documents(subjects, data, lengths)
            else:
                records += self.measure(subjects, data, settings, measured, lengths)
        prompted = self.open_prompted(subjects, lengths) if late else prompted
        return records + (prompted() if prompted else [])

    def measure(
        self,
        subjects: Sequence[Subject],
        data: DataConfig,
        settings: EvaluationConfig,
        suites: tuple[str, ...] | None,
        lengths: tuple[int, ...],
    ) -> list[Record]:
        """Suites that read text and need no answers: perplexity, needles, beta."""
        from pe_lab import evaluation as ev

        arguments, descriptions = self.arguments, tuple(self.arguments.positional)
        flags = {"tokens": "tokens", "fit_tokens": "fit_tokens", "needle_windows": "windows", "seed": "seed"}
        given = {name: getattr(arguments, flag) for name, flag in flags.items()}
        settings = dataclasses.replace(settings, **{k: v for k, v in given.items() if v is not None})
        if descriptions and suites and "beta" in suites:
            raise ConfigError(
                "--suite=beta fits the scale of a checkpoint's own encoding, and --positional gives another. Make that "
                "a child first (python -m pe_lab.surgery), or leave --positional out."
            )
        plan = ev.Plan(lengths, suites, self.methods, descriptions, settings, arguments.again, arguments.stride)
        evaluation = ev.Evaluation(
            subjects, data, plan, self.out, attention=arguments.attention, forwards=self.forwards
        )
        return ev.run_evaluation(evaluation)

    def measure_documents(
        self, subjects: Sequence[Subject], data: DataConfig, lengths: tuple[int, ...]
    ) -> list[Record]:
        """The perplexity of each document of `--text`."""
        from pe_lab import evaluation as ev
        from pe_lab.data.sources import open_source

        arguments = self.arguments
        if arguments.text is None:
            raise ConfigError("--per-document needs a text with documents: --text=SOURCE.")
        variants = ev.all_variants(subjects, self.methods, arguments.positional, arguments.attention)
        source = open_source(data.sources[0])
        return ev.run_documents(variants, source, lengths, self.out, arguments.samples, arguments.again)

    def open_prompted(self, subjects: Sequence[Subject], lengths: tuple[int, ...]) -> Callable[[], list[Record]] | None:
        """Opens the prompted suites and the harness's tasks; the result measures them. None where none is asked for."""
        from pe_lab import evaluation as ev

        arguments, suites = self.arguments, self.suites or {}
        if not set(suites) - set(ev.SUITES):
            return None
        variants = ev.all_variants(subjects, self.methods, arguments.positional, arguments.attention)
        prompted = None
        limits = lengths if arguments.lengths else (None,)
        if tasks := suite_table.open_tasks(suites, arguments, limits):
            seed = suite_table.SEED if arguments.seed is None else arguments.seed
            prompted = ev.Prompted(variants, tasks, lengths, arguments.samples, seed, self.out, arguments.again)
        names = suites.get(suite_table.HARNESS)
        opened = None if names is None else ev.check_harness(names, arguments.lm_eval_tasks)

        def run() -> list[Record]:
            records: list[Record] = []
            if prompted is not None:
                records += ev.run_prompted(prompted)
                if arguments.ruler_files:
                    write_ruler_files(prompted, Path(arguments.ruler_files), self.target.display_name)
            if names is not None:
                records += ev.run_harness(
                    variants,
                    names,
                    self.out,
                    max_length=max(lengths) if arguments.lengths else None,
                    include=arguments.lm_eval_tasks,
                    limit=arguments.samples,
                    num_fewshot=arguments.num_fewshot,
                    chat=arguments.chat,
                    again=arguments.again,
                    opened=opened,
                )
            return records

        return run


if __name__ == "__main__":
    sys.exit(main())
