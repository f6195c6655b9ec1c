"""lm-evaluation-harness' tasks as a suite: rows beside those of the others, a task at a time, none measured twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.evaluation import methods
from pe_lab.evaluation.intervals import Z95, wilson
from pe_lab.evaluation.lm_eval_rows import evaluate_lm_eval
from pe_lab.evaluation.readers import Reader
from pe_lab.evaluation.rows import Row, RowFile, finite
from pe_lab.evaluation.task_lists import TASK_LISTS, expand_tasks
from pe_lab.training.machine import versions

# Of a task's metrics, the one that papers report of it; its others are in the row too.
MAIN = ("acc_norm", "acc", "exact_match", "word_perplexity", "perplexity")


def run_harness(
    readers: Sequence[Reader],
    names: Sequence[str],
    directory: Path,
    max_length: int | None = None,
    include: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    again: bool = False,
    said: Callable[[str], None] = print,
) -> list[Row]:
    """Measures readers on tasks, one after another; each is written as it comes, to `lm_eval.jsonl`.

    Args:
      names: of tasks, and of `TASK_LISTS`; none is DroPE's six.
      max_length: tokens beyond which the harness cuts contexts from the left; None is the training length.
      include: a folder with YAML files of tasks.
      limit: documents of each task.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its dataset cannot be had.
    """
    file, rows = RowFile(directory / "lm_eval.jsonl"), []
    for reader in readers:
        length = max_length or reader.training_length
        settings = {
            "max_length": length,
            "limit": limit,
            "num_fewshot": num_fewshot,
            "chat": chat,
            "include": include and str(Path(include).resolve()),
            "reading": reader.fingerprint(length),
        }
        identity = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        mine = {"checkpoint_id": reader.subject.id, "settings": identity}
        for name in expand_tasks(names or [next(iter(TASK_LISTS))]):
            found = [row for row in file.rows if row.get("asked") == name and mine.items() <= row.items()]
            if found and not again:
                said(f"{name} was measured before for {reader.label} (--again: once more).")
                rows += found
                continue
            said(f"lm_eval:{name} for {reader.label}")
            lm = reader.at(length)
            measured = evaluate_lm_eval(
                lm, [name], include, limit, num_fewshot, apply_chat_template=chat, max_length=length
            )
            new = [finite(_row(reader, length, name, metrics) | mine) for metrics in _by_task(measured)]
            file.put(new)
            rows += new
            read, seconds = measured[0]["tokens"], measured[0]["seconds"]
            said(f"Read {read:,} tokens in {seconds:.1f} s, compiling included: {read / seconds:,.1f} tokens/s")
            if cut := sum(row["truncated"] for row in new):
                said(f"{cut} contexts of {name} were cut from the left to {length:,} tokens, as the harness has it.")
    return rows


def _by_task(measured: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The metrics of each task, the one that is reported first; those without a number are left out."""
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in measured:
        if isinstance(row["score"], float):
            tasks.setdefault(row["task"], []).append(row)
    rank = {name: place for place, name in enumerate(MAIN)}
    return [sorted(rows, key=lambda row: rank.get(row["metric"].split(",")[0], len(rank))) for rows in tasks.values()]


def _row(reader: Reader, length: int, asked: str, metrics: Sequence[Mapping[str, Any]]) -> Row:
    subject, main = reader.subject, metrics[0]
    score, stderr, count = main["score"], main["stderr"], main["samples"]
    higher = main["higher_is_better"] is not False
    if stderr:
        low, high = score - Z95 * stderr, score + Z95 * stderr
        if higher and 0 <= score <= 1:
            low, high = max(low, 0.0), min(high, 1.0)
    else:  # of equal answers, or of a metric without a formula
        low, high = wilson(score, count) if higher and count and 0 <= score <= 1 else (None, None)
    return {
        "suite": "lm_eval",
        "source": main["task"],
        "asked": asked,
        "run": subject.run,
        "phase": subject.checkpoint.metadata.get("phase", ""),
        "checkpoint": subject.path,
        "step": subject.checkpoint.step,
        "model": subject.model,
        "method": reader.method,
        "label": reader.label,
        "positional": methods.summary(reader.layers_at(length)),
        "length": None,
        "factor": None,
        "metric": main["metric"],
        "score": score,
        "stderr": stderr,
        "low": low,
        "high": high,
        "samples": count,
        "scores": {row["metric"]: row["score"] for row in metrics},
        "stderrs": {row["metric"]: row["stderr"] for row in metrics},
        "higher_is_better": higher,
        "num_fewshot": main["num_fewshot"],
        "max_length": length,
        "truncated": main["truncated"],
        "tokens": main["tokens"],
        "seconds": main["seconds"],
        "lineage": reader.lineage,
        "task_version": main["version"],
        "versions": versions() | {"lm_eval": main["harness"]},
    }
