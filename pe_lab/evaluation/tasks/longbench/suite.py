"""LongBench v1 (Bai et al. 2023, arXiv 2308.14508) and LongBench-E, from files in their own schema."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError, did_you_mean
from pe_lab.evaluation.scoring import metrics as scorers
from pe_lab.evaluation.tasks.longbench.table import GROUPS, RECORD_EDGES, TASKS, bucket_of, record_bucket_of
from pe_lab.evaluation.tasks.task import HALF_A_PAIR, Lazy, Sample, Scores

URL = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
BY_HAND = f"Download {URL}, unzip it, and give the directory with its data/*.jsonl: --longbench=DIR."
_TEXTS = ("input", "context", "dataset", "language", "_id")


def open_longbench(
    directory: Path, names: Sequence[str], max_length: int | None = None, chat: bool = False
) -> list[LongBenchTask]:
    """The tasks `names`, each once, from the unpacked data.zip.

    Args:
      directory: holds TASK.jsonl and TASK_e.jsonl (LongBench-E), or a directory `data` that does.
      names: tasks, `TASK_e`, or groups of them (`longbench_tasks.GROUPS`).
      max_length: tokens that prompt and answer may take together; None: as many as they are.
      chat: prompts in the tokenizer's chat format where the original has them so.

    Raises:
      UserError: an unknown name, no such files, a damaged line, or jieba is missing and a Chinese task asked for.
    """
    wanted: dict[str, None] = {}
    for name in names:
        wanted.update(dict.fromkeys(GROUPS.get(name, (name,))))
    known = [*TASKS, *GROUPS["e"]]
    for name in wanted:
        if name not in known:
            raise UserError(f"longbench:{name} is no task. {did_you_mean(name, [*known, *GROUPS])}")
    if not directory.is_dir():
        raise UserError(f"--longbench={directory}: there is no such directory. {BY_HAND}")
    files = {name: _find(directory, name) for name in wanted}
    missing = [f"{name}.jsonl" for name, path in files.items() if path is None]
    if missing:
        raise UserError(f"{directory} holds no {', '.join(missing)}, nor does a directory data in it. {BY_HAND}")
    return [LongBenchTask(name, path, max_length, chat) for name, path in files.items() if path is not None]


def _find(directory: Path, name: str) -> Path | None:
    paths = (directory / f"{name}.jsonl", directory / "data" / f"{name}.jsonl")
    return next((path for path in paths if path.is_file()), None)


class LongBenchTask:
    """One task, its records in the file's order, answered greedily.

    A prompt that is too long loses its middle, as in the original: of its tokens, special ones included, the first and
    the last int(budget / 2) are decoded without special tokens, joined, and tokenized again. The budget is what
    `max_length` or `length` leaves beside the answer. The original takes it from config/model2maxlen.json instead, one
    number for a model whatever the answer's length: 3,500 for 4K of context, 7,500, 15,500 and 31,500 for 8K, 16K and
    32K. With max_length = 3,500 + max_new_tokens prompts are those of 4K there.

    Two things are stricter than there. Where the joined text takes more tokens than the budget (the seam and cut
    characters may cost some), a few fewer are kept; and a chat's frame counts into the budget, while the original
    wraps what it has cut.

    One thing is looser: in samsum, which ends at a line end, the original does not let an answer begin with one.

    Args:
      name: a task, or `TASK_e` of LongBench-E.
      path: its file.
      max_length: see `open_longbench`.
      chat: see `open_longbench`.

    Attributes:
      edges_by_record_length: where the original's buckets of a record's `length` begin, in words; None for a task that
        it does not report in buckets, which those of LongBench-E alone are.

    Raises:
      UserError: see `open_longbench`.
    """

    suite = "longbench"
    sized = False

    def __init__(self, name: str, path: Path, max_length: int | None = None, chat: bool = False):
        self.name, self.path, self.max_length = name, path, max_length
        self.rules = TASKS[name.removesuffix("_e")]
        self.edges_by_record_length: tuple[int, ...] | None = RECORD_EDGES if name.endswith("_e") else None
        self.metric = self.rules.metric
        self.chat = chat and self.rules.chat
        if self.metric in ("qa_f1_zh", "rouge_l_zh"):
            scorers.jieba()  # better missed now than after the answers
        self._starts, fingerprint = self._read()
        self.settings: Mapping[str, Any] = {"data": fingerprint, "max_length": max_length, "chat": self.chat}

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """The first `count` records. `length`, where it is given, limits as `max_length` does; `seed` changes nothing.

        Facts of each: `_id`, `dataset`, `language` and, for classification, `all_classes` of its record;
        `record_length`, its `length` (words, or characters in Chinese), and of LongBench-E the `record_bucket` of
        that; `tokens_before_truncation` of the prompt without a chat's frame, and the `bucket` of that; `truncated`.

        Raises:
          UserError: what frames a prompt, two tokens of it and the answer do not fit; the file has changed.
        """
        limits = [limit for limit in (length, self.max_length) if limit is not None]
        budget = min(limits) - self.rules.max_new_tokens if limits else None
        least = len(self._as_read(tokenizer, "")[1]) + 2
        if budget is not None and budget < least:
            raise self._no_room(min(limits))
        return Lazy(lambda index: self._sample(tokenizer, index, budget), min(count, len(self._starts)))

    def score(self, sample: Sample, output: str) -> Scores:
        """The metric, best over the references. Code has a second number, `code_similarity_levenshtein`.

        Chance is about 0, but for these. One class drawn by lot is right 1 time in as many as there are: 2% in trec
        (50), 4% in lsht (24). A paragraph drawn by lot is right 1 time in 30 (passage_retrieval_en). Code is compared
        by characters: another line of the same file is 40% like the right one, and 44% by Levenshtein (2,840 pairs of
        lines, at most five apart, of Python's standard library).
        """
        text = scorers.first_line(output) if self.rules.first_line else output
        if self.metric == "classification":
            measured = {self.metric: partial(scorers.classification, classes=sample.facts["all_classes"])}
        else:
            also = ("code_similarity_levenshtein",) if self.metric == "code_similarity" else ()
            measured = {name: scorers.METRICS[name] for name in (self.metric, *also)}
        return {
            name: max((metric(text, reference) for reference in sample.references), default=0.0)
            for name, metric in measured.items()
        }

    def _sample(self, tokenizer: Tokenizer, index: int, budget: int | None) -> Sample:
        record = self._record(index)
        prompt = self.rules.prompt.format(context=record["context"], input=record["input"])
        text, tokens = self._as_read(tokenizer, prompt)
        whole = tokenizer.encode_prompt(prompt) if self.chat else tokens
        truncated = budget is not None and len(tokens) > budget
        if truncated:
            text, tokens = self._without_middle(tokenizer, whole, budget)
        facts = {name: record[name] for name in ("_id", "dataset", "language")} | {
            "record_length": record["length"],
            "tokens_before_truncation": len(whole),
            "bucket": bucket_of(len(whole)),
            "truncated": truncated,
        }
        if self.edges_by_record_length:
            facts["record_bucket"] = record_bucket_of(record["length"])
        if self.metric == "classification":
            facts["all_classes"] = record["all_classes"]
        rules = self.rules
        return Sample(index, text, tokens, tuple(record["answers"]), rules.max_new_tokens, rules.stop, facts=facts)

    def _as_read(self, tokenizer: Tokenizer, prompt: str) -> tuple[str, Int32[np.ndarray, " m"]]:
        """What the model is given."""
        if self.chat:
            text = tokenizer.chat([{"role": "user", "content": prompt}])
            return text, tokenizer.encode_prompt(text, add_special_tokens=False)
        return prompt, tokenizer.encode_prompt(prompt)

    def _without_middle(
        self, tokenizer: Tokenizer, whole: Int32[np.ndarray, " n"], budget: int
    ) -> tuple[str, Int32[np.ndarray, " m"]]:
        half = min(budget, len(whole) - 1) // 2  # where a chat's frame alone is too much, halves must not overlap
        while half > 0:
            joined = tokenizer.decode(whole[:half]) + tokenizer.decode(whole[-half:])
            text, tokens = self._as_read(tokenizer, joined)
            if len(tokens) <= budget:
                return text, tokens
            half -= (len(tokens) - budget + 1) // 2
        raise self._no_room(budget + self.rules.max_new_tokens)

    def _no_room(self, length: int) -> UserError:
        frame = " in its chat format" if self.chat else ""
        return UserError(
            f"longbench:{self.name}: {length:,} tokens have no room for a prompt{frame} and its answer of "
            f"{self.rules.max_new_tokens}. Allow more, or leave the limit out."
        )

    def _read(self) -> tuple[list[int], str]:
        """Where each record's line starts, in bytes, and a fingerprint of the file. Every record is looked at."""
        starts, at, digest = [], 0, hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._parse(line, f"line {number}")
                        starts.append(at)
                    at += len(line)
                    digest.update(line)
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror or error}. {BY_HAND}") from error
        if not starts:
            raise UserError(f"{self.path} is empty. {BY_HAND}")
        return starts, digest.hexdigest()[:16]

    def _record(self, index: int) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[index])
                return self._parse(file.readline(), f"record {index + 1}")
        except OSError as error:
            raise UserError(f"Cannot read {self.path}: {error.strerror or error}. {BY_HAND}") from error

    def _parse(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            record = json.loads(line.decode("utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are
            raise self._damaged(where, f"is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise self._damaged(where, "is not a record, {...}")
        for name in _TEXTS:
            if not isinstance(record.get(name), str):
                raise self._damaged(where, f"has no text {name!r}")
        if not isinstance(record.get("length"), int):
            raise self._damaged(where, "has no number 'length'")
        answers, classes = record.get("answers"), record.get("all_classes")
        if not _texts(answers):
            raise self._damaged(where, "has no list of texts 'answers'")
        if self.metric == "classification" and not (classes and _texts(classes)):
            raise self._damaged(where, "has no list of texts 'all_classes'")
        scored = {"answers": answers} | ({"all_classes": classes} if self.metric == "classification" else {})
        for name, texts in ({name: [record[name]] for name in _TEXTS} | scored).items():
            if any(HALF_A_PAIR.search(text) for text in texts):
                raise self._damaged(where, f"has half of a surrogate pair, which is no character, in {name!r}")
        mark = {"retrieval": "Paragraph ", "retrieval_zh": "段落"}.get(self.metric)
        if mark and not all(re.search(mark + r"\d", answer) for answer in answers):
            raise self._damaged(where, f"has an answer that names no {mark.strip()}: {answers}")
        return record

    def _damaged(self, where: str, what: str) -> UserError:
        return UserError(f"{self.path}, {where}: {what}; the schema is LongBench's. Unzip its data.zip again ({URL}).")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
