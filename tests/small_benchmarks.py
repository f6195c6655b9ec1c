"""Small files in the schemas of public benchmarks, with generated contents, to run every suite without a network.

    python tests/small_benchmarks.py DIR     # DIR/longbench, qa, problems.jsonl, helmet, nolima and lm_eval

They measure nothing; docs/evaluation.md says where to get the originals.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

PEOPLE = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")
PLACES = ("Lima", "Oslo", "Quito", "Riga", "Tunis", "Cork", "Porto", "Graz")
TRADES = ("baker", "potter", "tailor", "pilot", "gardener", "printer", "mason", "weaver")
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")


def story(rng: random.Random, count: int) -> tuple[str, str, str]:
    """A text, a question that it answers, and the answer."""
    sentences = []
    for _ in range(count):
        who, where, what = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(TRADES)
        sentences.append(f"{who} went to {where} and worked there as a {what} for {rng.randint(2, 30)} years.")
    name, place = f"{rng.choice(PEOPLE)} Nobody", rng.choice(PLACES)
    sentences.insert(rng.randrange(len(sentences)), f"{name} was born in {place}.")
    return " ".join(sentences), f"Where was {name} born?", place


def longbench_record(task: str, index: int) -> dict[str, Any]:
    """A record of a LongBench task, in its schema."""
    rng = random.Random(f"{task}/{index}")
    context, question, answer = story(rng, 40 + 40 * index)
    answers, classes = [answer], None
    if task in ("trec", "lsht"):
        classes = ["体育", "财经", "科技"] if task == "lsht" else ["Place", "Number", "Person"]
        context = "\n".join(f"Question: {story(rng, 2)[1]}\nType: {classes[0]}" for _ in range(20))
        answers, question = [classes[0]], f"Question: {question}\nType:"
    elif task == "passage_count":
        answers, question = [str(index + 3)], ""
        context = "\n".join(f"Paragraph {i + 1}: {story(rng, 5)[0]}" for i in range(index + 3))
    elif task.startswith("passage_retrieval"):
        word = "段落" if task.endswith("zh") else "Paragraph "
        passages = [story(rng, 5)[0] for _ in range(8)]
        context = "\n".join(f"{word}{i + 1}: {passage}" for i, passage in enumerate(passages))
        answers, question = [f"{word}{index + 2}"], passages[index + 1]
    elif task in ("lcc", "repobench-p"):
        lines = [f"def add_{i}(a, b):\n    return a + b + {i}\n" for i in range(30)]
        context, answers, question = "\n".join(lines), ["    return a + b + 30"], "def add_30(a, b):\n"
    if task in CHINESE and classes is None and not task.startswith("passage"):
        context, answers = "今天的会议很长。" * 60 + "会议在奥斯陆举行。", ["奥斯陆"]
        question = "会议在哪里举行？"
    return {
        "input": question,
        "context": context,
        "answers": answers,
        "length": len(context.split()),
        "dataset": task,
        "language": "zh" if task in CHINESE else "en",
        "all_classes": classes,
        "_id": f"{task}-{index}",
    }


def squad(count: int) -> dict[str, Any]:
    """SQuAD v2's development file, small."""
    articles = []
    for number in range(count):
        paragraphs = []
        for part in range(3):
            context, question, answer = story(random.Random(f"squad/{number}/{part}"), 8)
            answers = [{"text": answer, "answer_start": context.index(answer)}]
            asked = {"id": f"{number}-{part}", "question": question, "answers": answers, "is_impossible": False}
            paragraphs.append({"context": context, "qas": [asked]})
        articles.append({"title": f"Article {number}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpot(count: int) -> list[dict[str, Any]]:
    """HotpotQA's development file (distractor), small."""
    found = []
    for number in range(count):
        rng = random.Random(f"hotpot/{number}")
        context, question, answer = story(rng, 6)
        others = [[f"Title {number}-{i}", [f"{part}. " for part in story(rng, 6)[0].split(". ")]] for i in range(4)]
        entry = [[f"Title {number}", [f"{part}. " for part in context.split(". ")]], *others]
        found.append({"_id": str(number), "question": question, "answer": answer, "context": entry})
    return found


def problems(count: int) -> list[dict[str, Any]]:
    """Problems in the schema of nlile/hendrycks-MATH-benchmark."""
    found = []
    for number in range(count):
        rng = random.Random(f"math/{number}")
        a, b, c = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 9)
        found.append(
            {
                "problem": f"What is ${a} + {b} \\cdot {c}$?",
                "solution": f"First ${b} \\cdot {c} = {b * c}$, and ${a} + {b * c} = \\boxed{{{a + b * c}}}$.",
                "answer": str(a + b * c),
                "subject": "Prealgebra",
                "level": 1,
            }
        )
    return found


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_helmet(directory: Path) -> None:
    """Files of HELMET's data.tar.gz for 8,192 tokens (some for 16,384), and its datasets for in-context learning."""
    rng = random.Random("helmet")
    for folder, several in (("niah_multikey_2", 1), ("niah_multikey_3", 1), ("niah_multivalue", 4)):
        for length in (8192, 16384):
            records = []
            for index in range(4):
                key, values = f"calm-{rng.choice(TRADES)}", [str(rng.randrange(10**6, 10**7)) for _ in range(several)]
                needles = [f"One of the special magic numbers for {key} is: {value}." for value in values]
                context = " ".join([story(rng, 10 * index + 4)[0], *needles, story(rng, 5)[0]])
                kind = "numbers" if several > 1 else "number"
                records.append(
                    {"index": index, "query": key, "outputs": values, "type_needle_v": kind, "context": context}
                )
            write_lines(directory / f"data/ruler/{folder}/validation_{length}.jsonl", records)
    records = []
    for index in range(7):
        pairs = {f"{rng.getrandbits(64):016x}": f"{rng.getrandbits(64):016x}" for _ in range(30)}
        asked = list(pairs)[index]
        demos = [[key, pairs[key]] for key in list(pairs)[10:13]]
        records.append(
            {
                "context": "JSON data:\n" + json.dumps(pairs),
                "question": asked,
                "answer": pairs[asked],
                "demos": demos,
                "num_kvs": len(pairs),
                "depth": index / 6,
            }
        )
    write_lines(directory / "data/json_kv/test_k105_dep6.jsonl", records)

    def questions(count: int, depths: int, passages: int, words: int, name: str) -> list[dict[str, Any]]:
        found = []
        for number in range(count):
            texts = [(f"Title {number}-{i}", story(rng, words)[0]) for i in range(passages - 1)]
            context, question, answer = story(rng, words)
            for depth in range(depths):
                place = depth * (passages - 1) // max(depths - 1, 1)
                inside = [*texts[:place], (f"Café {number}", context), *texts[place:]]
                record = {"question": f"{question} ({number})", "answers": [answer, f"{answer} city"]}
                record |= {} if name == "triviaqa" else {"id": f"{name}-{number}"}
                record |= {"s_pop": 10 ** (1 + number % 4)} if name == "popqa" else {}
                ctxs = [
                    {"title": title, "text": text, "has_answer": i == place} for i, (title, text) in enumerate(inside)
                ]
                found.append(record | {"ctxs": ctxs, "depth": depth / max(depths - 1, 1)})
        return found

    for name, test, solved, depths in (
        ("nq", "nq-dev-multikilt_1000_k50_dep6", "nq-train-multikilt_1000_k3_dep6", 3),
        ("triviaqa", "triviaqa-dev-multikilt_1000_k50_dep6", "triviaqa-train-multikilt_1000_k3_dep6", 2),
        ("hotpotqa", "hotpotqa-dev-multikilt_1000_k50_dep3", "hotpotqa-train-multikilt_1000_k3_dep3", 2),
        ("popqa", "popqa_test_1000_k50_dep6", "popqa_test_1000_k3_dep6", 2),
    ):
        write_lines(directory / f"data/kilt/{test}.jsonl", questions(8, depths, 5, 12, name))
        write_lines(directory / f"data/kilt/{solved}.jsonl", questions(9, 2, 3, 1, name))
    for name, columns, splits in (
        ("CogComp/trec/default", {"coarse_label": 6, "fine_label": 50}, ("train", "test")),
        ("PolyAI/banking77/default", {"label": 77}, ("train", "test")),
        ("clinc/clinc_oos/plus", {"intent": 151}, ("train", "validation", "test")),
        ("xingkunliuxtracta/nlu_evaluation_data/default", {"label": 68}, ("train",)),
    ):
        for split in splits:
            write_labelled(directory / "data" / name, split, columns, rng)


def write_labelled(folder: Path, split: str, columns: dict[str, int], rng: random.Random) -> None:
    """A split of a dataset of labelled texts, as the hub converts it to parquet."""
    import pyarrow
    import pyarrow.parquet

    number = 130 if split == "train" else 13
    table = {
        "text": [f"{split} {i}: what does a {rng.choice(TRADES)} in {rng.choice(PLACES)} do?" for i in range(number)]
    }
    for column, labels in columns.items():  # few of the labels occur, as they do in few texts
        table[column] = [rng.randrange(0, labels, max(labels // 7, 1)) for _ in range(number)]
    (folder / split).mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(table), folder / split / "0000.parquet")


def write_nolima(directory: Path) -> None:
    """Two needle sets and two books, in the layout of a clone of NoLiMa with its data."""
    entries = [
        {
            "id": "0007",
            "reasoning_type": "world_knowledge",
            "system_prompt": "",
            "task_template": "A part of a book:\n\n{haystack}\n\nQuestion: {question}\nAnswer in one word.",
            "needle": "That year {CHAR} moved to a flat opposite {1}.",
            "questions": {"onehop": "Who has been to {2}?", "twohop": "Who, of {2}, has been to {3}?"},
            "character_set": ["Ada", "Boris", "Chen", "Dora"],
            "tests": {
                "T01": {"input_args": ["the Azulejo tower", "Porto", "Portugal"]},
                "T02": {"input_args": ["the Clock hill", "Graz", "Austria"]},
            },
        },
        {
            "id": "0012Inv",
            "reasoning_type": "commonsense",
            "system_prompt": "",
            "task_template": "{haystack}\n\n{question}",
            "needle": "At {1} the bell of {2} was heard.",
            "questions": {"onehop": "Where was a bell?"},
            "tests": {"T01": {"input_args": ["dawn", "Riga"], "gold_answers": ["Riga", "Latvia"]}},
        },
    ]
    without = {name: value for name, value in entries[0].items() if name != "task_template"}
    for name, found in (("needle_set", entries), ("needle_set_hard", [without])):
        file = directory / f"data/needlesets/{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), encoding="utf-8")
    script = directory / "evaluation/run_tests.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text('DEFAULT_TASK_TEMPLATE = "Book:\\n{haystack}\\nQuestion: {question}"\n', encoding="utf-8")
    for number in (1, 2):
        rng = random.Random(f"nolima/{number}")
        book = directory / f"data/haystack/rand_shuffle/rand_book_{number}.txt"
        book.parent.mkdir(parents=True, exist_ok=True)
        book.write_text("\n".join(story(rng, rng.randint(1, 4))[0] for _ in range(40)), encoding="utf-8")


def write_all(directory: Path, tasks: list[str], records: int = 2) -> None:
    """All files, below a directory."""
    (directory / "longbench").mkdir(parents=True, exist_ok=True)
    (directory / "qa").mkdir(exist_ok=True)
    for task in tasks:
        lines = [json.dumps(longbench_record(task, index), ensure_ascii=False) for index in range(records)]
        (directory / "longbench" / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "qa" / "dev-v2.0.json").write_text(json.dumps(squad(30)))
    (directory / "qa" / "hotpot_dev_distractor_v1.json").write_text(json.dumps(hotpot(60)))
    write_helmet(directory / "helmet")
    write_nolima(directory / "nolima")
    (directory / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems(200)))


if __name__ == "__main__":
    from lm_eval_tasks import write_tasks

    from pe_lab.evaluation.suites.longbench import TASKS

    write_all(Path(sys.argv[1]), list(TASKS))
    write_tasks(Path(sys.argv[1]) / "lm_eval")
    print(f"Wrote {sys.argv[1]}")
