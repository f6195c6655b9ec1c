"""All suites by name, and the suites and tasks that a command line names.

A new suite is a file with a `Suite`, and its entry in SUITES. Importing this module does not import JAX.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.evaluation.tasks import beta, lm_eval, many_shot, needles, niah, perplexity
from pe_lab.evaluation.tasks.longbench import suite as longbench
from pe_lab.evaluation.tasks.ruler import suite as ruler
from pe_lab.evaluation.tasks.task import Suite, Task
from pe_lab.terminal import positive

SEED = 42  # of prompts; RULER's
SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (perplexity, needles, beta, niah, ruler, longbench, many_shot, lm_eval)
}
HARNESS = lm_eval.SUITE.name
AVERAGED = {name: suite.average_of for name, suite in SUITES.items() if suite.average_of is not None}
MEASURED = ("perplexity", "needles", "beta")  # measured on token sequences; the others ask prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all suites to the command line of `evaluate`."""
    measured = parser.add_argument_group(", ".join(MEASURED))
    measured.add_argument(
        "--text",
        metavar="SOURCE",
        help="text to measure on: a glob, jsonl:, parquet:, arrow:, hf:, tfds:, stdlib (default: the held-out data)",
    )
    prompted = parser.add_argument_group(", ".join(name for name in SUITES if name not in MEASURED))
    prompted.add_argument(
        "--samples", type=positive, help="a task and length (default: 500, or as many as its file has)"
    )
    prompted.add_argument(
        "--haystack", default="essays", help="essays, noise, needles, or a glob of text files (niah, ruler)"
    )
    prompted.add_argument("--chat", action="store_true", help="prompts as messages of a chat (longbench, lm_eval)")
    for suite in SUITES.values():
        for flag, options in suite.flags.items():
            (measured if suite.name in MEASURED else prompted).add_argument(flag, **options)


def title(suite: str) -> str:
    """A suite's name for people; also of a suite that only a result file names."""
    return SUITES[suite].title if suite in SUITES else suite.replace("_", " ").capitalize()


def terms(suites: Collection[str]) -> dict[str, str]:
    """The glossary entries of suites, each once."""
    return {t: meaning for s in SUITES.values() if s.name in suites for t, meaning in s.terms.items()}


def parse_suites(text: str) -> dict[str, tuple[str, ...]]:
    """Suite -> names of its tasks (none: the default ones), from `perplexity,niah:standard,ruler:vt,cwe`.

    An item after `suite:task` that is no suite is another task of that suite.

    Raises:
      ConfigError: an item is neither.
    """
    found: dict[str, list[str]] = {}
    last = None
    for item in filter(None, (part.strip() for part in text.split(","))):
        suite, colon, task = item.partition(":")
        known = suite.lower().replace("-", "_")
        if known in SUITES:
            found.setdefault(known, [])
            if colon and known in MEASURED:
                raise ConfigError(f"--suite={item}: {known} has no tasks to choose from. Write --suite={known}.")
            if colon and task:
                found[known].append(task)
            last = known if colon else None
        elif last is not None:
            found[last].append(item)
        else:
            raise ConfigError(f"--suite: there is no suite '{suite}'. {did_you_mean(known, list(SUITES))}")
    if not found:
        raise ConfigError(f"--suite is empty. Allowed: {', '.join(SUITES)}.")
    return {suite: tuple(dict.fromkeys(tasks)) for suite, tasks in found.items()}


def open_tasks(
    chosen: Mapping[str, Sequence[str]], arguments: argparse.Namespace, limits: Sequence[int | None] = (None,)
) -> list[Task]:
    """The tasks of the suites of prompts among `chosen`; see `Suite.open`.

    Raises:
      ConfigError: a suite has no task of a name, or a flag is missing or wrong.
      DataError: a file is missing or damaged.
    """
    tasks: list[Task] = []
    for suite in SUITES.values():
        if suite.open is None or suite.name not in chosen:
            continue
        names = [name if name in suite.tasks else name.replace("-", "_") for name in chosen[suite.name]]
        for name in names:
            if name not in suite.tasks:
                raise ConfigError(f"--suite={suite.name}:{name}: no such task. {did_you_mean(name, suite.tasks)}")
        tasks += suite.open(names, arguments, limits)
    return tasks
