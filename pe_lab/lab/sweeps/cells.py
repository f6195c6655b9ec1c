"""The cells of a sweep, each an ordinary run, sweep.json, which describes them, and the grid that they come from."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import itertools
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pe_lab import storage
from pe_lab.config import SEED, Config, from_dict, to_json
from pe_lab.errors import ConfigError, DataError, UserError, redacted
from pe_lab.identity import changed, config_hash, identity
from pe_lab.recipes import load_config, split_reference
from pe_lab.results.comparison import short_names
from pe_lab.results.formatting import shortened
from pe_lab.results.groups import SEEDS
from pe_lab.results.records import as_dict, digest, mappings
from pe_lab.storage import AnyPath, create_file, exists, json_object, read_bytes, replace_file

FILE, LOGS = "sweep.json", "logs"
LAST_PHASE = "last phase"  # an option of `Sweep.evaluation`, not of the command
SHOWN = 10  # errors of cells in one message


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep.

    Attributes:
      name: of its directory in the sweep's.
      setting: {key: value} of the grid, as texts.
      seed: what config.seed and config.data.seed are set to; None: the recipe's are kept.
      reference: the recipe with its argument.
      overrides: all keys that are set, those of the grid included, as texts.
      config: what they make.
    """

    name: str
    setting: Mapping[str, str]
    seed: int | None
    reference: str
    overrides: Mapping[str, str]
    config: Config

    def command(self, directory: AnyPath) -> list[str]:
        """The command that trains this cell, or continues it."""
        keys = [f"--config.{key}={value}" for key, value in self.overrides.items()]
        workdir = f"--workdir={directory / self.name}"
        return [sys.executable, "-m", "pe_lab.train", f"--config={self.reference}", *keys, workdir]


@dataclass(frozen=True)
class Sweep:
    """A sweep: the cells of one command, and those that earlier commands have added to its directory.

    Attributes:
      directory: of the cells, sweep.json, the logs and the results.
      cells: all of them.
      names: of the cells that this command asks for.
      evaluation: the options of `pe_lab.evaluate` after the training of each cell; None: it is not evaluated.
      description: the recipe, the overrides, the grid and the seeds, as JSON.
    """

    directory: AnyPath
    cells: tuple[SweepCell, ...]
    names: frozenset[str]
    evaluation: tuple[str, ...] | None = None
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def asked(self) -> tuple[SweepCell, ...]:
        """The cells that this command asks for."""
        return tuple(cell for cell in self.cells if cell.name in self.names)

    def evaluate_command(self, cell: SweepCell) -> list[str]:
        """The command that evaluates a cell: its run, or with `LAST_PHASE` among the options its last phase alone."""
        options = [one for one in self.evaluation or () if one != LAST_PHASE]
        run = self.directory / cell.name
        subject = run / cell.config.phases[-1].name if LAST_PHASE in (self.evaluation or ()) else run
        return [sys.executable, "-m", "pe_lab.evaluate", f"--from={subject}", *options]


