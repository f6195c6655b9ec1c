"""NoLiMa's prompts and scores are its own code's (tests/data/make_nolima_golden.py), on the same small files."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny
from small_benchmarks import write_nolima

from pe_lab.config import DataConfig
from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.generation.tasks import PromptTask
from pe_lab.evaluation.live import LiveEvaluation
from pe_lab.evaluation.suites.nolima import DEPTHS, SUITE, NoLiMaSettings
from pe_lab.language_model import LanguageModel
from pe_lab.positional import Rope, layers

GOLDEN = json.loads((Path(__file__).parents[1] / "data/nolima_golden.json").read_text(encoding="utf-8"))


class Chat(ByteTokenizer):
    def chat(self, messages, add_generation_prompt=True, **variables):
        return "".join(f"[{one['role']}]{one['content']}" for one in messages) + "[assistant]"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("nolima")
    write_nolima(root)
    return root


def one(directory, name="standard", **settings):
    (task,) = SUITE.open([name], NoLiMaSettings(str(directory), **settings))
    return task


@pytest.mark.parametrize("size", [250, 1000])
def test_prompts_and_scores_are_the_originals(directory, size):
    task = one(directory, nolima_context=size)
    samples = {}
    for sample in task.samples(ByteTokenizer(), 2000, 10**6, 42):
        metadata = sample.metadata
        assert metadata["context"] == size and len(sample.depth) == 1
        samples[metadata["test"], metadata["book"], round(sample.depth[0])] = sample
    golden = [entry for entry in GOLDEN if entry[2] == size]
    assert len(golden) == len(samples) == 5 * 2 * DEPTHS
    for test, book, _, depth, digest, answer, score in golden:
        sample = samples[test, book, round(100 * depth)]
        assert hashlib.sha256(sample.text.encode()).hexdigest()[:16] == digest, (test, book, depth)
        assert task.score(sample, answer) == {"contains": score} and task.found(sample, answer) == [bool(score)]


def test_a_prompt_fills_its_length_and_no_more(directory):
    task = one(directory, max_new_tokens=16)
    assert isinstance(task, PromptTask) and task.sized
    for length in (400, 900):
        samples = task.samples(ByteTokenizer(), length, 60, 42)
        sizes = np.array([len(sample.tokens) + sample.max_new_tokens for sample in samples])
        assert len(samples) == 60 and sizes.max() <= length
        # What is missing is the rest of the line that the needle ends.
        assert sizes.mean() > length - 200
        for sample in samples:
            assert "moved to a flat" in sample.text or "the bell of" in sample.text
            json.dumps([dict(sample.metadata), dict(task.settings)])


def test_the_first_samples_are_of_all_tests_books_and_depths(directory):
    samples = one(directory).samples(ByteTokenizer(), 900, 60, 42)
    for of in (lambda s: s.metadata["test"], lambda s: s.metadata["book"], lambda s: s.depth[0] < 50):
        counts = Counter(map(of, samples))
        assert min(counts.values()) > 2
    other = one(directory).samples(ByteTokenizer(), 900, 60, 43)
    assert [s.text for s in samples] != [s.text for s in other]


def test_a_needle_set_without_templates_takes_the_clones(directory, tmp_path):
    sample = one(directory, "hard").samples(ByteTokenizer(), 900, 1, 42)[0]
    assert sample.text.startswith("Book:\n") and "\nQuestion: Who" in sample.text
    shutil.copytree(directory / "data", tmp_path / "alone")
    assert one(tmp_path / "alone").name == "standard"
    with pytest.raises(UserError, match="run_tests.py, which has the wording of NoLiMa's prompt, cannot be read"):
        one(tmp_path / "alone", "hard")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/run_tests.py").write_text("OTHER = 1\n")
    with pytest.raises(UserError, match="run_tests.py has no DEFAULT_TASK_TEMPLATE"):
        one(tmp_path / "alone", "hard")


def test_a_chat_has_a_system_message(directory):
    plain, chat = (
        one(directory, nolima_context=250, chat=chat).samples(Chat(), 900, 1, 42)[0] for chat in (False, True)
    )
    assert chat.text == f"[system]You are a helpful assistant[user]{plain.text}[assistant]"


def test_what_is_missing_is_named(directory, tmp_path):
    def refused(message, folder=directory, name="standard", length=900, **settings):
        with pytest.raises(UserError, match=message):
            task = SUITE.open([name], NoLiMaSettings(folder and str(folder), **settings))[0]
            list(task.samples(ByteTokenizer(), length, 40, 42))

    refused("its files are not here. Clone https://github.com/adobe-research/NoLiMa", None)
    refused("there is no such directory", tmp_path / "no")
    refused("There is no '.*needle_set_ONLYDirect.json'. Clone", name="direct")
    refused("900 tokens do not hold a needle", max_new_tokens=800)
    refused("rand_book_. has .* tokens, too few for", length=100_000)
    refused("with the question and an answer of 192 tokens a prompt takes", nolima_context=800)
    write_nolima(tmp_path)
    needles = tmp_path / "data/needlesets/needle_set.json"
    for content, message in (
        ("[{}]", "is no needle set of NoLiMa .KeyError"),
        ("[]", "has no tests"),
        ("{", "damaged"),
        (needles.read_text().replace("{haystack}", "{book}"), "is no needle set of NoLiMa .KeyError"),
        (needles.read_text().replace('"gold_answers"', '"gold"'), "0012Inv_T01_onehop has no right answer"),
    ):
        needles.write_text(content)
        refused(message, tmp_path)
    write_nolima(tmp_path)
    (tmp_path / "data/haystack/rand_shuffle/rand_book_1.txt").write_bytes(b"\xff")
    refused("rand_book_1.txt cannot be read", tmp_path)
    shutil.rmtree(tmp_path / "data/haystack")
    refused("has no books", tmp_path)


def test_it_is_measured_in_training(directory, monkeypatch):
    monkeypatch.setattr(
        LanguageModel, "generate", lambda self, prompts, *_, **__: ["Ada, Boris, Chen, Dora, Riga"] * len(prompts)
    )
    options = {"nolima": str(directory), "samples": 3, "max_new_tokens": 16}
    live = LiveEvaluation(tiny.MODEL, layers(Rope(), 2), tiny.LENGTH, DataConfig(), {"nolima": ()},
                          (512,), options=options, tokenizer=ByteTokenizer())  # fmt: skip
    (record,) = live.measure(tiny.parameters(), 3)
    assert (record["suite"], record["source"], record["length"], record["score"]) == ("nolima", "standard", 512, 1.0)
    assert sum(record["by_depth"]["count"]) == 3 and live.cost() == 3 * 512
