"""RULER (Hsieh et al. 2024, arXiv 2404.06654): its thirteen tasks, with the settings of its scripts/synthetic.yaml."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.tasks import niah
from pe_lab.evaluation.tasks.haystacks import Haystack, open_haystack
from pe_lab.evaluation.tasks.ruler.questions import qa_task
from pe_lab.evaluation.tasks.ruler.synthetic import CommonWords, FrequentWords, VariableTracking
from pe_lab.evaluation.tasks.task import Suite, Task, half_pair
from pe_lab.storage import read_json

NEEDLES = tuple(niah.RULER)
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")  # in the order of RULER's tables
WORDS_ADVICE = (
    "--words takes RULER's english_words.json, an object of words, from scripts/data/synthetic/json of "
    "github.com/NVIDIA/RULER."
)


def ruler_tasks(
    names: Sequence[str] | None = None,
    essays: Haystack | None = None,
    qa: Path | None = None,
    words: Path | None = None,
) -> list[Task]:
    """The tasks `names`, or all thirteen.

    Args:
      essays: replaces Paul Graham's essays in the needle tasks.
      qa: the directory with the files of SQuAD and HotpotQA, for qa_1 and qa_2.
      words: RULER's english_words.json, for `cwe` at lengths beyond the words of wonderwords.

    Raises:
      ConfigError: `qa` is needed.
      DataError: a file is missing or damaged.
    """
    made: list[Task] = []
    for name in names or TASKS:
        if name in NEEDLES:
            made.append(niah.ruler_needle_task(name, essays))
        elif name == "vt":
            made.append(VariableTracking())
        elif name == "cwe":
            made.append(CommonWords(_words(words) if words else ()))
        elif name == "fwe":
            made.append(FrequentWords())
        else:
            made.append(qa_task(name, qa))
    return made


def _words(path: Path) -> tuple[str, ...]:
    """The words of RULER's english_words.json, whose keys are numbers."""
    entries = read_json(path, WORDS_ADVICE)
    if len(entries) < 100 or not all(isinstance(word, str) for word in entries.values()):
        raise DataError(f"--words={path} is no object of 100 words or more. {WORDS_ADVICE}")
    if wrong := half_pair(entries.values()):
        raise DataError(f"--words={path} has {wrong}. {WORDS_ADVICE}")
    return tuple(dict.fromkeys(entries.values()))


def open_ruler(names: Sequence[str], arguments: argparse.Namespace, limits: Sequence[int | None]) -> list[Task]:
    """The tasks `names`, or all; see `Suite.open`."""
    if arguments.haystack in ("noise", "needles"):
        raise ConfigError(
            f"--haystack={arguments.haystack}: each of RULER's tasks has its own haystack. Give text files, which "
            "replace the essays, or leave --haystack out."
        )
    essays = None if arguments.haystack == "essays" else open_haystack(arguments.haystack)
    return ruler_tasks(names, essays, arguments.qa, arguments.words)


SUITE = Suite(
    name="ruler",
    title="RULER",
    protocol=2,
    about="Tasks made for long context: needles of many kinds, variables to trace, words to count, questions about "
    "documents, among others.",
    terms=niah.SUITE.terms
    | {
        "RULER": "A suite of 13 tasks made for long context at any length (Hsieh et al., 2024): eight kinds of "
        "needles, variable tracing, two of word counts, two of questions about documents.",
    },
    average_of=len(TASKS),
    tasks=TASKS,
    samples=dict.fromkeys(TASKS, 500),  # RULER's
    flags={
        "--qa": {"type": Path, "metavar": "DIR", "help": "SQuAD's and HotpotQA's files, for ruler's qa tasks"},
        "--words": {
            "type": Path,
            "metavar": "FILE",
            "help": "RULER's english_words.json, for cwe at very long lengths",
        },
        "--predictions": {"metavar": "DIR", "help": "score RULER's prediction files instead of a model"},
        "--ruler-files": {
            "metavar": "DIR",
            "help": "also write answers as RULER's prediction files, for its own scorer",
        },
    },
    open=open_ruler,
)
