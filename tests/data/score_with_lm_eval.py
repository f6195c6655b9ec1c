"""Runs lm-evaluation-harness on Hugging Face directories as its users do, and writes what it answered.

    PYTHON tests/data/score_with_lm_eval.py --tasks=DIR --jobs=FILE --out=FILE

tests/test_real_lm_eval.py starts it, with the python of an environment that has the harness, torch and transformers 5;
it imports nothing of this repository. The jobs are a list of {"model": DIR, "names": [...], "max_length": N or null,
"chat": bool, "limit": N or null}; the output is a list with, for each, what the model's class says of itself, the
scores of each task, and of each document its requests' arguments and the harness's answers.

Log-probabilities are summed in float64. In float32, which is HFLM's default, torch loses the smallest of a
vocabulary's probabilities: every token then has some 1e-5 too much.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager


def run(job: dict, manager: TaskManager) -> dict:
    start = time.perf_counter()
    lm = HFLM(
        pretrained=job["model"],
        device="cpu",
        dtype="float32",
        softmax_dtype="float64",
        batch_size=8,
        max_length=job["max_length"],
    )
    results = simple_evaluate(
        lm,
        tasks=job["names"],
        task_manager=manager,
        bootstrap_iters=0,
        limit=job["limit"],
        apply_chat_template=job["chat"],
        fewshot_as_multiturn=job["chat"],
    )
    print(f"{job}: {time.perf_counter() - start:.1f} s")
    return {
        "prefix_token_id": lm.prefix_token_id,
        "eot_token_id": lm.eot_token_id,
        "max_length": lm.max_length,
        "results": results["results"],
        "samples": {
            name: [{key: one[key] for key in ("arguments", "resps")} for one in samples]
            for name, samples in results["samples"].items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("tasks", "jobs", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    manager = TaskManager(include_path=given.tasks, include_defaults=False)
    found = [run(job, manager) for job in json.loads(given.jobs.read_text())]
    given.out.write_text(json.dumps(found, default=str))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
