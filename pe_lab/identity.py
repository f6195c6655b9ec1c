"""What a run is: the keys of its config that its results depend on, and those that may change between two starts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pe_lab.config import Config, from_dict, to_json

# The keys that a result depends on. They make `config_hash`.
_IDENTITY = ("seed", "model", "data", "phases")
_NOT_IDENTITY = ("data.cache_dir", "data.workers", "model.remat", "model.loss_chunks", "model.scan")
_OF_SUPPLY = re.compile(r"data\.sources\.\d+\.(name|epochs|when_dry)")  # they change no order of data

# What may change between two starts of a run, and what then happens. N is a number, * anything that follows.
# docs/recipes.md has this table. Every change is recorded in run.json; those of training also in the lineage.
MAY_CHANGE = {
    "phases.N.steps": "the schedule is that of the new number; with `--extend`, as `on_extend` says",
    "phases.N.extensions.*": "written by `--extend`",
    "phases.N.batch_size": "the data go on at the next unread sequence",
    "phases.N.accumulate": "the gradients are the same up to rounding",
    "phases.N.optimizer.*": "the moments stay; the schedule is computed anew; not `name`, whose state is another",
    "data.sources.N.weight": "the mixture has the new weights from the next batch on",
    "phases.N.weights.*": "the same",
    "data.sources.N.name": "",
    "data.sources.N.epochs": "checked against what the phases still read",
    "data.sources.N.when_dry": "",
    "data.tokenizer": "where it is found; another vocabulary is refused",
    "data.cache_dir": "",
    "data.workers": "",
    "model.dtype": "of the computation; the parameters stay float32",
    "model.attention": "",
    "model.attention_chunk": "",
    "model.remat": "",
    "model.scan": "",
    "model.loss_chunks": "",
    "mesh.*": "on other devices, the losses are the same up to rounding",
    "compiler_options.*": "",
    "checkpoint.*": "",
    "log.*": "",
    "stability.*": "",
    "evaluation.*": "",
    "name": "with the same `--workdir`",
    "notes.*": "",
}
_UNRECORDED = re.compile(r"(name|notes|evaluation)\b")  # in the lineage: they do not concern the weights


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\.N\.", r"\.\d+\.").replace(r"\*", ".+")


_CHANGEABLE = re.compile("|".join(map(_pattern, MAY_CHANGE)))
_STATE = re.compile(r"phases\.\d+\.optimizer\.name")


def _flat(config: Config) -> dict[str, Any]:
    """Every value of a config by its key: {"model.layers": 4, "phases.0.steps": 10, ...}."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        else:
            flat[path] = value

    walk(to_json(config), "")
    return flat


def identity(config: Config) -> dict[str, Any]:
    """The part of a config that a result depends on, flat: {"model.layers": 4, ...}."""
    other = {*_NOT_IDENTITY, *(f"phases.{i}.steps" for i, phase in enumerate(config.phases) if phase.epochs)}
    return {
        key: value
        for key, value in _flat(config).items()
        if key.partition(".")[0] in _IDENTITY and key not in other and not _OF_SUPPLY.fullmatch(key)
    }


def changed(before: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, each with both values; None where one config lacks it.

    `before` is the JSON of a config. Fields that an earlier version of pe_lab did not have get their defaults.
    """
    old, new = _flat(from_dict(Config, before)), _flat(now)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def may_change(key: str, phases: int) -> bool:
    """Whether a key may change between two starts of a run, which had so many `phases` before."""
    added = re.match(r"phases\.(\d+)\.", key)
    known = bool(_CHANGEABLE.fullmatch(key)) and not _STATE.fullmatch(key)
    return known or (added is not None and int(added[1]) >= phases)


def change_text(found: Mapping[str, tuple[Any, Any]], phase: int) -> str:
    """The changes that concern the weights of a phase, for its lineage: `phases.0.batch_size 8 -> 16, ...`."""
    keys = [key for key in found if not re.match(r"phases\.(?!" + str(phase) + r"\.)", key)]
    return ", ".join(f"{key} {found[key][0]} -> {found[key][1]}" for key in keys if not _UNRECORDED.match(key))


def config_hash(config: Config) -> str:
    """Twelve hex digits of the hash of `identity(config)`."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:12]