def make_sweep(
    recipe: str,
    grid: Mapping[str, Iterable[object]] | None = None,
    seeds: int | Sequence[int] = (),
    directory: str | AnyPath = "",
    overrides: Mapping[str, str] | None = None,
    evaluation: Sequence[str] | None = None,
) -> Sweep:
    """The sweep of a grid, with the cells that its directory has already; writes nothing.

    The config of every cell is made and its phases are planned: an error of any of them is raised here.

    Args:
      recipe: `configs/x.py`, or `configs/x.py:ARG`.
      grid: {key: values}; `:name` is an argument of the recipe.
      seeds: their number, or themselves; none: each cell keeps the recipe's.
      directory: by default runs/NAME_sweep, with the name of the recipe's file.
      overrides: keys that all cells set, as `load_config` takes them.
      evaluation: options of `pe_lab.evaluate`; () are its defaults, None is no evaluation.

    Raises:
      ConfigError: nothing varies, two cells are the same run, a cell would not train, or the directory is another
        sweep, a run, or has a cell of that name with another config.
    """
    axes = {key: axis_values(key, values) for key, values in (grid or {}).items()}
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    overrides = dict(overrides or {})
    if not axes and not numbers:
        raise ConfigError("Nothing varies: give --grid KEY=VALUE,VALUE or --seeds=N, or train with pe_lab.train.")
    fixed = sorted(set(overrides) & {*axes, *(SEEDS if numbers else ())})
    if fixed:
        raise ConfigError(f"--config.{fixed[0]} sets a key that the grid or --seeds varies. Leave one of them out.")
    name = PurePath(split_reference(recipe)[0]).stem
    where = storage.path("--workdir", directory or f"runs/{name}_sweep")
    storage.check_checkpoints("--workdir", where)
    cells = _checked(recipe, axes, numbers, overrides, where)
    description = {
        "recipe": recipe,
        "overrides": overrides,
        "grid": {key: list(values) for key, values in axes.items()},
        "seeds": list(numbers),
    }
    options = None if evaluation is None else tuple(evaluation)
    before = load_sweep(where) if exists(where / FILE) else None
    if before is None:
        _refuse_other(where)
    else:  # runs that are there keep their names
        names = {config_hash(cell.config): cell.name for cell in before.cells}
        cells = [dataclasses.replace(cell, name=names.get(config_hash(cell.config), cell.name)) for cell in cells]
    sweep = Sweep(where, tuple(cells), frozenset(cell.name for cell in cells), options, description)
    return joined(sweep, before) if before else sweep


def _checked(
    recipe: str, axes: Mapping[str, Sequence[str]], seeds: Sequence[int], overrides: Mapping[str, str], where: AnyPath
) -> list[SweepCell]:
    """The cells; all that is wrong with them is in one error."""
    from pe_lab.training.plan import given_layers, plan_phases

    cells: list[SweepCell] = []
    errors: dict[str, list[str]] = {}  # message -> cells
    for setting, seed in product(axes, seeds):
        name = cell_name(setting, seed)
        keys = {key: value for key, value in setting.items() if not key.startswith(":")}
        keys |= {} if seed is None else dict.fromkeys(SEEDS, str(seed))
        reference = with_arguments(recipe, setting)
        try:
            config = load_config(reference, {**overrides, **keys}, inherits=True, workdir=where / name)
            plan_phases(config, given_layers(config))
            cells.append(SweepCell(name, setting, seed, reference, {**overrides, **keys}, config))
        except UserError as error:
            errors.setdefault(str(error), []).append(name)
    if errors:
        total = len(cells) + sum(map(len, errors.values()))
        told = [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {message}"
            for message, names in list(errors.items())[:SHOWN]
        ]
        more = f"; and {len(errors) - SHOWN} more errors" if len(errors) > SHOWN else ""
        wrong = total - len(cells)
        if wrong == total and len(errors) == 1:  # the recipe itself, or a key
            raise ConfigError(next(iter(errors)))
        raise ConfigError(f"{wrong} of {total} cells would not train, and none was started. {'; '.join(told)}{more}")
    _refuse_twins(cells)
    return cells


def _refuse_twins(cells: Sequence[SweepCell]) -> None:
    """`ConfigError` for two cells that would be the same run, or have the same directory."""
    by_config: dict[str, SweepCell] = {}
    by_name: dict[str, SweepCell] = {}
    for cell in cells:
        twin = by_config.setdefault(config_hash(cell.config), cell)
        if twin is not cell:
            raise ConfigError(
                f"'{twin.name}' and '{cell.name}' are the same run: their configs differ in nothing that a result "
                "depends on. Take a value out of the grid."
            )
        if by_name.setdefault(cell.name, cell) is not cell:
            raise ConfigError(f"Two cells would have the directory '{cell.name}'. Take a value out of the grid.")


def joined(sweep: Sweep, before: Sweep) -> Sweep:
    """The sweep with the cells that its directory has already.

    Raises:
      ConfigError: the directory is another sweep, or has another run of the name of a cell.
    """
    if sweep.asked:
        _refuse_other_sweep(before, sweep)
    others = {cell.name: cell for cell in before.cells}
    for cell in sweep.asked:
        there = others.pop(cell.name, cell)
        if config_hash(there.config) != config_hash(cell.config):
            differ = changed(to_json(there.config), cell.config)
            keys = "; ".join(f"{key}: {old} there, {new} here" for key, (old, new) in list(differ.items())[:4])
            raise ConfigError(
                f"--workdir '{before.directory}' has a cell '{cell.name}' with another config ({keys}). A sweep may "
                "add cells and changes none. Choose another --workdir."
            )
    others |= {cell.name: cell for cell in sweep.cells if cell.name not in sweep.names}
    return dataclasses.replace(sweep, cells=(*others.values(), *sweep.asked))


