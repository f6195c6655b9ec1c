"""Final answers of solutions, and which answers are equal."""

import json
from pathlib import Path

import pytest

from pe_lab.evaluation.scoring.math_answers import final_answer, last_boxed, same_answer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "many_shot_golden.json").read_text(encoding="utf-8"))

# Others agree on another verdict: a reading of theirs, not of mathematics.
OTHERS_ARE_WRONG = {
    ("5 dollars", "\\$5"),
    ("\\frac{\\pi}{4}", "\\frac\\pi4"),
    ("even.", "\\text{even}"),
    ("x^2,", "x^2"),
}


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['given']}~{case['right']}")
def test_answers_are_the_same_where_they_are(case):
    given, right = case["given"], case["right"]
    assert same_answer(given, right) == case["same"]
    if case["given"]:
        assert same_answer(right, given) == case["same"]  # symmetric
        assert same_answer(given, given)
    if case["hendrycks"] == case["math_verify"]:
        assert (case["same"] == case["hendrycks"]) != ((given, right) in OTHERS_ARE_WRONG)


def test_an_answer_without_end_is_wrong():
    for endless in ("0." + "3" * 9000, "1" * 9000, "0." + "0" * 900, "\\frac{1}{" + "3" * 900 + "}", "\\boxed{" * 900):
        assert not same_answer(final_answer(f"The answer is {endless}"), "\\frac{1}{3}")


@pytest.mark.parametrize("text", GOLDEN["boxes"])
def test_boxes_are_those_that_others_find(text):
    assert last_boxed(text) == GOLDEN["boxes"][text]


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("So it is $\\boxed{\\frac{1}{2}}$. The answer is 3.", "\\frac{1}{2}"),
        ("\\boxed{1} and then \\boxed{2", "1"),  # cut off by the end of the answer
        ("The final answer is $\\frac{3}{4}$. I hope it is correct.", "\\frac{3}{4}"),
        ("The answer is: 12.5. Then more", "12.5"),
        ("the answer is 4\nThe answer is $$x^2$$", "x^2"),
        ("The answer is **5**.", "5"),
        ("**The answer is 5.** Done", "5"),
        ("The **answer** is: `1/2`", "1/2"),
        ("**Final answer is:** _12.5_, as told", "12.5"),
        ("The answer is **$x^2$**.", "x^2"),
        ("The final answer is 5, since 2+3=5", "5"),
        ("The answer is 5 because 2+3=5", "5"),
        ("The answer is **1,204**; then we are done", "1,204"),
        ("The answer is 5, and thus 7 is not", "5"),
        ("The answer is 5, and we are done", "5"),
        ("The answer is \\frac{1}{2}, which is less than 1", "\\frac{1}{2}"),
        ("The answer is 1, 2, and 3.", "1, 2, and 3"),
        ("The answer is 3, or -5.", "3, or -5"),
        ("The answer is (1, 2).", "(1, 2)"),
        ("The answer is x_1, x_2.", "x_1, x_2"),
        ("The answer isn't 5 but 7", "7"),
        ("We get 3, then 1,204 in all", "1,204"),
        ("that makes -7", "-7"),
        ("or 2/3 of it", "2/3"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(output, answer):
    assert final_answer(output) == answer
