"""LongBench v1 and LongBench-E (Bai et al. 2023, arXiv 2308.14508), from the files of their data.zip.

The 21 tasks as a table, with groups of tasks and buckets of lengths, are those of THUDM/LongBench:
config/dataset2prompt.json, config/dataset2maxlen.json, pred.py and eval.py.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.generation.tasks import Lazy, Sample, Scores, half_pair, newline_ids
from pe_lab.evaluation.scoring import metrics
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric, option
from pe_lab.storage import json_object
from pe_lab.terminal import positive


@dataclass(frozen=True)
class LongBenchRules:
    """The original's prompt and scoring of a task."""

    prompt: str  # with {context}, and {input} if the task has one; letter for letter, slips included ("asconcisely")
    max_new_tokens: int
    metric: str  # a name in `scoring.metrics`; the best of a record's answers counts
    first_line: bool = False  # whether only the first line of an answer is scored
    one_line: bool = False  # whether the newline's token ends an answer
    chat: bool = True  # whether a chat model reads it in its chat format; not where it continues examples or code


_BRIEFLY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
_QASPER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_MULTI_DOCUMENT = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:"
)

TASKS: dict[str, LongBenchRules] = {
    "narrativeqa": LongBenchRules(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_BRIEFLY}\n\nStory: {{context}}\n\nNow, answer the question based on the story {_BRIEFLY}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": LongBenchRules(
        f"You are given a scientific article and a question. Answer the question {_QASPER}\n\nArticle: {{context}}\n\n "
        f"Answer the question based on the above article {_QASPER}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": LongBenchRules(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "multifieldqa_zh": LongBenchRules(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        "qa_f1_zh",
    ),
    "hotpotqa": LongBenchRules(_MULTI_DOCUMENT, 32, "qa_f1"),
    "2wikimqa": LongBenchRules(_MULTI_DOCUMENT, 32, "qa_f1"),
    "musique": LongBenchRules(_MULTI_DOCUMENT, 32, "qa_f1"),
    "dureader": LongBenchRules(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_l_zh",
    ),
    "gov_report": LongBenchRules(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": LongBenchRules(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": LongBenchRules(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "vcsum": LongBenchRules(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_l_zh",
    ),
    "trec": LongBenchRules(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        first_line=True,
        chat=False,
    ),
    "triviaqa": LongBenchRules(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
        first_line=True,
        chat=False,
    ),
    "samsum": LongBenchRules(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge_l",
        first_line=True,
        one_line=True,
        chat=False,
    ),
    "lsht": LongBenchRules(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        "classification",
        first_line=True,
        chat=False,
    ),
    "passage_count": LongBenchRules(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": LongBenchRules(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "passage_retrieval_zh": LongBenchRules(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}"
        '\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval_zh",
    ),
    "lcc": LongBenchRules(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code_similarity", chat=False
    ),
    "repobench-p": LongBenchRules(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_similarity",
        chat=False,
    ),
}

# LongBench-E: thirteen of the tasks, sampled evenly over lengths.
_EVEN = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)

# Names for several tasks. The six between `drope` and `all` are the original's categories; `e` is LongBench-E.
GROUPS: dict[str, tuple[str, ...]] = {
    "drope": ("multifieldqa_en", "musique", "gov_report", "lcc"),  # DroPE, Table 2
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few_shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
    "all": tuple(TASKS),
    "e": tuple(f"{name}_e" for name in _EVEN),
}

# The buckets of DroPE's Tables 8 and 9, by the tokens of a prompt before truncation; K is 1,024.
EDGES, BUCKETS = (4096, 8192, 16384, 32768), ("0-4K", "4-8K", "8-16K", "16-32K", "32K+")
# The buckets of eval.py --e (`scorer_e`) for LongBench-E, by a record's `length` in words; k is 1,000.
RECORD_EDGES, RECORD_BUCKETS = (0, 4000, 8000), ("0-4k", "4-8k", "8k+")


def bucket_of(tokens: int) -> str:
    """The bucket of a prompt."""
    return BUCKETS[bisect.bisect(EDGES, tokens)]


def record_bucket_of(length: int) -> str:
    """The bucket of a record of LongBench-E."""
    return RECORD_BUCKETS[bisect.bisect(RECORD_EDGES[1:], length)]


URL = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
ADVICE = f"Download {URL}, unzip it, and give the directory with its data/*.jsonl: --longbench=DIR."
_TEXTS = ("input", "context", "dataset", "language", "_id")


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

    `name` is a task, or `TASK_e` of LongBench-E; `max_length` the tokens that a prompt and its answer may take together
    (None: no limit); `chat`: whether prompts are in the tokenizer's chat format where the original's are.

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


CHAT = "prompts as messages of a chat"


@dataclass(frozen=True)
class LongBenchSettings:
    longbench: str | None = option(None, "LongBench's files, TASK.jsonl each", metavar="DIR")
    samples: int | None = option(None, "a task (default: as many as its file has)", positive)
    chat: bool = option(False, CHAT)


class LongBench(PromptSuite):
    name = "longbench"
    title = "LongBench"
    protocol = 3  # since 3 samsum ends at a token
    about = (
        "Questions, summaries and code about real documents, each as long as it is. Those that were too long for the "
        "model lost their middle; pointing at a figure tells how many."
    )
    terms = {
        "LongBench": "A suite of 21 tasks on real texts of thousands of words, in English and Chinese (Bai et al., "
        "2023). Each task has its own metric.",
    }
    metrics = (SuiteMetric("score", "score", unit="%", interval="wilson"),)
    average_of = len(TASKS)
    tasks = (*TASKS, *GROUPS["e"], *GROUPS)
    settings = LongBenchSettings

    def open(
        self, names: Sequence[str], settings: LongBenchSettings, limits: Sequence[int | None] = (None,)
    ) -> list[LongBenchTask]:
        """The tasks `names` (tasks, `TASK_e`, or names of `GROUPS`), each once, or all.

        Raises:
          UnsupportedError: a Chinese task, and jieba is not installed.
        """
        if settings.longbench is None:
            raise ConfigError(f"--suite=longbench: its files are not here. {ADVICE}")
        directory = Path(settings.longbench)
        if not directory.is_dir():
            raise DataError(f"--longbench={directory}: there is no such directory. {ADVICE}")
        wanted = dict.fromkeys(task for name in names or ("all",) for task in GROUPS.get(name, (name,)))
        files = {name: _find(directory, name) for name in wanted}
        missing = [f"{name}.jsonl" for name, path in files.items() if path is None]
        if missing:
            raise DataError(f"{directory} has no {', '.join(missing)}, nor does a directory data in it. {ADVICE}")
        return [LongBenchTask(name, path, limit, settings.chat) for limit in limits for name, path in files.items()]


SUITE = LongBench()