def _refuse_other_sweep(before: Sweep, sweep: Sweep) -> None:
    """`ConfigError` for a sweep whose cells would differ from those that are there in more than the grids."""
    old, new = before.description, sweep.description
    varied = {*as_dict(old.get("grid")), *new["grid"], *SEEDS}
    there, here = (_fixed(one, varied, identity(sweep.asked[0].config)) for one in (old, new))
    differ = [key for key in sorted(there | here) if there.get(key) != here.get(key)]
    if differ:
        keys = "; ".join(
            f"{key}: {there.get(key, 'absent')} there, {here.get(key, 'absent')} here" for key in differ[:4]
        )
        raise ConfigError(
            f"--workdir '{before.directory}' is another sweep ({keys}). Its cells and these differ in more than the "
            "grid. Choose another --workdir."
        )


def _fixed(description: Mapping[str, Any], varied: Collection[str], decisive: Iterable[str]) -> dict[str, str]:
    """The recipe, its arguments and the overrides that a result depends on, without those that are varied."""
    file, argument = split_reference(str(description.get("recipe", "")))
    fixed = {"recipe": PurePath(file).name}
    for part in filter(None, argument.split(",")):
        name = f":{part.partition('=')[0] if '=' in part else ''}"
        if name not in varied:
            fixed[name] = redacted(part.partition("=")[2] or part)
    for key, value in as_dict(description.get("overrides")).items():
        if key not in varied and any(f"{one}.".startswith(f"{key}.") for one in decisive):
            fixed[key] = redacted(str(value))
    return fixed


def _refuse_other(directory: AnyPath) -> None:
    """`ConfigError` for a directory that is neither new nor empty, and no sweep."""
    if not exists(directory):
        return
    if not storage.is_remote(directory) and not directory.is_dir():
        raise ConfigError(f"--workdir '{directory}' is a file; give a directory.")
    others = sorted(path.name for path in storage.children(directory) if not path.name.startswith("."))
    if others:
        what = "is a run" if "run.json" in others else f"holds {', '.join(others[:3])} and no {FILE}"
        raise ConfigError(f"--workdir '{directory}' {what}, and no sweep. Choose an empty or new directory.")


# ---------------------------------------------------------------------------------------------------------------------
# sweep.json


def save_sweep(sweep: Sweep, command: str = "") -> Sweep:
    """Writes sweep.json, and returns the sweep with the cells that other commands have added meanwhile.

    Raises:
      ConfigError: another sweep has begun in the directory since `make_sweep`, or its cells have these names.
    """
    path = sweep.directory / FILE
    while True:
        found = read_bytes(path) if exists(path) else None
        if found is not None:
            sweep = joined(sweep, _read(sweep.directory, found))
        value = _to_json(sweep, command, json_object(found or b"") or {})
        content = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if replace_file(path, content, found) if found is not None else create_file(path, content):
            return sweep


