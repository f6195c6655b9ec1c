"""Suites by name: which there are, which tasks of one are asked for, and what they need to be opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pe_lab.errors import UserError, did_you_mean
from pe_lab.evaluation import plan
from pe_lab.evaluation.tasks.haystacks import Haystack, open_haystack
from pe_lab.evaluation.tasks.task import Task

PROMPTED = ("niah", "ruler", "longbench", "many_shot")
HARNESS = "lm_eval"
SUITES = (*plan.SUITES, *PROMPTED, HARNESS)
SEED = 42  # of the prompted suites; RULER's


def parse_suites(text: str) -> dict[str, tuple[str, ...]]:
    """Suite -> tasks of it (none: all that are meant by default), from `perplexity,niah:standard,ruler:vt,cwe`.

    What follows a suite with a task, and is no suite itself, is another of its tasks.

    Raises:
      UserError: no suite is called so.
    """
    found: dict[str, list[str]] = {}
    last = None
    for item in filter(None, (part.strip() for part in text.split(","))):
        suite, colon, task = item.partition(":")
        known = suite.lower().replace("-", "_")
        if known in SUITES:
            found.setdefault(known, [])
            if colon and known in plan.SUITES:
                raise UserError(f"--suite={item}: {known} has no tasks to choose from. Write --suite={known}.")
            if colon and task:
                found[known].append(task)
            last = known if colon else None
        elif last is not None:
            found[last].append(item)
        else:
            raise UserError(f"--suite: no suite is called '{suite}'. {did_you_mean(known, SUITES)}")
    if not found:
        raise UserError(f"--suite is empty. Allowed: {', '.join(SUITES)}.")
    return {suite: tuple(dict.fromkeys(tasks)) for suite, tasks in found.items()}


@dataclass(frozen=True)
class Options:
    """Where the prompted suites find what they ask about, and what may be said of it.

    Attributes:
      haystack: `essays`, `noise`, `needles` or a glob of text files, for niah; text files also for RULER's essays.
      depths: per cent, instead of niah's 0, 10 ... 100.
      samples: how many will be asked; fewer than niah has depths are spread over them.
      longbench, qa, problems: directories and the file with other people's data.
      words: RULER's own list, for very long `cwe`.
      chat: prompts as a user's message, for a model that was made for chats (LongBench).
      max_new_tokens, buffer: of many_shot, instead of the paper's.
    """

    haystack: str = "essays"
    depths: tuple[float, ...] | None = None
    samples: int | None = None
    longbench: str | None = None
    qa: str | None = None
    problems: str | None = None
    words: str | None = None
    chat: bool = False
    max_new_tokens: int | None = None
    buffer: int | None = None


def open_tasks(
    chosen: Mapping[str, Sequence[str]], options: Options, limits: Sequence[int | None] = (None,)
) -> list[Task]:
    """The tasks of the prompted suites among `chosen`.

    Args:
      limits: tokens that LongBench's prompts and answers may have together; None: as many as they have.

    Raises:
      UserError: no task is called so, or what it asks about is not there.
    """
    tasks: list[Task] = []
    for suite in PROMPTED:
        if suite in chosen:
            tasks += _OPEN[suite](chosen[suite], options, limits)
    return tasks


def _niah(names: Sequence[str], options: Options, limits: Sequence[int | None]) -> list[Task]:
    from pe_lab.evaluation.tasks.niah import DEFAULT, GRID, niah_task

    haystack, depths = open_haystack(options.haystack), options.depths
    if options.samples is not None and options.samples < len(depths or GRID):
        if depths is not None:
            raise UserError(
                f"--samples={options.samples} would leave out some of the {len(depths)} depths. Give at least as many "
                "samples, or fewer --depths."
            )
        depths = parse_depths(str(options.samples)) if options.samples > 1 else (50.0,)
    return [niah_task(name, haystack, depths) for name in names or DEFAULT]


def _ruler(names: Sequence[str], options: Options, limits: Sequence[int | None]) -> list[Task]:
    from pe_lab.evaluation.tasks.ruler.suite import ruler_tasks

    essays: Haystack | None = None
    if options.haystack in ("noise", "needles"):
        raise UserError(f"--haystack={options.haystack}: RULER's tasks say themselves what they hide needles in.")
    if options.haystack != "essays":
        essays = open_haystack(options.haystack)
    return ruler_tasks(
        names, essays, Path(options.qa) if options.qa else None, Path(options.words) if options.words else None
    )


def _longbench(names: Sequence[str], options: Options, limits: Sequence[int | None]) -> list[Task]:
    from pe_lab.evaluation.tasks.longbench.suite import BY_HAND, open_longbench

    if options.longbench is None:
        raise UserError(f"--suite=longbench: its files are not here. {BY_HAND}")
    directory = Path(options.longbench)
    return [task for limit in limits for task in open_longbench(directory, names or ("all",), limit, options.chat)]


def _many_shot(names: Sequence[str], options: Options, limits: Sequence[int | None]) -> list[Task]:
    from pe_lab.evaluation.tasks.many_shot import PROBLEMS_BY_HAND, many_shot_tasks

    if options.problems is None:
        raise UserError(f"--suite=many_shot: there is no file of problems. {PROBLEMS_BY_HAND}")
    return list(many_shot_tasks(options.problems, names, options.max_new_tokens, options.buffer))


_OPEN: dict[str, Callable[[Sequence[str], Options, Sequence[int | None]], list[Task]]] = {
    "niah": _niah,
    "ruler": _ruler,
    "longbench": _longbench,
    "many_shot": _many_shot,
}


def parse_depths(text: str) -> tuple[float, ...]:
    """Depths in per cent: `0,25,50`, or a number of them spread evenly from 0 to 100.

    Raises:
      UserError: something is no number, or outside 0 to 100.
    """
    items = [part.strip().removesuffix("%") for part in text.split(",") if part.strip()]
    try:
        numbers = [float(item) for item in items]
    except ValueError:
        raise UserError(f"--depths={text}: write per cents, such as 0,50,100, or how many, such as 11.") from None
    if len(items) == 1 and items[0].isdigit() and int(items[0]) > 1 and not text.strip().endswith((",", "%")):
        count = int(items[0])
        return tuple(round(100 * i / (count - 1), 1) for i in range(count))
    if not numbers or not all(0 <= depth <= 100 for depth in numbers):
        raise UserError(f"--depths={text}: depths are per cents from 0 to 100.")
    return tuple(sorted(set(numbers)))
