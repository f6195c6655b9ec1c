import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.generation.backend import ModelBackend
from pe_lab.evaluation.generation.tasks import PromptTask, Sample
from pe_lab.evaluation.suites.longbench import (
    GROUPS,
    SUITE,
    TASKS,
    LongBenchSettings,
    LongBenchTask,
    bucket_of,
    record_bucket_of,
)
from pe_lab.language_model import LanguageModel
from pe_lab.model.generation import Ending

GOLDEN = json.loads((Path(__file__).parents[1] / "data/scorer_golden.json").read_text(encoding="utf-8"))
CLASSES = {"trec": ["Food", "Date", "City", "Animal"], "lsht": ["体育", "财经", "科技"]}
ANSWERS = {
    "qa_f1": [["Ada Lovelace", "Lovelace"], ["in 1843"]],
    "qa_f1_zh": [["五公里", "5公里"], ["北京大学"]],
    "rouge_l": [["The house fell. Nobody was hurt."], ["It rained for two days."]],
    "rouge_l_zh": [["会议讨论了预算。"], ["每天喝两杯水", "多喝水"]],
    "count": [["17"], ["5"]],
    "retrieval": [["Paragraph 7"], ["Paragraph 30"]],
    "retrieval_zh": [["段落7"], ["段落12"]],
    "code_similarity": [["    return self.cache[key]"], ["for (int i = 0; i < n; i++) {"]],
}


class Words(ByteTokenizer):
    """Bytes behind a start-of-sequence token, with a chat format."""

    bos_id = 257
    vocab_size = 258

    def encode_prompt(self, text, add_special_tokens=True):
        ids = super().encode_prompt(text)
        return np.concatenate([np.array([257] * add_special_tokens, np.int32), ids]).astype(np.int32)

    def chat(self, messages, add_generation_prompt=True, **variables):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


