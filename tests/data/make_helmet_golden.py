"""Makes helmet_golden.json beside it: the prompts and scores of HELMET's own code, on the files of small_benchmarks.py.

    PYTHONPATH=tests python tests/data/make_helmet_golden.py --helmet=DIR

DIR is a checkout of princeton-nlp/HELMET (MIT; commit 4526dfbd: data.py, utils.py, model_utils.py, eval.py). torch,
transformers and pytrec_eval, which these tasks do not use, are stand-ins; so is the tokenizer: bytes, with the offsets
of characters. Datasets of the hub come from local parquet files, with its labels' types. The values were made with
datasets 5.2.0 and rouge_score 0.1.2 under Python 3.11.

`prompts` has, for a task, a length and a number of samples, the SHA-256 of each prompt and its answers, cut to the
length as `tokenize` cuts it; `scores` the main metric of an answer, behind the beginning of the answer as eval.py puts
it there, and (`chat`) without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from small_benchmarks import write_helmet
from stubbed_modules import StubbedModules

# Task of the suite -> dataset of HELMET, test file, file of solved examples, new tokens, metric.
KILT = "data/kilt/{}.jsonl"
TASKS = {
    "niah_mk_2": ("ruler_niah_mk_2", "data/ruler/niah_multikey_2/validation_{length}.jsonl", "", 50, "ruler_recall"),
    "niah_mk_3": ("ruler_niah_mk_3", "data/ruler/niah_multikey_3/validation_{length}.jsonl", "", 100, "ruler_recall"),
    "niah_mv": ("ruler_niah_mv", "data/ruler/niah_multivalue/validation_{length}.jsonl", "", 50, "ruler_recall"),
    "json_kv": ("json_kv", "data/json_kv/test_k105_dep6.jsonl", "", 100, "substring_exact_match"),
    **{
        task: (name, KILT.format(test), KILT.format(demos), 20, "substring_exact_match")
        for task, name, test, demos in (
            ("nq", "kilt_nq", "nq-dev-multikilt_1000_k50_dep6", "nq-train-multikilt_1000_k3_dep6"),
            (
                "triviaqa",
                "kilt_triviaqa",
                "triviaqa-dev-multikilt_1000_k50_dep6",
                "triviaqa-train-multikilt_1000_k3_dep6",
            ),
            (
                "hotpotqa",
                "kilt_hotpotqa",
                "hotpotqa-dev-multikilt_1000_k50_dep3",
                "hotpotqa-train-multikilt_1000_k3_dep3",
            ),
            ("popqa", "kilt_popqa_3", "popqa_test_1000_k50_dep6", "popqa_test_1000_k3_dep6"),
        )
    },
    "trec_coarse": ("icl_trec_coarse_400shot_balance", "", "", 20, "exact_match"),
    "trec_fine": ("icl_trec_fine_400shot_balance", "", "", 20, "exact_match"),
    "banking77": ("icl_banking77_360shot_balance", "", "", 20, "exact_match"),
    "clinic150": ("icl_clinic150_440shot_balance", "", "", 20, "exact_match"),
    "nlu": ("icl_nlu_510shot_balance", "", "", 20, "exact_match"),
}
# (task, length, samples): all of a file, and fewer.
ASKED = [(task, 8192, count) for task in TASKS for count in (3, 100)] + [("niah_mv", 16384, 2)]
# RIGHT is the first answer, LAST the last one.
OUTPUTS = [
    " RIGHT",
    "RIGHT",
    " The RIGHT.",
    " Answer: RIGHT",
    "\nlabel: RIGHT",
    " label: RIGHT",
    " LAST and RIGHT",
    " it is RIGHT\nand more",
    " Corresponding value: RIGHT, I think",
    " corresponding value:\nRIGHT",
    " nothing",
    "",
    " RIGHT Answer: nothing",
    " xRIGHTx",
    " R I G H T",
]


class Bytes:
    """A fast tokenizer's calls, on bytes."""

    is_fast = True

    def __call__(
        self, texts: list[str], return_tensors: str = "", return_offsets_mapping: bool = False, **_: Any
    ) -> Any:
        (text,) = texts
        if return_offsets_mapping:
            pairs = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
            return {"input_ids": [pairs], "offset_mapping": [pairs]}
        size = len(text.encode())
        return types.SimpleNamespace(input_ids=types.SimpleNamespace(size=lambda axis: size), text=text)


def original(checkout: Path) -> tuple[Any, Any]:
    """HELMET's modules data and model_utils."""
    import datasets

    StubbedModules("torch", "transformers", "pytrec_eval")
    sys.path.insert(0, str(checkout))
    import data
    import model_utils

    load, mapped = datasets.load_dataset, datasets.Dataset.map

    def load_dataset(path: str, name: str = "default", **more: Any) -> Any:
        if path == "json":
            return load(path, **more)
        folder = Path("data") / {"clinc_oos": "clinc/clinc_oos"}.get(path, path) / name
        found = datasets.DatasetDict()
        for split in folder.iterdir():
            one = datasets.Dataset.from_parquet(str(split / "0000.parquet"))
            for column, labels in (("coarse_label", 6), ("fine_label", 50), ("label", 77), ("intent", 151)):
                if column in one.column_names:
                    one = one.cast_column(column, datasets.ClassLabel(names=[str(i) for i in range(labels)]))
            found[split.name] = one
        return found

    data.load_dataset = load_dataset
    datasets.Dataset.map = lambda self, *given, num_proc=None, **more: mapped(self, *given, **more)
    return data, model_utils


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helmet", type=Path, required=True)
    checkout = parser.parse_args().helmet.resolve()
    target = Path(__file__).parent.resolve() / "helmet_golden.json"
    golden: dict[str, Any] = {"prompts": [], "scores": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_helmet(Path(folder))
        os.chdir(folder)
        data, model_utils = original(checkout)
        for task, length, count in ASKED:
            name, test, demos, new, metric = TASKS[task]
            arguments = types.SimpleNamespace(max_test_samples=count, shots=2, seed=42)
            random.seed(42)  # as run_test does
            loaded = data.load_data(arguments, name, test.format(length=length), demos)
            prompts, answers = [], []
            for item in loaded["data"]:
                encoded = model_utils.tokenize(dict(item), loaded, Bytes(), length, new)
                prompts.append(hashlib.sha256(encoded.text.encode()).hexdigest()[:16])
                answers.append(item["answer"])
            golden["prompts"].append(
                {"task": task, "length": length, "count": count, "sha256": prompts, "answers": answers}
            )
            if count == 3:
                item = loaded["data"][0]
                known = [item["answer"]] if isinstance(item["answer"], str) else item["answer"]
                for written in OUTPUTS:
                    output = written.replace("RIGHT", known[0]).replace("LAST", known[-1])
                    begun = loaded["system_template"].format(**item) + output
                    scores = [
                        float(loaded["post_process"]({"output": text}, item)[0][metric]) for text in (begun, output)
                    ]
                    golden["scores"].append([task, output, *scores])
    target.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
