"""The harness's tasks as a suite: what is measured before stays so, an interrupted task goes on where it was."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from lm_eval_tasks import TASKS, write_tasks

from pe_lab.errors import UserError
from pe_lab.evaluation.lm_eval import PeLabLM, harness, task_lists
from pe_lab.evaluation.scoring import forward as forwards
from pe_lab.evaluation.scoring import likelihood as likelihoods
from pe_lab.evaluation.scoring.likelihood import Likelihoods
from pe_lab.evaluation.suites.lm_eval import HarnessSettings
from pe_lab.evaluation.variants import Subject, Variant, all_variants
from pe_lab.language_model import LanguageModel

CHOICES, WORDS, PASSAGES, QUESTIONS = "local_choices", "local_last_words", "local_passages", "local_questions"


def variants(*methods: str, seed: int = 0) -> list[Variant]:
    lm = tiny.language_model(tiny.checkpoint(seed=seed))
    return all_variants([Subject(lm, "tiny", f"pretrain/checkpoints/{seed}")], methods or None, [])


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(harness, "adapter", lambda: functools.partial(PeLabLM, devices=tiny.one_device()))
    return write_tasks(tmp_path / "tasks")


class Counted:
    """Requests that the model answers, told from those that are kept; after `until` batches it is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int = 10**9, error: type[BaseException] = RuntimeError):
        self.requests = self.batches = 0
        read, generate = Likelihoods.read, LanguageModel.generate

        def begin() -> None:
            if self.batches == until:
                raise error("interrupted")
            self.batches += 1

        def counted_read(scorer, batch):
            found = list(read(scorer, batch))
            yield from found[:1]
            begin()
            self.requests += len(found)
            yield from found[1:]

        def counted_generate(lm, prompts, *arguments, **settings):
            begin()
            self.requests += len(prompts)
            return generate(lm, prompts, *arguments, **settings)

        self._patch = monkeypatch
        monkeypatch.setattr(Likelihoods, "read", counted_read)
        monkeypatch.setattr(LanguageModel, "generate", counted_generate)

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.undo()


@pytest.fixture
def counted():
    def make(*arguments: Any) -> Counted:
        return Counted(pytest.MonkeyPatch(), *arguments)

    return make


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setitem(forwards.BATCH_TOKENS, "cpu", 128)
    monkeypatch.setattr(likelihoods, "STEPS", 1)


def run(
    tasks: Path,
    names: list[str],
    out: Path,
    who: list[Variant] | None = None,
    max_length: int = 64,
    again: bool = False,
    **more: Any,
) -> list[dict[str, Any]]:
    settings = HarnessSettings(lm_eval_tasks=str(tasks), **more)
    return harness.Harness(who or variants(), names, out, settings, max_length, again).run()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(path: Path) -> list[str]:
    """The lines as they are written, but for the seconds."""
    return [json.dumps({name: value for name, value in line.items() if name != "seconds"}) for line in lines(path)]


# ------------------------------------------------------------------------------------------------------------
# Interrupted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), [
    (CHOICES, KeyboardInterrupt),
    *((name, RuntimeError) for name in (QUESTIONS, PASSAGES, "local_group")),
])  # fmt: skip
def test_a_task_that_was_interrupted_goes_on_where_it_was(name, error, tasks, tmp_path, small_batches, counted, capsys):
    with counted() as undisturbed:
        whole = run(tasks, [name], tmp_path / "whole", samples=20)
    assert undisturbed.batches >= 3
    with counted(2, error) as first, pytest.raises(error):
        run(tasks, [name], tmp_path / "killed", samples=20)
    assert 0 < first.requests < undisturbed.requests and not (tmp_path / "killed" / "lm_eval.jsonl").exists()
    capsys.readouterr()
    with counted() as second:
        rest = run(tasks, [name], tmp_path / "killed", samples=20)
    assert second.requests == undisturbed.requests - first.requests
    assert "were answered before" in capsys.readouterr().out
    strip = [{key: value for key, value in row.items() if key != "seconds"} for row in whole]
    assert strip == [{key: value for key, value in row.items() if key != "seconds"} for row in rest]
    for file in ("lm_eval.jsonl", "samples/lm_eval.jsonl"):
        assert untimed(tmp_path / "killed" / file) == untimed(tmp_path / "whole" / file), file
    (kept,) = (tmp_path / "killed" / "samples" / "lm_eval_requests").iterdir()
    (same,) = (tmp_path / "whole" / "samples" / "lm_eval_requests").iterdir()
    assert sorted(untimed(kept)) == sorted(untimed(same)) and kept.name == same.name


