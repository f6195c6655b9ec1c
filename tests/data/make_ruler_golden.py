"""Makes ruler_golden.json beside it: prompts and scores by RULER's own scripts.

    python tests/data/make_ruler_golden.py --ruler=DIR

DIR is a checkout of https://github.com/NVIDIA/RULER (the prompts here: as vendored by THUDM/LongBench at 1fc6f41 and
005ad4b). The Python that runs this needs numpy, scipy, pandas, pyyaml, tqdm and wonderwords. The scripts' tokenizer is
replaced by one that counts two characters as a token, and so are the modules that they import and do not use here
(nltk, nemo); files that the repository downloads are made here, small, and english_words.json is left empty.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STUBS = {
    "tokenizer.py": """
class Characters:
    def text_to_tokens(self, text):
        return [text[i : i + 2] for i in range(0, len(text), 2)]

def select_tokenizer(tokenizer_type, tokenizer_path):
    return Characters()
""",
    "nltk/__init__.py": """
class data:
    @staticmethod
    def find(name):
        return name
""",
    "nltk/tokenize.py": "def sent_tokenize(text):\n    raise NotImplementedError\n",
    "nemo/__init__.py": "",
    "nemo/collections/__init__.py": "",
    "nemo/collections/asr/__init__.py": "",
    "nemo/collections/asr/parts/__init__.py": "",
    "nemo/collections/asr/parts/utils/__init__.py": "",
    "nemo/collections/asr/parts/utils/manifest_utils.py": """
import json

def read_manifest(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]