def records(name):
    """Two records of a task, with answers for its metric."""
    chinese = name in ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
    rules, classes = TASKS[name], CLASSES.get(name)
    answers = [[classes[0]], [classes[2]]] if classes else ANSWERS[rules.metric]
    words = "今天的会议很长，{没有}人说话。" if chinese else "Some {long} text, with braces. "
    return [
        {
            "input": f"question {i}" if "{input}" in rules.prompt else "",
            "context": words * (i + 3),
            "answers": answer,
            "length": 100 * i + 7,
            "dataset": name,
            "language": "zh" if chinese else "en",
            "all_classes": classes,
            "_id": f"{name}-{i}",
        }
        for i, answer in enumerate(answers)
    ]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The files of the unpacked data.zip."""
    root = tmp_path_factory.mktemp("longbench")
    for name in TASKS:
        write(root / "data" / f"{name}.jsonl", records(name))
    for name in GROUPS["e"]:
        write(root / "data" / f"{name}.jsonl", records(name.removesuffix("_e"))[::-1])
    return root


def open_longbench(directory, names, max_length=None, chat=False):
    return SUITE.open(names, LongBenchSettings(str(directory), chat=chat), [max_length])


def one(directory, name, **options):
    return open_longbench(directory, [name], **options)[0]


def test_prompts_and_lengths_are_the_originals():
    of = {name: hashlib.sha256(rules.prompt.encode()).hexdigest() for name, rules in TASKS.items()}
    assert of == GOLDEN["prompts"] and len(of) == 21
    assert {name: rules.max_new_tokens for name, rules in TASKS.items()} == GOLDEN["max_new_tokens"]


def test_groups_and_buckets():
    six = [GROUPS[name] for name in ("single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code")]
    assert sorted(sum(six, ())) == sorted(TASKS) == sorted(GROUPS["all"])
    assert {*GROUPS["drope"]} < {*TASKS} and len(GROUPS["e"]) == 13
    edges = [0, 4095, 4096, 8191, 8192, 16383, 16384, 32767, 32768, 10**6]
    assert [bucket_of(n) for n in edges] == sum([[b, b] for b in ("0-4K", "4-8K", "8-16K", "16-32K", "32K+")], [])


@pytest.mark.parametrize("group", ["all", "e"])
def test_an_oracle_is_always_right_and_noise_never(directory, group):
    rng = random.Random(0)
    for task in open_longbench(directory, [group]):
        assert isinstance(task, PromptTask) and not task.sized
        for sample in task.samples(ByteTokenizer(), None, 10, 0):
            right = task.score(sample, sample.references[0])
            assert next(iter(right)) == task.metric
            assert all(value == pytest.approx(1, abs=1e-7) for value in right.values()), task.name
            assert task.score(sample, "") == dict.fromkeys(right, 0.0)
            # Ten noises: a number in them is of one digit, mostly, and right one time in ten; characters that lines
            # have in common are chance's share of code.
            noises = [ByteTokenizer().decode(rng.choices(range(32, 127), k=200)) for _ in range(10)]
            chance = np.mean([max(task.score(sample, noise).values()) for noise in noises])
            bound = {"code_similarity": 0.35, "count": 0.2, "retrieval": 0.2, "retrieval_zh": 0.2}
            assert chance < bound.get(task.metric, 0.03), task.name


def test_a_random_class_is_right_once_in_the_number_of_classes(directory):
    for name, classes in CLASSES.items():
        task = one(directory, name)
        for sample in task.samples(ByteTokenizer(), None, 2, 0):
            assert sum(task.score(sample, guess)["classification"] for guess in classes) == 1
            assert task.score(sample, " ".join(classes))["classification"] == pytest.approx(1 / len(classes))


def test_records_score_as_longbench_scores_them(directory):
    assert {name for name, *_ in GOLDEN["tasks"]} == {*TASKS}
    tokens = np.zeros(1, np.int32)
    for name, output, answers, classes, golden in GOLDEN["tasks"]:
        sample = Sample(0, "", tokens, tuple(answers), 1, metadata={"all_classes": classes})
        task = one(directory, name)
        assert task.score(sample, output)[task.metric] * 100 == pytest.approx(golden, abs=0.00501), (name, output)


def test_a_sample_has_the_values_of_its_record(directory):
    task = one(directory, "trec")
    samples = task.samples(ByteTokenizer(), None, 1000, 5)
    assert [s.metadata["_id"] for s in samples] == ["trec-0", "trec-1"] and len(
        task.samples(ByteTokenizer(), None, 1, 0)
    ) == 1
    sample, record = samples[1], records("trec")[1]
    prompt = TASKS["trec"].prompt.replace("{context}", record["context"]).replace("{input}", record["input"])
    assert sample.text == prompt and bytes(sample.tokens.tolist()).decode() == prompt
    assert sample.references == ("City",) and sample.max_new_tokens == 64 and sample.stop == ()
    assert sample.metadata == {
        "_id": "trec-1",
        "dataset": "trec",
        "language": "en",
        "record_length": 107,
        "all_classes": CLASSES["trec"],
        "tokens_before_truncation": len(prompt),
        "bucket": "0-4K",
        "truncated": False,
    }
    json.dumps([dict(sample.metadata), dict(task.settings)])
    (samsum,) = one(directory, "samsum").samples(ByteTokenizer(), None, 1, 0)
    assert samsum.stop_ids == (ord("\n"),) and samsum.stop == ()
    assert samples[1].fingerprint == one(directory, "trec").samples(ByteTokenizer(), None, 9, 6)[1].fingerprint


class Scripted(LanguageModel):
    """A language model that writes given tokens, until one that ends its answer. 300 is a token of two newlines."""

    eos_ids = frozenset((256,))

    def __init__(self, *written):
        self.written = written

    def generate(self, prompts, new, *, stop, eos_ids, **_):
        def decode(ids):
            return "".join({300: "\n\n", 257: ""}.get(i) or chr(i) for i in ids)

        ending = Ending(prompts[0], eos_ids, stop, decode)
        for token in self.written:
            ending.push(token)
        ending.finish()
        return [ending.text]


@pytest.mark.parametrize(
    "written, scored",
    [
        ([300, *b"The house fell."], True),
        ([*b"The house fell.", 10, *b"Dialogue: no"], True),
        ([10, *b"The house"], False),
    ],
    ids=["two newlines in one token", "a newline after it", "the newline's token first"],
)
def test_samsum_ends_at_the_newlines_token_and_not_at_its_text(directory, written, scored):
    """As pred.py: eos_token_id=[..., tokenizer.encode("\\n", add_special_tokens=False)[-1]], then the first line."""
    task = one(directory, "samsum")
    (sample,) = task.samples(ByteTokenizer(), None, 1, 0)
    (output,) = ModelBackend(Scripted(*written))([sample])
    assert "Dialogue" not in output and (task.score(sample, output)["rouge_l"] > 0.5) is scored
    alone = one(directory, "trec").samples(ByteTokenizer(), None, 1, 0)[0]
    assert alone.stop_ids == () and alone.stop == ()


def test_longbench_e_has_the_buckets_of_its_own_report(directory, tmp_path):
    scores = {"0-4k": [], "4-8k": [], "8k+": []}  # as scorer_e of the original's eval.py
    lengths = [0, 3999, 4000, 7999, 8000, 90000]
    for length in lengths:
        if length < 4000:
            scores["0-4k"].append(length)
        elif length < 8000:
            scores["4-8k"].append(length)
        else:
            scores["8k+"].append(length)
    assert {bucket: [n for n in lengths if record_bucket_of(n) == bucket] for bucket in scores} == scores
    for task in open_longbench(directory, ["all", "e"]):
        even = task.name.endswith("_e")
        assert task.edges_by_record_length == ((0, 4000, 8000) if even else None)
        facts = [sample.metadata for sample in task.samples(ByteTokenizer(), None, 2, 0)]
        assert [fact.get("record_bucket") for fact in facts] == ["0-4k" if even else None] * 2
    made = [line | {"length": length} for line, length in zip(records("lcc") * 3, lengths, strict=True)]
    write(tmp_path / "lcc_e.jsonl", made)
    samples = one(tmp_path, "lcc_e").samples(ByteTokenizer(), None, 6, 0)
    assert [sample.metadata["record_bucket"] for sample in samples] == [b for b in scores for _ in range(2)]
    assert [sample.metadata["record_length"] for sample in samples] == lengths


def test_a_long_prompt_loses_its_middle(directory):
    whole = one(directory, "gov_report").samples(Words(), None, 1, 0)[0]
    for budget in (101, 100, 3, len(whole.tokens) - 1):
        sample = one(directory, "gov_report", max_length=budget + 512).samples(Words(), None, 1, 0)[0]
        half = budget // 2
        assert sample.text == whole.text[: half - 1] + whole.text[-half:]  # BOS is the first of the first half
        assert sample.tokens.tolist() == whole.tokens[:half].tolist() + whole.tokens[-half:].tolist()
        assert sample.metadata["truncated"] is True
        assert sample.metadata["tokens_before_truncation"] == len(whole.tokens) == len(whole.text) + 1
    fits = one(directory, "gov_report", max_length=len(whole.tokens) + 512).samples(Words(), None, 1, 0)[0]
    assert fits.text == whole.text and fits.metadata["truncated"] is False


def test_a_truncated_prompt_fits_even_where_a_character_was_cut(directory):
    """Half of a character is decoded to three bytes, with which the original's halves would not fit."""
    task = one(directory, "vcsum")
    whole = task.samples(ByteTokenizer(), None, 1, 0)[0]
    over = 0
    for budget in range(20, 60):
        sample = one(directory, "vcsum", max_length=budget + 512).samples(ByteTokenizer(), None, 1, 0)[0]
        half = budget // 2
        original = ByteTokenizer().decode(whole.tokens[:half]) + ByteTokenizer().decode(whole.tokens[-half:])
        over += len(original.encode()) > budget
        assert budget - 8 <= len(sample.tokens) <= budget
        assert ByteTokenizer().decode(sample.tokens) == sample.text
        if len(original.encode()) <= budget:
            assert sample.text == original
    assert over > 5


