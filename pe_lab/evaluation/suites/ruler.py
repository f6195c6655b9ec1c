"""RULER (Hsieh et al. 2024, arXiv 2404.06654): its thirteen tasks, with the settings of its scripts/synthetic.yaml.

Templates, numbers and rules are those of scripts/data/synthetic of NVIDIA/RULER and its scripts/synthetic.yaml, with
the template `base`. Three things differ:
- Every sample draws from its own generator, and RULER's samples share one. Ours is the same at all lengths, so that
  names, words and documents are shared between lengths, which can be compared in pairs.
- Every sample is as long as fits. RULER chooses one size for all samples of a length: the largest of a first prompt,
  from which samples that are too long go down in coarse steps.
- Every sample is shuffled by its own generator. RULER shuffles all samples of a length by one permutation, so that the
  places of the answers hardly differ between them.
"""

from __future__ import annotations

import functools
import hashlib
import random
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pe_lab import storage
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.generation.tasks import (
    Draft,
    PromptTask,
    Sample,
    Scores,
    SizedTask,
    half_pair,
    random_for,
)
from pe_lab.evaluation.scoring.metrics import string_match_all, string_match_part
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric, option
from pe_lab.evaluation.suites import niah
from pe_lab.evaluation.suites.niah import (
    HAYSTACK,
    NOISE,
    SAMPLES,
    distinct,
    open_haystack,
    ruler_needle_task,
    word_list,
)
from pe_lab.storage import read_json
from pe_lab.terminal import positive

if TYPE_CHECKING:
    from pe_lab.evaluation.generation.prompted import PromptGroup
    from pe_lab.results.records import Record, SampleRecord

FULL_LENGTH = 4096  # below it, RULER repeats common words less often


class RulerTask(SizedTask):
    """A task of RULER whose answers contain words of the prompt."""

    suite = "ruler"
    metric = "string_match_all"

    def score(self, sample: Sample, output: str) -> Scores:
        """The share of the references that the answer contains."""
        return {self.metric: string_match_all(output, sample.references)}


# ------------------------------------------------------------------------------------------------------------------
# Variable tracking

TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
    "Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {value}, they are: "
)
EXAMPLE_TOKENS = 500  # of the solved example before the question, unless its smallest size has more


def assignments(names: Sequence[str], value: int) -> list[str]:
    """The lines that assign `value` to every name; as in RULER, all but the first end with a space."""
    return [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]


def tracking_prompt(lines: Sequence[str], value: int, count: int) -> str:
    """The prompt: assignments and noise, and the question."""
    return TRACKING.format(context="\n".join(lines), value=value, count=count)


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """`vt`: chains X1 = number, X2 = X1, ... in noise; the variables of the first chain are asked for."""

    chains: int = 1
    hops: int = 4  # assignments of a variable to a variable in each chain
    name: str = "vt"
    max_new_tokens: int = 30

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"chains": self.chains, "hops": self.hops}

    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        rng = random_for(self.suite, self.name, seed, index)
        solved, asked = self._text(3, rng), self._text(5, rng)
        size = solved.size_within(EXAMPLE_TOKENS, lambda text: len(tokenizer.encode_prompt(text)))
        # As in RULER, two spaces precede the answer.
        example = f"{solved.render(size or solved.smallest)} {' '.join(solved.references)}\n\n"
        return replace(asked, render=lambda size: example + asked.render(size))

    def _text(self, letters: int, rng: random.Random) -> Draft:
        """One question. Its size is the number of sentences of noise, at least the number of links of a chain."""
        links = self.hops + 1
        # All are different; in RULER a repeated name breaks a chain.
        names = distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), self.chains * links)
        chains = [names[start : start + links] for start in range(0, len(names), links)]
        values = rng.sample(range(10000, 99999), self.chains)
        state = rng.getrandbits(64)

        def render(size: int) -> str:
            places, lines = random.Random(state), [NOISE] * size
            for chain, value in zip(chains, values, strict=True):
                at = sorted(places.sample(range(len(lines)), links))
                for before, (place, line) in enumerate(zip(at, assignments(chain, value), strict=True)):
                    lines.insert(place + before, line)
            return tracking_prompt(lines, values[0], links)

        return Draft(render, tuple(chains[0]), "noises", links)


# ------------------------------------------------------------------------------------------------------------------
# Common words

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
COMMON_WORDS = 10


