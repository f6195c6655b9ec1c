"""What an evaluation writes, as JSON: result records and sample records of a suite, and what it set out to measure.

A new result record replaces the old one of the same measurement. Sample records, one for every answered sample, are
appended a batch at a time and are on disk before the next batch begins. A process that is killed leaves whole lines and
perhaps a part of one, which the next process cuts off: no finished sample is answered again. The measurements that an
evaluation planned are on disk until all of them are made: reports tell what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pe_lab import storage
from pe_lab.storage import AnyPath, AppendedLog, is_remote, read_records, write_file, write_records

Record = dict[str, Any]
SampleRecord = dict[str, Any]
LARGEST = 1e150  # of a number that is shown: squares and sums of such numbers are finite
KEYS = ("run", "checkpoint", "variant", "length", "seed", "source")  # what a result record measured
# What makes a sample record the answer to one question and to no other; `fingerprint` is that of the encoding.
SAMPLE_KEYS = ("checkpoint_id", "fingerprint", "suite", "task", "length", "seed", "settings", "index")
UNFINISHED = "unfinished"  # in the directory of the results; a file for each evaluation
# What tells a planned measurement from others. A source or a length of null: the records have their own.
PLANNED = ("suite", "source", "label", "phase", "checkpoint", "checkpoint_id", "step", "length", "factor")


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


def finite(value: Any, digits: int | None = 6) -> Any:
    """The value with floats rounded to `digits` decimals (None: not), and null for those that JSON cannot hold."""
    if isinstance(value, float):
        rounded = value if digits is None else round(value, digits)
        return rounded if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item, digits) for name, item in value.items()}
    return [finite(item, digits) for item in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def sample_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The question that a sample record answers: its values of `SAMPLE_KEYS`."""
    return tuple(hashable(record.get(name)) for name in SAMPLE_KEYS)


class SampleFile:
    """The sample records of one suite.

    Of several processes the first one reads and writes the file; all know its records.

    Raises:
      DataError: a complete line is no JSON object, or the file cannot be read.
    """

    def __init__(self, path: AnyPath):
        from pe_lab.parallel import on_first  # which imports JAX, and reports do not

        self.path = path
        self._log: AppendedLog | None = None  # once something is appended
        self.records = {sample_key(record): record for record in on_first(self._read)}

    def _read(self) -> list[SampleRecord]:
        return list(read_records(self.path, "sample record", "Move the file away and evaluate again.", partial=True))

    def add(self, records: Sequence[SampleRecord]) -> None:
        """Appends the records that are not in the file; on return they are on disk.

        Raises:
          DataError: the file cannot be written.
        """
        from pe_lab.parallel import is_first

        new = [record for record in records if sample_key(record) not in self.records]
        if is_first() and new:
            if self._log is None:
                self._log = AppendedLog(self.path, advice="Give another directory with --out.")
            self._log.append(*new)
            self._log.flush()
        self.records.update({sample_key(record): record for record in new})

    def forget(self, unwanted: Sequence[tuple[Any, ...]]) -> None:
        """Removes records, so that their samples are answered again."""
        from pe_lab.parallel import is_first

        removed = set(unwanted) & set(self.records)
        if not removed:
            return
        if is_first():
            if self._log is not None:
                self._log.close()
            kept = [record for record in self._read() if sample_key(record) not in removed]
            self._log = AppendedLog(self.path, kept, "Give another directory with --out.")
        self.records = {name: record for name, record in self.records.items() if name not in removed}


# ---------------------------------------------------------------------------------------------------------------------
# What is planned


@contextlib.contextmanager
def announced(directory: AnyPath, planned: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Writes what is to be measured to unfinished/DIGEST.json, and removes the file when the block ends without error.

    A process that is killed leaves the file, and the same evaluation, when it is whole, removes it. Of several
    processes the first one writes.

    Args:
      directory: of the results.
      planned: the parts of result records that name them, see `PLANNED`.

    Raises:
      DataError: the file cannot be written.
    """
    from pe_lab.parallel import is_first  # which imports JAX, and reports do not

    units = [{name: one.get(name) for name in PLANNED} for one in planned]
    path = directory / UNFINISHED / f"{digest(units)}.json"
    if is_first() and units:
        write_file(path, json.dumps({"planned": units}) + "\n", "Give another directory with --out.")
    yield
    if is_first() and units:
        storage.remove(path)
        if not storage.is_remote(path):
            with contextlib.suppress(OSError):  # of another evaluation that is not complete
                path.parent.rmdir()


def is_measured(unit: Mapping[str, Any], records: Sequence[Record]) -> bool:
    """Whether a record of a suite has what a unit planned, of the same checkpoint or of a later one of its phase."""

    def fits(record: Record) -> bool:
        names = (record.get("source"), record.get("task"), record.get("asked"))
        same = all(record.get(name) == unit.get(name) for name in ("label", "phase"))
        return (
            same
            and unit.get("source") in (None, *names)
            and unit.get("length") in (None, record.get("length"))
            and (number(record, "step") or 0.0) >= (number(unit, "step") or 0.0)
        )

    return any(map(fits, records))
