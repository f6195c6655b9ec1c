"""LongBench v2, BABILong and InfiniteBench through the harness, from files in the layout of their authors."""

import functools
import json
import sys
from pathlib import Path

import pytest
import tiny

from pe_lab.errors import UserError
from pe_lab.evaluation.lm_eval import PeLabLM, harness, local_datasets, task_lists
from pe_lab.evaluation.lm_eval.local_datasets import LocalDatasets, import_functions, split_length
from pe_lab.evaluation.lm_eval.requests import cut_context
from pe_lab.evaluation.lm_eval.task_lists import open_tasks
from pe_lab.evaluation.scoring.likelihood import Likelihood
from pe_lab.evaluation.suites.lm_eval import HarnessSettings
from pe_lab.evaluation.variants import Subject, all_variants
from pe_lab.language_model import LanguageModel

GOLDEN = json.loads((Path(__file__).parents[1] / "data/long_benchmark_golden.json").read_text(encoding="utf-8"))
# Where the harness's scorer gives another score than the original's, and which.
DIFFERENT = {
    ("infinitebench_code_debug", "C"): 1.0,
    ("infinitebench_code_debug", "The error is in C."): 1.0,
    ("infinitebench_longdialogue_qa_en", "ADAM"): 1.0,
    ("infinitebench_longbook_sum_en", "Ada left Lima and worked in Oslo."): pytest.approx(0.588235),
    ("infinitebench_longbook_choice_en", "A or C"): 1.0,
    ("infinitebench_longbook_choice_en", "C, not A"): 0.0,
    ("infinitebench_longbook_choice_en", "In Riga"): 0.0,
    ("infinitebench_longbook_choice_en", "Clearly B"): 0.0,
    ("babilong_qa1", "Mary was in the kitchen and then the hallway."): 1.0,
    ("babilong_qa5", "Fred or Bill"): 1.0,
    ("babilong_qa7", "one or two"): 1.0,
    ("babilong_qa8", "milk and apple"): 0.0,
    ("babilong_qa6", "yes and no"): 1.0,
}
SPLITS = (*local_datasets._INFINITEBENCH.values(), "math_calc")
LONGBENCH_2 = {
    "_id": "66f2",
    "domain": "Code Repository Understanding",
    "sub_domain": "Code repo QA",
    "difficulty": "easy",
    "length": "short",
    "question": " Which file parses? ",
    "choice_A": "a.py",
    "choice_B": "b.py",
    "choice_C": "c.py",
    "choice_D": "d.py",
    "answer": "C",
    "context": "parse() is in c.py. " * 20,
}


def tasks_folder(name: str) -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / name


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The three benchmarks as `hf download --local-dir` leaves them, and the harness with these tasks alone."""
    import datasets

    root = tmp_path / "data"
    context = "The grass is green. " * 30 + "The pass key is 71432. " + "The sky is blue. " * 30
    record = {"id": 0, "context": context, "input": "What is the pass key?", "answer": ["71432"], "options": []}
    for split in SPLITS:
        write(root / f"xinrongzhang2022/InfiniteBench/{split}.jsonl", json.dumps(record) + "\n")
    config = "---\nconfigs:\n"
    for length, where in (("0k", "hallway"), ("1k", "garden")):
        config += f"- config_name: {length}\n  data_files:\n  - split: qa1\n    path: data/qa1/{length}.json\n"
        told = {"input": f"Mary went to the {where}.", "question": "Where is Mary?", "target": where}
        write(root / f"RMT-team/babilong-1k-samples/data/qa1/{length}.json", json.dumps([told]))
    write(root / "RMT-team/babilong-1k-samples/README.md", config + "---\n")
    write(root / "THUDM/LongBench-v2/data.json", json.dumps([LONGBENCH_2]))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(harness, "adapter", lambda: functools.partial(PeLabLM, devices=tiny.one_device()))
    manager = few_tasks()
    monkeypatch.setattr(task_lists, "_task_manager", lambda *_: manager)
    return root


@functools.cache
def few_tasks():
    """A task manager of the three: to read all of the harness's files takes seconds."""
    from lm_eval.tasks import TaskManager

    folders = [str(tasks_folder(name)) for name in ("longbench2", "babilong", "infinitebench")]
    return TaskManager(include_path=folders, include_defaults=False)