def numbered(words: Sequence[str]) -> str:
    """`1. word 2. word 3. word`."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def common_words_prompt(example: Sequence[str], answer: Sequence[str], words: Sequence[str]) -> str:
    """The prompt: a list with its common words, and another list whose common words are asked for."""
    return f"{COMMON.format(context=numbered(example))} {numbered(answer)}\n{COMMON.format(context=numbered(words))}"


@functools.cache
def all_words() -> tuple[str, ...]:
    """The nouns, adjectives and verbs of wonderwords, sorted, without repetitions."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind)}))


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """`cwe`: a shuffled list in which ten words are more frequent than the others.

    Below 4,096 tokens the common words occur 6 times and the others once, else 30 and 3 times.
    """

    more_words: tuple[str, ...] = ()  # replace wonderwords' at lengths that need more (RULER: english_words.json)
    name: str = "cwe"
    max_new_tokens: int = 120

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        return {"words": _fingerprint(all_words()), "more_words": _fingerprint(self.more_words)}

    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        state = random_for(self.suite, self.name, seed, index).getrandbits(64)
        draft = self._over(all_words(), length, random.Random(state))
        if not self.more_words:
            return draft
        for size in (len(all_words()) // 16, len(all_words())):  # a short prompt is rendered sooner
            if len(tokenizer.encode_prompt(draft.render(size))) >= length - self.max_new_tokens:
                return draft
        return self._over(self.more_words, length, random.Random(state))

    def _over(self, pool: Sequence[str], length: int, rng: random.Random) -> Draft:
        """A list of words from `pool`, after a solved example of wonderwords' words."""
        size, example_times, times = (40, (10, 3), (30, 3)) if length >= FULL_LENGTH else (20, (3, 1), (6, 1))
        # The same draws at all lengths give the same words; the draws that depend on the pool come last.
        solved, state = rng.sample(all_words(), 40)[:size], rng.getrandbits(64)
        example = _repeated(solved, *example_times, random.Random(rng.getrandbits(64)))
        order = rng.sample(pool, len(pool))

        def render(size: int) -> str:
            words = _repeated(order[:size], *times, random.Random(state))
            return common_words_prompt(example, solved[:COMMON_WORDS], words)

        return Draft(
            render,
            tuple(order[:COMMON_WORDS]),
            "words",
            COMMON_WORDS + 1,
            len(pool),
            f"All {len(pool):,} different words are in them. RULER uses its english_words.json at such lengths: give "
            "it with --words=FILE.",
        )


def _repeated(words: Sequence[str], common: int, uncommon: int, rng: random.Random) -> list[str]:
    listed = [*words[:COMMON_WORDS]] * common + [*words[COMMON_WORDS:]] * uncommon
    rng.shuffle(listed)
    return listed


def _fingerprint(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16] if words else ""


# ------------------------------------------------------------------------------------------------------------------
# Frequent words

FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)


def frequencies(size: int, vocabulary: int, alpha: float) -> list[int]:
    """The count of each rank's word among about `size` words: size * rank^-alpha / zeta(alpha), rounded down.

    As in RULER, these are the expected counts of the zeta distribution.
    """
    from scipy.special import zeta

    ranks = np.arange(1, vocabulary + 1)
    return (size * ranks**-alpha / zeta(alpha)).astype(int).tolist()


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """`fwe`: shuffled coded words with zeta-distributed frequencies; the most frequent, `...`, is noise."""

    alpha: float = 2.0  # the exponent of the zeta distribution
    letters: int = 6  # of a coded word
    name: str = "fwe"
    max_new_tokens: int = 50

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"alpha": self.alpha, "letters": self.letters}

    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        rng = random_for(self.suite, self.name, seed, index)
        count = max((length - self.max_new_tokens) // 50, 10)  # RULER's shortest have 500 tokens
        state = rng.getrandbits(64)  # before the words, whose number depends on the length
        words = distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=self.letters)), count)
        vocabulary = ["...", *words[1:]]

        def render(size: int) -> str:
            times = frequencies(size, count, self.alpha)
            text = [word for word, n in zip(vocabulary, times, strict=True) for _ in range(n)]
            random.Random(state).shuffle(text)
            return FREQUENT.format(context=" ".join(text))

        return Draft(render, tuple(vocabulary[1:4]), "words", _without_ties(self.alpha))


@functools.cache
def _without_ties(alpha: float) -> int:
    """The size from which on the fourth word is always rarer than the three before it."""
    return max(size for size in range(1, 1000) if len(set(frequencies(size, 5, alpha)[3:])) == 1) + 1


PROMPT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {question} Answer:"
)


@dataclass(frozen=True)
class RulerQuestion:
    """A question, and the indices of its documents and of the other documents of the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionFile:
    """The questions of a file; its documents, sorted, each once; the beginning of its SHA-256."""

    questions: tuple[RulerQuestion, ...]
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
    data: QuestionFile
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


def _squad(data: Any) -> tuple[list[RulerQuestion], list[str]]:
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
                    questions.append(RulerQuestion(asked["question"], answers, (own,), beside))
    return questions, documents


def _hotpot(data: Any) -> tuple[list[RulerQuestion], list[str]]:
    """HotpotQA's distractor setting: ten documents for each question, each a title and its sentences."""
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]] for asked in data]
    documents = sorted({text for of_question in texts for text in of_question})
    place = {document: i for i, document in enumerate(documents)}
    questions = [
        RulerQuestion(asked["question"], (asked["answer"],), tuple(place[text] for text in own))
        for asked, own in zip(data, texts, strict=True)
    ]
    return questions, documents


