"""HELMET's prompts and scores are its own code's (tests/data/make_helmet_golden.py), on the same small files."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from small_benchmarks import write_helmet, write_labelled

from pe_lab.config import DataConfig
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.live import LiveEvaluation
from pe_lab.evaluation.suites.helmet import GROUPS, LENGTHS, SUITE, TASKS, HelmetSettings, parsed_answer
from pe_lab.language_model import LanguageModel
from pe_lab.positional import Rope, layers

GOLDEN = json.loads((Path(__file__).parents[1] / "data/helmet_golden.json").read_text(encoding="utf-8"))


class Chat(ByteTokenizer):
    def chat(self, messages, add_generation_prompt=True, **variables):
        return "".join(f"[{one['role']}]{one['content']}" for one in messages) + "[assistant]"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("helmet")
    write_helmet(root)
    return root


def one(directory, name, chat=False):
    (task,) = SUITE.open([name], HelmetSettings(str(directory), chat=chat))
    return task


def short(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_the_originals(directory, task):
    cut = 0
    for golden in GOLDEN["prompts"]:
        if golden["task"] == task:
            opened = one(directory, task)
            samples = opened.samples(ByteTokenizer(), golden["length"], golden["count"], 42)
            assert [short(sample.text) for sample in samples] == golden["sha256"]
            answers = [[found] if isinstance(found, str) else found for found in golden["answers"]]
            assert [list(sample.references) for sample in samples] == answers
            assert isinstance(opened, PromptTask) and opened.sized
            for sample in samples:
                json.dumps([dict(sample.metadata), dict(opened.settings)])
                assert len(sample.tokens) + sample.max_new_tokens <= golden["length"]
                cut += sample.metadata["truncated"]
    assert (cut > 0) == (task in GROUPS["icl"])  # bytes are more than tokens


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_the_originals(directory, task):
    mine = [golden[1:] for golden in GOLDEN["scores"] if golden[0] == task]
    assert len(mine) == 15
    for chat in (False, True):
        opened = one(directory, task, chat)
        sample = opened.samples(Chat(), 8192, 3, 42)[0]
        for output, *scores in mine:
            assert opened.score(sample, output) == {opened.metric: scores[chat]}, (output, chat)


def test_a_chat_asks_the_message_alone(directory):
    plain, chat = (one(directory, "nq", chat).samples(Chat(), 8192, 1, 42)[0] for chat in (False, True))
    assert plain.text.endswith("\nAnswer:") and plain.stop == ("\n",)
    assert chat.text == f"[user]{plain.text.removesuffix(chr(10) + 'Answer:')}[assistant]"
    assert one(directory, "json_kv").samples(Chat(), 8192, 1, 42)[0].stop == ()


def test_questions_at_several_depths_are_one_cluster(directory):
    samples = one(directory, "nq").samples(ByteTokenizer(), 8192, 2, 42)
    assert len(samples) == 6 and len({sample.metadata["cluster"] for sample in samples}) == 2
    assert [sample.metadata["place"] for sample in samples] == [0, 0.5, 1] * 2


def test_groups_and_default_counts():
    assert sorted(sum(GROUPS.values(), ())) == sorted(TASKS) and len(TASKS) == 13
    assert SUITE.samples["nq"] == 100 and SUITE.samples["nlu"] == 500 and LENGTHS[0] == 8192


def test_the_answer_within_an_output():
    assert parsed_answer("Answer: answer: a\nb", "Answer:") == "a"
    assert parsed_answer("so the ANSWER: a. \nb", "Answer:") == "a."
    assert parsed_answer(" a \nb", "Answer:") == "a" and parsed_answer("", "Answer:") == ""


def test_what_is_missing_is_named(directory, tmp_path):
    def refused(message, folder=directory, name="nq", length=8192):
        with pytest.raises(UserError, match=message):
            for task in SUITE.open([name], HelmetSettings(None if folder is None else str(folder))):
                task.samples(ByteTokenizer(), length, 3, 42)

    refused("its files are not here. Download .*data.tar.gz.*--helmet=DIR", None)
    refused("there is no such directory", tmp_path / "no")
    refused("has no kilt/nq-dev-multikilt_1000_k50_dep6.jsonl. Download", tmp_path)
    refused("nq-dev-multikilt_1000_k105_dep6.jsonl cannot be read .No such file", length=16384)
    refused("has the lengths 8k, 16k, 32k, 64k, 128k; 4,096 is asked for", length=4096)
    refused("has no CogComp/trec .*hf download CogComp/trec --repo-type=dataset --revision", tmp_path, "trec_fine")
    (tmp_path / "data/json_kv").mkdir(parents=True)
    file = tmp_path / "data/json_kv/test_k105_dep6.jsonl"
    file.write_text('{"question": "a"}\n')
    refused("record 1, has no texts context, question", tmp_path, "json_kv")
    file.write_text('{"question": "\\ud800", "context": ""}\n')
    refused("record 1, has half of a surrogate pair", tmp_path, "json_kv")
    file.write_text('{"question": "a", "context": "b"}\n')
    with pytest.raises(UserError, match="the record of sample 0 for 8,192 tokens in .* is damaged .KeyError"):
        one(tmp_path, "json_kv").samples(ByteTokenizer(), 8192, 3, 42)[0]
    file.write_text('{"question": "a", "context": "b", "demos": [], "answer": []}\n')
    with pytest.raises(UserError, match="the record of sample 0 .* is damaged .ValueError.'no answer'"):
        one(tmp_path, "json_kv").samples(ByteTokenizer(), 8192, 3, 42)[0]
    write_helmet(tmp_path)
    file = tmp_path / "data/kilt/popqa_test_1000_k50_dep6.jsonl"
    file.write_text(file.read_text().replace("s_pop", "pop"))
    refused("a file for 8,192 tokens in .* is damaged .KeyError", tmp_path, "popqa")
    write_labelled(tmp_path / "data/PolyAI/banking77/default", "test", {"label": 700}, random.Random(0))
    refused("a text of test has no label of 77. Download it: hf download PolyAI/banking77", tmp_path, "banking77")
    (tmp_path / "data/PolyAI/banking77/default/test/0000.parquet").write_bytes(b"no")
    refused("0000.parquet cannot be read", tmp_path, "banking77")
    file = tmp_path / "data/json_kv/test_k105_dep6.jsonl"
    file.write_text("")
    refused("no record in .* for 8,192 tokens", tmp_path, "json_kv")


def test_changed_files_are_other_results(directory, tmp_path):
    write_helmet(tmp_path)
    before = one(tmp_path, "json_kv").settings
    assert before == one(directory, "json_kv").settings
    file = tmp_path / "data/json_kv/test_k105_dep6.jsonl"
    file.write_text(file.read_text().replace("depth", "Depth"))
    assert one(tmp_path, "json_kv").settings != before


def test_results_of_other_numbers_of_questions_are_others_where_these_choose_the_questions(directory):
    """HELMET draws questions of rag and texts of icl together: the first of two is not the first of three."""

    def opened(name, count):
        (task,) = SUITE.open([name], HelmetSettings(str(directory), samples=count))
        return task, [sample.text for sample in task.samples(ByteTokenizer(), 8192, count, 42)]

    for name in TASKS:
        (few, texts), (more, others) = opened(name, 1), opened(name, 2)
        assert texts == others[: len(texts)] or few.settings != more.settings
        assert (few.settings != more.settings) == (name not in GROUPS["recall"])
    assert opened("nq", 1)[1] != opened("nq", 2)[1][:3]
    (default,) = SUITE.open(["nq"], HelmetSettings(str(directory)))
    assert default.settings["samples"] == 100


def test_the_order_of_files_is_that_of_every_process(directory):
    """1 s each."""
    code = (
        "import sys; from pe_lab.evaluation.suites.helmet import SUITE, HelmetSettings; "
        "print(SUITE.open(['banking77'], HelmetSettings(sys.argv[1]))[0].settings)"
    )
    found = set()
    for seed in "123":
        line, environment = [sys.executable, "-c", code, str(directory)], {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run(line, env=environment, capture_output=True, check=True).stdout)
    assert len(found) == 1


def test_it_is_measured_in_training(directory, monkeypatch):
    """At its own lengths: the model is asked, and its answers are scored, without a checkpoint."""
    monkeypatch.setattr(LanguageModel, "generate", lambda self, prompts, *_, **__: [" nothing"] * len(prompts))
    options = {"helmet": str(directory), "samples": 2}
    live = LiveEvaluation(tiny.MODEL, layers(Rope(), 2), tiny.LENGTH, DataConfig(), {"helmet": ("json_kv",)},
                          (8192,), options=options, tokenizer=ByteTokenizer())  # fmt: skip
    (record,) = live.measure(tiny.parameters(), 3)
    assert (record["suite"], record["source"], record["length"], record["samples"]) == ("helmet", "json_kv", 8192, 2)
    assert record["score"] == 0 and live.cost() == 2 * 8192
