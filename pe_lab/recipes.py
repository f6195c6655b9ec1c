"""Recipes: Python files that build an `ml_collections.ConfigDict`, converted into a `Config` here.

No other module sees a ConfigDict, except the recipes.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from pe_lab.config import Config, check_key, from_dict
from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.terminal import command


def load_config(
    reference: str,
    overrides: Mapping[str, str] | None = None,
    inherit: Callable[[dict[Any, Any]], dict[Any, Any]] = lambda tree: tree,
) -> Config:
    """Reads a recipe: `configs/x.py`, or `configs/x.py:ARG` to pass ARG to its `get_config`.

    Args:
      reference: the file, with its argument after a colon. Where there is no such file, `configs/x.py` and
        `pe_lab/configs/x.py` are the recipe x of this installation.
      overrides: `{"model.layers": "4", "phases.0.steps": "10"}`; a value is a Python literal or else a text.
      inherit: completes the tree of the keys that are set; `training.inheritance.inherit` does so from `init_from`.

    Raises:
      ConfigError: there is no such file or no `get_config` in it, its code raises anything, a key is unknown, a value
        has another type or is out of bounds.
    """
    name, arg = split_reference(reference)
    with explained(name):
        module = load_module(_find_recipe(Path(name)))
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"--config: '{name}' defines no get_config(arg).")
    with explained(name):
        tree = _plain(get_config(arg))
    if not isinstance(tree, dict):
        raise ConfigError(f"--config: get_config of '{name}' returns {tree!r}; it must return a ConfigDict.")
    for key, text in (overrides or {}).items():
        _override(tree, key, text)
    return from_dict(Config, inherit(tree))


def split_reference(reference: str) -> tuple[str, str]:
    """(the file, its argument) of `configs/x.py:ARG`; the name of a file that exists may have colons."""
    name, _, arg = reference.partition(":")
    ends = [place for place, sign in enumerate(f"{reference}:") if sign == ":"]
    for end in reversed(ends):
        with contextlib.suppress(OSError, ValueError):
            if Path(reference[:end]).is_file():
                return reference[:end], reference[end + 1 :]
    return name, arg


@contextlib.contextmanager
def explained(name: str, option: str = "--config") -> Iterator[None]:
    """Makes whatever the code of a recipe or a claim raises a `ConfigError` with the line that raised it.

    `name` is its file as the user gave it by `option`.
    """
    try:
        yield
    except ValueError as error:  # a recipe refuses its argument; `ConfigError` is one
        raise ConfigError(f"{option}: '{name}': {error}") from None
    except (Exception, SystemExit) as error:
        if isinstance(error, AttributeError) and "'dict' object" in str(error):
            raise ConfigError(
                f"{option}: '{name}' sets an attribute of a dict ({error}). Make phases with "
                "pe_lab.recipes.phase(...), or write config.phases[0]['steps'] = ..."
            ) from error
        directory = str(Path(name).parent.resolve())
        frames = traceback.extract_tb(error.__traceback__)
        at = next((frame for frame in reversed(frames) if frame.filename.startswith(directory)), None)
        located = isinstance(error, SyntaxError) and error.filename is not None  # not of a binary file
        where = f"{error.filename}, line {error.lineno}: " if located else ""
        where = where or (f"{at.filename}, line {at.lineno}: " if at else "")
        reason = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise ConfigError(f"{option}: {where or repr(name) + ': '}{type(error).__name__}: {reason}") from error


def installed_recipes() -> Path:
    """The directory of the recipes: inside the package where a wheel installed it, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _find_recipe(path: Path) -> Path:
    """The file that a path means: itself, or else the installed recipe of that name."""
    if path.is_file():
        return path
    directory = installed_recipes()
    if path.parts[:-1] in (("configs",), ("pe_lab", "configs")) and (directory / path.name).is_file():
        return directory / path.name
    names = ", ".join(sorted(recipe.stem for recipe in directory.glob("*.py")))
    raise ConfigError(
        f"--config: there is no file '{path}'. configs/NAME.py is a recipe of pe_lab, with NAME of {names}."
    )