@dataclass(frozen=True)
class _QuestionSource:
    dataset: str
    files: tuple[str, ...]  # the original's name, and RULER's
    address: str  # RULER's, in download_qa_dataset.sh
    kind: type  # of the JSON in the file
    read: Callable[[Any], tuple[list[RulerQuestion], list[str]]]

    @property
    def advice(self) -> str:
        return f"Place {self.files[0]} from {self.address} in a directory"


SOURCES = {
    "qa_1": _QuestionSource(
        "SQuAD 2.0",
        ("dev-v2.0.json", "squad.json"),
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        dict,
        _squad,
    ),
    "qa_2": _QuestionSource(
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
def _load(name: str, path: Path) -> QuestionFile:
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
    return QuestionFile(tuple(questions), tuple(documents), hashlib.sha256(path.read_bytes()).hexdigest()[:16])


NEEDLES = tuple(niah.RULER)
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")  # in the order of RULER's tables
WORDS_ADVICE = (
    "--words takes RULER's english_words.json, an object of words, from scripts/data/synthetic/json of "
    "github.com/NVIDIA/RULER."
)


def _words(path: Path) -> tuple[str, ...]:
    """The words of RULER's english_words.json, whose keys are numbers."""
    entries = read_json(path, WORDS_ADVICE)
    if len(entries) < 100 or not all(isinstance(word, str) for word in entries.values()):
        raise DataError(f"--words={path} is no object of 100 words or more. {WORDS_ADVICE}")
    if wrong := half_pair(entries.values()):
        raise DataError(f"--words={path} has {wrong}. {WORDS_ADVICE}")
    return tuple(dict.fromkeys(entries.values()))


@dataclass(frozen=True)
class RulerSettings:
    samples: int | None = option(None, SAMPLES, positive)
    haystack: str = option("essays", HAYSTACK)
    qa: Path | None = option(None, "SQuAD's and HotpotQA's files, for the qa tasks", Path, "DIR")
    words: Path | None = option(None, "RULER's english_words.json, for cwe at very long lengths", Path, "FILE")
    predictions: str | None = option(None, "score RULER's prediction files instead of a model", metavar="DIR")
    ruler_files: Path | None = option(
        None, "also write answers as RULER's prediction files, for its own scorer", Path, "DIR"
    )


class Ruler(PromptSuite):
    name = "ruler"
    title = "RULER"
    protocol = 2
    about = (
        "Tasks made for long context: needles of many kinds, variables to trace, words to count, questions about "
        "documents, among others."
    )
    terms = niah.SUITE.terms | {
        "RULER": "A suite of 13 tasks made for long context at any length (Hsieh et al., 2024): eight kinds of "
        "needles, variable tracing, two of word counts, two of questions about documents.",
    }
    metrics = (SuiteMetric("score", "score", unit="%", interval="wilson"),)
    average_of = len(TASKS)
    tasks = TASKS
    samples = dict.fromkeys(TASKS, 500)  # RULER's
    settings = RulerSettings

    def open(
        self, names: Sequence[str], settings: RulerSettings, limits: Sequence[int | None] = (None,)
    ) -> list[PromptTask]:
        """The tasks `names`, or all thirteen."""
        if settings.haystack in ("noise", "needles"):
            raise ConfigError(
                f"--haystack={settings.haystack}: each of RULER's tasks has its own haystack. Give text files, which "
                "replace the essays, or leave --haystack out."
            )
        essays = None if settings.haystack == "essays" else open_haystack(settings.haystack)
        made: list[PromptTask] = []
        for name in names or TASKS:
            if name in NEEDLES:
                made.append(ruler_needle_task(name, essays))
            elif name == "vt":
                made.append(VariableTracking())
            elif name == "cwe":
                made.append(CommonWords(_words(settings.words) if settings.words else ()))
            elif name == "fwe":
                made.append(FrequentWords())
            else:
                made.append(qa_task(name, settings.qa))
        return made

    def from_files(self, settings: RulerSettings) -> list[Record] | None:
        """The scores of RULER's prediction files."""
        if settings.predictions is None:
            return None
        from pe_lab.evaluation.suites.ruler_files import score_predictions

        return score_predictions(storage.local_copy(storage.path("--predictions", settings.predictions)), TASKS)

    def finish(
        self,
        settings: RulerSettings,
        answered: Sequence[tuple[PromptGroup, Sequence[Sample], list[SampleRecord]]],
        run: str,
    ) -> None:
        """Writes the answers as RULER's prediction files, where it is asked for."""
        if settings.ruler_files is not None:
            from pe_lab.evaluation.suites.ruler_files import write_answers
            from pe_lab.parallel import on_first

            on_first(functools.partial(write_answers, settings.ruler_files, run, answered))


SUITE = Ruler()
