"""Many-shot prompts: their problems, lengths and scores."""

import json
import random
import re
from dataclasses import replace

import pytest

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import DataError, UserError
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.suites import many_shot
from pe_lab.evaluation.suites.many_shot import SUITE, ManyShotSettings

BYTES = ByteTokenizer()
LENGTH, BUFFER, NEW = 3000, 400, 256


def lines(number=30):
    """Problems in the dataset's schema; the last one is the first in other white space."""
    rng = random.Random(0)
    made = []
    for i in range(number):
        a, b = rng.randint(10, 99), rng.randint(100, 999)
        text = f"What is ${a} \\cdot {b}$ for the {i}-th time?"
        solution = f"We multiply{' with care' * rng.randint(0, 9)}: $\\boxed{{{a * b}}}$."
        made.append({"problem": text, "solution": solution, "answer": str(a * b), "level": 1})
    return [*made, made[0] | {"problem": made[0]["problem"].replace(" ", "\n")}]


def write(path, found):
    path.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    return path


def opened(path, *names):
    return SUITE.open(names, ManyShotSettings(path, max_new_tokens=NEW, buffer=BUFFER))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("many") / "problems.jsonl", lines())
    return {task.name: task for task in opened(path)}


def parts(text):
    """The solved problems of a prompt, and the one to solve."""
    *solved, asked = text.split("\n\nProblem: ")
    assert solved[0].startswith("Problem: ") and asked.endswith("\nSolution:")
    return [solved[0].removeprefix("Problem: "), *solved[1:]], asked.removesuffix("\nSolution:")


def words(text):
    return text.split("\nSolution:")[0].split()


