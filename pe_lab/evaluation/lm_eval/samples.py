"""The harness's documents as lines: a sample each, with the fields that the lines of prompted suites have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.evaluation.lm_eval.requests import Used
from pe_lab.results.records import finite
from pe_lab.results.samples import SampleRecord

# Of a task's metrics, the one that papers report of it; its others are in the row too.
MAIN = ("acc_norm", "acc", "exact_match", "word_perplexity", "perplexity")


def rank(metric: str) -> int:
    """What comes first of several metrics; one after a filter is called `metric,filter`."""
    name = metric.split(",")[0]
    return MAIN.index(name) if name in MAIN else len(MAIN)


def document_lines(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    used: Mapping[tuple[Any, Any], Used],
    identity: Mapping[str, Any],
    more: Mapping[str, Any],
) -> list[SampleRecord]:
    """A line a document, task after task, from what the harness logs: an entry a document and filter.

    `references` is the harness's target: an answer's text, or the number of the right choice. `output` is what the
    first filter made of the answers: a text, or (log-likelihood, whether it is the greedy one) of each choice; those
    of other filters are in `outputs`. A metric that is computed from all documents has what a document gives to it.

    Args:
      used: by task and document.
      identity: checkpoint_id, reading, suite, length, seed, settings.
      more: the other fields that are the same in all lines.
    """
    lines = []
    for task, entries in samples.items():
        documents: dict[Any, list[Mapping[str, Any]]] = {}
        for entry in entries:
            documents.setdefault(entry["doc_id"], []).append(entry)
        lines += [_line(task, entries, used, identity, more) for entries in documents.values()]
    return lines


def _line(
    task: str,
    entries: Sequence[Mapping[str, Any]],
    used: Mapping[tuple[Any, Any], Used],
    identity: Mapping[str, Any],
    more: Mapping[str, Any],
) -> SampleRecord:
    first = entries[0]
    spent = used.get((task, first["doc_id"]), Used())
    scores = {
        metric if entry["filter"] == "none" else f"{metric},{entry['filter']}": _plain(entry[metric])
        for entry in entries
        for metric in entry["metrics"]
    }
    main = scores[min(scores, key=rank)] if scores else None
    outputs = {entry["filter"]: _output(entry["filtered_resps"]) for entry in entries}
    target = first["target"]
    cut = spent.tokens < spent.tokens_before_truncation
    facts = {"document": first["doc_hash"][:16], "requests": len(first["arguments"])}
    line = {
        **identity,
        "task": task,
        "index": first["doc_id"],
        "prompt": first["prompt_hash"][:16],
        "tokens": spent.tokens,
        "depth": [],
        "references": _plain(target if isinstance(target, list | tuple) else [target]),
        "output": outputs[first["filter"]],
        "score": float(main) if isinstance(main, int | float) else None,
        "scores": scores,
        "facts": facts
        | ({"truncated": True, "tokens_before_truncation": spent.tokens_before_truncation} if cut else {}),
        **more,
        "seconds": spent.seconds,
    }
    return finite(line | ({"outputs": outputs} if len(outputs) > 1 else {}))


def _output(answers: Sequence[Any]) -> Any:
    """Of one request as it is, of several in a list."""
    found = [_plain(answer) for answer in answers]
    return found[0] if len(found) == 1 else found


def _plain(value: Any) -> Any:
    """What JSON has a name for; the text of anything else."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's
        return _plain(value.tolist())
    return str(value)
