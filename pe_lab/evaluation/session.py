"""One target of `pe_lab.evaluate`, measured as the command line asks for."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from pe_lab.checkpoints.checkpoint import read_logit_scale
from pe_lab.config import Config, DataConfig, EvaluationConfig, SourceConfig, from_dict
from pe_lab.data.sources import KINDS, open_source
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.generation.prompted import Prompted
from pe_lab.evaluation.lm_eval.suite import Harness
from pe_lab.evaluation.measure import Evaluation, Forwards
from pe_lab.evaluation.plan import Plan, parse_lengths
from pe_lab.evaluation.scoring.forward import check_length
from pe_lab.evaluation.targets import Target, load_subjects
from pe_lab.evaluation.tasks.documents import Documents
from pe_lab.evaluation.tasks.ruler.files import write_answers
from pe_lab.evaluation.tasks.suites import HARNESS, MEASURED, SEED, open_tasks
from pe_lab.evaluation.variants import ALL, Subject, Variant, all_variants
from pe_lab.parallel import on_first
from pe_lab.results.records import Record
from pe_lab.results.variants import VARIANTS
from pe_lab.storage import AnyPath
from pe_lab.terminal import console


@dataclasses.dataclass
class Session:
    """The checkpoints of a target, and what is to be measured.

    Attributes:
      arguments: of the command line.
      suites: suite -> tasks (none: all that are meant by default); None: what can be measured without prompts.
      methods: None: all that make sense, but for prompts as trained, unless the command line says `ALL`.
      out: the directory of the results.
      forwards: compiled forward passes, which checkpoints of one shape share.
    """

    target: Target
    arguments: argparse.Namespace
    suites: dict[str, tuple[str, ...]] | None
    methods: tuple[str, ...] | None
    out: AnyPath
    forwards: Forwards = dataclasses.field(default_factory=dict)

    def run(self) -> list[Record]:
        """The records of all suites. With `--steps` checkpoints are loaded and measured one after another."""
        if self.arguments.steps is None:
            return self.measure(load_subjects(self.target, self.target.paths))
        records: list[Record] = []
        for path in self.target.paths:
            subjects = load_subjects(self.target, [path])
            session = self.suitable(subjects[0])
            if session is None:
                console().print(f"{subjects[0].path} left out: nothing that is asked for is possible for it.")
            else:
                records += session.measure(subjects)
        if not records:
            raise ConfigError("--steps: none of the checkpoints can be measured with these --suite and --methods.")
        return records

    def suitable(self, subject: Subject) -> Session | None:
        """The session without the suites and methods that are impossible for one checkpoint; None: nothing is left."""
        possible = subject.methods
        suites = self.suites and {k: v for k, v in self.suites.items() if k != "beta" or "beta" in possible}
        methods = self.methods and tuple(method for method in self.methods if method in possible)
        if suites == {} or (methods == () and not self.arguments.positional):
            return None
        return dataclasses.replace(self, suites=suites, methods=methods)

    def measure(self, subjects: Sequence[Subject]) -> list[Record]:
        """The records of loaded checkpoints."""
        arguments = self.arguments
        data, settings = self.data_and_settings(subjects[-1])
        text = arguments.lengths
        if text is None:
            text = ",".join(f"{factor}x" for factor in settings.factors)
        lengths = parse_lengths(text, subjects[0].training_length)
        for subject in subjects:
            check_length(subject.checkpoint.model, subject.checkpoint.layers, max(lengths))
        measured = None if self.suites is None else tuple(suite for suite in self.suites if suite in MEASURED)
        if data is None and measured != ():
            raise ConfigError(
                f"{self.target.paths[-1]} does not tell its training data (it is external). Measure it on a text: "
                "--text=GLOB."
            )
        if arguments.positional and measured and "beta" in measured:
            raise ConfigError(
                "--suite=beta fits the scale of a checkpoint's own encoding, and --positional gives another. Make that "
                "a child first (python -m pe_lab.surgery), or leave --positional out."
            )
        # Errors of prompted suites come before anything is measured; but a scale may have to be fitted first.
        late = bool(measured) and (arguments.methods == ALL or "beta" in (*measured, *(self.methods or ())))
        prompted = [] if late else self.open_prompted(subjects, lengths)
        if not arguments.out:
            self.target.write_marker()
        records: list[Record] = []
        if data is not None and measured != ():
            if arguments.per_document:
                source, count = open_source(data.sources[0]), arguments.samples
                variants = self.variants(subjects)
                records += Documents(variants, source, lengths, self.out, count, arguments.again).run()
            else:
                described = tuple(arguments.positional)
                plan = Plan(lengths, measured, self.methods, described, settings, arguments.again, arguments.stride)
                records += Evaluation(
                    subjects, data, plan, self.out, attention=arguments.attention, forwards=self.forwards
                ).run()
        if late:
            prompted = self.open_prompted(subjects, lengths)
        for suite in prompted:
            records += suite.run()
            if arguments.ruler_files and isinstance(suite, Prompted):
                directory, run = Path(arguments.ruler_files), self.target.display_name
                on_first(functools.partial(write_answers, directory, run, suite.answered()))
        return records

    def data_and_settings(self, subject: Subject) -> tuple[DataConfig | None, EvaluationConfig]:
        """The data and the evaluation of a checkpoint's config, with those of the command line instead.

        The data is None where an external checkpoint does not tell it.
        """
        config = subject.checkpoint.metadata.get("config")
        data, settings = None, EvaluationConfig()
        if self.arguments.text is not None:
            data = text_source(self.arguments.text, subject)
        elif config:
            whole = {name: config[name] for name in ("data", "evaluation") if name in config}
            read = from_dict(Config, whole, f"config of {subject.path}")
            data, settings = read.data, read.evaluation
        flags = {"tokens": "tokens", "fit_tokens": "fit_tokens", "needle_windows": "windows", "seed": "seed"}
        given = {name: getattr(self.arguments, flag) for name, flag in flags.items()}
        return data, dataclasses.replace(settings, **{k: v for k, v in given.items() if v is not None})

    def variants(self, subjects: Sequence[Subject]) -> list[Variant]:
        methods = self.methods
        if self.arguments.methods == ALL:
            fitted = any(read_logit_scale(subject.checkpoint) for subject in subjects)
            meant = {method for subject in subjects for method in subject.default_methods}
            methods = tuple(method for method in VARIANTS if method in meant and (fitted or method != "beta"))
        return all_variants(subjects, methods, self.arguments.positional, self.arguments.attention)

    def open_prompted(self, subjects: Sequence[Subject], lengths: tuple[int, ...]) -> list[Prompted | Harness]:
        """The prompted suites and the harness's tasks, as far as they are asked for."""
        arguments, suites = self.arguments, self.suites or {}
        if not set(suites) - set(MEASURED):
            return []
        variants = self.variants(subjects)
        found: list[Prompted | Harness] = []
        limits = lengths if arguments.lengths else (None,)
        if tasks := open_tasks(suites, arguments, limits):
            seed = SEED if arguments.seed is None else arguments.seed
            found.append(Prompted(variants, tasks, lengths, arguments.samples, seed, self.out, arguments.again))
        if HARNESS in suites:
            found.append(
                Harness(
                    variants,
                    suites[HARNESS],
                    self.out,
                    max_length=max(lengths) if arguments.lengths else None,
                    include=arguments.lm_eval_tasks,
                    limit=arguments.samples,
                    num_fewshot=arguments.num_fewshot,
                    chat=arguments.chat,
                    again=arguments.again,
                )
            )
        return found


def text_source(given: str, subject: Subject) -> DataConfig:
    """The data of `--text`: all of it is for measuring."""
    tokenizer = subject.checkpoint.tokenizer
    if not tokenizer:
        raise CheckpointError(f"--text: {subject.path} came without a tokenizer, so text cannot be read.")
    source = given if given.partition(":")[0] in KINDS else f"text:{given}"
    return DataConfig(sources=(SourceConfig(source=source),), tokenizer=tokenizer, validation_fraction=1.0)
