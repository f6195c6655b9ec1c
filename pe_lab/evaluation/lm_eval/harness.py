"""Tasks of lm-evaluation-harness as a suite: a record a task and metric, a sample record a document."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_lab.evaluation.lm_eval.adapter import adapter
from pe_lab.evaluation.lm_eval.local_datasets import CUT_IN_THE_MIDDLE, LocalDatasets, split_length
from pe_lab.evaluation.lm_eval.requests import Journal, Used
from pe_lab.evaluation.lm_eval.task_lists import TASK_LISTS, expand_tasks, folder_digest, harness_version, open_tasks
from pe_lab.evaluation.progress import describe_speed
from pe_lab.evaluation.suite import Suite, read_settings
from pe_lab.evaluation.suites.lm_eval import SUITE, HarnessSettings
from pe_lab.evaluation.variants import Variant
from pe_lab.identity import versions
from pe_lab.parallel import on_first
from pe_lab.positional import label_layers
from pe_lab.results.records import Record, RecordFile, SampleFile, SampleRecord, announced, digest, finite, sample_key
from pe_lab.results.statistics import Z95, wilson
from pe_lab.storage import AnyPath
from pe_lab.terminal import console

if TYPE_CHECKING:
    from pe_lab.evaluation.session import EvaluationSession

BOOTSTRAPS = 1000  # for the standard errors of metrics that have no formula
# The metric that papers report of a task is the first of these; its others are in the record too.
MAIN = ("acc_norm", "acc", "exact_match", "word_perplexity", "perplexity")


class Harness:
    """The harness's tasks, for variants one after another.

    The records of a task are written as it ends, to `lm_eval.jsonl`, and a sample record for every document to
    `samples/lm_eval.jsonl`. The answers to its requests are kept a batch at a time in `samples/lm_eval_requests`: an
    interrupted task goes on where it was, and its records are the same in the end.

    Args:
      names: of tasks, and of `TASK_LISTS`; none: DroPE's six.
      max_length: tokens to which contexts are cut; None: the training length. It is never more than a variant's `crop`.
      again: whether tasks that were measured before are measured again.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its dataset cannot be opened.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        names: Sequence[str],
        directory: AnyPath,
        settings: HarnessSettings,
        max_length: int | None = None,
        again: bool = False,
    ):
        names = expand_tasks(names or [next(iter(TASK_LISTS))])
        include = settings.lm_eval_tasks
        shared = {
            "limit": settings.samples,
            "num_fewshot": settings.num_fewshot,
            "chat": settings.chat,
            "include": include and str(Path(include).resolve()),
            "contents": folder_digest(include, directory),
            "harness": harness_version(),
        }
        self._make_model = adapter()
        data = LocalDatasets(settings.lm_eval_data)
        self._manager, self._tasks, digests = open_tasks(names, include, data)
        self._directory, self._again = directory, again
        self._measurements = [
            HarnessMeasurement(
                variant, name, max_length, {**shared, "datasets": digests[name]}, directory, settings.truncation
            )
            for variant in variants
            for name in names
        ]

    def run(self) -> list[Record]:
        """The records of all tasks; those that do not exist yet are measured."""
        out, records = console(), []
        file = RecordFile(self._directory / f"{SUITE.name}.jsonl")
        samples = SampleFile(self._directory / "samples" / f"{SUITE.name}.jsonl")
        existing = [[] if self._again else one.found(file.records) for one in self._measurements]
        planned = [{"suite": SUITE.name, **one.variant.record(None), "source": one.name} for one in self._measurements]
        model, of = None, None
        with announced(self._directory, planned):
            for one, found in zip(self._measurements, existing, strict=True):
                if found:
                    out.print(f"{one.name} was measured before for {one.variant.label} (--again: once more).")
                    records += found
                    continue
                out.print(f"lm_eval:{one.name} for {one.variant.label}")
                if of is not one.variant:
                    model, of = None, one.variant  # frees its weights before others are placed
                    model = self._make_model(one.variant.at(one.length), max_length=one.length)
                model.truncation = one.truncation
                if self._again:
                    on_first(lambda path=one.requests: path.unlink(missing_ok=True))
                new = one.run(model, self._manager, self._tasks[one.name], samples)
                file.put(new)
                records += new
        return records