def run(data, out, *names, max_length=200, **settings):
    variants = all_variants([Subject(tiny.language_model(tiny.checkpoint()), "tiny", "a/checkpoints/1")], None, [])
    settings = HarnessSettings(lm_eval_data=str(data), **settings)
    return harness.Harness(variants, names, out, settings, max_length).run()


@pytest.fixture
def asked(monkeypatch):
    """The prompts that the model is asked to continue; it answers with the pass key."""
    found = []

    def generate(self, prompts, new_tokens, **_):
        found.extend((bytes(prompt).decode(), new_tokens) for prompt in prompts)
        return ["The pass key is 71432, Mary is in the garden"] * len(prompts)

    monkeypatch.setattr(LanguageModel, "generate", generate)
    return found


def test_the_harness_scores_as_the_originals_but_for_known_answers():
    import_functions(tasks_folder("babilong") / "babilong_qa1.yaml")
    assert "transformers" not in sys.modules or sys.modules["transformers"].__spec__ is not None
    from lm_eval.tasks._yaml_loader import load_yaml

    tasks = {task for task, *_ in GOLDEN["scores"]}
    files = {task: tasks_folder(task.split("_")[0]) / f"{task}.yaml" for task in tasks}
    scorers = {task: load_yaml(file, resolve_func=True)["process_results"] for task, file in files.items()}
    different = {}
    for task, record, output, score in GOLDEN["scores"]:
        as_texts = record | {"answer": [str(answer) for answer in record.get("answer", [])]}
        (given,) = scorers[task](as_texts, [output]).values()
        if given != pytest.approx(score, abs=1e-6):
            different[task, output] = given
    assert different == DIFFERENT
    assert len(GOLDEN["scores"]) == 92


def test_tasks_of_infinitebench_are_asked_and_cut_in_the_middle(data, tmp_path, asked):
    names = ("infinitebench_passkey", "infinitebench_longbook_qa_en")
    passkey, book = run(data, tmp_path / "out", *names)
    assert (passkey["score"], passkey["source"], passkey["truncated"]) == (1.0, names[0], 1)
    assert 0 < book["score"] < 1  # F1 of a sentence that contains the answer
    (prompt, new), (_, of_book) = asked
    assert (new, of_book) == (6, 40) and len(prompt) == 200 - 6
    assert prompt.startswith("There is an important info hidden") and prompt.endswith("What is the pass key?")
    run(data, tmp_path / "left", names[0], truncation="left")
    assert asked[-1][0].startswith(" The sky is blue. The") and asked[-1][0].endswith("What is the pass key?")


