"""The protocol of a suite: one file says what is measured, its options, its cost, its records and how they are shown.

A suite scores tokens (`TokenSuite`), asks prompts (`PromptSuite`), or opens a runner of its own (`Suite.runner`). A
suite of one's own is a file with an instance, `--suite=my_suite.py:SUITE`. Importing a suite does not import JAX:
reports, which show its records, do not need it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pe_lab.errors import ConfigError

if TYPE_CHECKING:
    from pe_lab.evaluation.generation.prompted import PromptGroup
    from pe_lab.evaluation.generation.tasks import PromptTask, Sample
    from pe_lab.evaluation.measure import Evaluation, MeasurementUnit
    from pe_lab.results.records import Record, SampleRecord

# Opens suites of one kind together: (suites with the names of their tasks, session) -> an object with `run()`.
Runner = Callable[[Mapping["Suite", Sequence[str]], Any], Any]


@dataclass(frozen=True)
class SuiteMetric:
    """A number of a suite's records.

    Attributes:
      key: of the record.
      title: for people.
      unit: after the number; "%" of a share of 1.
      higher_is_better: whether a larger number is a better model.
      interval: of 95%: `wilson` for shares of independent answers, `normal` for means, `log` for e to a mean.
      decimals: that are shown.
    """

    key: str
    title: str
    unit: str = ""
    higher_is_better: bool = True
    interval: Literal["wilson", "normal", "log", "none"] = "normal"
    decimals: int = 3


def option(default: Any, about: str, parse: Callable[[str], Any] | None = None, metavar: str | None = None) -> Any:
    """A field of a suite's settings: a flag of `pe_lab.evaluate`, and a key of `evaluation.options` in a config.

    Suites may share an option by its name: they then get one value.

    Args:
      default: False makes a flag without a value.
      about: for `--help`.
      parse: a type of argparse, which also bounds the value.
      metavar: for `--help`.
    """
    return dataclasses.field(default=default, metadata={"help": about, "type": parse, "metavar": metavar})


@dataclass(frozen=True)
class NoSettings:
    """The settings of a suite without options."""


class Suite:
    """What is measured of a model, and how it is shown.

    Attributes:
      name: as in `--suite=NAME`; of the file of records, `NAME.jsonl`; the key `suite` of a record.
      title: in tables and reports.
      protocol: counted up when prompts or scores change; what an older protocol measured is measured again.
      about: a sentence or two for reports.
      terms: entries of a report's glossary.
      metrics: the numbers of its records, the main one first.
      arrangement: of its tables: variants by length for each source; tasks and variants at each length; or a line a
        record, which has its metrics.
      average_of: how many tasks the mean over tasks is of (0: of any number); None: no mean.
      judged: whether a report's verdict on a run is made of it.
      by_default: whether it is measured where no suite is named, if that is possible.
      tasks: the names that `--suite=NAME:TASK` takes; None: any.
      settings: a frozen dataclass whose fields are `option`s.
    """

    name: str
    title: str
    protocol: int = 1
    about: str = ""
    terms: Mapping[str, str] = {}
    metrics: tuple[SuiteMetric, ...] = ()
    arrangement: Literal["lengths", "tasks", "lines"] = "tasks"
    average_of: int | None = None
    judged: bool = False
    by_default: bool = False
    tasks: Collection[str] | None = ()
    settings: type = NoSettings

    def runner(self) -> Runner:
        """What opens this suite. Those of `TokenSuite` and `PromptSuite` are the session's."""
        raise NotImplementedError(f"suite '{self.name}' is a TokenSuite, a PromptSuite, or has a runner")

    def from_files(self, settings: Any) -> list[Record] | None:
        """Records of files that the settings name, which need no model; None: they name none."""
        return None