class HarnessMeasurement:
    """One variant on one name: a task, a group or a tag.

    Attributes:
      length: tokens that contexts are cut to.
      truncation: where they are cut: `left` or `middle`; by default as the benchmark does.
      suffix: the length after the names of BABILong's tasks, in records.
      requests: the file that keeps the answers.
    """

    def __init__(
        self,
        variant: Variant,
        name: str,
        max_length: int | None,
        shared: Mapping[str, Any],
        directory: AnyPath,
        truncation: str | None = None,
    ):
        self.variant, self.name, self.shared = variant, name, shared
        length = max_length or variant.training_length
        self.length = min(length, variant.crop or length)
        self.fingerprint = variant.fingerprint(self.length)
        self.truncation = truncation or ("middle" if name.startswith(CUT_IN_THE_MIDDLE) else "left")
        self.suffix = name.removeprefix(split_length(name)[0])
        settings = {**shared, "max_length": self.length, "fingerprint": self.fingerprint}
        settings["truncation"] = self.truncation
        self.mine = {"checkpoint_id": variant.subject.id, "settings": digest(settings, 16)}
        shown = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:80]
        self.requests = directory / "samples" / "lm_eval_requests" / f"{shown}-{digest([name, self.mine])}.jsonl"

    def found(self, records: Sequence[Record]) -> list[Record]:
        """Its records if all of them exist; another measurement may have replaced one."""
        subject = self.variant.subject
        who = {"run": subject.run, "checkpoint": subject.path, "variant": self.variant.name}
        wanted = {"asked": self.name, **who, **self.mine}
        mine = {record["source"]: record for record in records if wanted.items() <= record.items()}
        written = next(iter(mine.values())).get("asked_tasks", []) if mine else []
        return [mine[task] for task in written] if set(written) == set(mine) else []

    def run(self, model: Any, manager: Any, loaded: Sequence[Any], samples: SampleFile) -> list[Record]:
        """Measures it, and writes the sample records; its records."""
        shared, out = self.shared, console()
        fields = {"fingerprint": self.fingerprint, "suite": SUITE.name, "task": "", "length": None, "seed": None}
        identity = {**self.mine, **fields, "index": 0}
        model.journal = Journal(SampleFile(self.requests), identity | {"task": self.name})
        model.used.clear()
        measured, logged = measure(model, manager, loaded, shared["limit"], shared["num_fewshot"], shared["chat"])
        more = self.variant.sample_record(self.length) | {"protocol": f"{SUITE.name}-{shared['harness']}"}
        documents = [
            {**record, "task": record["task"] + self.suffix}
            for record in sample_records(logged, model.used, identity, more)
        ]
        samples.forget([sample_key(record) for record in documents])
        samples.add(documents)
        if kept := model.journal.found:
            out.print(f"{kept:,} requests of {self.name} were answered before.")
        if not measured:
            out.print(f"{self.name} gives no number; its answers are in {samples.path}.")
            return []
        out.print(describe_speed(measured[0]["tokens"], measured[0]["seconds"]))
        if cut := sum(record["truncated"] for record in measured):
            where = "in the middle" if self.truncation == "middle" else "from the left"
            out.print(f"{cut} contexts of {self.name} were cut {where} to {self.length:,} tokens.")
        shared_keys = {
            "suite": SUITE.name,
            "asked": self.name,
            **self.variant.record(None),
            "positional": label_layers(self.variant.layers_at(self.length)),
            "lineage": self.variant.subject.lineage,
            "versions": versions() | {"lm_eval": shared["harness"]},
            **self.mine,
            "asked_tasks": [record["source"] + self.suffix for record in measured],
        }
        return [finite(shared_keys | record | {"source": record["source"] + self.suffix}) for record in measured]


def open_harness(chosen: Mapping[Suite, Sequence[str]], session: EvaluationSession) -> Harness:
    """The harness's tasks, as a session asks for them; see `Suite.runner`."""
    settings, plan = read_settings(SUITE, session.plan.options), session.plan
    max_length = max(plan.lengths) if session.limits != (None,) else None
    return Harness(session.variants, chosen[SUITE], session.out, settings, max_length, plan.again)


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
    for known_as, score in found.items():
        metric, _, kind = known_as.partition(",")
        if kind and not metric.endswith("_stderr") and isinstance(score, int | float):
            name, stderr = metric if kind == "none" else known_as, found.get(f"{metric}_stderr,{kind}")
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
      identity: checkpoint_id, fingerprint, suite, length, seed, settings.
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
