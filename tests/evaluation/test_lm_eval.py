"""A model measured through the harness, on local tasks of each kind; its settings and its command line."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from adapters import LM, MAX_LENGTH, language_model, with_beginning
from lm_eval_tasks import NAMES, TASKS, write_tasks

from pe_lab.data.tokenizers import export_tokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.lm_eval import PeLabLM, main, task_lists, with_defaults
from pe_lab.evaluation.lm_eval.harness import measure
from pe_lab.evaluation.lm_eval.task_lists import TASK_LISTS, expand_tasks, open_tasks
from pe_lab.evaluation.scoring.likelihood import Likelihood
from pe_lab.language_model import LanguageModel, load
from pe_lab.positional import NoPE, Yarn

ROOT = Path(__file__).parent.parent.parent
VOCABULARY = tiny.MODEL.vocab_size


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield write_tasks(tmp_path_factory.mktemp("tasks"))


def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def measured(lm: LanguageModel, names: Sequence[str], folder: Path, limit: int | None = None, **settings: Any) -> list:
    """The metrics of a model on tasks of a folder, on one device."""
    model = PeLabLM(lm, devices=tiny.one_device(), **settings)
    manager, opened, _ = open_tasks(expand_tasks(names), folder)
    records = [record for loaded in opened.values() for record in measure(model, manager, loaded, limit)[0]]
    return [
        {**record, "task": record["source"], "metric": name, "score": score, "stderr": record["stderrs"][name]}
        for record in records
        for name, score in record["scores"].items()
    ]


# ------------------------------------------------------------------------------------------------------------
# Settings


def test_how_a_model_is_asked_for():
    model = PeLabLM(
        LM, positional="yarn:factor=2", logit_scale=1.5, max_length="4x", device="cuda:0", batch_size="auto:4"
    )
    assert model.max_length == 4 * tiny.LENGTH and model.batch_size is None and PeLabLM(LM).max_length == tiny.LENGTH
    assert [layer.encoding.scaling for layer in model.lm.layers] == [Yarn(2, tiny.LENGTH)] * 2
    assert {layer.logit_scale for layer in model.lm.layers} == {1.5}
    assert {layer.encoding for layer in PeLabLM(LM, drop=True).lm.layers} == {NoPE()}
    assert "yarn" in model.get_model_info()["positional"][0]
    for settings, message in (
        ({"max_lenght": 9}, "Did you mean 'max_length'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": "long"}, "max_length: 'long' is no length"),
        ({"max_gen_toks": "abc"}, "max_gen_toks is 'abc'; give a whole number from 1"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"seed": "abc"}, "seed is 'abc'; give a whole number"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": True}, "seed is True"),
        ({"prefix_token_id": "abc"}, "prefix_token_id is 'abc'; give a whole number from 0 to 383"),
        ({"prefix_token_id": VOCABULARY}, "prefix_token_id is 384"),
        ({"logit_scale": "fitted"}, "logit_scale is 'fitted'; give a number above 0"),
        ({"logit_scale": 0}, "logit_scale is 0; give a number above 0"),
        ({"drop": "maybe"}, "drop is 'maybe'; give True or False"),
        ({"add_bos_token": "maybe"}, "add_bos_token is 'maybe'; give True or False"),
    ):
        with pytest.raises(UserError, match=message):
            PeLabLM(LM, **settings)
    with pytest.raises(UserError, match="pretrained=runs/NAME"):
        PeLabLM()
    with pytest.raises(UserError, match="without a tokenizer"):
        PeLabLM(dataclasses.replace(LM, tokenizer=None))


def test_the_command_line_has_our_defaults():
    given = ["--tasks", "a"]
    assert with_defaults(given) == [*given, "--model", "pe_lab", "--batch_size", "auto"]
    assert with_defaults(["--model=hf", "-b", "2"]) == ["--model=hf", "-b", "2"]
    for others in (["ls", "tasks"], ["--config", "a.yaml"], ["--help"], []):
        assert with_defaults(others) == others


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ValueError("Tasks not found: a"), "Tasks not found: a. `python -m pe_lab.evaluation.lm_eval ls tasks`"),
        (ConnectionError("Couldn't reach 'b' on the Hub"), "Couldn't reach 'b' on the Hub. Where there is no network"),
        (UserError("batch_size is 0"), "error: batch_size is 0"),
    ],
)
def test_a_command_that_fails_says_why(raised, message, monkeypatch, capsys):
    monkeypatch.setattr("multiprocessing.set_start_method", lambda *_, **__: None)

    def cli_evaluate():
        assert sys.argv == ["lm-eval", "--tasks", "a", "--model", "pe_lab", "--batch_size", "auto"]
        raise raised

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", cli_evaluate)
    before = list(sys.argv)
    assert main(["--tasks", "a"]) == 2 and message in capsys.readouterr().err and sys.argv == before


@pytest.mark.slow
def test_the_harnesses_command_line_measures_ours(tasks, tmp_path):
    model = shutil.copytree(ROOT / "tests" / "data" / "hf" / "llama", tmp_path / "model")
    export_tokenizer(with_beginning(), model)
    arguments = ["--model_args", f"pretrained={model},positional=yarn:factor=2,max_length=40", "--tasks", "local_group",
                 "--include_path", str(tasks), "--limit", "4", "--output_path", str(tmp_path / "out")]  # fmt: skip
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets"), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pe_lab.evaluation.lm_eval", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|local_group|" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    assert found["config"]["positional"] == ["rope(base=500) + yarn(factor=2, original_length=256)"]
    assert found["config"]["max_length"] == 40 and found["config"]["truncated"] > 0
    assert found["config"]["pretrained"] == str(model) and found["config"]["batch_size"] == "auto"
    lm = load(model).with_positional("yarn:factor=2")
    rows = measured(lm, ["local_group"], tasks, limit=4, max_length=40)
    assert [row["task"] for row in rows] == ["local_choices"] * 2 + ["local_last_words"] * 2 + ["local_group"]
    for row in rows:
        assert found["results"][row["task"]][f"{row['metric']},none"] == pytest.approx(row["score"], rel=1e-4)
    assert rows[-1]["samples"] == 8
    # Bootstrapped, in processes of its own.
    assert found["results"]["local_last_words"]["perplexity_stderr,none"] > 0


# ------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.mark.slow
def test_a_model_that_knows_nothing_scores_chance(tasks):
    """Of a uniform distribution every score follows from the lengths of the texts."""
    uniform = language_model(uniform=True)
    rows = measured(uniform, NAMES[:3], tasks, max_length=MAX_LENGTH)
    scores = {(row["task"], row["metric"]): row["score"] for row in rows}
    choices = documents("choices")
    costs = [[len(f" {choice}".encode()) for choice in document["choices"]] for document in choices]
    right = [document["answer"] == int(np.argmin(cost)) for document, cost in zip(choices, costs, strict=True)]
    assert scores["local_choices", "acc"] == np.mean(right)
    last = [len(" " + document["text"].split(" ")[-1]) for document in documents("last_words")]
    assert scores["local_last_words", "perplexity"] == pytest.approx(VOCABULARY ** np.mean(last), rel=1e-4)
    # Each byte is predicted once, however the passage is cut into windows.
    assert scores["local_passages", "bits_per_byte"] == pytest.approx(math.log2(VOCABULARY), rel=1e-6)
    for row in rows:
        assert (row["samples"], row["task_version"], row["num_fewshot"]) == (30, 1.0, 0)
        assert row["max_length"] == MAX_LENGTH and row["higher_is_better"] is (row["task"] != "local_passages")
        assert (row["truncated"] > 0) == (row["task"] != "local_passages")
        assert (row["stderr"] is None) == (row["task"] == "local_passages")


@pytest.mark.parametrize("wanted", [1.0, 0.0])
def test_a_model_that_knows_the_answers(tasks, monkeypatch, wanted):
    right = {f"Question: {d['question']}\nAnswer:": f" {d['choices'][d['answer']]}" for d in documents("choices")}
    known = {(bytes(question + answer, "utf-8")) for question, answer in right.items()}

    def oracle(scorer, batch):
        for text in batch.sequences:
            for pair, first, continuation in text.asked:
                knows = bytes([*text.tokens[: first + 1], *continuation]) in known
                yield pair, Likelihood(0.0 if knows == bool(wanted) else -1000.0, False)

    monkeypatch.setattr("pe_lab.evaluation.scoring.likelihood.Likelihoods.read", oracle)
    rows = measured(LM, ["local_choices"], tasks, max_length=300)
    assert [row["score"] for row in rows] == [wanted, wanted]


def test_generated_answers_are_compared(tasks, monkeypatch):
    answers = {f"Question: {d['question']}\nAnswer:": f" {d['answer'].upper()}" for d in documents("questions")}

    def generate(self, prompts, new_tokens, stop, **_):
        assert new_tokens == 16 and stop == ["\n", "<|endoftext|>"]
        texts = [answers[bytes(prompt).decode()] for prompt in prompts]
        return [text if len(text) % 2 else " wrong" for text in texts]

    monkeypatch.setattr(LanguageModel, "generate", generate)
    (row,) = measured(LM, ["local_questions"], tasks, limit=10, max_length=300)
    some = list(answers.values())[:10]
    assert row["samples"] == 10 and row["metric"] == "exact_match"
    assert row["score"] == np.mean([len(text) % 2 for text in some]) and 0 < row["score"] < 1


def test_what_cannot_be_opened_says_why(tasks, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    lines = ["task: far", "dataset_path: nobody/nothing", "output_type: generate_until", "test_split: test"]
    (tmp_path / "far.yaml").write_text("\n".join([*lines, "doc_to_text: a", "doc_to_target: b"]))
    with pytest.raises(
        UserError, match=r"'far' cannot be opened, with its dataset 'nobody/nothing': .*test: /absolute"
    ):
        open_tasks(["far"], tmp_path)
    with pytest.raises(UserError, match="folder of tasks 'nowhere' is not there"):
        open_tasks(["far"], "nowhere")
    without_the_others = task_lists._task_manager
    monkeypatch.setattr(task_lists, "_task_manager", lambda folder, *_: without_the_others(folder, False))
    for name, message in (("local_choises", "Did you mean 'local_choices'"), ("zzz", "ls tasks` lists them all")):
        with pytest.raises(UserError, match=f"has no task '{name}' .nor in .*{message}"):
            open_tasks([name], tasks)


def test_lists_of_tasks():
    assert expand_tasks(["DROPE-six", "mine", "piqa"]) == [*TASK_LISTS["droPE-six"], "mine"]
    assert len(expand_tasks(list(TASK_LISTS))) == 12 and len(TASK_LISTS["partial-rope-ten"]) == 10
    with pytest.raises(UserError, match="'drope_six'. Did you mean 'droPE-six'"):
        expand_tasks(["drope_six"])
    with pytest.raises(UserError, match="No task is named"):
        expand_tasks([" "])
    assert expand_tasks(["drop"]) == ["drop"]  # near a list's name, and a task


@pytest.mark.slow
def test_the_harness_has_the_tasks_of_the_lists():
    known = task_lists._task_manager(None, True).task_index
    assert set(expand_tasks(list(TASK_LISTS))) <= set(known)
    with pytest.raises(UserError, match="has no task 'arc_easi'. Did you mean 'arc_easy'"):
        open_tasks(["arc_easi"])
