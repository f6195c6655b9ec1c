"""What an evaluation set out to measure, on disk until all of it has been: reports tell what is missing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pe_lab import storage
from pe_lab.results.records import Record, digest
from pe_lab.storage import AnyPath, write_file

FOLDER = "unfinished"  # in the directory of the results; a file for each evaluation
# What tells a measurement from others. A source or a length of null: the records have their own.
NAMES = ("suite", "source", "label", "phase", "checkpoint", "checkpoint_id", "step", "length", "factor")


@contextlib.contextmanager
def announced(directory: AnyPath, planned: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Writes what is to be measured to unfinished/DIGEST.json, and removes the file when the block ends without error.

    A process that is killed leaves the file, and the same evaluation, when it is whole, removes it. Of several
    processes the first one writes.

    Args:
      directory: of the results.
      planned: the parts of result records that name them, see `NAMES`.

    Raises:
      DataError: the file cannot be written.
    """
    from pe_lab.parallel import is_first  # which imports JAX, and reports do not

    units = [{name: one.get(name) for name in NAMES} for one in planned]
    path = directory / FOLDER / f"{digest(units)}.json"
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
            and _step(record) >= _step(unit)
        )

    return any(map(fits, records))


def _step(record: Mapping[str, Any]) -> float:
    step = record.get("step")
    return step if isinstance(step, int | float) else 0
