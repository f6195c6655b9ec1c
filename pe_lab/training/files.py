"""The files a run writes beside its checkpoints: rows of JSON, TensorBoard events, facts about a run and a phase."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pe_lab.config import Config, config_hash, from_dict, identity, to_json
from pe_lab.errors import UserError
from pe_lab.storage import write_file, write_json


class Rows:
    """A file of JSON lines, one per step, that continues where a checkpoint left off."""

    def __init__(self, path: Path, resume_step: int):
        """Keeps rows up to `resume_step`, and drops later ones: they belong to steps about to be done again.

        At step 0 nothing has been done: a phase that starts over writes its row of step 0 again too.
        """
        kept = []
        if path.exists() and resume_step > 0:
            for line in path.read_text().splitlines(keepends=True):
                # A killed process may have left half a line.
                if line.endswith("\n") and json.loads(line)["step"] <= resume_step:
                    kept.append(line)
        write_file(path, "".join(kept))
        self._file = path.open("a")

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class NoRows:
    """What processes other than the first write."""

    def write(self, row: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """The same numbers for TensorBoard."""

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=resume_step + 1 if resume_step else 0)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


def claim_workdir(workdir: Path, config: Config) -> None:
    """`UserError` if the directory holds a run of another config, or something that is no run; writes nothing."""
    if not workdir.exists():
        return
    if not workdir.is_dir():
        raise UserError(f"--workdir '{workdir}' is a file; give a directory.")
    path = workdir / "run.json"
    if not path.exists():
        # A run killed while it wrote its first file leaves half of it beside.
        strangers = sorted(p.name for p in workdir.iterdir() if not p.name.startswith(".run.json."))
        if strangers:
            raise UserError(
                f"--workdir '{workdir}' holds {', '.join(strangers[:3])}{' ...' if len(strangers) > 3 else ''} and no "
                "run.json: it is not a run. Choose an empty or new directory."
            )
        return
    try:
        run = json.loads(path.read_text())
        known, before = run["config_hash"], run["identity"]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"--workdir '{workdir}': its run.json is not one of ours. Choose another --workdir.") from None
    if known == config_hash(config):
        return
    with contextlib.suppress(UserError, KeyError):
        # Written by an earlier version: fields that it did not know have their defaults.
        before = identity(from_dict(Config, run["config"]))
    now = identity(config)
    keys = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    if not keys:
        return
    shown = [f"{k}: {before.get(k, 'absent')} there, {now.get(k, 'absent')} here" for k in keys[:4]]
    raise UserError(
        f"--workdir '{workdir}' belongs to another config ({'; '.join(shown)}{'; ...' if len(keys) > 4 else ''}). "
        "Choose another --workdir, or delete that one."
    )


def write_run(workdir: Path, config: Config, command: str, **facts: Any) -> None:
    """run.json: the whole resolved config and what it runs on. The first session's date and command are kept."""
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "run.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    run = {
        "name": config.name,
        "config_hash": config_hash(config),
        "command": before.get("command", command),
        "created": before.get("created", facts.pop("created")),
        **facts,
        "notes": to_json(config.notes),
        "config": to_json(config),
        "identity": identity(config),
    }
    write_json(path, run)
