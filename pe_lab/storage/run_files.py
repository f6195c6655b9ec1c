"""The files of a run beside its checkpoints: their names, the digest of its log, and what is wrong with them.

Nothing here imports JAX: `pe_lab.verify` and the report read runs without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.errors import DataError
from pe_lab.storage.json_files import read_records
from pe_lab.storage.logs import record_line
from pe_lab.storage.paths import AnyPath

RUN_FILE, LEDGER_FILE = "run.json", "ledger.jsonl"  # of a run
PHASE_FILE, LOGS = "phase.json", ("metrics", "speed", "spikes")  # of a phase; each log is a `.jsonl`


def no_step(record: Mapping[str, Any]) -> str:
    """Why a record of a log cannot be placed; "" if it can."""
    step = record.get("step")
    return "" if isinstance(step, int) and not isinstance(step, bool) else "no step"


def log_damage(directory: AnyPath, name: str, step: int = 0, expected: Mapping[str, Any] | None = None) -> str:
    """What is wrong with a log, one of `LOGS`, of the phase in a directory; "" if nothing is.

    `step` is that of the last checkpoint, `expected` the `LogDigest` of metrics.jsonl up to there.
    """
    path, digest = directory / f"{name}.jsonl", LogDigest()
    try:
        for record in read_records(path, partial=True, check=no_step):
            if record["step"] <= step:
                digest.add(record)
    except DataError as error:
        return str(error)
    if name == "metrics" and expected not in (None, digest.value):
        return f"{path} is not what was logged up to step {step}."
    return ""


class LogDigest:
    """The digest of metrics.jsonl without the records of rewinds, which stay when the log goes back to a checkpoint."""

    def __init__(self) -> None:
        import google_crc32c

        self._checksum, self._size = google_crc32c.Checksum(), 0

    def add(self, *records: Mapping[str, Any]) -> None:
        for record in records:
            if record.get("event") != "rewind":
                line = record_line(record)
                self._checksum.update(line)
                self._size += len(line)

    @property
    def value(self) -> dict[str, Any]:
        return {"size": self._size, "crc32c": self._checksum.hexdigest().decode()}


def whole_records(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records that have all of their numbers; others, of a damaged file, are left out."""

    def numbers(values: Sequence[Any]) -> bool:
        return all(isinstance(value, int | float) and math.isfinite(value) for value in values)

    return [
        dict(record)
        for record in records
        if isinstance(record.get("seconds"), dict)
        and numbers([record.get(key) for key in ("start", "time", "created")])
        and numbers(list(record["seconds"].values()))
        and isinstance(record.get("step", 0), int)
        and isinstance(record.get("phase", ""), str)
    ]
