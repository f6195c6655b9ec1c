"""RULER's prediction files: scored as RULER's own evaluate.py scored them, and written for it; damaged input files."""

import json
from pathlib import Path

import pytest

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.suites.niah import NOISE
from pe_lab.evaluation.suites.ruler import SUITE, TASKS, RulerSettings, qa_task
from pe_lab.evaluation.suites.ruler_files import (
    read_predictions,
    score_predictions,
    write_predictions,
    write_prompts,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "ruler_golden.json").read_text())


def write(directory, files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_scores_are_those_of_rulers_evaluate(tmp_path):
    for length in (8192, 4096):
        write(tmp_path / "synthetic" / str(length) / "pred", GOLDEN["predictions"])
        write(tmp_path / "synthetic" / str(length) / "data" / "vt", {"validation.jsonl": [{"input": ""}]})
    rows = score_predictions(tmp_path / "synthetic", TASKS)
    assert [row["length"] for row in rows] == [4096] * 6 + [8192] * 6
    for here in (rows[:6], rows[6:], score_predictions(tmp_path / "synthetic" / "4096" / "pred", TASKS)):
        theirs = {
            row["source"]: {"score": round(100 * row["score"], 6), "nulls": f"{row['nulls']}/{row['samples']}"}
            for row in here
        }
        assert theirs == GOLDEN["summary"] and list(theirs) == list(GOLDEN["summary"])


def test_what_is_written_scores_the_same_when_read(tmp_path):
    theirs = GOLDEN["predictions"]
    for task, given in (("vt", theirs["vt-0.jsonl"] + theirs["vt-1.jsonl"]), ("qa_1", theirs["qa_1.jsonl"])):
        lines = [
            {"index": i, "references": tuple(p["outputs"]), "output": p["pred"], "tokens": 70, "score": 9}
            for i, p in enumerate(given)
        ]
        write_predictions(tmp_path / "512" / "pred" / f"{task}.jsonl", task, lines)
    written = read_predictions(tmp_path / "512" / "pred" / "vt.jsonl")
    fields = {"index", "pred", "input", "outputs", "others", "truncation", "length"}
    assert [line["index"] for line in written] == [0, 1, 2] and all(set(line) == fields for line in written)
    fixed = GOLDEN["predictions"]["vt-0.jsonl"][0]
    assert all(line[name] == fixed[name] for line in written for name in ("input", "others", "truncation"))
    assert written[0]["length"] == 100  # RULER's lengths have the answer in them
    rows = {row["source"]: round(100 * row["score"], 2) for row in score_predictions(tmp_path, TASKS)}
    assert rows == {task: GOLDEN["summary"][task]["score"] for task in ("vt", "qa_1")}


def test_prompts_are_written_as_rulers_data(tmp_path):
    qa = tmp_path / "qa"
    qa.mkdir()
    (qa / "squad.json").write_text(json.dumps(GOLDEN["squad"]))
    (qa / "hotpotqa.json").write_text(json.dumps(GOLDEN["hotpot"]))
    essays = tmp_path / "essays.txt"
    essays.write_text(f"{NOISE} " * 9)
    for task in SUITE.open((), RulerSettings(haystack=str(essays), qa=qa)):
        sample = task.samples(ByteTokenizer(), 3000, 1, 0)[0]
        path = tmp_path / task.name / "validation.jsonl"
        write_prompts(path, task.name, [sample])
        (line,) = [json.loads(written) for written in path.read_text().splitlines()]
        assert line["input"] + line["answer_prefix"] == sample.text and line["outputs"] == list(sample.references)
        assert line["input"].endswith(("?", ".")) or task.name.startswith("qa")
        assert line["answer_prefix"].startswith((" Answer:", " The special magic"))
        assert "\n" not in line["answer_prefix"]
        assert line["length"] == len(sample.tokens) + sample.max_new_tokens <= 3000
        if task.name in GOLDEN["prompts"]:
            theirs = GOLDEN["prompts"][task.name]["samples"][0]
            assert set(line) >= set(theirs) and line["answer_prefix"][:24] == theirs["answer_prefix"][:24]


def test_files_that_are_not_rulers_are_refused(tmp_path):
    with pytest.raises(UserError, match="no directory"):
        score_predictions(tmp_path / "none", TASKS)
    with pytest.raises(UserError, match=r"no \.jsonl files"):
        score_predictions(tmp_path, TASKS)
    write(tmp_path, {"niah_singel_1.jsonl": []})
    with pytest.raises(UserError, match="Did you mean 'niah_single_1'"):
        score_predictions(tmp_path, TASKS)
    for name, wrong in {
        "no `pred`": {"outputs": ["a"]},
        "no `outputs`": {"pred": "a"},
        "`pred` is no text": {"pred": 3, "outputs": ["a"]},
        "`outputs` is no list of texts": {"pred": "a", "outputs": []},
        "no JSON object": ["a"],
    }.items():
        write(tmp_path, {"vt.jsonl": [{"pred": "a", "outputs": ["a"]}, wrong]})
        with pytest.raises(UserError, match=rf"vt\.jsonl, line 2, is no prediction of RULER: {name}"):
            score_predictions(tmp_path, TASKS)
    write(tmp_path, {"vt.jsonl": [{"pred": "a", "output": "a"}], "vt-0.jsonl": [{"pred": "a", "outputs": ["a"]}]})
    with pytest.raises(UserError, match=r"vt\.jsonl and chunks"):
        score_predictions(tmp_path, TASKS)
    (tmp_path / "vt-0.jsonl").unlink()
    (row,) = score_predictions(tmp_path, TASKS)
    assert row["score"] == 1 and row["samples"] == 1
    write(tmp_path, {"vt.jsonl": []})
    with pytest.raises(UserError, match="is empty"):
        score_predictions(tmp_path, TASKS)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "512" / "vt.jsonl"
    line = {"index": 0, "references": ("a",), "output": "a", "tokens": 7}

    def interrupted():
        yield line
        raise KeyboardInterrupt

    for written in (0, 5):
        with pytest.raises(KeyboardInterrupt):
            write_predictions(path, "vt", interrupted())
        assert len(list(read_predictions(path))) == written
        write_predictions(path, "vt", [line] * 5)
    assert [found.name for found in path.parent.iterdir()] == ["vt.jsonl"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_predictions(tmp_path / "file" / "vt.jsonl", "vt", [line])


def test_half_a_character_in_words_or_questions_is_refused(tmp_path):
    words = {str(i): f"word{i}" for i in range(200)} | {"7": "half \ud83d"}
    (tmp_path / "words.json").write_text(json.dumps(words))
    with pytest.raises(UserError, match=r"words\.json has half of a surrogate pair.*half \\ud83d"):
        SUITE.open(["cwe"], RulerSettings(words=tmp_path / "words.json"))
    whole, half = "of a paragraph", "of a para \ud83d"
    qas = [{"question": "Who?", "answers": [{"text": "She"}], "is_impossible": False}]
    files = {
        "squad.json": lambda text: {"data": [{"paragraphs": [{"context": text, "qas": qas}]}]},
        "hotpotqa.json": lambda text: [{"question": text, "answer": "She", "context": [["Title", ["She did."]]]}],
    }
    for (file, made), name in zip(files.items(), ("qa_1", "qa_2"), strict=True):
        for directory, text in (("whole", whole), ("half", half)):
            (tmp_path / directory).mkdir(exist_ok=True)
            (tmp_path / directory / file).write_text(json.dumps(made(text)))
        assert len(qa_task(name, tmp_path / "whole").data.questions) == 1
        with pytest.raises(UserError, match=rf"{file} has half of a surrogate pair.*of a para \\ud83d"):
            qa_task(name, tmp_path / "half")
