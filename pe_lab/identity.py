"""What a run is: the keys that its results depend on, those that may change between two starts, and its run.json.

run.json also has the versions and the machine, which results of every kind name.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
from collections.abc import Mapping
from typing import Any

from pe_lab.config import Config, flat, from_dict, to_json
from pe_lab.errors import CheckpointError, ConfigError, UserError, redacted
from pe_lab.storage import (
    AnyPath,
    check_checkpoints,
    children,
    exists,
    is_remote,
    json_object,
    read_bytes,
    write_json,
)
from pe_lab.storage.manifest import salvage_sealed, seal_broken, sealed
from pe_lab.storage.run_files import RUN_FILE
from pe_lab.terminal import console

LEASE_FILE = "lease.json"  # of a workdir

# The keys that a result depends on. They make `config_hash`.
_IDENTITY = ("seed", "model", "data", "phases")
_NOT_IDENTITY = ("data.cache_dir", "data.workers", "model.remat", "model.loss_chunks", "model.scan")
_OF_SUPPLY = re.compile(r"data\.sources\.\d+\.(name|epochs|when_dry)")  # they change no order of data

# What may change between two starts of a run, and what then happens. N is a number, * anything that follows.
# docs/recipes.md has this table. Every change is recorded in run.json; those of training also in the lineage.
MAY_CHANGE = {
    "phases.N.steps": "the schedule is that of the new number; with `--until`, as `on_prolong` says",
    "phases.N.prolonged.*": "written by `--until`",
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


def identity(config: Config) -> dict[str, Any]:
    """The part of a config that a result depends on, flat: {"model.layers": 4, ...}."""
    other = {*_NOT_IDENTITY, *(f"phases.{i}.steps" for i, phase in enumerate(config.phases) if phase.epochs)}
    return {
        key: value
        for key, value in flat(to_json(config))
        if key.partition(".")[0] in _IDENTITY and key not in other and not _OF_SUPPLY.fullmatch(key)
    }


def changed(before: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """The keys that differ, each with both values; None where one config lacks it.

    `before` is the JSON of a config.
    """
    old, new = (dict(flat(to_json(config))) for config in (from_dict(Config, before), now))
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


# ---------------------------------------------------------------------------------------------------------------------
# run.json


def check_workdir(workdir: AnyPath, config: Config) -> dict[str, Any]:
    """Checks that a run of `config` may be written to `workdir`, and returns its run.json, {} if there is none.

    Writes nothing; a damaged run.json of this run is renamed.

    Raises:
      ConfigError: it is a file, or a directory that holds a run of another config or anything else; or no checkpoint
        could be written there.
    """
    from pe_lab.checkpoints.locating import DIRECTORY  # loads JAX, as below

    for phase in config.phases:
        check_checkpoints("--workdir", workdir / phase.name / DIRECTORY)
    if not exists(workdir):
        return {}
    if not is_remote(workdir) and not workdir.is_dir():
        raise ConfigError(f"--workdir '{workdir}' is a file; give a directory.")
    path = workdir / RUN_FILE
    if not exists(path):
        # A process that was killed while it wrote its first files leaves temporary ones.
        temporary = (f".{RUN_FILE}.", f".{LEASE_FILE}.", LEASE_FILE)
        others = sorted(p.name for p in children(workdir) if not p.name.startswith(temporary))
        if others and not _has_phase(workdir, config):
            raise ConfigError(
                f"--workdir '{workdir}' holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} and no "
                "run.json: it is not a run. Choose an empty or new directory."
            )
        return {}
    mine = _has_phase(workdir, config)
    run = salvage_sealed(path, console(stderr=True).print) if mine else json_object(read_bytes(path))
    if mine and not run:
        return {}
    if run is None or seal_broken(run) or not {"config_hash", "identity", "config"} <= run.keys():
        raise ConfigError(
            f"--workdir '{workdir}': its run.json is damaged, or not one of pe_lab. Choose another --workdir."
        )
    if run["config_hash"] != config_hash(config):
        _refuse_changes(workdir, run, config)
    return run


def saved_config(workdir: AnyPath) -> dict[str, Any] | None:
    """The config of the run in a directory as JSON, of its run.json or else its last checkpoint; None: no run."""
    from pe_lab.checkpoints.locating import find_checkpoints, stored_metadata

    if not exists(workdir) or (not is_remote(workdir) and not workdir.is_dir()):
        return None
    path, found = workdir / RUN_FILE, None
    if exists(path):
        content = json_object(read_bytes(path)) or {}
        found = None if seal_broken(content) else content.get("config")
    if not isinstance(found, dict):
        with contextlib.suppress(CheckpointError):
            found = next((stored_metadata(path).get("config") for path in find_checkpoints(workdir)[::-1]), None)
    return found if isinstance(found, dict) else None


def _has_phase(workdir: AnyPath, config: Config) -> bool:
    """Whether a directory has checkpoints of a phase of this config; they are compared with it before they are used."""
    from pe_lab.checkpoints.locating import DIRECTORY

    return any(exists(workdir / phase.name / DIRECTORY) for phase in config.phases)


def _refuse_changes(workdir: AnyPath, run: Mapping[str, Any], config: Config) -> None:
    """`ConfigError` for a change of the config that a run may not make between two starts."""
    try:
        found, phases = changed(run["config"], config), len(run["config"]["phases"])
    except (UserError, LookupError, TypeError):
        raise ConfigError(
            f"--workdir '{workdir}': its run.json has a config that is none of pe_lab. Choose another --workdir."
        ) from None
    refused, why = [key for key in sorted(found) if not may_change(key, phases)], "belongs to another config"
    if not refused:
        refused, why = _of_trained_phases(workdir, config, found), "has trained phases that this config changes"
    if not refused:
        return
    values = {key: ["absent" if value is None else value for value in found[key]] for key in refused[:4]}
    shown = "; ".join(f"{key}: {old} there, {new} here" for key, (old, new) in values.items())
    raise ConfigError(
        f"--workdir '{workdir}' {why} ({shown}{'; ...' if len(refused) > 4 else ''}). Between two starts of a run, "
        f"phases may be added, and these keys may change, those of phases in the last one that was trained: "
        f"{', '.join(MAY_CHANGE)}. Choose another --workdir."
    )


def _of_trained_phases(workdir: AnyPath, config: Config, found: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """The changed keys of phases that a later phase has started from, or that would have fewer steps than it has."""
    from pe_lab.checkpoints.locating import DIRECTORY, steps_in

    trained = [(steps_in(workdir / phase.name / DIRECTORY) or [-1])[-1] for phase in config.phases]
    refused = []
    for key in sorted(found):
        index = int(key.split(".")[1]) if key.startswith("phases.") else len(trained)
        if index < len(trained) and (
            max(trained[index + 1 :], default=-1) >= 0 or config.phases[index].steps < trained[index]
        ):
            refused.append(key)
    return refused


def write_run(workdir: AnyPath, config: Config, command: str, before: Mapping[str, Any]) -> None:
    """Writes run.json: the config, the versions and the machine, and what has changed since earlier starts.

    It has its own digest. `before` is the run.json of the last start, whose date and command stay.
    """
    command, now = redacted(command), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    changes = list(before.get("changes", []))
    if before:
        keys = {key: list(values) for key, values in changed(before["config"], config).items()}
        changes += [{"time": now, "command": command, "keys": keys}] if keys else []
    run = {
        "name": config.name,
        "config_hash": config_hash(config),
        "command": before.get("command", command),
        "created": before.get("created", now),
        "changes": changes,
        "versions": versions(),
        "machine": machine(),
        "notes": to_json(config.notes),
        "config": to_json(config),
        "identity": identity(config),
    }
    write_json(workdir / RUN_FILE, sealed(run))


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on."""
    names = ("pe-lab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """The platform, devices, memory and host of this process."""
    import jax

    from pe_lab.parallel import host_memory

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "memory_gib": round(host_memory() / 2**30, 1),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}",
    }
