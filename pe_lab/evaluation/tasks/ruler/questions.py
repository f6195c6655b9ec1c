"""RULER's questions of SQuAD and HotpotQA, whose documents lie among others: from the originals' files, placed by hand.

Template and rules are those of scripts/data/synthetic/qa.py of NVIDIA/RULER; what differs is said in `ruler_tasks`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.metrics import string_match_part
from pe_lab.evaluation.tasks.ruler.synthetic import Draft, RulerTask
from pe_lab.evaluation.tasks.task import HALF_A_PAIR, Lazy, Sample, Scores

PROMPT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {question} Answer:"
)


@dataclass(frozen=True)
class Question:
    """A question and its documents, as indices: those that it was asked of, and others of the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """A file of questions: its documents, each once, sorted; and its SHA-256, shortened."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]
    fingerprint: str


def question_prompt(documents: Iterable[str], question: str) -> str:
    """The question after its documents, which are numbered from 1."""
    context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
    return PROMPT.format(context=context, question=question)


@dataclass(frozen=True)
class QuestionAnswering(RulerTask):
    """`qa_1`, `qa_2`: a question, and its documents among others, in any order.

    Sample i is the i-th question of the file, of those whose own documents fit the length; the seed decides on the
    others around them. SQuAD's are first of the same article, as far as it goes. Where a length asks for more
    documents than there are, they are repeated. Questions with the same first document of their own have the same
    `cluster` in their facts: several of SQuAD's are asked of one paragraph.
    """

    name: str
    data: Questions
    max_new_tokens: int = 32
    metric: ClassVar[str] = "string_match_part"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"questions": self.data.fingerprint}

    def score(self, sample: Sample, output: str) -> Scores:
        """1 where the output has any of the references, else 0."""
        return {self.metric: string_match_part(output, sample.references)}

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Any]:
        """See `Task`. Prompts are as long as fit: one document more would not."""
        if length is None:
            raise ValueError(f"{self.name} needs a length")
        chosen = self._fitting(tokenizer, length, count)
        return Lazy(lambda index: self._sample(tokenizer, length, index, seed, chosen[index]), len(chosen))

    def _fitting(self, tokenizer: Tokenizer, length: int, count: int) -> list[int]:
        """The first questions that fit with their own documents alone."""
        budget, chosen, least = length - self.max_new_tokens, [], 0
        for index, question in enumerate(self.data.questions):
            if len(chosen) == count:
                break
            own = question_prompt([self.data.documents[i] for i in question.documents], question.text)
            tokens = len(tokenizer.encode_prompt(own))
            if tokens <= budget:
                chosen.append(index)
            least = min(least or tokens, tokens)
        if count and not chosen:
            raise UserError(
                f"--lengths: no question of ruler:{self.name} fits {length:,} tokens with its own documents and an "
                f"answer of {self.max_new_tokens}; the shortest take {least + self.max_new_tokens:,}."
            )
        return chosen

    def draft(self, tokenizer: Tokenizer, length: int, index: int, rng: random.Random) -> Draft:
        question, documents = self.data.questions[index], self.data.documents
        own = {*question.documents, *question.beside}
        others = [i for i in range(len(documents)) if i not in own]
        order = [*question.documents, *_shuffled(question.beside, rng), *_shuffled(others, rng)]
        state = rng.getrandbits(64)

        def render(size: int) -> str:
            chosen = order[:size] if size < len(documents) else [i % len(documents) for i in range(size)]
            return question_prompt([documents[i] for i in _shuffled(chosen, random.Random(state))], question.text)

        smallest = len(question.documents)
        facts = {"question": index, "cluster": question.documents[0]}
        return Draft(render, question.answers, "documents", smallest, facts=facts)


def _shuffled(values: Sequence[int], rng: random.Random) -> list[int]:
    return rng.sample(values, len(values))


# ------------------------------------------------------------------------------------------------------------------
# The files


def _squad(data: Any) -> tuple[list[Question], list[str]]:
    """SQuAD 2.0: the questions that have an answer; documents are paragraphs."""
    documents = sorted({paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"]})
    place = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in data["data"]:
        of_article = [place[paragraph["context"]] for paragraph in article["paragraphs"]]
        for own, paragraph in zip(of_article, article["paragraphs"], strict=True):
            beside = tuple(i for i in of_article if i != own)
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Question(asked["question"], answers, (own,), beside))
    return questions, documents


def _hotpot(data: Any) -> tuple[list[Question], list[str]]:
    """HotpotQA's distractor setting: ten documents a question, each a title and its sentences."""
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]] for asked in data]
    documents = sorted({text for of_question in texts for text in of_question})
    place = {document: i for i, document in enumerate(documents)}
    questions = [
        Question(asked["question"], (asked["answer"],), tuple(place[text] for text in own))
        for asked, own in zip(data, texts, strict=True)
    ]
    return questions, documents


@dataclass(frozen=True)
class _Source:
    dataset: str
    files: tuple[str, ...]  # the original's name, and RULER's
    address: str  # as in RULER's download_qa_dataset.sh
    read: Callable[[Any], tuple[list[Question], list[str]]]


SOURCES = {
    "qa_1": _Source(
        "SQuAD 2.0",
        ("dev-v2.0.json", "squad.json"),
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        _squad,
    ),
    "qa_2": _Source(
        "HotpotQA",
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json (when that host is gone: the file of "
        "this name in the hub's dataset namlh2004/hotpotqa, which lm-evaluation-harness takes)",
        _hotpot,
    ),
}


def qa_task(name: str, directory: Path | None) -> QuestionAnswering:
    """The task `qa_1` or `qa_2` from the file in `directory`.

    Raises:
      UserError: no directory, no file in it, or a file that is not in the dataset's schema.
    """
    source = SOURCES[name]
    found = [directory / file for file in source.files if (directory / file).is_file()] if directory else []
    if not found:
        where = f"{directory} has no {' and no '.join(source.files)}" if directory else "--qa is not given"
        raise UserError(
            f"ruler:{name} asks questions of {source.dataset}, and {where}. Place {source.files[0]} in a directory by "
            f"hand and give that as --qa=DIR, or name other tasks. It comes from {source.address}."
        )
    return QuestionAnswering(name, _load(name, found[0]))


@functools.cache
def _load(name: str, path: Path) -> Questions:
    source = SOURCES[name]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--qa: {path} cannot be read ({error.strerror}).") from None
    try:
        questions, documents = source.read(json.loads(content))
        if not questions or not all(question.answers for question in questions):
            raise ValueError("no questions, or one without answers")
        asked = [text for question in questions for text in (question.text, *question.answers)]
        if not all(isinstance(text, str) for text in (*asked, *documents)):
            raise TypeError("a question, an answer or a document is no text")
        if not all(question.documents for question in questions):
            raise ValueError("a question has no documents")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"--qa: {path} is not in the schema of {source.dataset} ({what}). Place {source.files[0]} there as it "
            f"comes from {source.address}."
        ) from None
    for text in (*asked, *documents):
        if half := HALF_A_PAIR.search(text):
            excerpt = ascii(text[max(half.start() - 30, 0) : half.end() + 30])
            raise UserError(
                f"--qa: {path} has half of a surrogate pair, which is no character, in {excerpt}. Remove it, or place "
                f"{source.files[0]} there as it comes from {source.address}."
            )
    return Questions(tuple(questions), tuple(documents), hashlib.sha256(content).hexdigest()[:16])
