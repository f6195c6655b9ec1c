"""HELMET's recall, RAG and in-context learning (Yen et al. 2025, arXiv 2410.02694), from its files.

Tasks, files, prompts, draws and scores are those of princeton-nlp/HELMET: configs/*.yaml, data.py, utils.py and
`tokenize` of model_utils.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError, UserError
from pe_lab.evaluation.generation.tasks import Lazy, Sample, Scores, half_pair
from pe_lab.evaluation.scoring import metrics
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric, option
from pe_lab.evaluation.suites.longbench import CHAT
from pe_lab.storage import json_object
from pe_lab.terminal import positive

LENGTHS = (8192, 16384, 32768, 65536, 131072)
URL = "https://huggingface.co/datasets/princeton-nlp/HELMET/resolve/main/data.tar.gz"
ADVICE = f"Download {URL}, unpack it, and give the directory with its data: --helmet=DIR."
SHOTS = 2  # of recall and RAG


class Example(NamedTuple):
    """What a prompt is made of."""

    fields: Mapping[str, str]  # of the template; `context` is what may be cut
    answers: tuple[str, ...]
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class HelmetRules:
    """The original's prompt and scoring of a task."""

    message: str  # a user's message, letter for letter
    prefix: str  # the beginning of the answer, on a line of its own; in a chat the model writes it
    metric: str  # `recall`, or a name in `scoring.metrics`
    max_new_tokens: int
    parsed: str = "Answer:"  # what precedes an answer within an output
    one_line: bool = False  # whether a line end ends an answer


# --------------------------------------------------------------------------------------------------------------------
# Tasks


