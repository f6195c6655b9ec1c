"""Damage for real files: of bytes, of the structure of JSON, and of the values in binary formats."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# What a count, a size or an id becomes.
NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    255,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**33,
    2**63 - 1,
    2**64 - 1,
    10**11,
    10**30,
    -(2**31),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    "\ud800",
    "a\0b",
    "(" * 40,
    "(a{9999}){9999}",
    "x" * 5_000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
)


# What a number of steps, tokens, a length or a score cannot be, or can hardly be.
ABSURD: tuple[Any, ...] = (
    -1,
    0,
    1e23,
    1e308,
    -1e308,
    5e-324,
    10**30,
    10**400,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "7",
    "x",
    [],
    {},
    [1e308, -1e308],
)


def damage_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """The data after one to `most` accidents: flipped bits, a cut, a splice, a repetition, a huge count."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(out) + 1)
        size = min(rng.choice((1, 2, 4, 8, 16, 64, 512)), len(out) - at)
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            source = rng.randrange(len(out) + 1)
            out[at:at] = out[source : source + size]
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            width = rng.choice((1, 2, 4, 8))
            out[at : at + width] = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(
                width, rng.choice(("little", "big"))
            )
        elif kind == 5:
            out[at : at + size] = rng.randbytes(size)
        else:
            out[at : at + size] = bytes([rng.choice((0, 255))]) * size
    return bytes(out)


def value(rng: random.Random) -> Any:
    """A value of some type, often an extreme one."""
    return rng.choice(NUMBERS) if rng.random() < 0.4 else copy.deepcopy(rng.choice(VALUES))


def damage_json(rng: random.Random, data: Any, most: int = 3) -> str:
    """The text of a JSON value in which one to `most` places have another value, are gone, or are nested deeply."""
    whole = {"": json.loads(json.dumps(data))}
    deep = 0
    for _ in range(rng.randint(1, most)):
        holder, key = rng.choice(places(whole))
        kind = rng.randrange(6)
        if kind == 0 and holder is not whole:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict) and holder is not whole:
            holder[rng.choice(("x", "", "\udfff", str(key) * 2))] = holder.pop(key)
        elif kind == 2:
            holder[key] = [holder[key]] * rng.choice((1, 2, 50))
        elif kind == 3 and rng.random() < 0.3:
            holder[key], deep = "DEEP", rng.choice((50, 500, 5_000, 100_000))
        elif kind == 4:
            other, place = rng.choice(places(whole))
            holder[key] = json.loads(json.dumps(other[place]))
        else:
            holder[key] = value(rng)
    text = json.dumps(whole[""], ensure_ascii=rng.random() < 0.9)
    if deep:
        text = text.replace(
            '"DEEP"', "[" * deep + "]" * deep if rng.random() < 0.7 else '{"a":' * deep + "1" + "}" * deep
        )
    return text


def damage_json_text(rng: random.Random, data: Any) -> bytes:
    """As `damage_json`, in bytes, which in a quarter of the cases are damaged too."""
    content = damage_json(rng, data).encode("utf-8", "surrogatepass")
    return damage_bytes(rng, content) if rng.random() < 0.25 else content


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every place in nested lists and dicts."""
    found, todo = [], [value]
    while todo:
        holder = todo.pop()
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])
    return found
