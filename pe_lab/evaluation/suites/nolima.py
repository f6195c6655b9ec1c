"""NoLiMa (Modarressi et al. 2025, arXiv 2502.05167): needles that share no words with the question, in books.

The rules are those of adobe-research/NoLiMa: evaluation/run_tests.py, evaluation/async_evaluate.py and
data/book_haystack.py. Their licence allows research that is not commercial; nothing of theirs is here, the wording of
the prompt included, which is read from a person's own copy.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError, UserError
from pe_lab.evaluation.generation.tasks import Lazy, Sample, Scores, random_for
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric, option
from pe_lab.evaluation.suites.longbench import CHAT
from pe_lab.storage import read_json
from pe_lab.terminal import positive

TASKS = {"standard": "needle_set", "hard": "needle_set_hard", "direct": "needle_set_ONLYDirect"}
DEPTHS = 26  # from 0 to 100%
SYSTEM = "You are a helpful assistant"  # in a chat
ADVICE = (
    "Clone https://github.com/adobe-research/NoLiMa, run data/download_NoLiMa_data.sh in its folder data (or download "
    "https://huggingface.co/datasets/amodaresi/NoLiMa there), and give the clone: --nolima=DIR."
)


@dataclass(frozen=True)
class NeedleTest:
    """One needle and one question."""

    name: str
    needle: str  # {CHAR} is a name, which is drawn
    question: str
    template: str  # with {haystack} and {question}
    names: tuple[str, ...]
    answers: tuple[str, ...]  # where no name is drawn
    number: int  # which the draws depend on

    def drawn(self, seed: int) -> list[str]:
        """The name at each depth; none where the needle has none."""
        if "{CHAR}" not in self.needle:
            return [""] * DEPTHS
        rng = np.random.RandomState(seed)
        return [str(rng.choice(self.names)) for _ in range(DEPTHS)]


class Book:
    """A book in tokens, and the places between its lines.

    Args:
      text: of the book.
    """

    def __init__(self, name: str, text: str, tokenizer: Tokenizer):
        self._name, self._decode = name, tokenizer.decode
        self._tokens = tokenizer.encode_prompt(text, add_special_tokens=False)
        kinds = {token: "\n" in tokenizer.decode([token]) for token in np.unique(self._tokens).tolist()}
        self._places = np.asarray([0, *(i for i, token in enumerate(self._tokens.tolist()) if kinds[token])])

    def __len__(self) -> int:
        return len(self._tokens)

    def with_needle(self, needle: str, size: int, depth: float) -> str:
        """`size` tokens of the book, with the needle as a line of its own at a depth of 0 to 1.

        The needle replaces the end of the first line that ends at the depth or later, counted from the book's
        beginning; the excerpt begins so many tokens before it that this is the depth.

        Raises:
          ConfigError: the book is too short.
        """
        behind = self._places[self._places / (size + 1) >= depth]
        start = int(behind[0]) - round(size * depth) if len(behind) else -1
        if start < 0 or start + size > len(self._tokens):
            raise ConfigError(
                f"--lengths: {self._name} has {len(self):,} tokens, too few for {size:,} and a needle at {depth:.0%}."
            )
        at = int(behind[0]) + 1
        before = self._decode(self._tokens[start:at])
        before = before[: max(before.rfind("\n"), 0)]
        return f"{before} {needle}\n{self._decode(self._tokens[at : start + size])}"


class NoLiMaTask:
    """A needle set: each of its tests in each book, at 26 depths, in an order that the seed draws.

    `context` is the number of tokens of the book, as the original counts lengths; None: as many as the length leaves
    beside the rest of the prompt and the answer. `chat`: whether prompts are in the tokenizer's chat format.
    """

    suite = "nolima"
    metric = "contains"
    sized = True

    def __init__(self, name: str, folder: Path, max_new_tokens: int, context: int | None = None, chat: bool = False):
        self.name, self.chat = name, chat
        self._context, self._new = context, max_new_tokens
        path = folder / "needlesets" / f"{TASKS[name]}.json"
        self.tests = read_tests(path, folder)
        books = sorted((folder / "haystack" / "rand_shuffle").glob("*.txt"))
        if not books:
            raise DataError(f"{folder / 'haystack' / 'rand_shuffle'} has no books. {ADVICE}")
        self._texts = {}
        for book in books:
            try:
                self._texts[book.stem] = book.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{book} cannot be read ({error}). {ADVICE}") from error
        self._books: dict[tuple[str, str], Book] = {}
        contents = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in self._texts.values()]
        self.settings: Mapping[str, Any] = {
            "tests": hashlib.sha256(repr(self.tests).encode()).hexdigest()[:16],
            "books": contents,
            "context": context,
            "max_new_tokens": max_new_tokens,
            "chat": chat,
        }

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """The first `count` of all tests, books and depths in their drawn order.

        Raises:
          ConfigError: a book is too short for the length, or the length for a prompt.
        """
        asked = [(test, number) for number in range(len(self._texts)) for test in range(len(self.tests))]
        places = [(*one, depth) for one in asked for depth in range(DEPTHS)]
        random_for(self.suite, self.name, seed).shuffle(places)
        return Lazy(lambda index: self._sample(tokenizer, index, length, seed, *places[index]), min(count, len(places)))

    def score(self, sample: Sample, output: str) -> Scores:
        """1 if a right answer occurs in the output, in its capitals."""
        return {self.metric: float(any(reference in output for reference in sample.references))}

    def found(self, sample: Sample, output: str) -> list[bool]:
        """Whether the needle was found."""
        return [bool(self.score(sample, output)[self.metric])]

    def _sample(
        self, tokenizer: Tokenizer, index: int, length: int | None, seed: int, test_index: int, book: int, place: int
    ) -> Sample:
        assert length is not None
        test, name = self.tests[test_index], list(self._texts)[book]
        chosen = test.drawn(seed + test.number + book)[place]
        needle, question = (text.replace("{CHAR}", chosen) if chosen else text for text in (test.needle, test.question))
        answers = (chosen,) if chosen else test.answers
        depth, budget = place / (DEPTHS - 1), length - self._new

        def prompt(haystack: str) -> tuple[str, Int32[np.ndarray, " m"]]:
            return self._encode(tokenizer, test.template.format(haystack=haystack, question=question))

        size = self._context
        if size is None:
            size = budget - len(prompt(f" {needle}\n")[1])
        while True:
            if size < 1:
                raise ConfigError(
                    f"--lengths: {length:,} tokens do not hold a needle of nolima:{self.name} and its answer of "
                    f"{self._new}. Give a larger length, or fewer --max-new-tokens."
                )
            text, tokens = prompt(self._book(name, tokenizer).with_needle(needle, size, depth))
            if self._context is not None or len(tokens) <= budget:
                break
            size -= len(tokens) - budget
        if len(tokens) > budget:
            raise ConfigError(
                f"--nolima-context={size}: with the question and an answer of {self._new} tokens a prompt takes "
                f"{len(tokens) + self._new:,}; {length:,} are allowed. Give a larger --lengths."
            )
        metadata = {"test": test.name, "book": name, "context": size, "cluster": test.name}
        return Sample(index, text, tokens, answers, self._new, depth=(100 * depth,), metadata=metadata)

    def _book(self, name: str, tokenizer: Tokenizer) -> Book:
        key = (name, tokenizer.fingerprint)
        if key not in self._books:
            self._books[key] = Book(name, self._texts[name], tokenizer)
        return self._books[key]

    def _encode(self, tokenizer: Tokenizer, prompt: str) -> tuple[str, Int32[np.ndarray, " m"]]:
        if self.chat:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
            text = tokenizer.chat(messages)
            return text, tokenizer.encode_prompt(text, add_special_tokens=False)
        return prompt, tokenizer.encode_prompt(prompt)


def read_tests(path: Path, folder: Path) -> list[NeedleTest]:
    """The tests of a needle set: each question of a needle with each list of what the needle and question name.

    As in the original, {1}, {2} ... of a needle are all filled; of a question, the last one that it has.

    Raises:
      DataError: the file is missing or damaged, or nothing has the template of its prompts.
    """
    tests, entries = [], read_json(path, ADVICE, kind=list)
    try:
        for entry in entries:
            template = entry["task_template"] if "task_template" in entry else default_template(folder)
            template.format(haystack="", question="")  # raises for other fields
            for kind, question in entry["questions"].items():
                for test, of_test in entry["tests"].items():
                    needle, asked = entry["needle"], question
                    for number, named in enumerate(of_test["input_args"], 1):
                        needle = needle.replace(f"{{{number}}}", named)
                        asked = question.replace(f"{{{number}}}", named) if f"{{{number}}}" in question else asked
                    tests.append(
                        NeedleTest(
                            f"{entry['id']}_{test}_{kind}",
                            needle,
                            asked,
                            template,
                            tuple(entry.get("character_set") or ()),
                            tuple(of_test.get("gold_answers") or ()),
                            int(entry["id"][:4]),
                        )
                    )
                    if not (tests[-1].names if "{CHAR}" in needle else tests[-1].answers):
                        raise DataError(f"{path}: {tests[-1].name} has no right answer. {ADVICE}")
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is no needle set of NoLiMa ({error!r}). {ADVICE}") from error
    if not tests:
        raise DataError(f"{path} has no tests. {ADVICE}")
    return tests


def default_template(folder: Path) -> str:
    """The prompt of needle sets that have none of their own, from evaluation/run_tests.py beside the data."""
    path = folder.parent / "evaluation" / "run_tests.py"
    name = "DEFAULT_TASK_TEMPLATE"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise DataError(
            f"{path}, which has the wording of NoLiMa's prompt, cannot be read ({error}). {ADVICE}"
        ) from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return str(ast.literal_eval(node.value))
    raise DataError(f"{path} has no {name}. {ADVICE}")


@dataclass(frozen=True)
class NoLiMaSettings:
    nolima: str | None = option(None, "NoLiMa's clone, with its data", metavar="DIR")
    nolima_context: int | None = option(None, "tokens of the book (default: what a length leaves)", positive)
    samples: int | None = option(None, "a task and length (default: every test, book and depth)", positive)
    max_new_tokens: int = option(192, "of an answer (default: 192, many_shot 2048)", positive)
    chat: bool = option(False, CHAT)


class NoLiMa(PromptSuite):
    name = "nolima"
    title = "NoLiMa"
    about = "Needles that share no words with the question: they are found by what they imply."
    terms = {
        "NoLiMa": "Needles in books whose questions can only be answered by an association, such as a museum and its "
        "city (Modarressi et al., 2025).",
    }
    metrics = (SuiteMetric("score", "score", unit="%", interval="wilson"),)
    tasks = tuple(TASKS)
    settings = NoLiMaSettings

    def open(
        self, names: Sequence[str], settings: NoLiMaSettings, limits: Sequence[int | None] = (None,)
    ) -> list[NoLiMaTask]:
        """The needle sets `names`; none: the standard one."""
        if settings.nolima is None:
            raise ConfigError(f"--suite=nolima: its files are not here. {ADVICE}")
        folder = Path(settings.nolima)
        if not folder.is_dir():
            raise DataError(f"--nolima={folder}: there is no such directory. {ADVICE}")
        folder = folder / "data" if (folder / "data").is_dir() else folder
        return [
            NoLiMaTask(name, folder, settings.max_new_tokens, settings.nolima_context, settings.chat)
            for name in names or ("standard",)
        ]


SUITE = NoLiMa()