class HelmetTask:
    """A task: at each of HELMET's lengths it has a file, or a number of examples, of its own.

    A prompt beyond the length without its answer loses the end of its context (documents, or solved examples), as in
    the original, whose prompt may then still be some tokens too long where tokens were joined: here more is cut.

    Args:
      directory: of HELMET's files.
      chat: whether prompts are in the tokenizer's chat format.
      count: how many samples are asked for, on which the choice of each may depend.
    """

    suite = "helmet"
    sized = True
    rules: HelmetRules
    drawn_together = False  # whether sample i depends on how many there are

    def __init__(self, name: str, directory: Path, chat: bool = False, count: int | None = None):
        self.name, self.directory, self.chat = name, directory, chat
        self.metric = self.rules.metric
        there = [path for path in self.files() if path.is_file()]
        if not there:
            raise DataError(f"{directory} has no {self.missing()}. {self.advice()}")
        contents = [[str(path.relative_to(directory)), _fingerprint(path)] for path in there]
        drawn = {"samples": count} if self.drawn_together else {}
        self.settings: Mapping[str, Any] = {"data": contents, "chat": chat, **drawn}

    def files(self) -> list[Path]:
        """The files of all lengths, which may or may not be there."""
        raise NotImplementedError

    def missing(self) -> str:
        """The name of its first file, for a message."""
        return str(self.files()[0].relative_to(self.directory))

    def advice(self) -> str:
        return ADVICE

    def examples(self, length: int, count: int, seed: int) -> tuple[int, Callable[[int], Example]]:
        """How many examples there are at a length, and what makes each."""
        raise NotImplementedError

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """The samples of `count` records (of RAG: of `count` questions, each at several depths), drawn by the seed.

        Raises:
          ConfigError: a length that HELMET does not have.
          DataError: files are missing or damaged.
        """
        if length not in LENGTHS:
            known = ", ".join(f"{one // 1024}k" for one in LENGTHS)
            raise ConfigError(
                f"helmet:{self.name} has the lengths {known}; {length:,} is asked for. Give --lengths=8k."
            )
        with self._damaged(f"a file for {length:,} tokens"):
            number, make = self.examples(length, count, seed)
        if not number:
            raise DataError(f"helmet:{self.name} has no record in {self.directory} for {length:,} tokens. {ADVICE}")

        def sample(index: int) -> Sample:
            with self._damaged(f"the record of sample {index} for {length:,} tokens"):
                example = make(index)
                if not example.answers:
                    raise ValueError("no answer")
            return self._sample(tokenizer, index, length, example)

        return Lazy(sample, number)

    @contextlib.contextmanager
    def _damaged(self, what: str) -> Iterator[None]:
        """Raises a `DataError` for what a record lacks."""
        try:
            yield
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(
                f"helmet:{self.name}: {what} in {self.directory} is damaged ({error!r}). {ADVICE}"
            ) from error

    def score(self, sample: Sample, output: str) -> Scores:
        """The metric of the answer; without a chat format the output is read behind the beginning of the answer."""
        text = output if self.chat else sample.metadata["answer_prefix"] + output
        if self.metric == "recall":
            found = [reference.lower() in text.lower() for reference in sample.references]
            return {"recall": sum(found) / len(found)}
        texts = [parsed_answer(text, self.rules.parsed)]
        if self.metric == "substring_match":
            texts.append(text)
        metric = metrics.METRICS[self.metric]
        return {self.metric: max(metric(text, reference) for text in texts for reference in sample.references)}

    def _sample(self, tokenizer: Tokenizer, index: int, length: int, example: Example) -> Sample:
        rules, budget = self.rules, length - self.rules.max_new_tokens
        fields = dict(example.fields)
        text, tokens = self._encode(tokenizer, fields)
        whole = len(tokens)
        while (excess := len(tokens) - budget) > 0:
            offsets = tokenizer.encode_with_offsets(fields["context"])[1]
            if excess > len(offsets):
                raise ConfigError(
                    f"helmet:{self.name}: {length:,} tokens do not hold prompt {index} without its context."
                )
            fields["context"] = fields["context"][: int(offsets[-excess][0])]
            text, tokens = self._encode(tokenizer, fields)
        metadata = {
            **example.metadata,
            "answer_prefix": rules.prefix.format(**fields),
            "tokens_before_truncation": whole,
            "truncated": whole > budget,
        }
        stop = ("\n",) if rules.one_line else ()
        return Sample(index, text, tokens, example.answers, rules.max_new_tokens, stop=stop, metadata=metadata)

    def _encode(self, tokenizer: Tokenizer, fields: Mapping[str, str]) -> tuple[str, Int32[np.ndarray, " m"]]:
        """The prompt and its tokens."""
        message = self.rules.message.format(**fields)
        if self.chat:
            text = tokenizer.chat([{"role": "user", "content": message}])
            return text, tokenizer.encode_prompt(text, add_special_tokens=False)
        text = f"{message}\n{self.rules.prefix.format(**fields)}"
        return text, tokenizer.encode_prompt(text)


class HelmetNiah(HelmetTask):
    """RULER's needles, in files that RULER's scripts made, with the prompts of HELMET."""

    def __init__(self, name: str, directory: Path, chat: bool = False, count: int | None = None):
        self._folder, new_tokens, several = NIAH[name]
        some, is_ = ("Some", "are") if several else ("A", "is")
        what = "are all the" if several else "is the"
        self.rules = HelmetRules(
            f"{some} special magic {{type_needle_v}} {is_} hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
            f"What {what} special magic {{type_needle_v}} for {{query}} mentioned in the provided text?",
            f"The special magic {{type_needle_v}} for {{query}} mentioned in the provided text {is_}",
            "recall",
            new_tokens,
        )
        super().__init__(name, directory, chat, count)

    def files(self) -> list[Path]:
        return [self.directory / "ruler" / self._folder / f"validation_{length}.jsonl" for length in LENGTHS]

    def examples(self, length: int, count: int, seed: int) -> tuple[int, Callable[[int], Example]]:
        names = ("type_needle_v", "query", "context")
        lines = Lines(self.files()[LENGTHS.index(length)], names)
        chosen = shuffled(len(lines), seed)[:count]

        def make(index: int) -> Example:
            record = lines[chosen[index]]
            answers = _texts(record.get("answer", record.get("outputs")))
            return Example({name: record[name] for name in names}, answers, {})

        return len(chosen), make