def write_manifest(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + chr(10) for line in lines)
""",
}
# task -> script, length, options; prompts of two samples each.
PROMPTS = {
    "vt": ("variable_tracking", 1200, ["--num_chains=1", "--num_hops=4"]),
    "vt_2_chains": ("variable_tracking", 1500, ["--num_chains=2", "--num_hops=2"]),
    "cwe_short": ("common_words_extraction", 1600, []),
    "cwe": ("common_words_extraction", 4400, []),
    "fwe": ("freq_words_extraction", 1200, ["--alpha=2.0"]),
    "qa_1": ("qa", 800, ["--dataset=squad"]),
    "qa_1_repeated": ("qa", 1800, ["--dataset=squad"]),
    "qa_2": ("qa", 800, ["--dataset=hotpotqa"]),
}
NEW_TOKENS = {
    "variable_tracking": 30,
    "common_words_extraction": 120,
    "freq_words_extraction": 50,
    "qa": 32,
}


def squad() -> dict:
    """A few articles in SQuAD 2.0's schema, with a question that has no answer and one with two."""
    articles = []
    for a, place in enumerate(["Aln", "Beck", "Coll", "Dove", "Esk"]):
        paragraphs = []
        for p, year in enumerate(range(1811 + 10 * a, 1815 + 10 * a)):
            context = (
                f"The town of {place} built bridge number {p} in {year}. It {{still}} crosses the river {place}water."
            )
            answers = [{"text": str(year), "answer_start": context.index(str(year))}]
            answers += [{"text": f"in {year}", "answer_start": context.index(str(year)) - 3}] * (p == 1)
            asked = f"When did {place} build bridge number {p}?"
            qas = [{"question": asked, "id": f"{a}-{p}", "answers": answers, "is_impossible": False}]
            never = {"question": "Who paid?", "id": f"{a}-{p}-no", "answers": [], "is_impossible": True}
            paragraphs.append({"qas": [never, *qas] if p == 0 else qas, "context": context})
        articles.append({"title": place, "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpot() -> list:
    """A few questions in HotpotQA's schema; some documents belong to two."""
    people = [f"Person {chr(65 + i)}" for i in range(25)]
    about = [[name, [f"{name} was born in 19{10 + i}.", f" {name} sang."]] for i, name in enumerate(people)]
    asked = []
    for q, first in enumerate((0, 7, 15)):
        asked.append(
            {
                "_id": f"q{q}",
                "question": f"In which year was {people[first]} born?",
                "answer": f"19{10 + first}",
                "supporting_facts": [[people[first], 0]],
                "context": about[first : first + 10],
                "type": "bridge",
                "level": "hard",
            }
        )
    return asked


# Predictions, a task each: answers that RULER's scripts treat in some way of their own.
PREDICTIONS = {
    "niah_multivalue.jsonl": [
        (" 123 and 456", ["123", "456", "789", "000"]),
        ("\x07\n", ["5"]),
        ("7\x00 8", ["7\n 8"]),
    ],
    "vt-0.jsonl": [("ABC def", ["ABC", "DEF"]), ("", ["ABC", "XYZ"])],
    "vt-1.jsonl": [("xyz", ["ABC", "XYZ", "QRS"])],
    "cwe.jsonl": [("1. Apple 2. pear", ["apple", "pear", "plum"])] * 2 + [("none", ["apple", "pear", "plum"])],
    "fwe.jsonl": [("abcdef, ghijkl, mnopqr", ["abcdef", "ghijkl", "mnopqr"])],
    "qa_1.jsonl": [("It was in 1811.", ["1811", "year 1811"]), ("never", ["1812"]), ("   ", ["1813"])],
    "qa_2.jsonl": [("1910", ["1910"]), ("1911", ["1912"])],
}


def run(script: Path, arguments: list[str], stubs: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(stubs), "HOME": str(stubs)}
    done = subprocess.run([sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ruler", type=Path, required=True)
    ruler = parser.parse_args().ruler
    golden: dict = {"by": "NVIDIA/RULER, scripts/data/synthetic and scripts/eval", "squad": squad(), "hotpot": hotpot()}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(ruler / "scripts", place / "scripts")
        stubs, synthetic = place / "stubs", place / "scripts" / "data" / "synthetic"
        for file, text in STUBS.items():
            (stubs / file).parent.mkdir(parents=True, exist_ok=True)
            (stubs / file).write_text(text)
        (place / "scripts" / "data" / "tokenizer.py").unlink(missing_ok=True)
        (synthetic / "json").mkdir(exist_ok=True)
        (synthetic / "json" / "squad.json").write_text(json.dumps(golden["squad"]))
        (synthetic / "json" / "hotpotqa.json").write_text(json.dumps(golden["hotpot"]))
        (synthetic / "json" / "english_words.json").write_text("{}")
        sys.path.insert(0, str(synthetic))
        from constants import TASKS

        golden["prompts"] = {}
        for task, (script, length, options) in PROMPTS.items():
            template = TASKS[script]["template"] + TASKS[script]["answer_prefix"]  # scripts/data/prepare.py, base
            assert TASKS[script]["tokens_to_generate"] == NEW_TOKENS[script]
            arguments = [
                f"--save_dir={place}",
                f"--save_name={task}",
                "--tokenizer_path=",
                f"--max_seq_length={length}",
                f"--tokens_to_generate={NEW_TOKENS[script]}",
                "--num_samples=2",
                f"--template={template}",
                *options,
            ]
            run(synthetic / f"{script}.py", arguments, stubs)
            lines = (place / task / "validation.jsonl").read_text().splitlines()
            kept = ("index", "input", "answer_prefix", "outputs", "length")
            golden["prompts"][task] = {
                "max_length": length,
                "new_tokens": NEW_TOKENS[script],
                "samples": [{key: json.loads(line)[key] for key in kept} for line in lines],
            }

        predictions = place / "pred"
        predictions.mkdir()
        golden["predictions"] = {}
        for file, answers in PREDICTIONS.items():
            lines = [
                {"index": i, "pred": p, "input": "", "outputs": o, "others": {}, "truncation": -1, "length": -1}
                for i, (p, o) in enumerate(answers)
            ]
            golden["predictions"][file] = lines
            (predictions / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        run(place / "scripts" / "eval" / "evaluate.py", [f"--data_dir={predictions}"], stubs)
        with open(predictions / "summary.csv") as file:
            _, tasks, scores, nulls = list(csv.reader(file))
        golden["summary"] = {
            task: {"score": float(score), "nulls": null}
            for task, score, null in zip(tasks[1:], scores[1:], nulls[1:], strict=True)
        }
    (HERE / "ruler_golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
