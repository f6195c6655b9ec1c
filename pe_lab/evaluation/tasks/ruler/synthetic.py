"""RULER's tasks with a text of their own: variable tracking, common words, frequent words.

Templates, numbers and rules are those of scripts/data/synthetic of NVIDIA/RULER and its scripts/synthetic.yaml, with
the template `base`. What differs: every sample draws from a generator of its own (RULER continues one through all of
them), which is the same at all lengths, so that lengths have names, words and documents in common as far as they hold
them (and can be compared in pairs); is as long as fits (RULER finds a size once, in coarse steps); and is shuffled by
that generator (RULER shuffles all samples of a length by one permutation, so that the answers' places hardly differ
between them).
"""

from __future__ import annotations

import functools
import hashlib
import random
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.metrics import string_match_all
from pe_lab.evaluation.tasks.haystacks import NOISE
from pe_lab.evaluation.tasks.task import Lazy, Sample, Scores, largest_fitting, random_for
from pe_lab.evaluation.tasks.words import word_list

FULL_LENGTH = 4096  # below it, RULER repeats common words less often


@dataclass(frozen=True)
class Draft:
    """A sample whose size is not decided yet.

    Attributes:
      render: the prompt of a size; about proportional to it.
      references: the right answers, whatever the size.
      unit: what the size counts.
      smallest, largest: sizes there are; no largest where it is None.
      exhausted: what to do where the largest is far too short for a length.
      facts: as in `Sample`.
    """

    render: Callable[[int], str]
    references: tuple[str, ...]
    unit: str
    smallest: int
    largest: int | None = None
    exhausted: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class RulerTask(ABC):
    """A task of RULER: a draft for each index, made as large as the length allows."""

    suite: ClassVar[str] = "ruler"
    metric: ClassVar[str] = "string_match_all"
    sized: ClassVar[bool] = True
    name: str
    max_new_tokens: int

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """See `Task`."""

    @abstractmethod
    def draft(self, tokenizer: Tokenizer, length: int, index: int, rng: random.Random) -> Draft:
        """Everything about a sample but its size; what is random in it comes from `rng`, which is the same at all
        lengths."""

    def score(self, sample: Sample, output: str) -> Scores:
        """The share of the references that the output has."""
        return {self.metric: string_match_all(output, sample.references)}

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Any]:
        """See `Task`. Prompts are as long as fit: one unit more would not."""
        if length is None:
            raise ValueError(f"{self.name} needs a length")
        self._check_room(tokenizer, length, count, seed)
        return Lazy(lambda index: self._sample(tokenizer, length, index, seed, index), count)

    def _sample(self, tokenizer: Tokenizer, length: int, index: int, seed: int, drafted: int) -> Sample:
        """Sample `index`, made of draft `drafted`."""
        draft = self._draft(tokenizer, length, drafted, seed)
        size, least = size_within(draft, tokenizer, length - self.max_new_tokens)
        if size is None:
            raise UserError(
                f"--lengths: sample {index} of {self.suite}:{self.name} and its answer of {self.max_new_tokens} tokens "
                f"do not fit {length:,} tokens; the shortest take {least + self.max_new_tokens:,}."
            )
        text = draft.render(size)
        tokens = tokenizer.encode_prompt(text)
        facts = {draft.unit: size} | draft.facts
        return Sample(index, text, tokens, draft.references, self.max_new_tokens, facts=facts)

    def _draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        return self.draft(tokenizer, length, index, random_for(self.suite, self.name, seed, index))

    def _check_room(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> None:
        """`UserError` where a sample has no room, for which all are looked at where the length is anywhere near too
        short; or where prompts do not become so long, which the first one tells."""

        def least(draft: Draft) -> int:
            return len(tokenizer.encode_prompt(draft.render(draft.smallest))) + self.max_new_tokens

        first = self._draft(tokenizer, length, 0, seed)
        longest = least(first)
        if length < 2 * longest:
            others = (self._draft(tokenizer, length, index, seed) for index in range(1, count))
            longest = max([longest, *map(least, others)])
        if longest > length:
            raise UserError(
                f"--lengths: {length:,} tokens do not hold all {count:,} samples of {self.suite}:{self.name} with "
                f"answers of {self.max_new_tokens}; the shortest take {longest:,}."
            )
        enough = 0.9 * (length - self.max_new_tokens)
        if first.largest is not None and (most := tokens_of_largest(first, tokenizer, enough)) < enough:
            raise UserError(
                f"--lengths: prompts of {self.suite}:{self.name} have at most {most:,} tokens; {length:,} are asked "
                f"for. {first.exhausted}"
            )


def tokens_of_largest(draft: Draft, tokenizer: Tokenizer, enough: float) -> int:
    """How many tokens the largest prompt has; or a smaller one, which is made sooner, where that has `enough`."""
    assert draft.largest is not None
    tokens = 0
    for size in (max(draft.largest // 16, draft.smallest), draft.largest):
        tokens = len(tokenizer.encode_prompt(draft.render(size)))
        if tokens >= enough:
            break
    return tokens


def size_within(draft: Draft, tokenizer: Tokenizer, budget: int) -> tuple[int | None, int]:
    """The largest size whose prompt has at most `budget` tokens, or None; and how many tokens the smallest has.

    A prompt is tokenized a handful of times: tokens are nearly linear in the size, which the search follows.
    """
    known: dict[int, int] = {}

    def count(size: int) -> int:
        if size not in known:
            known[size] = len(tokenizer.encode_prompt(draft.render(size)))
        return known[size]

    smallest, largest = draft.smallest, draft.largest
    if count(smallest) > budget:
        return None, known[smallest]
    low, high, size = smallest, None, 2 * smallest + 16
    for _ in range(12):
        size = size if largest is None else min(size, largest)
        if size in known:
            break
        rate = (count(size) - known[smallest]) / (size - smallest)
        low, high = (size, high) if known[size] <= budget else (low, size)
        nearest = min(known, key=lambda at: abs(known[at] - budget))
        size = max(nearest + int((budget - known[nearest]) / max(rate, 1e-3)), low + 1)
        size = size if high is None else min(size, high - 1)
    return largest_fitting(count, budget, smallest, low, largest if high is None else high), known[smallest]


# ------------------------------------------------------------------------------------------------------------------
# Variable tracking

TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: "
    "Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {value}, they are: "
)
EXAMPLE_TOKENS = 500  # of the solved example before the question, where so few are possible


def assignments(names: Sequence[str], value: int) -> list[str]:
    """The lines that make `value` the value of every name; all but the first end with a space, as RULER's do."""
    return [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]


def tracking_prompt(lines: Sequence[str], value: int, count: int) -> str:
    """The question after a text of assignments and noise."""
    return TRACKING.format(context="\n".join(lines), value=value, count=count)


def with_tracking_example(example: str, names: Sequence[str], prompt: str) -> str:
    """A prompt behind a solved one, whose answer is `names`; there are two spaces before it, as in RULER."""
    return f"{example} {' '.join(names)}\n\n{prompt}"


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """`vt`: chains X1 = number, X2 = X1, ... lie in noise; all variables with the first chain's number are asked for.

    Attributes:
      chains: how many there are, of which one is asked for.
      hops: assignments of a variable to a variable in each.
    """

    chains: int = 1
    hops: int = 4
    name: str = "vt"
    max_new_tokens: int = 30

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"chains": self.chains, "hops": self.hops}

    def draft(self, tokenizer: Tokenizer, length: int, index: int, rng: random.Random) -> Draft:
        solved = self._text(3, rng)
        size, _ = size_within(solved, tokenizer, EXAMPLE_TOKENS)
        example = solved.render(solved.smallest if size is None else size)
        asked = self._text(5, rng)

        def render(size: int) -> str:
            return with_tracking_example(example, solved.references, asked.render(size))

        return Draft(render, asked.references, "noises", asked.smallest)

    def _text(self, letters: int, rng: random.Random) -> Draft:
        """One question; its size is that of the noise, which has as many sentences as a chain has links at least."""
        links = self.hops + 1
        names: dict[str, None] = {}  # RULER draws on where names coincide, and breaks the chain
        while len(names) < self.chains * links:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        chains = [list(names)[start : start + links] for start in range(0, len(names), links)]
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
    """A list with its common words named, and another whose common words are asked for."""
    return f"{COMMON.format(context=numbered(example))} {numbered(answer)}\n{COMMON.format(context=numbered(words))}"


@functools.cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs of wonderwords, sorted, each once."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind)}))


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """`cwe`: a shuffled list in which ten words occur more often than the others.

    Below 4,096 tokens common words occur 6 times and others once, else 30 and 3 times.

    Attributes:
      more_words: what all words are drawn from where wonderwords has too few for a length (RULER: english_words.json).
    """

    more_words: tuple[str, ...] = ()
    name: str = "cwe"
    max_new_tokens: int = 120

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        return {"words": _fingerprint(all_words()), "more_words": _fingerprint(self.more_words)}

    def draft(self, tokenizer: Tokenizer, length: int, index: int, rng: random.Random) -> Draft:
        state, budget = rng.getrandbits(64), length - self.max_new_tokens
        draft = self._over(all_words(), length, random.Random(state))
        if self.more_words and tokens_of_largest(draft, tokenizer, budget) < budget:
            draft = self._over(self.more_words, length, random.Random(state))
        return draft

    def _over(self, pool: Sequence[str], length: int, rng: random.Random) -> Draft:
        """The words of the list are drawn from `pool`; those of the solved example from wonderwords' anyway."""
        size, example_times, times = (40, (10, 3), (30, 3)) if length >= FULL_LENGTH else (20, (3, 1), (6, 1))
        # As much is drawn at any length, so that the words are the same; what the pool decides on comes last.
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
            f"They have {len(pool):,} different words, which is all there are. RULER draws from its english_words.json "
            "in such long ones: give that with --words=FILE.",
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


def frequent_words_prompt(words: Sequence[str]) -> str:
    """The question after a coded text."""
    return FREQUENT.format(context=" ".join(words))


def frequencies(size: int, vocabulary: int, alpha: float) -> list[int]:
    """How often the word of each rank occurs in a text of about `size` words: size * rank^-alpha / zeta(alpha), rounded
    down. Nothing is drawn: RULER takes the zeta distribution's expected counts."""
    from scipy.special import zeta

    ranks = np.arange(1, vocabulary + 1)
    return (size * ranks**-alpha / zeta(alpha)).astype(int).tolist()


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """`fwe`: a shuffled text of coded words with zeta-distributed frequencies; the first rank is noise, `...`.

    Attributes:
      alpha: of the zeta distribution.
      letters: of a coded word.
    """

    alpha: float = 2.0
    letters: int = 6
    name: str = "fwe"
    max_new_tokens: int = 50

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"alpha": self.alpha, "letters": self.letters}

    def draft(self, tokenizer: Tokenizer, length: int, index: int, rng: random.Random) -> Draft:
        count = max((length - self.max_new_tokens) // 50, 10)  # RULER has no text of less than 500 tokens
        state = rng.getrandbits(64)  # before the words, of which longer texts draw more
        words: dict[str, None] = {}
        while len(words) < count:
            words["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
        vocabulary = ["...", *list(words)[1:]]

        def render(size: int) -> str:
            times = frequencies(size, count, self.alpha)
            text = [word for word, n in zip(vocabulary, times, strict=True) for _ in range(n)]
            random.Random(state).shuffle(text)
            return frequent_words_prompt(text)

        return Draft(render, tuple(vocabulary[1:4]), "words", _without_ties(self.alpha))


@functools.cache
def _without_ties(alpha: float) -> int:
    """From this size on the fourth word is rarer than the three: in shorter texts some sizes have a tie."""
    return max(size for size in range(1, 1000) if len(set(frequencies(size, 5, alpha)[3:])) == 1) + 1