class HelmetJsonKv(HelmetTask):
    """The value of a key in a JSON object of random keys and values (Liu et al., 2024)."""

    rules = HelmetRules(
        "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n"
        "{demos}Key: {question}",
        "Corresponding value:",
        "substring_match",
        100,
        "corresponding value:",
    )
    _pairs = (105, 220, 440, 900, 1800)

    def files(self) -> list[Path]:
        return [self.directory / "json_kv" / f"test_k{pairs}_dep6.jsonl" for pairs in self._pairs]

    def examples(self, length: int, count: int, seed: int) -> tuple[int, Callable[[int], Example]]:
        lines = Lines(self.files()[LENGTHS.index(length)], ("context", "question"))
        chosen = shuffled(len(lines), seed)[:count]

        def make(index: int) -> Example:
            record = lines[chosen[index]]
            shown = [f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in record["demos"][:SHOTS]]
            fields = {"context": record["context"], "question": record["question"], "demos": "".join(shown)}
            return Example(fields, _texts(record["answer"]), _depth(record))

        return len(chosen), make


class HelmetRag(HelmetTask):
    """Questions with retrieved passages of Wikipedia, among which a right one is at each of several depths."""

    rules = HelmetRules(
        "Use the given documents to write a concise and short answer to the question. Write your answer in the "
        "following format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}",
        "Answer:",
        "substring_match",
        20,
        one_line=True,
    )
    drawn_together = True
    _passages = (50, 105, 220, 440, 1000)

    def __init__(self, name: str, directory: Path, chat: bool = False, count: int | None = None):
        self._test, self._demos, self._popularity = RAG[name]
        super().__init__(name, directory, chat, count)

    def files(self) -> list[Path]:
        names = [self._test.format(passages) for passages in self._passages]
        return [self.directory / "kilt" / f"{name}.jsonl" for name in (*names, self._demos)]

    def examples(self, length: int, count: int, seed: int) -> tuple[int, Callable[[int], Example]]:
        *tests, demo_file = self.files()
        path = tests[LENGTHS.index(length)]
        lines, demos = Lines(path, ("question",), ("id", "question", "s_pop")), Lines(demo_file, ("question",))
        rows = [row for row in range(len(lines)) if self._asked(lines.known[row])]
        key = "id" if rows and "id" in lines.known[rows[0]] else "question"
        keys = sorted({lines.known[row][key] for row in rows})
        drawn = set(random.Random(seed).sample(keys, min(count, len(keys))))
        chosen = [row for row in rows if lines.known[row][key] in drawn]
        solved = [record for record in map(demos.__getitem__, range(len(demos))) if self._asked(record)]

        def make(index: int) -> Example:
            record = lines[chosen[index]]
            shown = self._examples_for(record, key, solved)
            texts = [
                f"{_passages(one)}\n\nQuestion: {one['question']}\nAnswer: {one['answers'][0]}\n\n" for one in shown
            ]
            fields = {"context": _passages(record), "question": record["question"], "demos": "".join(texts)}
            return Example(fields, _texts(record["answers"]), {"cluster": str(record[key]), **_depth(record)})

        return len(chosen), make

    def _asked(self, record: Mapping[str, Any]) -> bool:
        """Whether its subject is rare enough."""
        return self._popularity is None or math.log10(record["s_pop"]) < self._popularity

    def _examples_for(self, record: Mapping[str, Any], key: str, solved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Two solved questions, drawn by the question."""
        if self._popularity is not None:  # both are of one split
            solved = [one for one in solved if one[key] != record[key]]
        seed = int(hashlib.sha256(str(record[key]).encode()).hexdigest(), 16) % 2**31
        found: dict[Any, dict[str, Any]] = {}
        for row in shuffled(len(solved), seed):
            found.setdefault(solved[row][key], solved[row])
            if len(found) == SHOTS:
                return list(found.values())
        raise DataError(f"{self.files()[-1]} has fewer than {SHOTS} other questions. {ADVICE}")


class HelmetIcl(HelmetTask):
    """Classification of texts from many solved examples, with numbers for labels, which differ from text to text."""

    rules = HelmetRules(
        "Use the provided mapping from the text to label to assign a label to the text. Only output "
        '"label: {{label}}" and nothing else. \n\n{context}\n\n{question}',
        "label:",
        "exact_match",
        20,
        "label:",
        one_line=True,
    )

    drawn_together = True

    def __init__(self, name: str, directory: Path, chat: bool = False, count: int | None = None):
        self._about = ICL[name]
        super().__init__(name, directory, chat, count)

    def files(self) -> list[Path]:
        folder = self.directory / self._about.dataset
        return [
            path
            for split in dict.fromkeys(("train", self._about.test))
            for path in _split_files(folder, self._about, split)
        ]

    def missing(self) -> str:
        return f"{self._about.dataset} with parquet files of its splits"

    def advice(self) -> str:
        name, revision = self._about.dataset, self._about.revision
        return f"Download it: hf download {name} --repo-type=dataset{revision} --local-dir={self.directory / name}"

    def examples(self, length: int, count: int, seed: int) -> tuple[int, Callable[[int], Example]]:
        about, shots = self._about, self._about.shots[LENGTHS.index(length)]
        train, test = self._read("train"), self._read(about.test) if about.test != "train" else []
        if about.test == "train":
            order = shuffled(len(train), seed)
            held_out = math.ceil(0.1 * len(train))
            train, test = [train[i] for i in order[held_out:]], [train[i] for i in order[:held_out]]
        if len(test) > count:
            test = balanced([test[i] for i in shuffled(len(test), seed)], count, random.Random(seed))

        def make(index: int) -> Example:
            text, label = test[index]
            own = (int(hashlib.sha256(text.encode()).hexdigest(), 16) + seed) % 2**31
            numbers = list(range(about.labels))
            random.Random(own).shuffle(numbers)
            shown = balanced(train, shots, random.Random(own))
            context = "\n\n".join(f"{text}\nlabel: {numbers[label]}" for text, label in shown)
            return Example({"context": context, "question": text}, (str(numbers[label]),), {})

        return len(test), make

    def _read(self, split: str) -> list[tuple[str, int]]:
        """The texts of a split with their labels' numbers."""
        import pyarrow.parquet

        about, found = self._about, []
        for path in _split_files(self.directory / about.dataset, about, split):
            try:
                columns = pyarrow.parquet.read_table(path, columns=["text", about.label]).to_pydict()
            except (OSError, pyarrow.ArrowException) as error:
                raise DataError(f"{path} cannot be read: {error}. {self.advice()}") from error
            if len(columns) < 2:
                raise DataError(f"{path} has no columns text and {about.label}. {self.advice()}")
            found += zip(columns["text"], columns[about.label], strict=True)
        if not all(isinstance(text, str) and 0 <= label < about.labels for text, label in found):
            raise DataError(
                f"{self.directory / about.dataset}: a text of {split} has no label of {about.labels}. {self.advice()}"
            )
        if not found:
            raise DataError(f"{self.directory / about.dataset} has no texts of {split}. {self.advice()}")
        return found


NIAH = {  # folder, new tokens, whether several values are asked for
    "niah_mk_2": ("niah_multikey_2", 50, False),
    "niah_mk_3": ("niah_multikey_3", 100, False),
    "niah_mv": ("niah_multivalue", 50, True),
}
RAG = {  # file by its number of passages, file of solved questions, popularity of the subjects below 10 to its power
    "nq": ("nq-dev-multikilt_1000_k{}_dep6", "nq-train-multikilt_1000_k3_dep6", None),
    "triviaqa": ("triviaqa-dev-multikilt_1000_k{}_dep6", "triviaqa-train-multikilt_1000_k3_dep6", None),
    "hotpotqa": ("hotpotqa-dev-multikilt_1000_k{}_dep3", "hotpotqa-train-multikilt_1000_k3_dep3", None),
    "popqa": ("popqa_test_1000_k{}_dep6", "popqa_test_1000_k3_dep6", 3),
}


@dataclass(frozen=True)
class IclDataset:
    """A dataset of the hub, and the number of solved examples at each length."""

    dataset: str
    label: str  # the column of labels
    labels: int
    shots: tuple[int, ...]
    test: str = "test"  # "train": a tenth of the training split
    configuration: str = "default"
    revision: str = " --revision=refs/convert/parquet"  # where its parquet files are


ICL = {
    "trec_coarse": IclDataset("CogComp/trec", "coarse_label", 6, (400, 800, 1600, 3300, 6600)),
    "trec_fine": IclDataset("CogComp/trec", "fine_label", 50, (400, 800, 1600, 3200, 6400)),
    "banking77": IclDataset("PolyAI/banking77", "label", 77, (360, 720, 1450, 2900, 5900)),
    "clinic150": IclDataset(
        "clinc/clinc_oos", "intent", 151, (440, 880, 1750, 3525, 7050), "validation", "plus", revision=""
    ),
    "nlu": IclDataset(
        "xingkunliuxtracta/nlu_evaluation_data", "label", 68, (510, 1020, 2040, 4080, 8296), test="train"
    ),
}
GROUPS: dict[str, tuple[str, ...]] = {"recall": (*NIAH, "json_kv"), "rag": tuple(RAG), "icl": tuple(ICL)}
TASKS: dict[str, type[HelmetTask]] = {
    **dict.fromkeys(NIAH, HelmetNiah),
    "json_kv": HelmetJsonKv,
    **dict.fromkeys(RAG, HelmetRag),
    **dict.fromkeys(ICL, HelmetIcl),
}

# --------------------------------------------------------------------------------------------------------------------
# Files and draws


class Lines(Sequence[dict[str, Any]]):
    """The records of a file of JSON lines, which may have gigabytes: each is read when it is indexed.

    Args:
      texts: keys that every record needs, with texts.
      keys: of each record, what `known` keeps.

    Raises:
      DataError: the file is missing, or a line is no such record.
    """

    def __init__(self, path: Path, texts: Sequence[str], keys: Sequence[str] = ()):
        self._path, self._texts = path, texts
        self._at: list[int] = []
        self.known: list[dict[str, Any]] = []
        try:
            with path.open("rb") as file:
                at = 0
                for line in file:
                    if line.strip():
                        self._at.append(at)
                        if keys:
                            record = self._checked(line, len(self._at))
                            self.known.append({key: record[key] for key in keys if key in record})
                    at += len(line)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror or error}). {ADVICE}") from error

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: Any) -> Any:
        with self._path.open("rb") as file:
            file.seek(self._at[index])
            return self._checked(file.readline(), index + 1)

    def _checked(self, line: bytes, number: int) -> dict[str, Any]:
        record = json_object(line)
        if record is None or not all(isinstance(record.get(name), str) for name in self._texts):
            raise DataError(f"{self._path}, record {number}, has no texts {', '.join(self._texts)}. {ADVICE}")
        if half := half_pair([record[name] for name in self._texts]):
            raise DataError(f"{self._path}, record {number}, has {half}. {ADVICE}")
        return record


