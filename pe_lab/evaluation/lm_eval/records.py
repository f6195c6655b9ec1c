"""A model measured on tasks of lm-evaluation-harness: a row a task and metric."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.evaluation.lm_eval.adapter import adapter
from pe_lab.evaluation.lm_eval.task_lists import expand_tasks, open_tasks
from pe_lab.language_model import LanguageModel

Record = dict[str, Any]
BOOTSTRAPS = 1000  # for the standard errors of metrics that have no formula


def evaluate_lm_eval(
    lm: LanguageModel,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    seed: int | None = None,
    apply_chat_template: bool = False,
    measured: Callable[[list[Record]], None] = lambda rows: None,
    **settings: Any,
) -> list[Record]:
    """Measures a model on tasks of the harness, one after another; all are opened before the first is measured.

    Args:
      tasks: of the harness or of `include_path`, and names of `TASK_LISTS`.
      include_path: a folder with YAML files of tasks.
      limit: documents of each task, or below 1 a share of them; None is all.
      num_fewshot: examples before each question; None is what each task says.
      seed: of few-shot examples and draws; None is the harness's own.
      apply_chat_template: whether questions are put as a user's messages.
      measured: hears of the rows of each task as they come.
      settings: as `PeLabLM` takes them: batch_size, max_length, max_gen_toks ...

    Returns:
      A row a task and metric: its `score` and `stderr` (None where it has none), `samples`, the task's `version`,
      `num_fewshot`, `higher_is_better`, the release of the `harness`, `max_length`, how many contexts of the task were
      `truncated` to it, and the `tokens` and `seconds` that it took. A metric after a filter is called
      `metric,filter`. Groups have rows of their own.

    Raises:
      UserError: an unknown task, or one whose dataset cannot be had.
    """
    model = adapter()(lm, **settings, **({} if seed is None else {"seed": seed}))
    manager, opened = open_tasks(expand_tasks(tasks), include_path)
    rows: list[Record] = []
    for loaded in opened.values():
        found, _ = measure(model, manager, loaded, limit, num_fewshot, seed, apply_chat_template)
        measured(found)
        rows += found
    return rows


def measure(
    model: Any,
    manager: Any,
    loaded: Sequence[Any],
    limit: float | None = None,
    num_fewshot: int | None = None,
    seed: int | None = None,
    apply_chat_template: bool = False,
    log_samples: bool = False,
) -> tuple[list[Record], Mapping[str, Sequence[Any]]]:
    """What one name stands for, measured on a `PeLabLM`: its rows, and where asked for the documents of each task.

    Args:
      manager, loaded: as `open_tasks` gives them.
    """
    from lm_eval import simple_evaluate

    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    journal = model.journal
    before, tokens, kept, start = model.truncated, model.tokens, journal.seconds, time.perf_counter()
    with _in_one_process():
        results = simple_evaluate(
            model,
            tasks=loaded,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=log_samples,
            **({} if seed is None else dict.fromkeys(kinds, seed)),
        )
    # What was answered before took its time then.
    seconds = time.perf_counter() - start + journal.seconds - kept
    found = _rows(results, max_length=model.max_length, truncated=model.truncated - before)
    return [row | {"tokens": model.tokens - tokens, "seconds": seconds} for row in found], results.get("samples") or {}


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """The harness bootstraps in forked processes, and a process in which JAX runs must not be forked."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def _rows(results: Mapping[str, Any], **more: Any) -> list[Record]:
    rows = []
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, score in metrics.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{kind}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if kind == "none" else key,
                    "score": float(score) if isinstance(score, int | float) else score,
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "samples": metrics.get("sample_len"),
                    "version": results["versions"].get(task),
                    "num_fewshot": results["n-shot"].get(task),
                    "higher_is_better": results["higher_is_better"].get(task, {}).get(metric),
                    "harness": importlib.metadata.version("lm_eval"),
                    **more,
                }
            )
    return rows
