"""One target of `pe_lab.evaluate`, measured as the command line asks for."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence

from pe_lab.checkpoints.checkpoint import read_logit_scale
from pe_lab.config import Config, DataConfig, EvaluationConfig, SourceConfig, from_dict
from pe_lab.data.sources import KINDS
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.command_line import parse_lengths, parse_variants
from pe_lab.evaluation.generation.prompted import open_prompted
from pe_lab.evaluation.lm_eval.harness import open_harness
from pe_lab.evaluation.measure import EvaluationPlan, Forwards, open_evaluation
from pe_lab.evaluation.scoring.forward import check_length
from pe_lab.evaluation.suite import PromptSuite, Runner, Suite, TokenSuite, given_options
from pe_lab.evaluation.suites import SUITES, check_options, parse_suites
from pe_lab.evaluation.suites.lm_eval import HarnessSuite
from pe_lab.evaluation.targets import EvaluationTarget, load_subjects
from pe_lab.evaluation.variants import ALL, Subject, Variant, all_variants
from pe_lab.results.records import Record, RecordFile
from pe_lab.results.variants import VARIANTS
from pe_lab.storage import AnyPath
from pe_lab.terminal import console

_RUNNERS: tuple[tuple[type[Suite], Runner], ...] = (
    (TokenSuite, open_evaluation),
    (PromptSuite, open_prompted),
    (HarnessSuite, open_harness),
)


def _runner_of(suite: Suite) -> Runner:
    """What opens a suite, together with the others of its kind."""
    return next((runner for kind, runner in _RUNNERS if isinstance(suite, kind)), None) or suite.runner()


@dataclasses.dataclass
class EvaluationSession:
    """The checkpoints of a target, and what is to be measured. Suites open their runners from it.

    Attributes:
      arguments: of the command line.
      suites: suite -> tasks (none: all that are meant by default); None: the config's, else what is possible of those
        that are measured by default.
      names: of variants; None: the config's, else all that make sense, but for prompts as trained, unless the command
        line says `ALL`.
      out: the directory of the results.
      forwards: compiled forward passes, which checkpoints of one shape share.
      subjects: the loaded checkpoints.
    """

    target: EvaluationTarget
    arguments: argparse.Namespace
    suites: dict[str, tuple[str, ...]] | None
    names: tuple[str, ...] | None
    out: AnyPath
    forwards: Forwards = dataclasses.field(default_factory=dict)
    subjects: Sequence[Subject] = ()

    def run(self) -> list[Record]:
        """The records of all suites. With `--steps` checkpoints are loaded and measured one after another."""
        if self.arguments.steps is None:
            return dataclasses.replace(self, subjects=load_subjects(self.target, self.target.paths)).measure()
        records: list[Record] = []
        for path in self.target.paths:
            subjects = load_subjects(self.target, [path])
            session = self.suitable(subjects[0])
            if session is None:
                console().print(f"{subjects[0].path} left out: nothing that is asked for is possible for it.")
            else:
                records += dataclasses.replace(session, subjects=subjects).measure()
        if not records:
            raise ConfigError("--steps: none of the checkpoints can be measured with these --suite and --variants.")
        return records

    def suitable(self, subject: Subject) -> EvaluationSession | None:
        """The session without the suites and variants that are impossible for one checkpoint; None: nothing is left."""
        possible = subject.variants

        def fits(name: str) -> bool:
            variant = getattr(SUITES[name], "fits", None)
            return variant is None or variant in possible or self.arguments.fit_scale

        suites = self.suites and {name: tasks for name, tasks in self.suites.items() if fits(name)}
        names = self.names and tuple(name for name in self.names if name in possible)
        if suites == {} or (names == () and not self.arguments.positional):
            return None
        return dataclasses.replace(self, suites=suites, names=names)

    def measure(self) -> list[Record]:
        """The records of the loaded checkpoints."""
        for subject in self.subjects:
            check_length(subject.checkpoint.model, subject.checkpoint.layers, max(self.plan.lengths))
        runners: dict[Runner, dict[Suite, tuple[str, ...]]] = {}
        for name, tasks in self.chosen.items():
            runners.setdefault(_runner_of(SUITES[name]), {})[SUITES[name]] = tasks
        # Suites that score tokens come first: they may fit what variants of the others need. Otherwise the errors of
        # all suites come before anything is measured.
        scored = [suite for suite in map(SUITES.get, self.chosen) if isinstance(suite, TokenSuite)]
        fitted = {suite.fits for suite in SUITES.values() if isinstance(suite, TokenSuite) and suite.fits}
        late = scored and (
            self.arguments.variants == ALL
            or any(suite.fits for suite in scored)
            or self.arguments.fit_scale
            or bool(fitted & {*(self.plan.variants or ())})
        )
        ordered = sorted(runners.items(), key=lambda item: not any(isinstance(s, TokenSuite) for s in item[1]))
        opened = [] if late else [runner(suites, self) for runner, suites in ordered]
        if not self.arguments.out:
            self.target.write_marker()
        opened = opened or (runner(suites, self) for runner, suites in ordered)
        return [record for one in opened for record in one.run()]

    # ----------------------------------------------------------------------------------------------------------------
    # What runners read

    @functools.cached_property
    def chosen(self) -> dict[str, tuple[str, ...]]:
        """The suites, with the names of their tasks."""
        # A config's suites are loaded in any case: its options may be theirs.
        configured = parse_suites(",".join(self._config.suites)) if self._config.suites else {}
        default = {suite.name: () for suite in SUITES.values() if suite.by_default}
        return configured or default if self.suites is None else self.suites

    @functools.cached_property
    def plan(self) -> EvaluationPlan:
        """What to measure, of the command line, and where it says nothing of the checkpoint's config."""
        arguments, config = self.arguments, self._config
        if arguments.fit_scale and not arguments.positional:
            raise ConfigError("--fit-scale is for the encodings of --positional. Name one, or the suite beta.")
        text = arguments.lengths or ",".join(f"{factor}x" for factor in config.factors)
        lengths = parse_lengths(text, self.subjects[0].training_length)
        default = self.suites is None and not config.suites
        suites = tuple(self.chosen)
        check_options(config.options)
        names = self.names
        if names is None and arguments.variants is None and config.variants and not arguments.positional:
            names = parse_variants(",".join(config.variants))
        return EvaluationPlan(
            lengths,
            suites=None if default else suites,
            variants=names,
            descriptions=tuple(arguments.positional),
            fit_scale=arguments.fit_scale,
            options={**config.options, **given_options(arguments, SUITES.values())},
            seed=config.seed if arguments.seed is None else arguments.seed,
            again=arguments.again,
        )

    @property
    def limits(self) -> tuple[int | None, ...]:
        """The tokens that prompts of files may take: those of `--lengths`; (None,): any number."""
        return self.plan.lengths if self.arguments.lengths else (None,)

    @functools.cached_property
    def data(self) -> DataConfig | None:
        """The data of the last checkpoint's config, or of `--text`; None where an external one does not tell it."""
        subject = self.subjects[-1]
        if self.arguments.text is not None:
            return text_source(self.arguments.text, subject)
        config = subject.checkpoint.metadata.get("config")
        return _read(config, subject).data if config else None

    @property
    def _config(self) -> EvaluationConfig:
        subject = self.subjects[-1]
        config = subject.checkpoint.metadata.get("config")
        return _read(config, subject).evaluation if config and self.arguments.text is None else EvaluationConfig()

    @property
    def variants(self) -> list[Variant]:
        """The variants for suites that fit nothing: a fitted scale is read from the checkpoints."""
        names = self.plan.variants
        if self.arguments.variants == ALL:
            fitted = any(read_logit_scale(subject.checkpoint) for subject in self.subjects)
            meant = {name for subject in self.subjects for name in subject.default_variants}
            names = tuple(name for name in VARIANTS if name in meant and (fitted or name != "beta"))
        fits = RecordFile(self.out / "beta.jsonl").records if self.arguments.fit_scale else None
        longest = None if None in self.limits else max(filter(None, self.limits))
        return all_variants(self.subjects, names, self.arguments.positional, self.arguments.attention, fits, longest)


def _read(config: dict[str, object], subject: Subject) -> Config:
    """The parts of a checkpoint's config that evaluation reads."""
    whole = {name: config[name] for name in ("data", "evaluation") if name in config}
    return from_dict(Config, whole, f"config of {subject.path}")


def text_source(given: str, subject: Subject) -> DataConfig:
    """The data of `--text`: all of it is for measuring."""
    tokenizer = subject.checkpoint.tokenizer
    if not tokenizer:
        raise CheckpointError(f"--text: {subject.path} came without a tokenizer, so text cannot be read.")
    source = given if given.partition(":")[0] in KINDS else f"text:{given}"
    return DataConfig(sources=(SourceConfig(source=source),), tokenizer=tokenizer, validation_fraction=1.0)
