"""Needles in haystacks: RULER's eight tasks, DroPE's four (App. C.2), and DoPE's noisy one (section 5.1)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import UserError, did_you_mean
from pe_lab.evaluation.scoring.metrics import string_match_all
from pe_lab.evaluation.tasks.haystacks import Haystack, needle, open_haystack
from pe_lab.evaluation.tasks.task import Lazy, Sample, Scores, largest_fitting, random_for
from pe_lab.evaluation.tasks.words import draw, draw_distinct

# Facts of RULER's scripts/data/synthetic/constants.py and niah.py.
TEMPLATE = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {values} afterwards.\n{context}\nWhat are all the special magic {values} for {query} mentioned in the "
    "provided text?"
)
PREFIX = " The special magic {values} for {query} mentioned in the provided text are"
RULER_DEPTHS = tuple(float(depth) for depth in np.round(np.linspace(0, 100, 40)))
GRID = tuple(float(depth) for depth in range(0, 101, 10))
NEW_TOKENS = 128
_CUT = "\0"  # where sinks go; in no text
SINKS = 10  # DoPE does not say how many start-of-sequence tokens follow its needle


@dataclass(frozen=True)
class NeedleTask:
    """Facts hidden in a haystack, some of which are asked for.

    Attributes:
      keys, values, queries: how many keys there are, values each has, and keys that are asked for.
      key_kind, value_kind: "words", "numbers" or "uuids".
      depths: where needles go, per cent. With `grid`, sample i puts its one needle at depth i modulo their number;
        else each needle takes another of them by lot. None: anywhere.
      colon: DroPE's prompts end with a colon where RULER's do not.
      excerpt: a haystack of texts begins at a random word (DroPE's "random excerpt"); else at its first (RULER).
      sinks: so many start-of-sequence tokens directly after every needle (DoPE's noise).
    """

    suite: str
    name: str
    haystack: Haystack
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"
    depths: tuple[float, ...] | None = GRID
    grid: bool = False
    colon: bool = False
    excerpt: bool = False
    sinks: int = 0
    max_new_tokens: int = NEW_TOKENS
    stop: tuple[str, ...] = ()

    metric = "fraction_found"
    sized = True

    @property
    def settings(self) -> Mapping[str, Any]:
        """The part of a result's identity that the prompts do not tell."""
        return self.haystack.settings | {
            "needles": [self.keys, self.values, self.queries, self.key_kind, self.value_kind],
            "depths": None if self.depths is None else list(self.depths),
            "sinks": self.sinks,
        }

    def samples(self, tokenizer: Tokenizer, length: int | None, count: int, seed: int) -> Sequence[Sample]:
        """See `Task`. Prompts are as long as fit: one word, or sentence, more would not."""
        if length is None:
            raise ValueError(f"{self.name} needs a length")
        kinds = self.key_kind, self.value_kind
        unit = "\n".join(self.haystack.pieces(256, 0, *kinds, random.Random(0)))
        rate = len(tokenizer.encode(unit)) / 256  # tokens a word, or a sentence
        self._check_room(tokenizer, length, count, seed)
        return Lazy(lambda index: self._sample(tokenizer, length, index, seed, rate), count)

    def score(self, sample: Sample, output: str) -> Scores:
        """The share of the values that were found, and whether all were."""
        fraction = string_match_all(output, list(sample.references))
        return {"fraction_found": fraction, "all_found": float(fraction == 1.0)}

    def found(self, sample: Sample, output: str) -> list[float]:
        """1 or 0 for each needle that was asked for, in the order of `Sample.depth`."""
        return [string_match_all(output, [value]) for value in sample.references]

    def _sample(self, tokenizer: Tokenizer, length: int, index: int, seed: int, rate: float) -> Sample:
        drawn = self._draw(seed, index)
        budget = length - self.max_new_tokens
        size = largest_fitting(
            lambda size: len(self._tokens(tokenizer, self._render(drawn, size)[0])), budget, 1, int(budget / rate)
        )
        if size is None:  # _check_room has looked at all of them where this is likely
            raise UserError(
                f"--haystack: sample {index} of {self.suite}:{self.name} does not fit {length:,} tokens, as the word "
                "that it begins with is too long. Give longer --lengths, or a text with spaces between its words."
            )
        parts, depth = self._render(drawn, size)
        ids = self._tokens(tokenizer, parts)
        facts = {"size": size} | ({"sinks": self.sinks} if self.sinks else {})
        return Sample(index, "".join(parts), ids, drawn.references, self.max_new_tokens, self.stop, depth, facts)

    def _check_room(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> None:
        """`UserError` where a sample has no room; all are looked at where the length is anywhere near too short."""

        def least(index: int) -> int:
            return len(self._tokens(tokenizer, self._render(self._draw(seed, index), 1)[0])) + self.max_new_tokens

        longest = least(0)
        # Any of a text's words may come to stand alone.
        word = max(map(len, self.haystack.words), default=0) if self.excerpt else 0
        if length < 2 * (longest + word):
            longest = max(least(index) for index in range(count))
        if longest > length:
            raise UserError(
                f"--lengths: a prompt of {self.suite}:{self.name} and its answer of {self.max_new_tokens} tokens do "
                f"not fit {length:,} tokens; the shortest take {longest:,}."
            )

    def _draw(self, seed: int, index: int) -> _Drawn:
        """Everything about a sample that does not depend on how long its text is: the same needles at all lengths."""
        rng = random_for(self.suite, self.name, seed, index)
        keys = draw_distinct(self.key_kind, self.keys, rng)
        values = [[draw(self.value_kind, rng) for _ in range(self.values)] for _ in keys]
        asked = rng.sample(range(self.keys), self.queries)
        order = [(key, value) for key in range(self.keys) for value in range(self.values)]
        rng.shuffle(order)
        if self.depths is None:
            places = sorted(100 * rng.random() for _ in order)
        elif self.grid:
            places = [self.depths[index % len(self.depths)]] * len(order)
        else:
            places = sorted(rng.sample(self.depths, len(order)))
        start = rng.randrange(len(self.haystack.words)) if self.excerpt and self.haystack.words else 0
        return _Drawn(keys, values, asked, order, places, start, rng.getrandbits(64))

    def _render(self, drawn: _Drawn, size: int) -> tuple[list[str], tuple[float, ...]]:
        """The prompt, cut after each needle where sinks go; the depths of the needles that are asked for."""
        rng = random.Random(drawn.filler)
        pieces = self.haystack.pieces(size, drawn.start, self.key_kind, self.value_kind, rng, drawn.keys)
        joint, cuts = self.haystack.joint, [0]
        context: list[str] = []
        depth: dict[tuple[int, int], float] = {}
        for (key, value), place in zip(drawn.order, drawn.places, strict=True):
            at = int(len(pieces) * place / 100)
            context += self._between(pieces[cuts[-1] : at])
            said = needle(self.value_kind, drawn.keys[key], drawn.values[key][value])
            context.append(said + _CUT * (self.sinks > 0))
            depth[key, value] = round(100 * at / len(pieces), 1)
            cuts.append(at)
        context += self._between(pieces[cuts[-1] :])
        text = self._question(joint.join(context), [drawn.keys[key] for key in drawn.asked])
        asked = tuple(depth[key, value] for key in drawn.asked for value in range(self.values))
        if self.grid:  # as it was asked for: so short a text may have no such place
            asked = tuple(drawn.places[:1]) * len(asked)
        return text.split(_CUT), asked

    def _between(self, pieces: list[str]) -> list[str]:
        """What stands before a needle, or after the last. RULER joins essays piecewise, so that where nothing stands, a
        space is left of it."""
        if self.suite == "ruler" and self.haystack.text:
            return [self.haystack.joint.join(pieces)]
        return pieces

    def _question(self, context: str, queries: Sequence[str]) -> str:
        kind = self.value_kind
        template = TEMPLATE + PREFIX
        if self.queries * self.values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind[:-1]
        template += ":" * self.colon
        if self.colon and len(queries) == 2:
            query = " and ".join(queries)
        else:
            query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
        return template.format(values=kind, context=context, query=query)

    def _tokens(self, tokenizer: Tokenizer, parts: Sequence[str]) -> Int32[np.ndarray, " n"]:
        if len(parts) == 1:
            return tokenizer.encode_prompt(parts[0])
        # Where a tokenizer has no start-of-sequence token, documents begin after an end of text.
        sink = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        ids = [tokenizer.encode_prompt(parts[0])]
        for part in parts[1:]:
            ids += [np.full(self.sinks, sink, np.int32), tokenizer.encode_prompt(part, add_special_tokens=False)]
        return np.concatenate(ids)


@dataclass(frozen=True)
class _Drawn:
    """What is hidden: values of keys; which keys are asked for; the needles (key, value) in the order of the text, and
    their places in per cent; the word that the haystack begins with; the seed of its distractors."""

    keys: list[str]
    values: list[list[str]]
    asked: list[int]
    order: list[tuple[int, int]]
    places: list[float]
    start: int
    filler: int

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(value for key in self.asked for value in self.values[key])


_ANYWHERE: dict[str, Any] = {"depths": None}
_DOPE: dict[str, Any] = {"grid": True, "max_new_tokens": 50, "stop": ("\n",)}
# name -> how it differs from one needle on a grid of depths (DroPE App. C.2; DoPE section 5.1 and App. A.2).
NIAH: dict[str, dict[str, Any]] = {
    "standard": {"grid": True},
    "multi_query": {"keys": 4, "queries": 4} | _ANYWHERE,
    "multi_key": {"keys": 4} | _ANYWHERE,
    "multi_value": {"values": 4} | _ANYWHERE,
    "noisy": _DOPE | {"sinks": SINKS},
    "clean": _DOPE,
}
DEFAULT = tuple(name for name in NIAH if name != "clean")  # the papers' five; `clean` is what `noisy` compares with
# name -> haystack, and how it differs from one needle in an essay (RULER's scripts/synthetic.yaml).
RULER: dict[str, tuple[str, dict[str, Any]]] = {
    "niah_single_1": ("noise", _ANYWHERE),
    "niah_single_2": ("essays", {}),
    "niah_single_3": ("essays", {"value_kind": "uuids"}),
    "niah_multikey_1": ("essays", {"keys": 4}),
    "niah_multikey_2": ("needles", _ANYWHERE),
    "niah_multikey_3": ("needles", {"key_kind": "uuids", "value_kind": "uuids"} | _ANYWHERE),
    "niah_multivalue": ("essays", {"values": 4}),
    "niah_multiquery": ("essays", {"keys": 4, "queries": 4}),
}


def niah_task(name: str, haystack: Haystack, depths: Sequence[float] | None = None) -> NeedleTask:
    """The task of the suite `niah` called `name`; `depths` in per cent replace the grid of those that have one.

    Raises:
      UserError: no task is called so.
    """
    known = name.replace("-", "_")
    if known not in NIAH:
        raise UserError(f"--suite=niah:{name}: no such task. {did_you_mean(known, list(NIAH))}")
    options = NIAH[known] | ({"depths": tuple(depths)} if depths and "grid" in NIAH[known] else {})
    return NeedleTask("niah", known, haystack, colon=True, excerpt=True, **options)


def ruler_needle_task(name: str, essays: Haystack | None = None) -> NeedleTask:
    """RULER's task called `name`; `essays` replaces Paul Graham's where the task has essays.

    Raises:
      UserError: the essays are not installed.
    """
    kind, options = RULER[name]
    haystack = essays if kind == "essays" and essays is not None else open_haystack(kind)
    return NeedleTask("ruler", name, haystack, **({"depths": RULER_DEPTHS} | options))