def shuffled(number: int, seed: int) -> list[int]:
    """The order of Hugging Face's `Dataset.shuffle(seed)`."""
    return np.random.default_rng(seed).permutation(number).tolist()


def balanced(labelled: Sequence[tuple[str, int]], count: int, rng: random.Random) -> list[tuple[str, int]]:
    """`count` examples in rounds of one of each label, whose order in a round is drawn.

    The examples of a label are drawn without replacement, and all of them again where they are too few.
    """
    by_label: dict[int, list[tuple[str, int]]] = {}
    for one in labelled:
        by_label.setdefault(one[1], []).append(one)
    rounds: list[list[tuple[str, int]]] = [[] for _ in range(math.ceil(count / len(by_label)))]
    for examples in by_label.values():
        places = range(len(examples))
        drawn = rng.sample(places, len(rounds) % len(examples))
        while len(drawn) < len(rounds):
            drawn += rng.sample(places, min(len(rounds) - len(drawn), len(examples)))
        for one, place in zip(rounds, drawn, strict=True):
            one.append(examples[place])
    for one in rounds:
        rng.shuffle(one)
    return [example for one in rounds for example in one][:count]


def parsed_answer(text: str, prefix: str) -> str:
    """The rest of the first line with the prefix, in any capitals; without one the first line."""
    found = re.search(re.escape(prefix) + "(.*)", text, re.IGNORECASE)
    line = (found[1] if found else text.partition("\n")[0]).strip()
    return line[len(prefix) :].strip() if line.lower().startswith(prefix.lower()) else line