def test_babilong_has_a_record_for_each_length(data, tmp_path, asked):
    records = run(data, tmp_path / "out", "babilong_qa1", "babilong_qa1@1k", max_length=4096)
    assert [(one["source"], one["asked"], one["score"]) for one in records] == [
        ("babilong_qa1", "babilong_qa1", 0.0),
        ("babilong_qa1@1k", "babilong_qa1@1k", 1.0),
    ]
    assert asked[1][0].endswith("Mary went to the garden.\nWhere is Mary?") and asked[1][1] == 16
    lines = (tmp_path / "out/samples/lm_eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines] == ["babilong_qa1", "babilong_qa1@1k"]
    again = run(data, tmp_path / "out", "babilong_qa1", "babilong_qa1@1k", max_length=4096)
    assert again == records and len(asked) == 2


@pytest.mark.parametrize("likely", "ABCD")
def test_longbench_2_scores_the_likeliest_letter_as_the_original_a_written_one(data, tmp_path, monkeypatch, likely):
    read = []

    def oracle(scorer, batch):
        for text in batch.sequences:
            for pair, first, continuation in text.asked:
                read.append(bytes(text.tokens[: first + 1]).decode())
                yield pair, Likelihood(0.0 if bytes(continuation).decode() == f" {likely}" else -9.0, False)

    monkeypatch.setattr("pe_lab.evaluation.scoring.likelihood.Likelihoods.read", oracle)
    (record,) = run(data, tmp_path, "longbench2_code")
    assert record["score"] == (GOLDEN["longbench_2"][f"The correct answer is ({likely})"] == "C")
    assert record["truncated"] == 4 and len(read[0]) == 199
    assert read[0].startswith("Please read the following text") and read[0].endswith("(D) d.py\n\nAnswer:")


def test_a_context_keeps_its_halves_as_in_the_original():
    for size in range(1, 12):
        for limit in range(1, 12):
            tokens = list(range(size))
            # pred.py of LongBench v2; without a cut where nothing is too long.
            halves = tokens[: limit // 2] + tokens[-limit // 2 :] if size > limit else tokens
            assert cut_context(tokens, limit, "middle") == halves
            assert cut_context(tokens, limit, "left") == tokens[-limit:]


def test_any_dataset_of_the_hub_may_be_in_the_folder(data, tmp_path, monkeypatch):
    """Tasks over files of their own are not touched."""
    for split in ("a", "json"):
        write(data / f"someone/{split}/{split}.jsonl", json.dumps({"question": "who?", "answer": split}) + "\n")
    lines = "output_type: generate_until\ntest_split: train\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
    write(tmp_path / "tasks/far.yaml", f"task: far\ndataset_path: someone/a\n{lines}")
    near = f"dataset_path: json\ndataset_kwargs: {{data_files: {{train: {data}/someone/json/json.jsonl}}}}\n{lines}"
    write(tmp_path / "tasks/near.yaml", f"task: near\n{near}")
    monkeypatch.undo()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    local = LocalDatasets(data)
    _, opened, digests = open_tasks(["far", "near"], tmp_path / "tasks", local)
    found = {name: [document["answer"] for document in tasks[0].test_docs()] for name, tasks in opened.items()}
    assert found == {"far": ["a"], "near": ["json"]}
    # Its results are those of its own data, whatever else is measured with it.
    *_, alone = open_tasks(["far"], tmp_path / "tasks", LocalDatasets(data))
    assert digests["far"] == alone["far"] is not None and digests["near"] is None


def test_other_data_is_measured_again(data, tmp_path, asked):
    first = run(data, tmp_path / "out", "infinitebench_passkey")
    assert run(data, tmp_path / "out", "infinitebench_passkey") == first and len(asked) == 1
    path = data / "xinrongzhang2022/InfiniteBench/passkey.jsonl"
    path.write_text(path.read_text().replace("green", "brown"))
    (second,) = run(data, tmp_path / "out", "infinitebench_passkey")
    assert second["settings"] != first[0]["settings"] and len(asked) == 2


def test_what_is_missing_is_named(data, tmp_path):
    def refused(name, folder, message):
        with pytest.raises(UserError, match=message):
            open_tasks([name], None, LocalDatasets(folder))

    empty = tmp_path / "empty"
    (empty / "xinrongzhang2022/InfiniteBench").mkdir(parents=True)
    refused("infinitebench_passkey", empty, "has no passkey.jsonl.*hf download xinrongzhang2022/InfiniteBench")
    refused("babilong_qa1@4k", data, "cannot be opened, with its dataset 'RMT-team/babilong-1k-samples'.*4k")
    refused("babilong_qa1", empty, "hf download RMT-team/babilong-1k-samples --repo-type=dataset.*--lm-eval-data=DIR")
    refused("longbench2_code", empty, "hf download zai-org/LongBench-v2 ")
    refused("longbench2_table", data, "data.json has no record of 'Table QA'")
    write(data / "THUDM/LongBench-v2/data.json", json.dumps([{"domain": "x"}]))
    refused("longbench2_code", data, "is not the list of LongBench v2's records .KeyError")
    with pytest.raises(UserError, match="--lm-eval-data=nowhere: there is no such folder"):
        LocalDatasets("nowhere")
    for name in ("arc_easy@4k", "babilong_qa1@"):
        with pytest.raises(UserError, match="only tasks of BABILong have lengths, such as babilong_longctx@4k"):
            split_length(name)
    with pytest.raises(UserError, match="truncation is 'right'; give left or middle"):
        PeLabLM(tiny.language_model(tiny.checkpoint()), truncation="right")


@pytest.mark.slow
def test_all_tasks_of_the_three_open():
    """The harness's own index: 6 s. A task that a later release renames fails here."""
    known = task_lists._task_manager(None, True).task_index
    assert {"babilong_longctx", "longbench2", "infinitebench"} <= set(known)

    def named(tasks, key):
        return {entry.cfg[key] for name, entry in known.items() if name.startswith(tasks) and key in (entry.cfg or {})}

    configurations, splits = named("longbench2_", "dataset_name"), named("infinitebench_", "test_split")
    assert configurations == set(local_datasets._LONGBENCH_2) and len(configurations) == 20
    assert splits == set(local_datasets._INFINITEBENCH) and len(splits) == 11
