"""The workdir of a run: whether it belongs to this config, run.json, and its lease, so that one run works in it."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pe_lab.checkpoints.locating import DIRECTORY, find_checkpoints, steps_in, stored_metadata
from pe_lab.config import Config, to_json
from pe_lab.data.tokenizers import KIND_FILE, Tokenizer, load_saved_tokenizer, save_tokenizer
from pe_lab.errors import CheckpointError, ConfigError, UserError, redacted
from pe_lab.identity import MAY_CHANGE, changed, config_hash, identity, may_change
from pe_lab.output import tell_at_once
from pe_lab.parallel import all_values
from pe_lab.storage import (
    AnyPath,
    LeaseTaken,
    check_checkpoints,
    children,
    exists,
    is_remote,
    json_object,
    lease,
    move_tree,
    new_directory,
    read_bytes,
    write_json,
)
from pe_lab.storage.manifest import salvage_sealed, seal_broken, sealed
from pe_lab.terminal import console
from pe_lab.training.machine import machine, versions

RUN_FILE, LEASE_FILE = "run.json", "lease.json"


def claim_workdir(workdir: AnyPath, config: Config) -> dict[str, Any]:
    """Checks that a run of `config` may be written to `workdir`, and returns its run.json, {} if there is none.

    Writes nothing; a damaged run.json of this run is renamed.

    Raises:
      ConfigError: it is a file, or a directory that holds a run of another config or anything else; or no checkpoint
        could be written there.
    """
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
    return any(exists(workdir / phase.name / DIRECTORY) for phase in config.phases)


def _refuse_changes(workdir: AnyPath, run: Mapping[str, Any], config: Config) -> None:
    """`ConfigError` for a change of the config that a run may not make between two starts."""
    try:
        found, phases = changed(run["config"], config), len(run["config"]["phases"])
    except (UserError, KeyError, TypeError):  # of a version whose keys were others
        before, now = run["identity"], identity(config)
        found = {k: (before.get(k), now.get(k)) for k in before.keys() | now.keys() if before.get(k) != now.get(k)}
        phases = 0
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
        with contextlib.suppress(UserError):  # of a version with other keys
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


# ---------------------------------------------------------------------------------------------------------------------
# The lease


@contextlib.contextmanager
def working_alone(workdir: AnyPath, show: Callable[[str], None]) -> Iterator[None]:
    """The lease of a workdir, which process 0 takes; all raise if it is refused. A process that loses it ends.

    Raises:
      ConfigError: another run has the lease, or it cannot be written.
    """

    def stop(message: str) -> None:
        tell_at_once(f"error: {message}")
        os._exit(os.EX_TEMPFAIL)  # nothing more may be written

    with contextlib.ExitStack() as stack:
        refusal = b""
        if jax.process_index() == 0:
            try:
                stack.enter_context(lease(workdir / LEASE_FILE, show, stop))
            except LeaseTaken as taken:
                refusal = (
                    f"--workdir '{workdir}': {taken.owner} trains there, and has its lease '{LEASE_FILE}'. Stop it "
                    "first, or choose another --workdir."
                ).encode()
            except UserError as error:
                refusal = str(error).encode()
        if refusal := all_values("lease", refusal)[0]:
            raise ConfigError(refusal.decode())
        yield


def keep_tokenizer(workdir: AnyPath, tokenizer: Tokenizer, tell: Callable[[str], None]) -> None:
    """Writes the tokenizer to the workdir, where its checkpoints are read with it, unless it is there and whole."""
    if tokenizer.kind == "none":
        return
    directory = workdir / "tokenizer"
    if exists(directory / KIND_FILE):
        try:
            if load_saved_tokenizer(directory).fingerprint == tokenizer.fingerprint:
                return
        except UserError:
            pass
        aside = directory.with_name(f"tokenizer.damaged-{secrets.token_hex(2)}")
        move_tree(directory, aside, first=KIND_FILE)
        tell(f"'{directory}' is damaged; it is now '{aside.name}', and is written anew")
    with new_directory(directory, marker=KIND_FILE) as building:
        save_tokenizer(tokenizer, building)
