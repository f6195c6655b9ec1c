"""Measures a model on tasks of lm-evaluation-harness: a record a task and metric, a sample record a document."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pe_lab.evaluation.lm_eval.requests import Used
from pe_lab.results.records import Record, SampleRecord, finite
from pe_lab.results.statistics import Z95, wilson

BOOTSTRAPS = 1000  # for the standard errors of metrics that have no formula
# The metric that papers report of a task is the first of these; its others are in the record too.
MAIN = ("acc_norm", "acc", "exact_match", "word_perplexity", "perplexity")


def measure(
    model: Any,
    manager: Any,
    loaded: Sequence[Any],
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
) -> tuple[list[Record], Mapping[str, Sequence[Any]]]:
    """Measures a `PeLabLM` on tasks as `open_tasks` returns them; for the rest see `Harness`.

    Returns:
      A record a task or group that gives a number, with the `score` and `stderr` (None where it has none) of its main
      `metric`, and the `scores` and `stderrs` of all: one after a filter is called `metric,filter`. `truncated` counts
      the contexts that were cut. And by task what the harness logs of each document.
    """
    from lm_eval import simple_evaluate

    journal = model.journal
    before, tokens, kept, start = model.truncated, model.tokens, journal.seconds, time.perf_counter()
    with _in_one_process():
        results = simple_evaluate(
            model,
            tasks=loaded,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            bootstrap_iters=BOOTSTRAPS,
        )
    more = {
        "max_length": model.max_length,
        "truncated": model.truncated - before,
        "tokens": model.tokens - tokens,
        "seconds": time.perf_counter() - start + journal.seconds - kept,  # with those of answers by an earlier process
    }
    found = {**results["results"], **results.get("groups", {})}
    records = [_record(task, metrics, results) for task, metrics in found.items()]
    return [record | more for record in records if record], results["samples"]


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


def _record(task: str, found: Mapping[str, Any], results: Mapping[str, Any]) -> Record:
    """The record of a task; empty where it gives no number."""
    scores, stderrs = {}, {}
    for key, score in found.items():
        metric, _, kind = key.partition(",")
        if kind and not metric.endswith("_stderr") and isinstance(score, int | float):
            name, stderr = metric if kind == "none" else key, found.get(f"{metric}_stderr,{kind}")
            scores[name] = float(score)
            stderrs[name] = float(stderr) if isinstance(stderr, int | float) else None
    if not scores:
        return {}
    names = sorted(scores, key=rank)
    score, stderr, count = scores[names[0]], stderrs[names[0]], found.get("sample_len")
    higher = results["higher_is_better"].get(task, {}).get(names[0].split(",")[0]) is not False
    if stderr:
        low, high = score - Z95 * stderr, score + Z95 * stderr
        if higher and 0 <= score <= 1:
            low, high = max(low, 0.0), min(high, 1.0)
    else:  # equal answers, or a metric without a formula for its error
        low, high = wilson(score, count) if higher and count and 0 <= score <= 1 else (None, None)
    return {
        "source": task,
        "metric": names[0],
        "score": score,
        "stderr": stderr,
        "low": low,
        "high": high,
        "samples": count,
        "scores": {name: scores[name] for name in names},
        "stderrs": {name: stderrs[name] for name in names},
        "higher_is_better": higher,
        "num_fewshot": results["n-shot"].get(task),
        "task_version": results["versions"].get(task),
    }


def rank(metric: str) -> int:
    """The order of metrics, the main one first; a metric after a filter is called `metric,filter`."""
    name = metric.split(",")[0]
    return MAIN.index(name) if name in MAIN else len(MAIN)


def sample_records(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    used: Mapping[tuple[Any, Any], Used],
    identity: Mapping[str, Any],
    more: Mapping[str, Any],
) -> list[SampleRecord]:
    """A sample record a document, task after task, from the harness's log, which has an entry a document and filter.

    `references` has the harness's target: the text of the answer, or the number of the right choice. `output` is the
    output of the first filter: a text, or (log-likelihood, whether it is the greedy one) of each choice; `outputs` has
    those of all filters. `scores` has, for a metric over all documents, the document's part of it.

    Args:
      used: by (task, document).
      identity: checkpoint_id, reading, suite, length, seed, settings.
      more: the other keys that are the same in all records.
    """
    found = []
    for task, entries in samples.items():
        documents: dict[Any, list[Mapping[str, Any]]] = {}
        for entry in entries:
            documents.setdefault(entry["doc_id"], []).append(entry)
        for index, of_document in documents.items():
            record = _document(of_document, used.get((task, index), Used()))
            found.append(finite({**identity, "task": task, "index": index, **record, **more}))
    return found


def _document(entries: Sequence[Mapping[str, Any]], used: Used) -> SampleRecord:
    first = entries[0]
    scores = {
        metric if entry["filter"] == "none" else f"{metric},{entry['filter']}": _to_json(entry[metric])
        for entry in entries
        for metric in entry["metrics"]
    }
    main = scores[min(scores, key=rank)] if scores else None
    outputs = {entry["filter"]: _output(entry["filtered_resps"]) for entry in entries}
    target = first["target"]
    metadata = {"document": first["doc_hash"][:16], "requests": len(first["arguments"])}
    if used.tokens < used.tokens_before_truncation:
        metadata |= {"truncated": True, "tokens_before_truncation": used.tokens_before_truncation}
    record = {
        "prompt": first["prompt_hash"][:16],
        "tokens": used.tokens,
        "depth": [],
        "references": _to_json(target if isinstance(target, list | tuple) else [target]),
        "output": outputs[first["filter"]],
        "score": float(main) if isinstance(main, int | float) else None,
        "scores": scores,
        "metadata": metadata,
        "seconds": used.seconds,
    }
    return record | ({"outputs": outputs} if len(outputs) > 1 else {})


def _output(answers: Sequence[Any]) -> Any:
    """The answer of a single request, or the list of several."""
    found = [_to_json(answer) for answer in answers]
    return found[0] if len(found) == 1 else found


def _to_json(value: Any) -> Any:
    """The value as JSON holds it: arrays as lists, the text of anything else that JSON has no form for."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return _to_json(value.tolist()) if hasattr(value, "tolist") else str(value)