def _to_json(sweep: Sweep, command: str, before: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commands = [one for one in before.get("commands", []) if isinstance(one, str)]
    described = {
        "created": before.get("created", now),
        "config_hash": digest(sorted(config_hash(cell.config) for cell in sweep.cells)),
        "commands": [*commands, *([command] if command and command not in commands else [])],
        **sweep.description,
        "evaluation": sweep.evaluation,
        "cells": [
            {
                "name": cell.name,
                "setting": dict(cell.setting),
                "seed": cell.seed,
                "reference": cell.reference,
                "overrides": dict(cell.overrides),
                "config_hash": config_hash(cell.config),
                "config": to_json(cell.config),
            }
            for cell in sweep.cells
        ],
    }
    return to_json(described)  # without credentials


def load_sweep(directory: str | AnyPath) -> Sweep:
    """The sweep that a directory's sweep.json describes, with all of its cells.

    Raises:
      DataError: there is none, or it is damaged.
    """
    where = storage.path("--workdir", directory)
    path = where / FILE
    if not exists(path):
        raise DataError(f"'{where}' is no sweep: it has no {FILE}. Give the --workdir of a sweep.")
    return _read(where, read_bytes(path))


def _read(directory: AnyPath, content: bytes) -> Sweep:
    found, cells = json_object(content), []
    try:
        for one in mappings((found or {})["cells"]):
            config = from_dict(Config, one["config"])
            seed = None if one["seed"] is None else int(one["seed"])
            texts = [{str(k): str(v) for k, v in as_dict(one[key]).items()} for key in ("setting", "overrides")]
            cells.append(SweepCell(str(one["name"]), texts[0], seed, str(one["reference"]), texts[1], config))
        evaluation = found.get("evaluation")
        options = None if evaluation is None else tuple(map(str, evaluation))
        names = [cell.name for cell in cells]
        if not names:
            raise ValueError("it has no cells")
        if len(set(names)) < len(names):
            raise ValueError("two cells have one name")
        for name in names:
            if name in ("", ".", "..", LOGS) or "/" in name or "\0" in name:
                raise ValueError(f"the cell {shortened(repr(name))} has no name that a directory can have")
        if not all(cell.config.phases for cell in cells):
            raise ValueError("a cell has no phases")
    except (UserError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"'{directory / FILE}' is damaged ({type(error).__name__}: {error}). Give the same command another "
            "--workdir; the cells themselves are ordinary runs, and whole."
        ) from None
    description = {key: found[key] for key in ("recipe", "overrides", "grid", "seeds") if key in found}
    return Sweep(directory, tuple(cells), frozenset(cell.name for cell in cells), options, description)


# ---------------------------------------------------------------------------------------------------------------------
# The grid: `KEY=VALUE,VALUE` and seeds as a command line gives them, their product, and names of cells

MOST_CELLS = 10_000
_OPENED = {"(": ")", "[": "]", "{": "}"}
_NAME, _NAMES = 60, 200  # characters of a value in the name of a directory, and of the name; file systems take 255


def parse_axes(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The grid of texts `KEY=VALUE,VALUE,...`. Commas inside brackets and quotes separate no values.

    A key is a dotted key of the config; `:name` is an argument of the recipe, and `:` its whole argument.

    Raises:
      ConfigError: there is no key, one is given twice, a value is missing or given twice, or a bracket or a quote is
        not closed.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for text in axes:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r":\w*|\w+(\.\w+)*", key):
            raise ConfigError(
                f"--grid '{text}': write KEY=VALUE,VALUE, as in --grid model.layers=2,4, or :NAME=VALUE,VALUE for an "
                "argument of the recipe."
            )
        if key in grid:
            raise ConfigError(f"--grid {key} is given twice. Write all its values in one: {key}=VALUE,VALUE.")
        grid[key] = axis_values(key, split_values(values, f"--grid {key}"))
    return grid


def axis_values(key: str, values: Iterable[object]) -> tuple[str, ...]:
    """Values as texts that `--config.KEY=VALUE` takes; `ConfigError` if one is empty or given twice, or none is."""
    texts = tuple(value if isinstance(value, str) else repr(value) for value in values)
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError(f"--grid {key}: a value is missing. Write {key}=VALUE,VALUE.")
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        raise ConfigError(f"--grid {key}: {twice[0]} is given twice. Each value makes cells of its own.")
    return texts


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


def product(axes: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[tuple[dict[str, str], int | None]]:
    """All (setting, seed), seeds fastest; a setting is {key: value}, the seed None where the recipe's is kept.

    Raises:
      ConfigError: an axis sets the seeds too, or there are more than `MOST_CELLS`.
    """
    if seeds and (both := sorted(set(axes) & set(SEEDS))):
        raise ConfigError(f"--grid {both[0]} and --seeds set the same key. Leave one of them out.")
    count = math.prod(map(len, axes.values())) * max(len(seeds), 1)
    if count > MOST_CELLS:
        raise ConfigError(f"The grid has {count:,} cells; a sweep has at most {MOST_CELLS:,}. Take fewer values.")
    settings = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
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
