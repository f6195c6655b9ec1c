"""The files of an evaluation: JSON lines, one file a suite, a new measurement replacing the old."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.config import UserError

Row = dict[str, Any]
# A second row that agrees in all of these replaces the first.
KEYS = ("run", "checkpoint", "method", "length", "seed", "source")


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row measured."""
    return tuple(row.get(name) for name in KEYS)


class RowFile:
    """The rows of one suite. Every change is on disk at once, and a reader never sees half of one."""

    def __init__(self, path: Path):
        self.path = path
        self.rows = self._read()

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}).") from None
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise UserError(f"{self.path}, line {number}, is no row. Move the file away and evaluate again.")
            rows.append(row)
        return rows

    def find(self, wanted: Mapping[str, Any], same: Sequence[str]) -> Row | None:
        """The row that measured the same, and agrees in the fields `same` (how it was measured)."""
        for row in self.rows:
            if key(row) == key(wanted) and all(row.get(name) == wanted.get(name) for name in same):
                return row
        return None

    def put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows in place of those that measured the same. Rows that others wrote meanwhile are kept."""
        new = {key(row): finite(dict(row)) for row in rows}
        kept = [new.pop(key(row), row) for row in self._read()]
        self.rows = [*kept, *new.values()]
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows), encoding="utf-8"
            )
            beside.replace(self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}). Give another directory with --out."
            ) from None


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for, and six decimals of every float."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
