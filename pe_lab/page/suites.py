"""The names of suites and tasks on the page, and their explanations."""

from __future__ import annotations

from collections.abc import Collection

from pe_lab.analysis.scores import Table
from pe_lab.results.intervals import is_prompted

SCORED = ("needles", "perplexity")  # the suites that a verdict is made of, the first one first
TITLES = {
    "needles": "Needle accuracy",
    "perplexity": "Perplexity",
    "niah": "Needle in a haystack",
    "ruler": "RULER",
    "longbench": "LongBench",
    "many_shot": "Many-shot learning",
    "lm_eval": "lm-evaluation-harness",
}
AVERAGED = {"ruler": 13, "longbench": 21, "lm_eval": None}  # suites whose tasks are averaged, and how many they have
ABOUT = {
    "niah": "Facts are hidden in a haystack of text, and the model is asked for them. The figure is the share of the "
    "values asked for that its answer contains; “all” is the share of prompts whose every value was found.",
    "ruler": "Tasks made for long context: needles of many kinds, variables to trace, words to count, questions about "
    "documents, among others.",
    "longbench": "Questions, summaries and code about real documents, each as long as it is. Those that were too "
    "long for the model lost their middle; pointing at a figure tells how many.",
    "many_shot": "A task explained by examples alone, as many as the length holds.",
    "lm_eval": "Scores as EleutherAI's lm-evaluation-harness computes them, ± its own standard errors.",
}
# Explained on the pages that have them.
TERMS = {
    "depth": "Where in the sequence a needle stands: 0% is its beginning, 100% its end, next to the question.",
    "needle in a haystack": "A sentence with a fact, put into text that has nothing to do with it. The model is asked "
    "for the fact at the end, and answers in words of its own.",
    "fraction found, all found": "The share of the asked values that the answer contains, and the share of prompts "
    "whose answer contains every one. They differ only where several are asked for.",
    "RULER": "A suite of 13 tasks made for long context at any length (Hsieh et al., 2024): eight kinds of needles, "
    "variable tracing, two of word counts, two of questions about documents.",
    "LongBench": "A suite of 21 tasks on real texts of thousands of words, in English and Chinese (Bai et al., 2023). "
    "Each task has its own metric.",
}


def task_terms(suites: Collection[str], depths: bool) -> dict[str, str]:
    """The entries of `TERMS` that a page with these suites needs; `depths`: it has heat maps."""
    needles = bool({"niah", "ruler"} & set(suites))
    wanted = {
        "depth": depths,
        "needle in a haystack": needles,
        "fraction found, all found": needles,
        "RULER": "ruler" in suites,
        "LongBench": "longbench" in suites,
    }
    return {term: TERMS[term] for term, is_there in wanted.items() if is_there}


def task_suites(names: Collection[str]) -> list[str]:
    """Suites in the order of the page: those of `TITLES` first, then by name."""
    known = list(TITLES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def suite_title(suite: str) -> str:
    """A suite's display name."""
    return TITLES.get(suite, suite.replace("_", " ").capitalize())


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
    metrics = (str(cell.record["metric"]) for cell in table.cells.values() if is_prompted(cell.record))
    return next(metrics, "").replace("_", " ")
