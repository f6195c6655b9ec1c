"""The grid of a sweep: `KEY=VALUE,VALUE` and seeds as a command line gives them, the product, and names of cells."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.config import SEED
from pe_lab.errors import ConfigError
from pe_lab.recipes import split_reference
from pe_lab.results.comparison import short_names
from pe_lab.results.groups import SEEDS
from pe_lab.results.records import digest

MOST_CELLS = 10_000
_OPENED = {"(": ")", "[": "]", "{": "}"}
_NAME, _NAMES = 60, 200  # characters of a value in the name of a directory, and of the name; file systems take 255


@dataclass(frozen=True)
class Axis:
    """A key and its values, as texts that `--config.KEY=VALUE` takes.

    `key` is a dotted key of the config; `:name` is an argument of the recipe, and `:` its whole argument.
    """

    key: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """The axis of `KEY=VALUE,VALUE,...`. Commas inside brackets and quotes separate no values.

    Raises:
      ConfigError: there is no key, a value is missing or given twice, or a bracket or a quote is not closed.
    """
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r":\w*|\w+(\.\w+)*", key):
        raise ConfigError(
            f"--grid '{text}': write KEY=VALUE,VALUE, as in --grid model.layers=2,4, or :NAME=VALUE,VALUE for an "
            "argument of the recipe."
        )
    return axis(key, split_values(values, f"--grid {key}"))


def axis(key: str, values: Iterable[object]) -> Axis:
    """An axis from Python values; `ConfigError` if there are none, or one is empty or given twice."""
    texts = tuple(value if isinstance(value, str) else repr(value) for value in values)
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError(f"--grid {key}: a value is missing. Write {key}=VALUE,VALUE.")
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        raise ConfigError(f"--grid {key}: {twice[0]} is given twice. Each value makes cells of its own.")
    return Axis(key, texts)


def split_values(text: str, where: str) -> list[str]:
    """The values of a list with commas, none of them inside brackets or quotes.

    Raises:
      ConfigError: a bracket or a quote is not closed.
    """
    values, closing, quote = [""], [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (closing or not values[-1].strip()):  # don't: no quote inside a word
            quote = character
        elif character in _OPENED:
            closing.append(_OPENED[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            values.append("")
            continue
        values[-1] += character
    if quote or closing:
        raise ConfigError(f"{where}: '{quote or closing[-1]}' is missing at the end of '{values[-1].strip()}'.")
    return [value.strip() for value in values]


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds of `3` (0, 1 and 2) or `0,5,7`; `7,` is the seed 7 alone.

    Raises:
      ConfigError: it is neither, is 0, or names a seed twice.
    """
    listed = re.fullmatch(r"([0-9]{1,10})((?:,[0-9]{1,10})*),?", text := re.sub(r"\s", "", text), re.ASCII)
    numbers = [int(part) for part in text.split(",") if part] if listed else []
    if not numbers or max(numbers) > SEED:
        raise ConfigError(f"--seeds='{text}': give a number of seeds, as in --seeds=3, or seeds, as in --seeds=0,5,7.")
    if "," not in text:
        if not 1 <= numbers[0] <= MOST_CELLS:
            raise ConfigError(
                f"--seeds={text}: it is the number of seeds, from 1 to {MOST_CELLS:,}. The seed {text} alone is "
                f"--seeds={text},"
            )
        return tuple(range(numbers[0]))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds='{text}': a seed is given twice.")
    return tuple(numbers)


def product(axes: Sequence[Axis], seeds: Sequence[int]) -> list[tuple[dict[str, str], int | None]]:
    """All (setting, seed), seeds fastest; a setting is {key: value}, the seed None where the recipe's is kept.

    Raises:
      ConfigError: a key has two axes, or there are more than `MOST_CELLS`.
    """
    keys = [one.key for one in axes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"--grid {twice[0]} is given twice. Write all its values in one: {twice[0]}=VALUE,VALUE.")
    if seeds and (both := sorted(set(keys) & set(SEEDS))):
        raise ConfigError(f"--grid {both[0]} and --seeds set the same key. Leave one of them out.")
    count = max(len(seeds), 1)
    for one in axes:
        count *= len(one.values)
    if count > MOST_CELLS:
        raise ConfigError(f"The grid has {count:,} cells; a sweep has at most {MOST_CELLS:,}. Take fewer values.")
    settings = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(one.values for one in axes))]
    return [(setting, seed) for setting in settings for seed in (seeds or (None,))]


def with_arguments(recipe: str, setting: Mapping[str, str]) -> str:
    """The recipe with the arguments that a setting has for it: `x.py:size=laptop` with `:method` `x.py:...,method=...`.

    Raises:
      ConfigError: the recipe has such an argument already.
    """
    file, argument = split_reference(recipe)
    for key, value in setting.items():
        if not key.startswith(":"):
            continue
        name, value = key.removeprefix(":"), _string(value)
        if name and "," in value:  # `recipe_arguments` takes a comma inside quotes
            value = f'"{value}"' if "'" in value else f"'{value}'"
        if (not name and argument) or any(part.partition("=")[0] == name for part in argument.split(",") if name):
            raise ConfigError(f"--grid {key}: the recipe '{recipe}' has this argument already. Leave one of them out.")
        argument = ",".join(filter(None, [argument, f"{name}={value}" if name else value]))
    return f"{file}:{argument}" if argument else file


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _string(value: str) -> str:
    """The text of a value that may be a quoted string."""
    literal = _literal(value)
    return literal if isinstance(literal, str) else value


def plain(value: str) -> str:
    """A value as the text that all equal ones have: `0.001` of `1e-3`, `2` of `2.0`, `rope` of `'rope'`."""
    literal = _literal(value)
    return f"{literal:.15g}" if type(literal) in (int, float) else _string(value)


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The shortest end of each dotted key that no other key has: `learning_rate`, or `0.optimizer.learning_rate`."""
    plain = {key: key.removeprefix(":") for key in keys}
    short = short_names([*plain.values()])
    return {key: short[name].replace(" ", ".") or "argument" for key, name in plain.items()}


def cell_name(setting: Mapping[str, str], seed: int | None) -> str:
    """The name of a cell's directory, from its setting: `learning_rate=0.001__layers=4__seed=0`."""
    names = short_keys(setting)
    parts = [f"{names[key]}={_file_text(value)}" for key, value in setting.items()]
    name = "__".join([*parts, *([] if seed is None else [f"seed={seed}"])])
    return name if len(name) <= _NAMES else f"{name[: _NAMES - 7]}-{digest(name, 6)}"


def label(setting: Mapping[str, str]) -> str:
    """A setting for people: `learning_rate=0.001, layers=4`."""
    names = short_keys(setting)
    return ", ".join(f"{names[key]}={_string(value)}" for key, value in setting.items()) or "as in the recipe"


def _file_text(value: str) -> str:
    """A value as a part of a file's name; one that loses characters ends in a digest of all of them."""
    text = _string(value)
    kept = re.sub(r"[^A-Za-z0-9.=+-]+", "-", text).strip("-")[:_NAME].rstrip("-")
    plain = re.sub(r"[ '\"]", "", text) == kept
    return kept if plain and kept else f"{kept}-{digest(text, 6)}".lstrip("-")