@pytest.mark.slow
def test_a_batch_that_was_begun_is_answered_whole(tasks, tmp_path, small_batches, counted):
    with counted() as undisturbed:
        run(tasks, [CHOICES], tmp_path)
    before = untimed(tmp_path / "samples" / "lm_eval.jsonl")
    (kept,) = (tmp_path / "samples" / "lm_eval_requests").iterdir()
    text = kept.read_bytes()
    kept.write_bytes(text[:-40])  # half a line
    (tmp_path / "lm_eval.jsonl").unlink()
    with counted() as second:
        run(tasks, [CHOICES], tmp_path)
    assert second.batches == 1 < second.requests < undisturbed.requests
    assert untimed(tmp_path / "samples" / "lm_eval.jsonl") == before
    assert len(lines(kept)) == len(text.splitlines())
    with counted() as third:
        assert len(run(tasks, [CHOICES], tmp_path)) == 1
    assert third.batches == 0
    with counted() as again:
        run(tasks, [CHOICES], tmp_path, again=True)
    assert again.requests == undisturbed.requests
    assert untimed(tmp_path / "samples" / "lm_eval.jsonl") == before


def test_a_killed_process_loses_no_answer(tasks, tmp_path, small_batches, counted):
    """What was answered is on disk before the next batch begins."""
    with counted(2) as first, pytest.raises(RuntimeError):
        run(tasks, [QUESTIONS], tmp_path)
    (kept,) = (tmp_path / "samples" / "lm_eval_requests").iterdir()
    assert len(lines(kept)) == first.requests
    line = lines(kept)[0]
    assert line["checkpoint_id"] == "id-0-None" and line["kind"] == "generate_until" and line["task"] == QUESTIONS
    assert {"fingerprint", "settings", "request", "index", "answer", "seconds"} <= line.keys()


def test_answers_of_other_requests_are_not_taken(tasks, tmp_path, counted):
    with counted() as some:
        run(tasks, [QUESTIONS], tmp_path, samples=8)
    with counted() as longer:
        run(tasks, [QUESTIONS], tmp_path, samples=8, max_length=48)
    with counted() as other:
        run(tasks, [QUESTIONS], tmp_path, variants(seed=1), samples=8)
    assert some.requests == longer.requests == other.requests > 0
    assert len(lines(tmp_path / "samples" / "lm_eval.jsonl")) == 3 * 8


# ------------------------------------------------------------------------------------------------------------
# Lines