def test_prompts_are_in_the_chat_format_where_the_originals_are(directory):
    plain = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    for task in open_longbench(directory, ["all"], chat=True):
        sample = task.samples(Words(), None, 1, 0)[0]
        bare = one(directory, task.name).samples(Words(), None, 1, 0)[0]
        framed = f"[user]{bare.text}[assistant]" if task.name not in plain else bare.text
        assert sample.text == framed and task.settings["chat"] is (task.name not in plain)
        assert (sample.tokens[0] == Words.bos_id) is np.bool_(task.name in plain)
        assert sample.metadata["tokens_before_truncation"] == len(bare.tokens)
    task = one(directory, "musique", chat=True)
    size = len(bare := one(directory, "musique").samples(Words(), None, 1, 0)[0].tokens)
    for budget in (60, size - 10, size + 3):  # the last one holds the prompt without its frame
        sample = one(directory, "musique", chat=True, max_length=budget + 32).samples(Words(), None, 1, 0)[0]
        assert sample.metadata["truncated"] and budget - 3 <= len(sample.tokens) <= budget
        assert sample.text.startswith("[user]Answer") and sample.text.endswith("Answer:[assistant]")
    assert len(bare) == task.samples(Words(), None, 1, 0)[0].metadata["tokens_before_truncation"]
    with pytest.raises(UserError, match="do not hold a prompt in its chat format"):
        one(directory, "musique", chat=True, max_length=15 + 32).samples(Words(), None, 1, 0)[0]


