"""RULER's tasks of generated text: variable tracking, common words, frequent words.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.evaluation.scoring.metrics import string_match_all
from pe_lab.evaluation.tasks.fitting import Draft, SizedTask
from pe_lab.evaluation.tasks.haystacks import NOISE, distinct, word_list
from pe_lab.evaluation.tasks.task import Sample, Scores, random_for

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
