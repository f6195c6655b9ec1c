"""The names of suites and tasks on the page, and their explanations."""

from __future__ import annotations

from collections.abc import Collection

from pe_lab.evaluation.tasks.suites import SUITES, terms
from pe_lab.evaluation.tasks.suites import title as suite_title
from pe_lab.results.table import Table

SCORED = ("needles", "perplexity")  # the suites that a verdict is made of, the first one first
ORDER = ("needles", *(name for name in SUITES if name != "needles"))
ABOUT = {name: suite.about for name, suite in SUITES.items() if suite.about}
DEPTH = "Where in the sequence a needle stands: 0% is its beginning, 100% its end, next to the question."


def task_terms(suites: Collection[str], depths: bool) -> dict[str, str]:
    """The glossary entries of these suites; `depths`: the page has heat maps."""
    return ({"depth": DEPTH} if depths else {}) | terms(suites)


def task_suites(names: Collection[str]) -> list[str]:
    """Suites in the order of the page: the known ones first, then by name."""
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def task_name(table: Table) -> str:
    """A task's display name."""
    return table.source.replace("_", " ")


def table_title(table: Table, name_source: bool = False) -> str:
    """`RULER, niah single 1` of a prompted task; the suite, with its source on request, of any other table."""
    title = suite_title(table.suite)
    if table.prompted:
        return f"{title}, {task_name(table)}"
    return f"{title} on {table.source}" if table.source and name_source else title


def metric_name(table: Table) -> str:
    """The display name of a prompted task's metric: `fraction found`."""
    return table.metric.replace("_", " ")
