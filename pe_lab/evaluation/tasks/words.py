"""What needles are made of: adjective-noun words, numbers of seven digits, UUIDs, as RULER draws them."""

from __future__ import annotations

import functools
import random
import uuid

from wonderwords import Defaults, RandomWord

KINDS = ("words", "numbers", "uuids")


@functools.cache
def word_list(category: str) -> tuple[str, ...]:
    """The words of wonderwords' list `noun`, `adjective` or `verb`, sorted, each once."""
    lists = {"noun": Defaults.NOUNS, "adjective": Defaults.ADJECTIVES, "verb": Defaults.VERBS}
    return tuple(sorted(set(RandomWord(wanted=lists[category]).filter(include_categories=["wanted"]))))


def draw(kind: str, rng: random.Random) -> str:
    """One of `kind`: `busy-otter`, `4821970`, or a UUID of version 4."""
    if kind == "words":
        return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_distinct(kind: str, count: int, rng: random.Random) -> list[str]:
    """So many that differ: a needle's key has one meaning in its text."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw(kind, rng)] = None
    return list(drawn)
