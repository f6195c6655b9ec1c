"""Needles in haystacks: DroPE's four tasks (appendix C.2), DoPE's noisy one (section 5.1), and RULER's eight."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError
from pe_lab.evaluation.scoring.metrics import string_match_all
from pe_lab.evaluation.tasks.fitting import Draft, SizedTask
from pe_lab.evaluation.tasks.haystacks import Haystack, distinct, draw, needle, open_haystack
from pe_lab.evaluation.tasks.task import Sample, Scores, Suite, random_for

# RULER, scripts/data/synthetic/constants.py and niah.py.
TEMPLATE = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {values} afterwards.\n{context}\nWhat are all the special magic {values} for {query} mentioned in the "
    "provided text?"
)
PREFIX = " The special magic {values} for {query} mentioned in the provided text are"
RULER_DEPTHS = tuple(float(depth) for depth in np.round(np.linspace(0, 100, 40)))
GRID = tuple(float(depth) for depth in range(0, 101, 10))
NEW_TOKENS = 128
SINKS = 10  # start-of-sequence tokens after DoPE's needle; the paper does not give their number
_CUT = "\0"  # marks where sinks go; haystacks do not contain it


@dataclass(frozen=True)
class NeedleTask(SizedTask):
    """Sentences that give values of keys, hidden in a haystack; the values of some keys are asked for."""

    suite: str
    name: str
    haystack: Haystack
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys that are asked for
    key_kind: str = "words"  # words | numbers | uuids
    value_kind: str = "numbers"
    # Possible places of needles, per cent. With `grid`, sample i has its needle at depth i modulo their number, in
    # tokens, as Kamradt's test has it (`before_needle`); else each needle has a different one, at random, in sentences,
    # as RULER has it. None: at any place.
    depths: tuple[float, ...] | None = GRID
    grid: bool = False
    drope: bool = False  # whether texts begin at a random word ("random excerpt"), and the prompt ends with a colon
    sinks: int = 0  # start-of-sequence tokens after every needle (DoPE's noise)
    max_new_tokens: int = NEW_TOKENS
    one_line: bool = False

    metric = "fraction_found"

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.haystack.settings | {
            "needles": [self.keys, self.values, self.queries, self.key_kind, self.value_kind],
            "depths": None if self.depths is None else list(self.depths),
            "sinks": self.sinks,
            "depth_of": "tokens" if self.grid else "sentences",
        }

    @property
    def margin(self) -> int:
        """The longest word: an excerpt may begin with any."""
        return max(map(len, self.haystack.words), default=0) if self.drope else 0

    def score(self, sample: Sample, output: str) -> Scores:
        """The share of the values that the answer contains, and whether it contains all."""
        fraction = string_match_all(output, list(sample.references))
        return {"fraction_found": fraction, "all_found": float(fraction == 1.0)}

    def found(self, sample: Sample, output: str) -> list[float]:
        """1 or 0 for each needle that is asked for, in the order of `Sample.depth`."""
        return [string_match_all(output, [value]) for value in sample.references]

    def draft(self, tokenizer: Tokenizer, length: int, index: int, seed: int) -> Draft:
        rng = random_for(self.suite, self.name, seed, index)
        keys = distinct(lambda: draw(self.key_kind, rng), self.keys)
        values = [[draw(self.value_kind, rng) for _ in range(self.values)] for _ in keys]
        asked = rng.sample(range(self.keys), self.queries)
        needles = [(key, value) for key in range(self.keys) for value in range(self.values)]
        rng.shuffle(needles)
        if self.depths is None:
            places = sorted(100 * rng.random() for _ in needles)
        elif self.grid:
            places = [self.depths[index % len(self.depths)]] * len(needles)
        else:
            places = sorted(rng.sample(self.depths, len(needles)))
        start = rng.randrange(len(self.haystack.words)) if self.drope and self.haystack.words else 0
        state = rng.getrandbits(64)

        def filler(size: int) -> list[str]:
            return self.haystack.pieces(size, start, self.key_kind, self.value_kind, random.Random(state), keys)

        hidden = [
            needle(self.value_kind, keys[key], values[key][value]) + _CUT * (self.sinks > 0) for key, value in needles
        ]

        def render(size: int) -> str:
            pieces, separator = filler(size), self.haystack.separator
            if self.grid:
                text = separator.join(pieces)
                at = before_needle(tokenizer, text, places[0])
                context = [text[:at].rstrip(), *hidden, text[at:].lstrip()]
                return self._question(separator.join(filter(None, context)), [keys[key] for key in asked])
            context, done = [], 0
            for one, place in zip(hidden, places, strict=True):
                at = int(len(pieces) * place / 100)
                context += [*self._between(pieces[done:at]), one]
                done = at
            context += self._between(pieces[done:])
            return self._question(separator.join(context), [keys[key] for key in asked])

        def depth(size: int) -> tuple[float, ...]:
            if self.grid:  # the requested depth: a short context may have no piece that begins there
                return tuple(places[:1]) * (self.queries * self.values)
            count = len(filler(size))
            of = {n: round(100 * int(count * place / 100) / count, 1) for n, place in zip(needles, places, strict=True)}
            return tuple(of[key, value] for key in asked for value in range(self.values))

        references = tuple(value for key in asked for value in values[key])
        metadata = {"sinks": self.sinks} if self.sinks else {}
        return Draft(render, references, "size", 1, depth=depth, metadata=metadata)

    def _between(self, pieces: list[str]) -> list[str]:
        """The filler before a needle, or after the last one.

        RULER joins essays piece by piece, so that empty filler leaves a space.
        """
        if self.suite == "ruler" and self.haystack.text:
            return [self.haystack.separator.join(pieces)]
        return pieces

    def _question(self, context: str, queries: Sequence[str]) -> str:
        kind = self.value_kind
        template = TEMPLATE + PREFIX
        if self.queries * self.values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind[:-1]
        template += ":" * self.drope
        query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
        return template.format(values=kind, context=context, query=query)

    def encode(self, tokenizer: Tokenizer, text: str) -> Int32[np.ndarray, " n"]:
        """The tokens of a prompt, with sinks where it has the mark."""
        first, *rest = text.split(_CUT)
        # Without a start-of-sequence token, the end of text separates documents.
        sink = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        ids = [tokenizer.encode_prompt(first)]
        for part in rest:
            ids += [np.full(self.sinks, sink, np.int32), tokenizer.encode_prompt(part, add_special_tokens=False)]
        return np.concatenate(ids)

    def _sample(self, tokenizer: Tokenizer, length: int, index: int, seed: int, drafted: int) -> Sample:
        sample = super()._sample(tokenizer, length, index, seed, drafted)
        return replace(sample, text=sample.text.replace(_CUT, ""))


def before_needle(tokenizer: Tokenizer, text: str, depth: float) -> int:
    """The number of characters of `text` before a needle at a depth, per cent of its tokens.

    As in LLMTest_NeedleInAHaystack (Kamradt 2023; the package needlehaystack): after the last token that is a period
    among the first int(tokens * depth / 100); the beginning if there is none, the end for a depth of 100. A tokenizer
    without a token for the period gives the place without going back.
    """
    if depth == 100:
        return len(text)
    ids, offsets = tokenizer.encode_with_offsets(text)
    before = ids[: int(len(ids) * (depth / 100))]
    periods = [i for i in tokenizer.encode_prompt("end.", add_special_tokens=False) if tokenizer.decode([i]) == "."]
    (at,) = np.nonzero(np.isin(before, periods)) if periods else (np.arange(len(before)),)
    return int(offsets[at[-1], 1]) if len(at) else 0


_ANYWHERE: dict[str, Any] = {"depths": None}
_DOPE: dict[str, Any] = {"grid": True, "max_new_tokens": 50, "one_line": True}
# name -> difference from one needle on a grid of depths (DroPE, appendix C.2; DoPE, section 5.1 and appendix A.2).
NIAH: dict[str, dict[str, Any]] = {
    "standard": {"grid": True},
    "multi_query": {"keys": 4, "queries": 4} | _ANYWHERE,
    "multi_key": {"keys": 4} | _ANYWHERE,
    "multi_value": {"values": 4} | _ANYWHERE,
    "noisy": _DOPE | {"sinks": SINKS},
    "clean": _DOPE,
}
DEFAULT = tuple(name for name in NIAH if name != "clean")  # the papers'; `clean` is `noisy` without its noise
# name -> haystack, and difference from one needle in essays (RULER, scripts/synthetic.yaml).
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
    """The task `name` of the suite niah; `depths`, per cent, replace the grid of a task that has one."""
    options = NIAH[name] | ({"depths": tuple(depths)} if depths and "grid" in NIAH[name] else {})
    return NeedleTask("niah", name, haystack, drope=True, **options)


def ruler_needle_task(name: str, essays: Haystack | None = None) -> NeedleTask:
    """RULER's task `name`; `essays` replaces Paul Graham's. `UnsupportedError` if those are not installed."""
    kind, options = RULER[name]
    haystack = essays if kind == "essays" and essays is not None else open_haystack(kind)
    return NeedleTask("ruler", name, haystack, **({"depths": RULER_DEPTHS} | options))


def parse_depths(text: str) -> tuple[float, ...]:
    """Depths in per cent from `0,25,50`, or from their number, spread evenly from 0 to 100; else `ConfigError`."""
    items = [part.strip().removesuffix("%") for part in text.split(",") if part.strip()]
    try:
        numbers = [float(item) for item in items]
    except ValueError:
        raise ConfigError(f"--depths={text}: write per cents, such as 0,50,100, or their number, such as 11.") from None
    if len(items) == 1 and items[0].isdecimal() and numbers[0] > 1 and not text.strip().endswith((",", "%")):
        count = int(numbers[0])
        if count > 1001:
            raise ConfigError(f"--depths={text}: give at most 1001 depths.")
        return tuple(round(100 * i / (count - 1), 1) for i in range(count))
    if not numbers or not all(0 <= depth <= 100 for depth in numbers):
        raise ConfigError(f"--depths={text}: depths are per cents from 0 to 100.")
    return tuple(sorted(set(numbers)))


def open_niah(names: Sequence[str], arguments: argparse.Namespace, limits: Sequence[int | None]) -> list[NeedleTask]:
    """The tasks `names`, or the papers' five; see `Suite.open`. Samples fewer than depths get depths of their own."""
    haystack, samples = open_haystack(arguments.haystack), arguments.samples
    depths = parse_depths(arguments.depths) if arguments.depths else None
    if samples is not None and samples < len(depths or GRID):
        if depths is not None:
            raise ConfigError(
                f"--samples={samples} would leave out some of the {len(depths)} depths. Give at least as many samples, "
                "or fewer --depths."
            )
        depths = parse_depths(str(samples)) if samples > 1 else (50.0,)
    return [niah_task(name, haystack, depths) for name in names or DEFAULT]


SUITE = Suite(
    name="niah",
    title="Needle in a haystack",
    about="Facts are hidden in a haystack of text, and the model is asked for them. The figure is the share of the "
    "values asked for that its answer contains; “all” is the share of prompts whose every value was found.",
    terms={
        "needle in a haystack": "A sentence with a fact, put into text that has nothing to do with it. The model is "
        "asked for the fact at the end, and answers in words of its own.",
        "fraction found, all found": "The share of the asked values that the answer contains, and the share of prompts "
        "whose answer contains every one. They differ only where several are asked for.",
    },
    tasks=tuple(NIAH),
    samples=dict.fromkeys(NIAH, 500),  # RULER's and DroPE's
    flags={"--depths": {"help": "per cents, or how many of them (niah; default 0,10,...,100)"}},
    open=open_niah,
)
