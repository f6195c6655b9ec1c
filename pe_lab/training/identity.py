"""What a run is: the keys of its config that its results depend on, and those that may change between two starts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pe_lab.config import Config, from_dict, to_json

# The keys that a result depends on: they may not change between two sessions of one run. Logging, evaluation, the
# cache's directory, the mesh, and what is kept or recomputed may.
_IDENTITY = ("seed", "model", "data", "phases")
_NOT_IDENTITY = ("data.cache_dir", "data.workers", "model.remat", "model.loss_chunks", "model.scan")


def identity(config: Config) -> dict[str, Any]:
    """The part of a config that a run may not change between sessions, flat: {"model.layers": 4, ...}."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}")
        else:
            flat[path] = value

    plain = to_json(config)
    for name in _IDENTITY:
        walk(plain[name], name)
    return {key: value for key, value in flat.items() if key not in _NOT_IDENTITY}


# Keys of the identity that may change between two starts of a run. The change is recorded in the lineage.
_CHANGEABLE = re.compile(
    r"phases\.\d+\.(steps|accumulate|optimizer\.(?!name$).+)|model\.(attention|attention_chunk|dtype)"
)


def changed(before: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """The keys of the identity that differ, each with both values; None where one config lacks it.

    `before` is the JSON of a config. Fields that an earlier version of pe_lab did not have get their defaults.
    """
    old, new = identity(from_dict(Config, before)), identity(now)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def may_change(key: str, phases: int) -> bool:
    """Whether a key of the identity may change between two starts of a run, which had so many `phases` before."""
    added = re.match(r"phases\.(\d+)\.", key)
    return bool(_CHANGEABLE.fullmatch(key)) or (added is not None and int(added[1]) >= phases)


def config_hash(config: Config) -> str:
    """Twelve hex digits of the hash of `identity(config)`."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:12]