def test_a_length_that_holds_no_prompt_is_refused(directory):
    with pytest.raises(UserError, match=r"longbench:qmsum: 513 tokens do not hold a prompt .* answer of 512"):
        one(directory, "qmsum", max_length=513).samples(ByteTokenizer(), None, 1, 0)


def test_tasks_are_opened_once_each_from_either_directory(directory, tmp_path):
    opened = open_longbench(directory, ["lcc", "drope", "lcc_e"])
    assert [task.name for task in opened] == ["lcc", "multifieldqa_en", "musique", "gov_report", "lcc_e"]
    assert opened[-1].metric == "code_similarity"
    assert opened[-1].samples(ByteTokenizer(), None, 1, 0)[0].metadata["_id"] == "lcc-1"
    flat = one(directory / "data", "musique")
    assert flat.settings == one(directory, "musique").settings
    first, second = records("musique")
    changed = LongBenchTask("musique", write(tmp_path / "musique.jsonl", [first, "", second]))
    assert changed.settings != flat.settings
    assert [sample.metadata["_id"] for sample in changed.samples(ByteTokenizer(), None, 2, 0)] == [
        "musique-0",
        "musique-1",
    ]
    assert one(directory, "musique", max_length=900).settings != flat.settings


def test_unknown_tasks_and_missing_files_are_refused(directory, tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match=r"nowhere: there is no such directory. Download https.*data.zip.*--longbench=DIR"
    ):
        open_longbench(tmp_path / "nowhere", ["lcc"])
    with pytest.raises(UserError, match=r"has no lcc.jsonl, repobench-p.jsonl,.*Download https.*data.zip"):
        open_longbench(tmp_path, ["code"])
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(UserError, match="pip install jieba"):
        open_longbench(directory, ["dureader"])
    open_longbench(directory, ["lsht", "passage_retrieval_zh"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("musique", "{", "no JSON object"),
        ("musique", "[1]", "no JSON object"),
        ("musique", {"input": None}, "no text 'input'"),
        ("musique", {"context": 3}, "no text 'context'"),
        ("musique", {"_id": None}, "no text '_id'"),
        ("musique", {"answers": "Ada"}, "no list of texts 'answers'"),
        ("musique", {"answers": [3]}, "no list of texts 'answers'"),
        ("musique", {"length": "7"}, "no number 'length'"),
        ("trec", {"all_classes": None}, "no list of texts 'all_classes'"),
        ("passage_retrieval_en", {"answers": ["7"]}, r"names no Paragraph: \['7'\]"),
        ("passage_retrieval_zh", {"answers": ["Paragraph 7"]}, "names no 段落"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, name, change, message):
    first, second = records(name)
    path = write(tmp_path / f"{name}.jsonl", [first, "", change if isinstance(change, str) else second | change])
    with pytest.raises(UserError, match=rf"{name}\.jsonl, line 3, is no record of LongBench: .*{message}.*data\.zip"):
        open_longbench(tmp_path, [name])
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        open_longbench(tmp_path, [name])


@pytest.mark.parametrize("field", ["input", "context", "_id", "answers", "all_classes"])
def test_half_a_character_is_named(tmp_path, field):
    first, second = records("trec")
    half = "half \ud83d" if isinstance(second[field], str) else [*second[field], "half \udc00"]
    write(tmp_path / "trec.jsonl", [first, json.dumps(second | {field: half})])
    with pytest.raises(UserError, match=rf"trec\.jsonl, line 2, .*'{field}' has half of a surrogate pair"):
        open_longbench(tmp_path, ["trec"])
    write(tmp_path / "trec.jsonl", [first, json.dumps(second | {"context": "whole \U0001f600"})])
    assert "\U0001f600" in one(tmp_path, "trec").samples(ByteTokenizer(), None, 2, 0)[1].text


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "lcc.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(UserError, match=r"lcc\.jsonl, line 1, .* no JSON object"):
        open_longbench(tmp_path, ["lcc"])
    path = write(tmp_path / "lcc.jsonl", records("lcc"))
    samples = one(tmp_path, "lcc").samples(ByteTokenizer(), None, 2, 0)
    path.write_text("changed\n" * 300)
    with pytest.raises(UserError, match=r"lcc\.jsonl, line 2, .* no JSON object"):
        samples[1]
    path.write_text("")
    with pytest.raises(UserError, match=r"lcc\.jsonl has become shorter"):
        samples[1]
