"""RULER's tasks other than needles, against prompts of RULER's scripts and answers read from the prompts."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.suites import ruler as ruler_tasks
from pe_lab.evaluation.suites.niah import NOISE
from pe_lab.evaluation.suites.ruler import (
    NEEDLES,
    TASKS,
    CommonWords,
    FrequentWords,
    VariableTracking,
    qa_task,
    question_prompt,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "ruler_golden.json").read_text())
BYTES = ByteTokenizer()


class Characters(ByteTokenizer):
    """A token for every `a_token` characters; the golden prompts were counted with two."""

    def __init__(self, a_token=2):
        self.a_token = a_token

    def encode_prompt(self, text, add_special_tokens=True):
        return np.zeros(-(-len(text) // self.a_token), np.int32)


def prompts(task):
    """(text, outputs) of RULER's scripts."""
    return [(s["input"] + s["answer_prefix"], s["outputs"]) for s in GOLDEN["prompts"][task]["samples"]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qa")
    (directory / "dev-v2.0.json").write_text(json.dumps(GOLDEN["squad"]))
    (directory / "hotpot_dev_distractor_v1.json").write_text(json.dumps(GOLDEN["hotpot"]))
    return directory


def tasks_named(names, **settings):
    return ruler_tasks.SUITE.open(names, ruler_tasks.RulerSettings(**settings))


@pytest.fixture(params=["vt", "vt long", "cwe", "cwe long", "fwe", "qa_1", "qa_2"])
def case(request, files):
    """A task and a length that holds it."""
    name = request.param.split()[0]
    task = qa_task(name, files) if name.startswith("qa") else tasks_named([name])[0]
    return task, {"vt long": 9000, "cwe": 2600, "cwe long": 8000}.get(request.param, 3000)


# ------------------------------------------------------------------------------------------------------------------
# Reading prompts


def tracked(text):
    """The parts of a variable tracking prompt, [(lines, value asked for, names that have it)], by execution."""
    found = []
    for part in re.findall(r"following text\.\n\n(.*?)\nQuestion: .*? the value (\d+) in", text, re.DOTALL):
        variables = {}
        for line in part[0].split("\n"):
            if assigned := re.fullmatch(r"VAR ([A-Z]+) = (?:(\d+)|VAR ([A-Z]+) )", line):
                name, number, other = assigned.groups()
                variables[name] = number if number else variables[other]  # a KeyError where the order is wrong
            else:
                assert line == NOISE
        found.append((part[0].split("\n"), int(part[1]), [name for name in variables if variables[name] == part[1]]))
    return found


def listed(text):
    """The numbered lists of a common words prompt, and the answer after the first."""
    found = re.findall(r"appear most often\.\n(.*?)\nQuestion: [^?]*\? Answer: [^:]*:([^\n]*)", text, re.DOTALL)
    return [[_words(numbered) for numbered in part] for part in found]


def _words(numbered):
    words = re.findall(r"(?:^| )(\d+)\. (.*?)(?= \d+\. |$)", numbered)
    assert [int(number) for number, _ in words] == list(range(1, len(words) + 1))
    return [word for _, word in words]


def coded(text):
    return re.search(r"frequently appeared coded words\. (.*)\nQuestion:", text).group(1).split(" ")


def documents(text):
    """The documents of a question in their order, and the question."""
    context, question = re.search(
        r"given documents\.\n\n(Document 1:\n.*)\n\nAnswer.*Question: (.*) Answer:", text, 16
    ).groups()
    return re.split(r"(?:^|\n\n)Document \d+:\n", context)[1:], question


def read(sample, name):
    """An answer from the prompt alone (for questions: the reference, if its document is in the prompt)."""
    if name == "vt":
        return " ".join(tracked(sample.text)[-1][2])
    if name == "cwe":
        return " ".join(word for word, _ in Counter(listed(sample.text)[-1][0]).most_common(10))
    if name == "fwe":
        return " ".join(word for word, _ in Counter(coded(sample.text)).most_common(4) if word != "...")
    texts, _ = documents(sample.text)
    return next(reference for reference in sample.references for text in texts if reference in text)


# ------------------------------------------------------------------------------------------------------------------
# Against RULER


@pytest.mark.parametrize(("name", "task"), [("vt", VariableTracking()), ("vt_2_chains", VariableTracking(2, 2))])
def test_tracking_prompts_are_rulers(name, task):
    for text, outputs in prompts(name):
        (example, value, names), (lines, asked, found) = tracked(text)
        if task.chains == 1:
            assert ruler_tasks.assignments(found, asked) == [line for line in lines if line != NOISE]
        else:  # RULER's solved example gives all chains one value
            names = text.split("they are: ")[1].split("\n")[0].split()
        links = task.hops + 1
        example = ruler_tasks.tracking_prompt(example, value, links)
        question = ruler_tasks.tracking_prompt(lines, asked, links)
        assert f"{example} {' '.join(names)}\n\n{question}" == text and found == outputs
    # As RULER, in its tokens: as much noise in the example, and in the text; the same lines but for names and numbers.
    golden = GOLDEN["prompts"][name]
    ours = task.samples(Characters(), golden["max_length"], 1, 0)[0]
    assert masked(ours.text) == masked(text) and ours.max_new_tokens == golden["new_tokens"]


def masked(text):
    """The lines with names and numbers masked, in any order: of the example, and of the question."""
    text = re.sub(r"\b(?!VAR\b)[A-Z]{3}\b", "AAA", re.sub(r"\b[A-Z]{5}\b", "AAAAA", text))
    return [sorted(part.split("\n")) for part in re.sub(r"\d{5}", "00000", text).split("Memorize")]


@pytest.mark.parametrize("name", ["cwe", "cwe_short"])
def test_common_words_prompts_are_rulers(name):
    golden = GOLDEN["prompts"][name]
    for text, outputs in prompts(name):
        (example, answer), (words, nothing) = listed(text)
        assert not nothing and ruler_tasks.common_words_prompt(example, answer, words) == text
        ours = CommonWords().samples(Characters(), golden["max_length"], 1, 0)[0]
        (our_example, our_answer), (our_words, _) = listed(ours.text)
        assert len(our_answer) == len(answer) == len(outputs) == len(ours.references)
        assert sorted(Counter(our_example).values()) == sorted(Counter(example).values())
        assert set(Counter(our_words).values()) == set(Counter(words).values())
        assert set(example) | set(words) <= set(ruler_tasks.all_words())
        assert ours.max_new_tokens == golden["new_tokens"]


def test_frequent_words_prompts_are_rulers():
    golden = GOLDEN["prompts"]["fwe"]
    count = (golden["max_length"] - golden["new_tokens"]) // 50
    for text, outputs in prompts("fwe"):
        words = coded(text)
        assert ruler_tasks.FREQUENT.format(context=" ".join(words)) == text
        ranked = Counter(words).most_common()
        assert [word for word, _ in ranked[:4]] == ["...", *outputs]
        sizes = [size for size in range(1, 2000) if sum(ruler_tasks.frequencies(size, count, 2.0)) == len(words)]
        assert [n for n in ruler_tasks.frequencies(sizes[0], count, 2.0) if n] == [n for _, n in ranked]
        budget = golden["max_length"] - golden["new_tokens"]
        assert any((size - budget // 6) % (budget // 32) == 0 for size in sizes)  # RULER's first size, and its steps
    # Ours takes what such a step leaves.
    ours = FrequentWords().samples(Characters(), golden["max_length"], 1, 0)[0]
    assert 0 <= ours.metadata["words"] - sizes[0] < golden["max_length"] // 32 + len(sizes)
    assert ours.max_new_tokens == golden["new_tokens"]


@pytest.mark.parametrize("name", ["qa_1", "qa_1_repeated", "qa_2"])
def test_questions_are_rulers(name, files):
    task, golden = qa_task(name[:4], files), GOLDEN["prompts"][name]
    for index, (text, outputs) in enumerate(prompts(name)):
        theirs, asked = documents(text)
        assert question_prompt(theirs, asked) == text
        question = task.data.questions[index]
        assert question.text == asked and list(question.answers) == outputs
        ours = task.samples(Characters(), golden["max_length"], 2, 0)[index]
        chosen, _ = documents(ours.text)
        all_of_them, own = task.data.documents, [task.data.documents[i] for i in question.documents + question.beside]
        assert Counter(own) <= Counter(theirs) and Counter(own) <= Counter(chosen)
        assert set(theirs) <= set(all_of_them) and len(chosen) >= len(theirs)
        if "repeated" in name:
            counts = Counter(all_of_them[i % len(all_of_them)] for i in range(len(theirs)))
            assert Counter(theirs) == counts and Counter(chosen) >= counts and max(counts.values()) > 1
        else:
            assert max(Counter(chosen).values()) == 1
        assert ours.max_new_tokens == golden["new_tokens"]
    assert name != "qa_1" or "Who paid?" not in [q.text for q in task.data.questions]


# ------------------------------------------------------------------------------------------------------------------
# By reading


def test_answers_read_from_the_prompt_are_right_and_random_words_are_not(case):
    task, length = case
    rng = random.Random(0)
    for sample in task.samples(BYTES, length, 2, 5):
        assert task.score(sample, read(sample, task.name)) == {task.metric: 1.0}
        chance = " ".join("".join(rng.choices("bcdfgh", k=6)) for _ in range(30))
        assert task.score(sample, chance) == {task.metric: 0.0}


def test_prompts_are_as_long_as_fit(case):
    task, length = case
    budget = length - task.max_new_tokens
    for sample in task.samples(BYTES, length, 2, 1):
        assert len(sample.tokens) <= budget and (sample.tokens == BYTES.encode_prompt(sample.text)).all()
        draft = task.draft(BYTES, length, sample.index, 1)
        size = sample.metadata[draft.unit]
        assert draft.render(size) == sample.text
        assert len(BYTES.encode_prompt(draft.render(size + 1))) > budget


def test_a_sample_depends_on_its_index_alone(case):
    task, length = case
    many = task.samples(BYTES, length, 3, 7)
    several = [many[i] for i in (2, 0, 1)]
    assert [sample.fingerprint for sample in task.samples(BYTES, length, 2, 7)] == [s.fingerprint for s in several[1:]]
    assert len({sample.text for sample in several}) == 3
    assert task.samples(BYTES, length, 1, 8)[0].text != several[1].text


def test_a_length_that_is_too_short_is_refused_with_the_shortest_possible(case):
    task, _ = case
    with pytest.raises(UserError, match="the shortest take") as refused:
        task.samples(BYTES, 200, 1, 0)[0]
    least = int(re.search(r"shortest take ([\d,]+)", str(refused.value)).group(1).replace(",", ""))
    assert len(task.samples(BYTES, least, 1, 0)[0].tokens) <= least - task.max_new_tokens
    with pytest.raises(UserError):
        task.samples(BYTES, least - 1, 1, 0)


@pytest.mark.parametrize("name", ["vt", "cwe", "fwe"])
def test_all_samples_are_checked_before_any_is_made(name):
    (task,) = tasks_named([name])
    least_of = {}
    for count in (1, 60):
        with pytest.raises(UserError, match=rf"hold all {count} samples.*the shortest take ([\d,]+)\.") as refused:
            task.samples(BYTES, 300, count, 42)
        told = re.search(r"shortest take ([\d,]+)", str(refused.value)).group(1)
        least_of[count] = int(told.replace(",", ""))
    first, least = least_of.values()
    assert max(len(sample.tokens) for sample in task.samples(BYTES, least, 60, 42)) == least - task.max_new_tokens
    with pytest.raises(UserError, match=f"the shortest take {least:,}"):
        task.samples(BYTES, least - 1, 60, 42)
    if name == "cwe":  # words are of all lengths: what the first sample takes says nothing of the others
        assert first < least and len(task.samples(BYTES, first, 1, 42)[0].tokens) == first - task.max_new_tokens
        with pytest.raises(UserError, match=f"{first:,} tokens do not hold all 60 samples"):
            task.samples(BYTES, first, 60, 42)


def test_one_sample_is_checked_if_it_is_far_from_the_length(monkeypatch):
    drafted = []
    draft = CommonWords.draft
    monkeypatch.setattr(
        CommonWords, "draft", lambda self, *arguments: drafted.append(arguments[2]) or draft(self, *arguments)
    )
    CommonWords().samples(BYTES, 16000, 500, 42)
    assert drafted == [0]


def test_lengths_have_names_words_and_documents_in_common(files):
    def shown(task, sample):
        """The variables, words or documents of a prompt; a longer prompt has those of a shorter one."""
        if task.name == "vt":
            return [(names, value) for _, value, names in tracked(sample.text)]
        if task.name == "cwe":
            return sorted(set(listed(sample.text)[-1][0]))
        if task.name == "fwe":
            return [word for word, _ in Counter(coded(sample.text)).most_common(4)]
        return sorted(documents(sample.text)[0])

    lengths = {"vt": (2000, 9000), "cwe": (2600, 8000), "fwe": (1000, 5000), "qa_1": (1000, 2000), "qa_2": (1200, 1800)}
    for name, (short, long) in lengths.items():
        task = qa_task(name, files) if name.startswith("qa") else tasks_named([name])[0]
        for a, b in zip(task.samples(BYTES, short, 3, 5), task.samples(BYTES, long, 3, 5), strict=True):
            assert len(a.text) < len(b.text) and a.references == b.references
            ours, longer = shown(task, a), shown(task, b)
            if name in ("vt", "fwe"):
                assert ours == longer
            else:  # from 4,096 tokens on, common words' lists have every word more often, and so may have fewer
                fewer, more = sorted((ours, longer), key=len)
                assert not Counter(fewer) - Counter(more)
    # Solved examples too, as far as they are as long.
    short, long = (listed(CommonWords().samples(BYTES, length, 1, 5)[0].text)[0] for length in (2600, 8000))
    assert short[1] == long[1] and set(short[0]) < set(long[0])


def test_questions_of_one_document_belong_together(files):
    for name in ("qa_1", "qa_2"):
        task = qa_task(name, files)
        for sample in task.samples(BYTES, 3000, 5, 0):
            question = task.data.questions[sample.metadata["question"]]
            assert task.data.documents[sample.metadata["cluster"]] in documents(sample.text)[0]
            assert sample.metadata["cluster"] == question.documents[0]


def test_two_chains_are_told_apart_by_their_value():
    task = VariableTracking(chains=2, hops=3)
    for sample in task.samples(BYTES, 4000, 5, 0):
        lines, _, names = tracked(sample.text)[-1]
        assert list(sample.references) == names and len(names) == 4
        assert sum(line.startswith("VAR") for line in lines) == 8


def test_short_prompts_ask_for_three_words_that_are_more_frequent_than_the_fourth():
    asked = 0
    for length in range(560, 760, 7):
        try:
            sample = FrequentWords().samples(BYTES, length, 1, 0)[0]
        except UserError:
            continue
        counts = Counter(coded(sample.text))
        third = min(counts[word] for word in sample.references)
        assert third > max(n for word, n in counts.items() if word not in (*sample.references, "..."))
        asked += 1
    assert asked > 10


def test_noise_lies_between_the_links_of_a_chain():
    for sample in VariableTracking().samples(BYTES, 2200, 10, 0):
        for lines, _, _ in tracked(sample.text):
            assert NOISE in lines and not any(a != NOISE != b for a, b in zip(lines, lines[1:], strict=False))


def test_common_words_do_not_suffice_for_long_prompts_unless_more_are_given():
    coarse = Characters(40)
    with pytest.raises(UserError, match=r"8,166 different words.*--words=FILE"):
        CommonWords().samples(coarse, 20000, 1, 0)[0]
    more = tuple(f"word{i}" for i in range(30000))
    sample = CommonWords(more).samples(coarse, 20000, 1, 0)[0]
    assert len(sample.tokens) > 0.98 * 19880 and sample.metadata["words"] > 8166
    assert CommonWords().score(sample, read(sample, "cwe")) == {"string_match_all": 1.0}
    with pytest.raises(UserError, match=r"have at most [\d,]+ tokens; 20,000"):
        CommonWords().samples(coarse, 20000, 500, 0)  # at once
    # Other words are another measurement.
    assert CommonWords(more).settings != CommonWords(more[::-1]).settings != CommonWords().settings
    assert CommonWords(more).settings == CommonWords(tuple(f"word{i}" for i in range(30000))).settings
    assert listed(sample.text)[0] == listed(CommonWords().samples(coarse, 8000, 1, 0)[0].text)[0]  # solved
    # Where wonderwords' suffice, they are taken.
    assert CommonWords(more).samples(coarse, 8000, 1, 0)[0].text == CommonWords().samples(coarse, 8000, 1, 0)[0].text


def test_questions_whose_own_documents_do_not_fit_are_skipped(tmp_path):
    data = json.loads(json.dumps(GOLDEN["squad"]))
    data["data"][0]["paragraphs"][0]["context"] *= 30
    (tmp_path / "squad.json").write_text(json.dumps(data))
    samples = qa_task("qa_1", tmp_path).samples(BYTES, 1500, 3, 0)
    assert [sample.metadata["question"] for sample in samples] == [1, 2, 3]
    assert len(qa_task("qa_1", tmp_path).samples(BYTES, 1500, 500, 0)) == 19
    assert len(qa_task("qa_1", tmp_path).samples(BYTES, 9000, 500, 0)) == 20


# ------------------------------------------------------------------------------------------------------------------
# Names and files


def test_all_thirteen_tasks_by_name(files, tmp_path):
    (tmp_path / "essays.txt").write_text(f"{NOISE} " * 9)
    made = tasks_named((), haystack=str(tmp_path / "essays.txt"), qa=files)
    assert [task.name for task in made] == list(TASKS) and len(TASKS) == 13
    assert all(isinstance(task, PromptTask) and task.suite == "ruler" and task.sized for task in made)
    metrics = {task.name: task.metric for task in made if task.name not in NEEDLES}
    assert metrics == dict.fromkeys(["vt", "cwe", "fwe"], "string_match_all") | dict.fromkeys(
        ["qa_1", "qa_2"], "string_match_part"
    )
    for task in made:
        json.dumps(task.settings)


def test_errors_of_missing_and_damaged_files_name_the_file_to_place(tmp_path, files):
    for directory in (None, tmp_path):
        with pytest.raises(UserError, match=r"SQuAD 2\.0.*https://rajpurkar\.github\.io.*dev-v2\.0\.json.*--qa=DIR"):
            qa_task("qa_1", directory)
    with pytest.raises(UserError, match=r"HotpotQA.*curtis\.ml\.cmu\.edu"):
        qa_task("qa_2", tmp_path)
    (tmp_path / "squad.json").write_text(json.dumps(GOLDEN["hotpot"]))
    (tmp_path / "hotpotqa.json").write_text('[{"question": "Who?"}]')
    for name, message in (("qa_1", "holds no JSON object. Place dev"), ("qa_2", "is not in the schema of HotpotQA")):
        with pytest.raises(UserError, match=message):
            qa_task(name, tmp_path)
    assert qa_task("qa_1", files).settings != qa_task("qa_2", files).settings
    (tmp_path / "english_words.json").write_text(json.dumps({str(i): f"word{i}" for i in range(200)}))
    assert len(tasks_named(["cwe"], words=tmp_path / "english_words.json")[0].more_words) == 200
    (tmp_path / "lists.json").write_text(json.dumps({str(i): [f"word{i}"] for i in range(200)}))
    for path in (tmp_path / "none.json", tmp_path / "squad.json", tmp_path / "lists.json"):
        with pytest.raises(UserError, match="--words"):
            tasks_named(["cwe"], words=path)
