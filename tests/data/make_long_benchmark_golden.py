"""Makes long_benchmark_golden.json beside it: what the originals' scorers give to answers made by hand.

    python tests/data/make_long_benchmark_golden.py --longbench=DIR --babilong=DIR --infinitebench=DIR

The directories are checkouts of THUDM/LongBench (MIT; commit 2e00731f: pred.py), booydar/babilong (Apache 2.0;
7a6efee2: babilong/metrics.py) and OpenBMB/InfiniteBench (MIT; 88b3daa6: src/compute_scores.py). InfiniteBench loads
ROUGE through `evaluate`, from the hub: here it is the same computation of the package rouge_score 0.1.2, as evaluate's
rouge.py calls it (no stemmer). Of pred.py only `extract_answer` is run, since the rest asks a server.

Each case is (task of lm-evaluation-harness, record, answer, score): the record as the original's file has it.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

OPTIONS = ["parse", "render", "collect", "dispatch"]
BOOKS = ["In Lima", "In Oslo", "In Riga", "In Cork"]
SINGLE = ("passkey", "number_string", "kv_retrieval", "code_run", "math_find")  # whose label is one answer
# Task, name in the original, answer, options, outputs.
INFINITEBENCH: list[tuple[str, str, Any, list[str], list[str]]] = [
    ("passkey", "passkey", ["71432"], [], ["71432", "The pass key is 71432.", "714 32", "", "key 5 71432", "71432."]),
    ("number_string", "number_string", ["9917"], [], ["9917", " 9917 9917", "99170", "none"]),
    (
        "kv_retrieval",
        "kv_retrieval",
        ["6ab6ea3e-f288-4f33-ba46-7f42bb75b03f"],
        [],
        [
            '"6ab6ea3e-f288-4f33-ba46-7f42bb75b03f"',
            "The value is 6ab6ea3e-f288-4f33-ba46-7f42bb75b03f.",
            "6ab6ea3e-f288-4f33-ba46",
            "x6ab6ea3e-f288-4f33-ba46-7f42bb75b03f",
            "",
        ],
    ),
    ("code_run", "code_run", [-17], [], ["-17", "It returns -17.", "17", "The value: `-17`", "", "-17 or 4"]),
    (
        "code_debug",
        "code_debug",
        ["collect"],
        OPTIONS,
        ["C", "C.", "C: collect", "The answer is: C", "answer is: collect", "The error is in C.", "B. render", "", "D"],
    ),
    ("math_find", "math_find", [37], [], ["37", "It is 37.", "3 37", "", "thirty-seven"]),
    (
        "longdialogue_qa_en",
        "longdialogue_qa_eng",
        ["ADA"],
        [],
        ["ADA", "Ada", "It is Ada.", "ADAM", "Boris", ""],
    ),
    (
        "longbook_qa_en",
        "longbook_qa_eng",
        ["the old lighthouse", "a lighthouse"],
        [],
        ["the old lighthouse", "lighthouse", "An old house by the sea", "The lighthouse, of course.", "", "harbour"],
    ),
    (
        "longbook_sum_en",
        "longbook_sum_eng",
        ["Ada leaves Lima.\nShe finds work in Oslo and returns."],
        [],
        ["Ada leaves Lima.\nShe finds work in Oslo and returns.", "Ada left Lima and worked in Oslo.", "A storm."],
    ),
    (
        "longbook_choice_en",
        "longbook_choice_eng",
        ["In Riga"],
        BOOKS,
        ["C", "C. In Riga", "The answer is C", "answer: C", "A or C", "C, not A", "In Riga", "B", "", "Clearly B"],
    ),
    (
        "longbook_qa_chn",
        "longbook_qa_chn",
        ["北京大学", "北大"],
        [],
        ["北京大学", "他在北京大学。", "北大", "清华大学", ""],
    ),
]
# Task, answer in the dataset, question, outputs.
BABILONG = [
    (
        "qa1",
        "hallway",
        "Where is Mary?",
        [
            "The most recent location of Mary is hallway.",
            "hallway",
            "Hallway. Then the kitchen.",
            "Mary was in the kitchen and then the hallway.",
            "The hallways.",
            "kitchen",
            "",
        ],
    ),
    ("qa2", "garden", "Where is the milk?", ["The milk is in the garden.", "garden", "the office", "The Garden"]),
    ("qa5", "Fred", "Who gave the milk to Mary?", ["Fred", "Fred gave it to Mary.", "Fred or Bill", "Bill"]),
    ("qa7", "two", "How many objects is Mary carrying?", ["two", "Two objects.", "2", "one or two"]),
    ("qa8", "apple,milk", "What is Mary carrying?", ["apple,milk", "milk and apple", "apple", "milk,apple,football"]),
    ("qa6", "yes", "Is Mary in the office?", ["yes", "Yes.", "no", "yes and no"]),
]
LONGBENCH_2 = [
    *(f"The correct answer is ({letter})" for letter in "ABCDE"),
    "**The correct answer is (C)**",
    "The correct answer is D",
    "A",
    "the correct answer is (A)",
    "The answer is B. The correct answer is (C).",
]


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def infinitebench(checkout: Path) -> list[Any]:
    from rouge_score import rouge_scorer

    class Rouge:
        def compute(
            self, predictions: list[str], references: list[Any], use_aggregator: bool
        ) -> dict[str, list[float]]:
            scorer = rouge_scorer.RougeScorer(["rougeLsum"], use_stemmer=False)
            (reference,), (prediction,) = references, predictions
            scored = scorer.score_multi(reference, prediction) if isinstance(reference, list) else None
            return {"rougeLsum": [(scored or scorer.score(reference, prediction))["rougeLsum"].fmeasure]}

    evaluate = types.ModuleType("evaluate")
    evaluate.load = lambda name: Rouge()
    arguments = types.ModuleType("args")
    arguments.parse_args = None
    sys.modules |= {"evaluate": evaluate, "args": arguments}
    scorers, cases = module(checkout / "src" / "compute_scores.py"), []
    for task, name, answer, options, outputs in INFINITEBENCH:
        # As in the results of its repository: a choice's text and its letter, one answer, or all answers.
        label = [answer[0], "ABCD"[options.index(answer[0])]] if options else answer
        label = answer[0] if name in SINGLE else label
        record = {"answer": answer, "options": options}
        cases += [
            [f"infinitebench_{task}", record, output, scorers.get_score_one(output, label, name, "gpt4")]
            for output in outputs
        ]
    return cases


def babilong(checkout: Path) -> list[Any]:
    metrics, cases = module(checkout / "babilong" / "metrics.py"), []
    for task, target, question, outputs in BABILONG:
        record, labels = {"target": target, "question": question}, metrics.TASK_LABELS[task]
        for output in outputs:
            right = metrics.compare_answers(target, output, question, labels)
            cases.append([f"babilong_{task}", record, output, float(right)])
    return cases


def longbench_2(checkout: Path) -> dict[str, Any]:
    tree = ast.parse((checkout / "pred.py").read_text(encoding="utf-8"))
    chosen = [node for node in tree.body if getattr(node, "name", "") == "extract_answer"]
    names: dict[str, Any] = {"re": re}
    exec(compile(ast.Module(chosen, []), "pred.py", "exec"), names)
    return {output: names["extract_answer"](output) for output in LONGBENCH_2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("longbench", "babilong", "infinitebench"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    golden = {
        "scores": infinitebench(given.infinitebench) + babilong(given.babilong),
        "longbench_2": longbench_2(given.longbench),
    }
    file = Path(__file__).parent / "long_benchmark_golden.json"
    file.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