class TokenSuite(Suite):
    """A suite that scores tokens with compiled forward passes: its records are measured one by one.

    An `Evaluation` gives its methods data, settings and compiled passes. A unit is one record: a variant, at a length,
    on a source of the data.

    Attributes:
      fits: the variant that its records make: it fits a number which that variant needs. Such a suite comes first.
    """

    arrangement = "lengths"
    fits: str | None = None

    def impossible(self, evaluation: Evaluation) -> str:
        """Why it cannot be measured here, as the end of a sentence; "" if it can."""
        return "" if self.sources(evaluation) else "its data has no source for it"

    def impossible_in_training(self, settings: Any) -> str:
        """Why a run cannot measure it again and again; "" if it can."""
        return ""

    def sources(self, evaluation: Evaluation) -> Sequence[int | None]:
        """The data sources that it is measured on, by their numbers; None: on no one of them."""
        return evaluation.text_sources

    def covers(self, unit: MeasurementUnit) -> bool:
        """Whether a variant is measured at a length."""
        return True

    def check(self, evaluation: Evaluation) -> list[str]:
        """Opens its data. Sentences for the user; raises `UserError` for a length or a setting that is impossible."""
        return []

    def cost(self, settings: Any, length: int) -> int:
        """Tokens that one record takes, about: for a progress bar and plans."""
        raise NotImplementedError

    def cost_before(self, evaluation: Evaluation) -> int:
        """Tokens that are read once, before the first record, about."""
        return 0

    def source_name(self, evaluation: Evaluation, unit: MeasurementUnit) -> str | None:
        """The key `source` of a record; None: it has none."""
        return None if unit.source is None else evaluation.mixture.sources[unit.source].name

    def identity(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The settings that a record's numbers depend on; a record under others is measured again."""
        return {"data": evaluation.fingerprint(unit.source), **dataclasses.asdict(evaluation.settings(self))}

    def measure(self, evaluation: Evaluation, unit: MeasurementUnit) -> Record:
        """The numbers of a record."""
        raise NotImplementedError

    def finish(self, evaluation: Evaluation) -> None:
        """Is called when all records are measured."""


class PromptSuite(Suite):
    """A suite that asks prompts: it gives tasks, whose samples every variant answers (`generation.prompted`).

    Attributes:
      samples: how many samples a task has by default, by its name; a task without an entry has all of its file.
    """

    samples: Mapping[str, int] = {}

    def open(self, names: Sequence[str], settings: Any, limits: Sequence[int | None]) -> list[PromptTask]:
        """The tasks `names`, of `tasks`; none: the default ones.

        Args:
          limits: the tokens that prompts of files and their answers may take together (None: no limit).

        Raises:
          ConfigError: a setting is missing or wrong.
          DataError: files are missing or damaged.
        """
        raise NotImplementedError

    def finish(
        self,
        settings: Any,
        answered: Sequence[tuple[PromptGroup, Sequence[Sample], list[SampleRecord]]],
        run: str,
    ) -> None:
        """Is called with the groups of its tasks when all are answered; `run` is the name of the run."""


# --------------------------------------------------------------------------------------------------------------------
# Options


def options_of(suites: Collection[Suite]) -> dict[str, tuple[dataclasses.Field[Any], list[Suite]]]:
    """The options of suites by name, with the suites that share each."""
    found: dict[str, tuple[dataclasses.Field[Any], list[Suite]]] = {}
    for suite in suites:
        for one in dataclasses.fields(suite.settings):
            found.setdefault(one.name, (one, []))[1].append(suite)
    return found


def add_options(parser: Any, suites: Collection[Suite]) -> None:
    """Adds the options of suites to a command line; one that is not given is None."""
    for name, (one, sharing) in options_of(suites).items():
        about = f"{one.metadata['help']} ({', '.join(suite.name for suite in sharing)})"
        if one.default is False:
            how: dict[str, Any] = {"action": "store_true", "default": None}
        else:
            how = {"type": one.metadata["type"] or str, "metavar": one.metadata["metavar"]}
        parser.add_argument(flag(name), help=about.replace("%", "%%"), **how)


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def given_options(arguments: argparse.Namespace, suites: Collection[Suite]) -> dict[str, Any]:
    """The options that a command line gives."""
    given = {name: getattr(arguments, name, None) for name in options_of(suites)}
    return {name: value for name, value in given.items() if value is not None}


def read_settings(suite: Suite, options: Mapping[str, Any]) -> Any:
    """The settings of a suite from options by name; those of other suites are left out.

    Raises:
      ConfigError: a value that its option does not take.
    """
    values = {}
    for one in dataclasses.fields(suite.settings):
        if options.get(one.name) is None:
            continue
        value, parse = options[one.name], one.metadata["type"]
        try:
            values[one.name] = value if parse is None else parse(str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"evaluation.options.{one.name} ({flag(one.name)}) is {value!r}: {error}") from None
    return suite.settings(**values)