def test_needle_prompts_have_the_needle_once_and_plain_prompts_never(tasks):
    needles = tasks["needle"].samples(BYTES, LENGTH, 24, 0)
    plains = tasks["plain"].samples(BYTES, LENGTH, 6, 0)
    assert len({sample.references for sample in plains}) >= 5
    for index, sample in enumerate(needles):
        plain = plains[index // 4]
        solved, asked = parts(sample.text)
        without, same = parts(plain.text)
        assert asked == same and sample.references == plain.references and plain.depth == ()
        places = [place for place, one in enumerate(solved) if words(one) == asked.split()]
        assert places == [round((len(solved) - 1) * (0, 1 / 3, 2 / 3, 1)[index % 4])]
        assert sample.depth == ((0.0, 33.3, 66.7, 100.0)[index % 4],)
        assert solved[places[0]].startswith(f"{asked}\nSolution: We multiply")
        assert not any(words(one) == asked.split() for one in without)
        # The solved ones around are the same, in the same order.
        others = solved[: places[0]] + solved[places[0] + 1 :]
        assert others == without[: len(others)] and 0 <= len(without) - len(others) <= 3
        assert sample.metadata["exemplars"] == len(others) and plain.metadata["exemplars"] == len(without)
        assert sample.metadata["cluster"] == plain.metadata["cluster"] == plain.metadata["problem"]
    assert len({sample.metadata["cluster"] for sample in needles}) == 6


def test_prompts_leave_the_buffer_free_and_no_more(tasks):
    longest = max(len(f"Problem: {line['problem']}\nSolution: {line['solution']}\n\n") for line in lines())
    for task in tasks.values():
        for length in (LENGTH, 6000):
            for sample in task.samples(BYTES, length, 8, 1):
                _, asked = parts(sample.text)
                question = len(f"Problem: {asked}\nSolution:")
                left = length - len(sample.tokens) + question
                assert BUFFER <= left < BUFFER + longest
                assert len(sample.tokens) + sample.max_new_tokens <= length
                assert sample.stop == ("</s>", "<|im_end|>", "<|endoftext|>", "Problem:")
    for sample, longer in zip(*[tasks["plain"].samples(BYTES, length, 8, 1) for length in (LENGTH, 6000)], strict=True):
        solved, asked = parts(sample.text)
        another = parts(longer.text)[0][len(solved)]
        budget = LENGTH - (BUFFER - len(f"Problem: {asked}\nSolution:"))
        assert len(sample.tokens) <= budget < len(sample.tokens) + len(f"Problem: {another}\n\n")
    # An answer may be longer than the buffer.
    greedy = replace(tasks["plain"], buffer=100, max_new_tokens=900)
    assert 0 <= LENGTH - len(greedy.samples(BYTES, LENGTH, 1, 0)[0].tokens) - 900 < longest


def test_the_needles_solution_is_right_and_other_answers_are_wrong(tasks):
    for sample in tasks["needle"].samples(BYTES, LENGTH, 12, 2):
        solved, asked = parts(sample.text)
        solution = next(one.split("\nSolution:")[1] for one in solved if words(one) == asked.split())
        assert tasks["needle"].score(sample, solution) == {"accuracy": 1.0}
        assert tasks["needle"].found(sample, solution) == [1.0]
        assert tasks["needle"].score(sample, f"The answer is ${sample.references[0]}$.") == {"accuracy": 1.0}
        for other in ("", "something else", "\\boxed{}", f"\\boxed{{-{sample.references[0]}}}", solution[:12]):
            assert tasks["needle"].score(sample, other) == {"accuracy": 0.0}


def test_a_sample_depends_on_its_index_alone(tasks):
    for task in tasks.values():
        whole = task.samples(BYTES, LENGTH, 12, 3)
        several = [whole[i] for i in (9, 0, 5)]
        assert task.samples(BYTES, LENGTH, 6, 3)[5].fingerprint == several[2].fingerprint
        assert task.samples(BYTES, LENGTH, 1, 4)[0].text != several[1].text
        longer, shorter = parts(task.samples(BYTES, 5000, 1, 3)[0].text)[0], parts(several[1].text)[0]
        assert len(longer) > len(shorter) == len(longer[: len(shorter)]) and longer[: len(shorter)] == shorter


def test_few_problems_are_repeated_but_not_the_needle(tmp_path):
    path = write(tmp_path / "few.jsonl", lines(4))
    for task in opened(path, "needle", "plain"):
        samples = task.samples(BYTES, LENGTH, 500, 0)
        assert len(samples) == (20 if task.needle else 5)
        for sample in samples[:8]:
            solved, asked = parts(sample.text)
            assert sum(words(one) == asked.split() for one in solved) == task.needle
            assert len(set(solved)) < len(solved) > 10


def test_a_short_length_is_refused_and_long_problems_are_skipped(tasks, tmp_path):
    with pytest.raises(UserError, match=r"the shortest take ([\d,]+)\.") as refused:
        tasks["needle"].samples(BYTES, 500, 4, 0)
    least = int(re.search(r"shortest take (\d+)", str(refused.value)).group(1))
    assert len(tasks["needle"].samples(BYTES, least, 4, 0)) == 4
    with pytest.raises(UserError):
        tasks["needle"].samples(BYTES, least - 1, 4, 0)
    found = lines(10)
    found[3] |= {"solution": "Long. " * 1000 + "\\boxed{1}"}
    (task,) = opened(write(tmp_path / "long.jsonl", found), "plain")
    asked = [sample.metadata["problem"] for sample in task.samples(BYTES, LENGTH, 50, 0)]
    assert sorted(asked) == [i for i in range(11) if i != 3]


def test_the_papers_settings_are_the_defaults(tasks, tmp_path):
    path = write(tmp_path / "problems.jsonl", lines(2))
    assert [(task.buffer, task.max_new_tokens) for task in SUITE.open((), ManyShotSettings(path))] == [(2300, 2048)] * 2
    assert many_shot.SAMPLES == {"needle": 4 * 100, "plain": 100}
    for task in tasks.values():
        assert isinstance(task, PromptTask) and task.suite == "many_shot" and task.metric == "accuracy"
        json.dumps(task.settings)


def test_files_that_are_not_problems_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--problems=.*none\.jsonl.*nlile/hendrycks-MATH-benchmark"):
        opened(tmp_path / "none.jsonl")
    good = lines(2)[0]
    for wrong, message in (
        ({"problem": "p", "answer": "1"}, "it has no text solution"),
        ([1], "no JSON object"),
        (good | {"answer": 3}, "it has no text answer"),
    ):
        with pytest.raises(DataError, match=f"line 2, is no problem: {message}"):
            many_shot.read_problems(write(tmp_path / "bad.jsonl", [good, wrong]))
    for field in many_shot.FIELDS:  # json.dumps escapes it, as a cut file of \\u escapes may have it
        found = [good, good | {field: "half \ud83d"}]
        with pytest.raises(UserError, match=r"bad\.jsonl, line 2, is no problem: half of a surrogate pair"):
            many_shot.read_problems(write(tmp_path / "bad.jsonl", found))
    whole = [line | {"solution": "\U0001f600 \\boxed{1}"} for line in lines(2)]
    assert many_shot.read_problems(write(tmp_path / "good.jsonl", whole))[0].solution[0] == "\U0001f600"
    with pytest.raises(UserError, match="has not two problems"):
        many_shot.read_problems(write(tmp_path / "one.jsonl", [good, good]))
    without = [{"problem": line["problem"], "solution": line["solution"]} for line in lines(3)]
    problems = many_shot.read_problems(write(tmp_path / "other.jsonl", without))
    assert [problem.answer for problem in problems] == [line["answer"] for line in lines(3)]
