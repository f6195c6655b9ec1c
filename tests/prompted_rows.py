"""Rows of suites that ask with prompts, made up: for tests of the report and of the terminal's tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

METHODS = {
    "RoPE": ("RoPE", "as trained"),
    "RoPE + NTK": ("RoPE", "NTK"),
    "RoPE + YaRN": ("RoPE", "YaRN"),
    "DroPE": ("DroPE", "as trained"),
    "DroPE, paper's β": ("DroPE", "paper beta"),
}
DEPTHS = (0.0, 50.0, 100.0)


def row(
    suite: str, task: str, label: str, score: float | None, length: int | None = None, n: int = 100, **more: Any
) -> dict[str, Any]:
    """One summary: `score` over `n` answers, each right or wrong. `more` goes over everything else."""
    model, method = METHODS.get(label, ("RoPE", label))
    stderr = None if score is None else math.sqrt(score * (1 - score) / n) if 0 <= score <= 1 else None
    phase = "recalibrate" if model == "DroPE" else "pretrain"
    return {
        "suite": suite,
        "source": task,
        "run": "demo",
        "phase": phase,
        "checkpoint": f"{phase}/checkpoints/800",
        "checkpoint_id": "c1",
        "step": 800,
        "model": model,
        "variant": method,
        "label": label,
        "length": length,
        "factor": None if length is None else length / 64,
        "seed": 42,
        "metric": "fraction_found",
        "score": score,
        "stderr": stderr,
        "low": None if stderr is None else max(0.0, score - 2 * stderr),
        "high": None if stderr is None else min(1.0, score + 2 * stderr),
        "samples": n,
        "scores": {"fraction_found": score},
        "truncated": 0,
        "higher_is_better": True,
    } | more


def by_depth(scores: Sequence[float | None], depths: Sequence[float] = DEPTHS, count: int = 8) -> dict[str, list]:
    """The same number of needles at each depth that has a score."""
    counts = [0 if score is None else count for score in scores]
    return {"depth": list(depths), "score": list(scores), "count": counts}


def write_rows(root: Path, suite: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """The rows of a suite, in place of those of a run directory."""
    folder = root / "evaluation"
    folder.mkdir(exist_ok=True)
    (folder / f"{suite}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def all_suites(root: Path) -> None:
    """A few rows of every suite, as a run's files."""
    lengths = (64, 128, 256)
    strength = {"RoPE": 0.1, "RoPE + NTK": 0.3, "RoPE + YaRN": 0.4, "DroPE": 0.6, "DroPE, paper's β": 0.8}

    def scores(label: str, length: int) -> float:
        return 0.9 if length == 64 else strength[label] * 128 / length

    def maps(label: str, length: int) -> dict[str, list]:
        middle = scores(label, length)
        return by_depth((min(1.0, middle + 0.1), middle, None if length == 256 else middle))

    for suite, tasks in (
        ("niah", ("standard", "multi_query")),
        ("ruler", ("niah_single_1", "vt", "cwe", "fwe", "qa_1")),
    ):
        write_rows(root, suite, (
            row(suite, task, label, scores(label, length), length, scores={
                "fraction_found": scores(label, length), "all_found": scores(label, length) ** 2
            }) | ({"by_depth": maps(label, length)} if suite == "niah" or "niah" in task else {})
            for task in tasks for label in strength for length in lengths
        ))  # fmt: skip
    lengths_of = {"edges": [0, 4096, 8192, 16384], "low": [0.1, 0.05, 0.0], "high": [0.5, 0.4, 0.3], "count": [9, 9, 9]}
    write_rows(root, "longbench", (
        row("longbench", task, label, strength[label] / 2, metric="qa_f1", truncated=3,
            by_length=lengths_of | {"score": [strength[label] / 2, strength[label] / 3, strength[label] / 4]})
        for task in ("musique", "lcc") for label in strength
    ))  # fmt: skip
    write_rows(root, "many_shot", (row("many_shot", "math", label, strength[label], 256) for label in strength))
    write_rows(root, "lm_eval", (
        row("lm_eval", task, label, score, metric=metric, higher_is_better=metric == "acc", low=None, high=None)
        for label in ("RoPE", "DroPE")
        for task, metric, score in (("arc_easy", "acc", 0.4), ("piqa", "acc", 0.6), ("wikitext", "word_perplexity", 22))
    ))  # fmt: skip