@pytest.mark.slow
def test_a_document_is_a_line(tasks, tmp_path):
    rows = run(tasks, [CHOICES, WORDS, PASSAGES, QUESTIONS], tmp_path, max_length=48)
    found = lines(tmp_path / "samples" / "lm_eval.jsonl")
    by_task = {name: [line for line in found if line["task"] == name] for name in (CHOICES, WORDS, PASSAGES, QUESTIONS)}
    for row in rows:
        some = by_task[row["source"]]
        assert [line["index"] for line in some] == list(range(row["samples"])) and row["samples"] == 30
        if row["source"] in (CHOICES, QUESTIONS):
            assert sum(line["score"] for line in some) / len(some) == pytest.approx(row["score"], abs=1e-6)
        for line in some:
            assert {line[name] for name in ("suite", "run", "protocol")} == {"lm_eval", "tiny", "lm_eval-0.4.13"}
            assert line["settings"] == row["settings"] and line["checkpoint"] == row["checkpoint"]
            assert line["label"] == row["label"] and line["lineage"] == row["lineage"] and line["schedule_length"] == 48
            assert line["seconds"] > 0 and len(line["prompt"]) == 16 and line["scores"] and line["depth"] == []
    documents = [json.loads(text) for text in (TASKS / "choices.jsonl").read_text(encoding="utf-8").splitlines()]
    for line, document in zip(by_task[CHOICES], documents, strict=True):
        longest = max(
            len(f"Question: {document['question']}\nAnswer: {choice}".encode()) for choice in document["choices"]
        )
        assert line["tokens"] == min(longest, 49) and line["references"] == [document["answer"]]
        assert line["metadata"].get("tokens_before_truncation", longest) == longest
        assert len(line["output"]) == len(document["choices"]) == line["metadata"]["requests"]
        assert set(line["scores"]) == {"acc", "acc_norm"} and line["score"] == line["scores"]["acc_norm"]
    assert all(isinstance(line["output"], str) for line in by_task[QUESTIONS])
    passages = [
        json.loads(text)["text"] for text in (TASKS / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["tokens"] for line in by_task[PASSAGES]] == [len(text.encode()) for text in passages]
    assert all(line["score"] is None and len(line["scores"]["word_perplexity"]) == 2 for line in by_task[PASSAGES])


# ------------------------------------------------------------------------------------------------------------
# What was measured before


@pytest.mark.slow
def test_a_group_is_measured_before_where_all_of_it_is_there(tasks, tmp_path, counted, capsys):
    parts = {CHOICES, WORDS, "local_group"}
    whole = run(tasks, ["local_group"], tmp_path)
    assert {row["source"] for row in whole} == parts
    assert run(tasks, ["local_group"], tmp_path) == whole and "measured before" in capsys.readouterr().out
    run(tasks, [CHOICES], tmp_path, samples=5)  # takes the place of one
    with counted() as second:
        again = run(tasks, ["local_group"], tmp_path)
    assert {row["source"] for row in again} == parts and {row["samples"] for row in again} == {30, 60}
    assert second.requests == 0  # kept
    assert [row["score"] for row in again] == [row["score"] for row in whole]


@pytest.mark.slow
def test_changed_tasks_are_measured_again(tasks, tmp_path, counted, monkeypatch):
    shutil.copy(TASKS / "questions.jsonl", tmp_path / "questions.jsonl")
    yaml = tasks / "questions.yaml"
    yaml.write_text(yaml.read_text().replace(str(TASKS), str(tmp_path)))
    out = tmp_path / "out"

    def measured() -> int:
        with counted() as found:
            run(tasks, [QUESTIONS], out, samples=3)
        return found.requests

    assert measured() > 0 and measured() == 0
    yaml.write_text(yaml.read_text().replace("Question:", "Q:"))
    assert measured() > 0 and measured() == 0
    assert (
        lines(out / "samples" / "lm_eval.jsonl")[0]["prompt"] != lines(out / "samples" / "lm_eval.jsonl")[3]["prompt"]
    )
    data = tmp_path / "questions.jsonl"  # elsewhere; the YAML file names it
    data.write_text("".join(sorted(data.read_text().splitlines(keepends=True))))
    assert measured() > 0 and measured() == 0
    (tasks / "own.csv").write_text("a,b\n")
    assert measured() > 0 and measured() == 0
    monkeypatch.setattr(harness, "harness_version", lambda: "0.5")
    assert measured() > 0


def test_results_within_the_folder_of_tasks_are_no_tasks(tasks, tmp_path, counted):
    run(tasks, [QUESTIONS], tasks / "out", samples=3)
    with counted() as second:
        run(tasks, [QUESTIONS], tasks / "out", samples=3)
    assert second.batches == 0


def test_cropped_reads_no_more_than_it_crops_to(tasks, tmp_path):
    whole, cropped = run(tasks, [PASSAGES], tmp_path, variants("as trained", "cropped"), samples=4)
    assert (whole["max_length"], cropped["max_length"]) == (64, tiny.LENGTH)
    assert cropped["score"] != whole["score"]


# ------------------------------------------------------------------------------------------------------------
# Before anything is measured


def test_all_tasks_are_opened_before_the_first_is_measured(tasks, tmp_path, counted, monkeypatch):
    without_the_others = task_lists._task_manager
    monkeypatch.setattr(task_lists, "_task_manager", lambda folder, _, *more: without_the_others(folder, False, *more))
    with counted() as found, pytest.raises(UserError, match="no task 'local_qestions'"):
        run(tasks, [CHOICES, "local_qestions"], tmp_path / "out")
    assert found.batches == 0 and not (tmp_path / "out").exists()


def test_the_harness_must_be_there(tasks, tmp_path, monkeypatch):
    import importlib.metadata

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(task_lists.importlib.metadata, "version", version)
    with pytest.raises(UserError, match="lm-evaluation-harness is needed"):
        run(tasks, [CHOICES], tmp_path)


def test_opened_tasks_serve_all_variants(tasks, tmp_path):
    """Examples are drawn anew for each, so that equal readers are asked equal questions."""
    both = run(tasks, [CHOICES], tmp_path / "both", [*variants(), *variants(seed=1)], num_fewshot=2, samples=6)
    alone = run(tasks, [CHOICES], tmp_path / "alone", variants(seed=1), num_fewshot=2, samples=6)
    assert both[1]["score"] == alone[0]["score"] and both[1]["tokens"] == alone[0]["tokens"]
    of_second = [line for line in lines(tmp_path / "both" / "samples" / "lm_eval.jsonl") if "1" in line["checkpoint"]]
    strip = [{**line, "seconds": 0} for line in lines(tmp_path / "alone" / "samples" / "lm_eval.jsonl")]
    assert [{**line, "seconds": 0} for line in of_second] == strip
