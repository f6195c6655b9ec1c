"""All suites by name, and the suites and tasks that a command line names. Importing this does not import JAX."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.suite import PromptSuite, Suite, options_of, read_settings
from pe_lab.evaluation.suites import (
    documents,
    helmet,
    lm_eval,
    logit_scale,
    long_range,
    longbench,
    many_shot,
    needles,
    niah,
    nolima,
    passkeys,
    perplexity,
    ruler,
)
from pe_lab.storage import at_home

SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (
        perplexity,
        needles,
        logit_scale,
        long_range,
        passkeys,
        documents,
        niah,
        ruler,
        longbench,
        helmet,
        nolima,
        many_shot,
        lm_eval,
    )
}
AVERAGED = {name: suite.average_of for name, suite in SUITES.items() if suite.average_of is not None}
_OWN = re.compile(r"(.+\.py):(\w+)(?::(.*))?")  # FILE.py:SUITE, or FILE.py:SUITE:TASK


def suite_of(name: str) -> Suite:
    """The suite of a record's key `suite`; for one that only a file names, a suite with nothing but names."""
    if name in SUITES:
        return SUITES[name]
    made = Suite()
    made.name, made.title = name, name.replace("_", " ").capitalize()
    return made


def title(name: str) -> str:
    """A suite's name for people; also of a suite that only a record names."""
    return suite_of(name).title


def terms(names: Collection[str]) -> dict[str, str]:
    """The glossary entries of suites, each once, in the order of all suites."""
    return {t: meaning for s in SUITES.values() if s.name in names for t, meaning in s.terms.items()}


def parse_suites(text: str) -> dict[str, tuple[str, ...]]:
    """Suite -> names of its tasks (none: the default ones), from `perplexity,niah:standard,ruler:vt,cwe`.

    An item after `suite:task` that is no suite is another task of that suite. `my_suite.py:SUITE` is the suite of that
    name in a file.

    Raises:
      ConfigError: an item is none of these.
    """
    found: dict[str, list[str]] = {}
    last = None
    for item in filter(None, (part.strip() for part in text.split(","))):
        if own := _OWN.fullmatch(item):
            suite, task = load_suite(own[1], own[2]).name, own[3] or ""
            colon, known = task, suite
        else:
            suite, colon, task = item.partition(":")
            known = suite.lower().replace("-", "_")
        if known in SUITES:
            found.setdefault(known, [])
            if colon and SUITES[known].tasks == ():
                raise ConfigError(f"--suite={item}: {known} has no tasks to choose from. Write --suite={known}.")
            if colon and task:
                found[known].append(task)
            last = known if colon else None
        elif last is not None:
            found[last].append(item)
        else:
            raise ConfigError(
                f"--suite: there is no suite '{suite}'. {did_you_mean(known, list(SUITES))} One of your own is "
                "FILE.py:SUITE."
            )
    if not found:
        raise ConfigError(f"--suite is empty. Allowed: {', '.join(SUITES)}.")
    return {suite: tuple(dict.fromkeys(tasks)) for suite, tasks in found.items()}


def load_suite(path: str, name: str) -> Suite:
    """The suite `name` of a file of one's own, which is then among SUITES.

    Raises:
      ConfigError: there is no such file, or nothing of that name; it is no suite; another suite has its name.
    """
    file = at_home(path).resolve()
    where = f"--suite={path}:{name}"
    if not file.is_file():
        raise ConfigError(f"{where}: there is no file {file}.")
    module_name = f"pe_lab_suite_{file.stem}"
    module = sys.modules.get(module_name)
    if module is None or module.__file__ != str(file):
        spec = importlib.util.spec_from_file_location(module_name, file)
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ConfigError(f"{where}: {file} cannot be imported: {type(error).__name__}: {error}.") from error
    suite = getattr(module, name, None)
    if not isinstance(suite, Suite):
        raise ConfigError(f"{where}: {file} has no suite '{name}': an instance of a class of pe_lab.evaluation.suite.")
    if not re.fullmatch("[a-z][a-z0-9_]*", getattr(suite, "name", "")) or not getattr(suite, "title", ""):
        raise ConfigError(f"{where}: give the suite a name of lower-case letters, digits and _, and a title.")
    if SUITES.setdefault(suite.name, suite) is not suite:
        raise ConfigError(f"{where}: another suite is called '{suite.name}'. Give yours another name.")
    return suite


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a key of a config's `evaluation.options` that no suite has, or a value it refuses."""
    known = options_of(SUITES.values())
    for name in options:
        if name not in known:
            raise ConfigError(f"evaluation.options: no suite has an option '{name}'. {did_you_mean(name, list(known))}")
    for suite in SUITES.values():
        read_settings(suite, options)


def open_tasks(
    chosen: Mapping[str, Sequence[str]], options: Mapping[str, Any], limits: Sequence[int | None] = (None,)
) -> list[PromptTask]:
    """The tasks of the suites of prompts among `chosen`; see `PromptSuite.open`.

    Raises:
      ConfigError: a suite has no task of a name, or an option is missing or wrong.
      DataError: a file is missing or damaged.
    """
    tasks: list[PromptTask] = []
    for suite in SUITES.values():
        if not isinstance(suite, PromptSuite) or suite.name not in chosen:
            continue
        names = [name if name in suite.tasks else name.replace("-", "_") for name in chosen[suite.name]]
        for name in names:
            if name not in suite.tasks:
                raise ConfigError(f"--suite={suite.name}:{name}: no such task. {did_you_mean(name, suite.tasks)}")
        tasks += suite.open(names, read_settings(suite, options), limits)
    return tasks
