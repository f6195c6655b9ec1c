"""LongBench v1 and LongBench-E (Bai et al. 2023, arXiv 2308.14508), from the files of their data.zip."""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.scoring import metrics
from pe_lab.evaluation.tasks.longbench.table import GROUPS, RECORD_EDGES, TASKS, bucket_of, record_bucket_of
from pe_lab.evaluation.tasks.task import Lazy, Sample, Scores, Suite, half_pair, newline_ids
from pe_lab.storage import json_object

URL = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
ADVICE = f"Download {URL}, unzip it, and give the directory with its data/*.jsonl: --longbench=DIR."
_TEXTS = ("input", "context", "dataset", "language", "_id")


def open_longbench(
    directory: Path, names: Sequence[str], max_length: int | None = None, chat: bool = False
) -> list[LongBenchTask]:
    """The tasks `names`, each once, from the unpacked data.zip.

    Args:
      directory: has TASK.jsonl and TASK_e.jsonl (LongBench-E), or a directory `data` that has them.
      names: tasks, `TASK_e`, or names of `table.GROUPS`.
      max_length: the tokens that a prompt and its answer may take together; None: no limit.
      chat: whether prompts are in the tokenizer's chat format where the original's are.

    Raises:
      DataError: a file is missing or damaged.
      UnsupportedError: a Chinese task, and jieba is not installed.
    """
    wanted = dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,)))
    if not directory.is_dir():
        raise DataError(f"--longbench={directory}: there is no such directory. {ADVICE}")
    files = {name: _find(directory, name) for name in wanted}
    missing = [f"{name}.jsonl" for name, path in files.items() if path is None]
    if missing:
        raise DataError(f"{directory} has no {', '.join(missing)}, nor does a directory data in it. {ADVICE}")
    return [LongBenchTask(name, path, max_length, chat) for name, path in files.items() if path is not None]


def _find(directory: Path, name: str) -> Path | None:
    paths = (directory / f"{name}.jsonl", directory / "data" / f"{name}.jsonl")
    return next((path for path in paths if path.is_file()), None)


