"""RULER (Hsieh et al., 2024): its thirteen tasks by name, with the settings of its scripts/synthetic.yaml."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pe_lab.errors import UserError, did_you_mean
from pe_lab.evaluation.tasks import niah
from pe_lab.evaluation.tasks.haystacks import Haystack
from pe_lab.evaluation.tasks.ruler.questions import qa_task
from pe_lab.evaluation.tasks.ruler.synthetic import CommonWords, FrequentWords, VariableTracking
from pe_lab.evaluation.tasks.task import HALF_A_PAIR, Task

NEEDLES = tuple(niah.RULER)
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")  # in the order of RULER's tables


def ruler_tasks(
    names: Sequence[str] | None = None,
    haystack: Haystack | None = None,
    qa: Path | None = None,
    words: Path | None = None,
) -> list[Task]:
    """The tasks called so, or all thirteen.

    Args:
      names: of TASKS.
      haystack: replaces Paul Graham's essays in the needle tasks that have essays.
      qa: the directory with the files of SQuAD and HotpotQA, for qa_1 and qa_2.
      words: RULER's english_words.json, for `cwe` in texts too long for the words of wonderwords.

    Raises:
      UserError: a name is unknown, or files are missing or not in their schema.
    """
    made: list[Task] = []
    for name in names or TASKS:
        if name not in TASKS:
            raise UserError(f"--suite=ruler:{name}: no such task. {did_you_mean(name, TASKS)}")
        if name in NEEDLES:
            made.append(niah.ruler_needle_task(name, haystack))
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
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"--words={path} cannot be read ({error.strerror}).") from None
    except ValueError:
        found = None
    entries = found if isinstance(found, dict) and all(isinstance(word, str) for word in found.values()) else {}
    words = tuple(dict.fromkeys(entries.values()))
    if len(words) < 100:
        raise UserError(
            f"--words={path} is not RULER's english_words.json: an object of words, as in "
            "scripts/data/synthetic/json of github.com/NVIDIA/RULER."
        )
    for key, word in entries.items():
        if HALF_A_PAIR.search(word):
            raise UserError(
                f"--words={path}: the word of {ascii(key)}, {ascii(word)}, has half of a surrogate pair, which is no "
                "character. Remove it, or take the file again as RULER has it."
            )
    return words
