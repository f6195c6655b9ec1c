"""RULER's questions about documents: SQuAD's (`qa_1`) and HotpotQA's (`qa_2`), from the datasets' own files.

Template and rules are those of scripts/data/synthetic/qa.py of NVIDIA/RULER, with the differences that `synthetic`
lists.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.scoring.metrics import string_match_part
from pe_lab.evaluation.tasks.fitting import Draft
from pe_lab.evaluation.tasks.ruler.synthetic import RulerTask
from pe_lab.evaluation.tasks.task import Sample, Scores, half_pair, random_for
from pe_lab.storage import read_json

PROMPT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {question} Answer:"
)


@dataclass(frozen=True)
class Question:
    """A question, and the indices of its documents and of the other documents of the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """The questions of a file; its documents, sorted, each once; the beginning of its SHA-256."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]
    fingerprint: str


def question_prompt(documents: Iterable[str], question: str) -> str:
    """The prompt: documents, numbered from 1, and the question."""
    context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
    return PROMPT.format(context=context, question=question)


@dataclass(frozen=True)
class QuestionAnswering(RulerTask):
    """`qa_1`, `qa_2`: a question after its documents and others, in random order.

    Sample i is the i-th question of the file whose own documents fit the length; the seed draws the other documents.
    SQuAD's are first those of the same article. Where a length needs more documents than there are, they repeat.
    Questions with the same first document have the same `cluster` in their metadata, as several of SQuAD's questions
    are about one paragraph.
    """

    name: str
    data: Questions
    max_new_tokens: int = 32
    metric: ClassVar[str] = "string_match_part"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"questions": self.data.fingerprint}

    def score(self, sample: Sample, output: str) -> Scores:
        """1 if the answer contains any of the references, else 0."""
        return {self.metric: string_match_part(output, sample.references)}

    def choose(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> Sequence[int]:
        def least(index: int) -> int:
            """Tokens with the question's own documents alone."""
            question = self.data.questions[index]
            own = question_prompt([self.data.documents[i] for i in question.documents], question.text)
            return len(tokenizer.encode_prompt(own)) + self.max_new_tokens

        return self.first_fitting(length, count, range(len(self.data.questions)), least)

    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        rng = random_for(self.suite, self.name, seed, index)
        question, documents = self.data.questions[index], self.data.documents
        own = {*question.documents, *question.beside}
        others = [i for i in range(len(documents)) if i not in own]
        order = [*question.documents, *_shuffled(question.beside, rng), *_shuffled(others, rng)]
        state = rng.getrandbits(64)

        def render(size: int) -> str:
            chosen = order[:size] if size < len(documents) else [i % len(documents) for i in range(size)]
            return question_prompt([documents[i] for i in _shuffled(chosen, random.Random(state))], question.text)

        metadata = {"question": index, "cluster": question.documents[0]}
        return Draft(render, question.answers, "documents", len(question.documents), metadata=metadata)


def _shuffled(values: Sequence[int], rng: random.Random) -> list[int]:
    return rng.sample(values, len(values))


# ------------------------------------------------------------------------------------------------------------------
# The files


def _squad(data: Any) -> tuple[list[Question], list[str]]:
    """SQuAD 2.0: the questions that have an answer, and all paragraphs as documents."""
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
    """HotpotQA's distractor setting: ten documents for each question, each a title and its sentences."""
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
    address: str  # RULER's, in download_qa_dataset.sh
    kind: type  # of the JSON in the file
    read: Callable[[Any], tuple[list[Question], list[str]]]

    @property
    def advice(self) -> str:
        return f"Place {self.files[0]} from {self.address} in a directory"


SOURCES = {
    "qa_1": _Source(
        "SQuAD 2.0",
        ("dev-v2.0.json", "squad.json"),
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        dict,
        _squad,
    ),
    "qa_2": _Source(
        "HotpotQA",
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json (or, when that host is gone, from the "
        "hub's dataset namlh2004/hotpotqa, which lm-evaluation-harness uses)",
        list,
        _hotpot,
    ),
}


def qa_task(name: str, directory: Path | None) -> QuestionAnswering:
    """The task `qa_1` or `qa_2` of the dataset's file in `directory`.

    Raises:
      ConfigError: no directory is given, or it has no such file.
      DataError: the file is not in the dataset's schema.
    """
    source = SOURCES[name]
    found = [directory / file for file in source.files if (directory / file).is_file()] if directory else []
    if not found:
        where = f"{directory} has no {' and no '.join(source.files)}" if directory else "--qa is not given"
        raise ConfigError(
            f"ruler:{name} asks questions of {source.dataset}, and {where}. {source.advice} and give it as --qa=DIR, "
            "or name other tasks."
        )
    return QuestionAnswering(name, _load(name, found[0]))


@functools.cache
def _load(name: str, path: Path) -> Questions:
    source = SOURCES[name]
    data = read_json(path, f"{source.advice}.", kind=source.kind)
    try:
        questions, documents = source.read(data)
        asked = [text for question in questions for text in (question.text, *question.answers)]
        if not questions or not all(question.answers and question.documents for question in questions):
            raise ValueError("no questions, or one without answers or documents")
        if not all(isinstance(text, str) for text in (*asked, *documents)):
            raise ValueError("a question, an answer or a document is no text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"--qa: {path} is not in the schema of {source.dataset} ({what}). {source.advice}.") from None
    if wrong := half_pair((*asked, *documents)):
        raise DataError(f"--qa: {path} has {wrong}. {source.advice}.")
    return Questions(tuple(questions), tuple(documents), hashlib.sha256(path.read_bytes()).hexdigest()[:16])
