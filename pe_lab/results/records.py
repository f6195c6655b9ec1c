"""The result records of a suite: a file of JSON lines in which a new measurement replaces the old one."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.storage import AnyPath, is_remote, read_records, write_records

Record = dict[str, Any]
LARGEST = 1e150  # of a number that is shown: squares and sums of such numbers are finite
KEYS = ("run", "checkpoint", "variant", "length", "seed", "source")  # what a record measured


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a record measured. Of two records with equal keys the later one replaces the earlier."""
    return tuple(hashable(record.get(name)) for name in KEYS)


def hashable(value: Any) -> Any:
    """A value of a key as it is; a list or an object, which damaged files have there, as text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def digest(value: Any, digits: int = 12) -> str:
    """The first hexadecimal digits of the SHA-256 of a value as JSON; what JSON has no form for counts as text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def number(record: Mapping[str, Any], name: str) -> float | None:
    """`record[name]` as a finite float; None if it is absent, null, a text, NaN, or beyond `LARGEST`."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def as_list(value: object) -> list:
    """`value` if it is a list, else []."""
    return value if isinstance(value, list) else []


def as_dict(value: object) -> dict:
    """`value` if it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Record]:
    """The mappings in a list; [] for anything but a list."""
    return [item for item in as_list(value) if isinstance(item, dict)]


def bins(found: Mapping[str, Any], edges: str, value: str, *others: str) -> list[dict[str, float | None]]:
    """The bins of parallel lists in a record: `start`, `end`, and the number that each list has for the bin.

    Bins without a value and those whose `count` is 0 are left out. [] if the lists do not fit each other, or a
    border is no number.

    Args:
      found: the record, or the part of it that holds the lists.
      edges: names the borders of the bins, or one place for each value.
      value, others: name the lists of numbers. Of the others, those of another length are left out.
    """
    lists = {name: [number({name: x}, name) for x in as_list(found.get(name))] for name in (edges, value, *others)}
    borders, size = lists.pop(edges), len(lists[value])
    if None in borders or len(borders) not in (size, size + 1):
        return []
    lists = {"start": borders[:size], "end": borders[-size:]} | lists
    names = [name for name, numbers in lists.items() if len(numbers) == size]
    measured = [{name: lists[name][index] for name in names} for index in range(size)]
    return [one for one in measured if one[value] is not None and one.get("count") != 0]


class RecordFile:
    """The result records of one suite. Every change is on disk at once, whole.

    Of several processes the first one reads and writes the file; all know its records.

    Raises:
      DataError: the file cannot be read, or a line is no record.
    """

    def __init__(self, path: AnyPath):
        from pe_lab.parallel import on_first  # which imports JAX, and reports do not

        self.path = path
        self._stamp = stamp(path)  # of the file that holds `records`; None: not known
        self.records = on_first(self._read)

    def _read(self) -> list[Record]:
        return list(read_records(self.path, "result record", "Move the file away and evaluate again."))

    def find(self, wanted: Mapping[str, Any]) -> Record | None:
        """The record of the same measurement, of the same weights under the same settings."""
        for record in self.records:
            if all(record.get(name) == wanted.get(name) for name in (*KEYS, "checkpoint_id", "settings")):
                return record
        return None

    def put(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds records in place of those that measured the same; records that another process wrote are kept.

        Raises:
          DataError: the file cannot be written.
        """
        from pe_lab.parallel import is_first

        new = {key(record): finite(dict(record)) for record in records}
        if is_first():
            known = self.records if self._stamp is not None and self._stamp == stamp(self.path) else self._read()
            write_records(self.path, merged(known, new), "Give another directory with --out.")
            self._stamp = stamp(self.path)
        self.records = merged(self.records, new)


def stamp(path: AnyPath) -> tuple[int, int, int] | None:
    """What another write of a local file changes; None of a file that is missing or on a store."""
    if is_remote(path) or not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def merged(records: Sequence[Record], new: Mapping[tuple[Any, ...], Record]) -> list[Record]:
    """The records with new ones, by their keys, in place of those that measured the same, or else at the end."""
    rest = dict(new)
    kept = [rest.pop(key(record), record) for record in records]
    return [*kept, *rest.values()]


def finite(value: Any) -> Any:
    """The value with floats rounded to six decimals, and null for those that JSON cannot hold."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