def _passages(record: Mapping[str, Any]) -> str:
    return "\n\n".join(f"Document (Title: {one['title']}): {one['text']}" for one in record["ctxs"])


def _texts(answers: Any) -> tuple[str, ...]:
    """Right answers, which are a text, a list of texts, or a list of lists."""
    listed = [answers] if isinstance(answers, str) else answers or []
    return tuple(text for one in listed for text in ([one] if isinstance(one, str) else one))


def _depth(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"place": record["depth"]} if "depth" in record else {}


def _split_files(folder: Path, about: IclDataset, split: str) -> list[Path]:
    """The parquet files of a split: CONFIGURATION/SPLIT/*.parquet, or SPLIT-*.parquet in a folder."""
    found = sorted(folder.rglob("*.parquet"))
    mine = [path for path in found if path.parent.name == split or path.name.startswith(f"{split}-")]
    of_configuration = [path for path in mine if about.configuration in path.relative_to(folder).parts]
    return of_configuration or (mine if about.configuration == "default" else [])


def _fingerprint(path: Path) -> str:
    """A digest of a file's size, beginning and end: some have gigabytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begins = file.read(65536)
        file.seek(max(size - 65536, 0))
        return hashlib.sha256(b"%d:" % size + begins + file.read()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------------------
# The suite


@dataclass(frozen=True)
class HelmetSettings:
    helmet: str | None = option(None, "HELMET's files, its data.tar.gz unpacked", metavar="DIR")
    samples: int | None = option(None, "a task and length; of RAG: questions (default: 100, icl 500)", positive)
    chat: bool = option(False, CHAT)


class Helmet(PromptSuite):
    name = "helmet"
    title = "HELMET"
    about = "Needles, questions about retrieved passages, and classification from many examples, at HELMET's lengths."
    terms = {
        "HELMET": "A suite of long-context tasks by category (Yen et al., 2025). Here: recall, retrieval-augmented "
        "generation (rag) and in-context learning (icl).",
    }
    metrics = (SuiteMetric("score", "score", unit="%", interval="wilson"),)
    average_of = 0  # a category's score is the mean of its tasks
    samples = {name: 500 if name in ICL else 100 for name in TASKS}
    tasks = (*TASKS, *GROUPS)
    settings = HelmetSettings

    def open(
        self, names: Sequence[str], settings: HelmetSettings, limits: Sequence[int | None] = (None,)
    ) -> list[HelmetTask]:
        """The tasks `names` (tasks, or names of `GROUPS`), each once, or all."""
        if settings.helmet is None:
            raise ConfigError(f"--suite=helmet: its files are not here. {ADVICE}")
        directory = Path(settings.helmet)
        if not directory.is_dir():
            raise DataError(f"--helmet={directory}: there is no such directory. {ADVICE}")
        directory = directory / "data" if (directory / "data").is_dir() else directory
        wanted = dict.fromkeys(task for name in names or GROUPS for task in GROUPS.get(name, (name,)))
        counts = {name: settings.samples or self.samples[name] for name in wanted}
        return [TASKS[name](name, directory, settings.chat, count) for name, count in counts.items()]


SUITE = Helmet()