def load_module(path: Path) -> types.ModuleType:
    """The module of a recipe or a claim, which may import others of its directory: `from .table1 import get_config`."""
    package = types.ModuleType(f"pe_lab_recipes_{hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]}")
    package.__path__ = [str(path.parent.resolve())]
    sys.modules.setdefault(package.__name__, package)
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file. Recipes are, such as configs/drope_laptop.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def phase(**keys: Any) -> ConfigDict:
    """A phase of a recipe. Its keys can be set later: `config.phases[0].positional = NoPE()`."""
    return ConfigDict(keys, type_safe=False)


def _plain(value: Any) -> Any:
    """The value with dicts for ConfigDicts, and lists for tuples."""
    if isinstance(value, ConfigDict | Mapping):
        return {key: _plain(value[key]) for key in value}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _override(tree: Any, key: str, text: str) -> None:
    """Sets one dotted key of a recipe's tree; items of lists by number. `from_dict` checks the names."""
    *path, last = key.split(".")

    def index(items: list[Any] | dict[str, Any], name: str) -> Any:
        if isinstance(items, dict):
            return name
        if not re.fullmatch("[0-9]{1,9}", name) or int(name) >= len(items):
            raise ConfigError(f"--config.{key}: '{name}' is not one of the {len(items)} items, numbered from 0.")
        return int(name)

    for name in path:
        if isinstance(tree, dict):
            tree.setdefault(name, {})
        tree = tree[index(tree, name)]
        if not isinstance(tree, dict | list):
            raise ConfigError(f"--config.{key}: '{name}' is a single value and has nothing inside.")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: brackets nested too deep
        value = {"true": True, "false": False}.get(text.lower(), text)
    tree[index(tree, last)] = value


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits a command line into the other arguments and `{"a.b": "value"}`, given as `--config.a.b=value`.

    Raises:
      ConfigError: no config has such a key, or its value is missing.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    items = iter(argv)
    for item in items:
        if not item.startswith("--config."):
            rest.append(item)
            continue
        key, equals, text = item.removeprefix("--config.").partition("=")
        if not equals:
            text = next(items, "")
            if not text or text.startswith("--"):
                raise ConfigError(f"{item}: give a value, as in {item}=VALUE.")
        check_key(Config, key)
        overrides[key] = text
    return rest, overrides


def refuse_misspelt_keys() -> None:
    """Ends the process where its command line has a key that no config has: for a command, before its slow imports."""
    if status := command(lambda argv: split_overrides(argv) and 0)():
        sys.exit(status)


def recipe_arguments(arg: str, **allowed: str | Sequence[str]) -> dict[str, str]:
    """The values of a recipe's argument `key=value,key=value`, completed with defaults.

    Args:
      arg: the argument. A value with a comma is in quotes: `data='text:{a,b}/*.md'`.
      **allowed: for each key its choices, of which the first is the default ("": the recipe has to choose), or a text,
        the default of a key that takes any value.

    Raises:
      ConfigError: a key or a value is not allowed.
    """
    listed = {key: [c for c in choices if c] for key, choices in allowed.items() if not isinstance(choices, str)}
    found = {key: choices if isinstance(choices, str) else choices[0] for key, choices in allowed.items()}
    usage = ", ".join(f"{key}={'|'.join(listed.get(key, ['TEXT']))}" for key in allowed)
    for item in re.findall(r"""(?:[^,"']|"[^"]*"|'[^']*'|["'])+""", arg):
        key, _, value = item.partition("=")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        if key not in allowed or not value or value not in listed.get(key, [value]):
            near = did_you_mean(value, listed[key]) if key in listed else did_you_mean(key, list(allowed))
            raise ConfigError(f"'{item}' is no argument of this recipe. {near} It takes {usage}.")
        found[key] = value
    return found