class LongBenchTask:
    """One task, its records in the file's order.

    A prompt beyond the budget loses its middle, as in the original: its first and its last int(budget / 2) tokens,
    special ones included, are decoded without special tokens, joined, and tokenized again. The budget is `max_length`
    without the answer's tokens. The original's budget, in config/model2maxlen.json, is one number for a
    model and any answer: 3,500 for a context of 4K, 7,500, 15,500 and 31,500 for 8K, 16K and 32K. With max_length =
    3,500 + max_new_tokens the prompts are the original's for 4K.

    Two rules are stricter than the original's. If the joined text has more tokens than the budget (where it was joined,
    or because a character was cut), fewer tokens are kept. A chat's frame counts as a part of the budget; the original
    adds it after truncation. One rule is looser: in samsum, whose answers end at the newline's token (and not at a
    newline within another token, such as that of two), the original does not let an answer begin with that token.

    `name` is a task, or `TASK_e` of LongBench-E; for the other arguments and the errors see `open_longbench`.

    Attributes:
      edges_by_record_length: the lower edges, in words, of the original's buckets of a record's `length`; None for a
        task that is not of LongBench-E.
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
            metrics.jieba()  # raises before anything is answered
        self._places = [place for place, _ in self._records()]
        if not self._places:
            raise DataError(f"{path} is empty. {ADVICE}")
        fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        self.settings: Mapping[str, Any] = {"data": fingerprint, "max_length": max_length, "chat": self.chat}

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """The first `count` records; `length` and `seed` have no effect.

        Their metadata: `_id`, `dataset`, `language` and, for classification, `all_classes` of the record;
        `record_length`, its `length` (words; characters in Chinese), and for LongBench-E its `record_bucket`;
        `tokens_before_truncation` of the prompt without a chat's frame, and its `bucket`; `truncated`.

        Raises:
          ConfigError: the template, two tokens of a record and the answer do not fit.
          DataError: the file has changed.
        """
        budget = None if self.max_length is None else self.max_length - self.rules.max_new_tokens
        if budget is not None and budget < len(self._encode(tokenizer, "")[1]) + 2:
            raise self._too_short()
        return Lazy(lambda index: self._sample(tokenizer, index, budget), min(count, len(self._places)))

    def score(self, sample: Sample, output: str) -> Scores:
        """The metric's best over the references; for code also `code_similarity_levenshtein`.

        Chance is about 0, with these exceptions. A random class is right 1 time in the number of classes: 2% in trec
        (50), 4% in lsht (24). A random paragraph is right 1 time in 30 (passage_retrieval_en). Another line of the same
        file of code scores 40%, and 44% by Levenshtein (2,840 pairs of lines, at most five apart, of Python's standard
        library).
        """
        text = metrics.first_line(output) if self.rules.first_line else output
        if self.metric == "classification":
            measured = {self.metric: partial(metrics.classification, classes=sample.metadata["all_classes"])}
        else:
            also = ("code_similarity_levenshtein",) if self.metric == "code_similarity" else ()
            measured = {name: metrics.METRICS[name] for name in (self.metric, *also)}
        return {
            name: max((metric(text, reference) for reference in sample.references), default=0.0)
            for name, metric in measured.items()
        }

    def _sample(self, tokenizer: Tokenizer, index: int, budget: int | None) -> Sample:
        found = next(self._records(*self._places[index]), None)
        if found is None:
            raise DataError(f"{self.path} has become shorter while it was read. {ADVICE}")
        _, record = found
        prompt = self.rules.prompt.format(context=record["context"], input=record["input"])
        text, tokens = self._encode(tokenizer, prompt)
        whole = tokenizer.encode_prompt(prompt) if self.chat else tokens
        truncated = budget is not None and len(tokens) > budget
        if truncated:
            text, tokens = self._without_middle(tokenizer, whole, budget)
        metadata = {name: record[name] for name in ("_id", "dataset", "language")} | {
            "record_length": record["length"],
            "tokens_before_truncation": len(whole),
            "bucket": bucket_of(len(whole)),
            "truncated": truncated,
        }
        if self.edges_by_record_length:
            metadata["record_bucket"] = record_bucket_of(record["length"])
        if self.metric == "classification":
            metadata["all_classes"] = record["all_classes"]
        rules = self.rules
        stop_ids = newline_ids(tokenizer) if rules.one_line else ()
        answers = tuple(record["answers"])
        return Sample(index, text, tokens, answers, rules.max_new_tokens, stop_ids=stop_ids, metadata=metadata)

    def _encode(self, tokenizer: Tokenizer, prompt: str) -> tuple[str, Int32[np.ndarray, " m"]]:
        """The prompt, in the chat format if there is one, and its tokens."""
        if self.chat:
            text = tokenizer.chat([{"role": "user", "content": prompt}])
            return text, tokenizer.encode_prompt(text, add_special_tokens=False)
        return prompt, tokenizer.encode_prompt(prompt)

    def _without_middle(
        self, tokenizer: Tokenizer, whole: Int32[np.ndarray, " n"], budget: int
    ) -> tuple[str, Int32[np.ndarray, " m"]]:
        half = min(budget, len(whole) - 1) // 2  # the halves must not overlap where only a chat's frame is too much
        while half > 0:
            joined = tokenizer.decode(whole[:half]) + tokenizer.decode(whole[-half:])
            text, tokens = self._encode(tokenizer, joined)
            if len(tokens) <= budget:
                return text, tokens
            half -= (len(tokens) - budget + 1) // 2
        raise self._too_short()

    def _too_short(self) -> ConfigError:
        frame = " in its chat format" if self.chat else ""
        return ConfigError(
            f"longbench:{self.name}: {self.max_length:,} tokens do not hold a prompt{frame} and its answer of "
            f"{self.rules.max_new_tokens}. Allow more, or leave the limit out."
        )

    def _records(self, at: int = 0, first: int = 1) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        """The records from line `first` on, at byte `at`; each with its byte and line, and checked."""
        try:
            with self.path.open("rb") as file:
                file.seek(at)
                for number, line in enumerate(file, first):
                    if line.strip():
                        record = json_object(line)
                        if wrong := "no JSON object" if record is None else self._wrong(record):
                            raise DataError(
                                f"{self.path}, line {number}, is no record of LongBench: {wrong}. Unzip its data.zip "
                                f"again ({URL})."
                            )
                        yield (at, number), record
                    at += len(line)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror or error}). {ADVICE}") from error

    def _wrong(self, record: dict[str, Any]) -> str:
        """Describes a defect of a record; "" if there is none."""
        for name in _TEXTS:
            if not isinstance(record.get(name), str):
                return f"no text {name!r}"
        if not isinstance(record.get("length"), int):
            return "no number 'length'"
        scored = {"answers": record.get("answers")}
        if self.metric == "classification":
            scored["all_classes"] = record.get("all_classes") or None
        for name, texts in scored.items():
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                return f"no list of texts {name!r}"
        for name, texts in ({name: [record[name]] for name in _TEXTS} | scored).items():
            if half := half_pair(texts):
                return f"{name!r} has {half}"
        mark = {"retrieval": "Paragraph ", "retrieval_zh": "段落"}.get(self.metric)
        if mark and not all(re.search(mark + r"\d", answer) for answer in record["answers"]):
            return f"an answer names no {mark.strip()}: {record['answers']}"
        return ""


def _open(names: Sequence[str], arguments: argparse.Namespace, limits: Sequence[int | None]) -> list[LongBenchTask]:
    if arguments.longbench is None:
        raise ConfigError(f"--suite=longbench: its files are not here. {ADVICE}")
    directory = Path(arguments.longbench)
    return [task for limit in limits for task in open_longbench(directory, names or ("all",), limit, arguments.chat)]


SUITE = Suite(
    name="longbench",
    title="LongBench",
    protocol=3,  # since 3 samsum ends at a token
    about="Questions, summaries and code about real documents, each as long as it is. Those that were too long for the "
    "model lost their middle; pointing at a figure tells how many.",
    terms={
        "LongBench": "A suite of 21 tasks on real texts of thousands of words, in English and Chinese (Bai et al., "
        "2023). Each task has its own metric.",
    },
    average_of=len(TASKS),
    tasks=(*TASKS, *GROUPS["e"], *GROUPS),
    flags={"--longbench": {"metavar": "DIR", "help": "LongBench's files, TASK.jsonl each"}},
    open=_open,
)
