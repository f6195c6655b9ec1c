"""The sample records of a suite: a line of JSON for every answered sample, in the order of the answers.

Records are appended a batch at a time and are on disk before the next batch begins. A process that is killed leaves
whole lines and perhaps a part of one, which the next process cuts off: no finished sample is answered again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pe_lab.errors import DataError
from pe_lab.storage import read_records, write_records

SampleRecord = dict[str, Any]
# "reading" names the variant of the model in the files that users have.
KEY = ("checkpoint_id", "reading", "suite", "task", "length", "seed", "settings", "index")


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a record the answer to one question and to no other."""
    return tuple(record.get(name) for name in KEY)


class SampleFile:
    """The sample records of one suite.

    Of several processes the first one reads and writes the file; all know its records.

    Raises:
      DataError: a complete line is no JSON object, or the file cannot be read.
    """

    def __init__(self, path: Path):
        from pe_lab.parallel import on_first  # which imports JAX, and reports do not

        self.path = path
        self.records = {key(record): record for record in on_first(self._read)}

    def _read(self) -> list[SampleRecord]:
        return list(read_records(self.path, "sample record", "Move the file away and evaluate again.", partial=True))

    def add(self, records: Sequence[SampleRecord]) -> None:
        """Appends the records that are not in the file; on return they are on disk.

        Raises:
          DataError: the file cannot be written.
        """
        from pe_lab.parallel import is_first

        new = [record for record in records if key(record) not in self.records]
        if is_first() and new:
            self._append(new)
        self.records.update({key(record): record for record in new})

    def _append(self, new: Sequence[SampleRecord]) -> None:
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in new)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                _cut_off_partial_line(file)
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written ({error.strerror}). Give another directory with --out."
            ) from None

    def forget(self, unwanted: Sequence[tuple[Any, ...]]) -> None:
        """Removes records, so that their samples are answered again."""
        from pe_lab.parallel import is_first

        removed = set(unwanted) & set(self.records)
        if not removed:
            return
        if is_first():
            write_records(self.path, (record for record in self._read() if key(record) not in removed))
        self.records = {name: record for name, record in self.records.items() if name not in removed}


def _cut_off_partial_line(file: BinaryIO) -> None:
    """Truncates what a killed process left after the last complete line."""
    end, found = file.seek(0, os.SEEK_END), -1
    while end and found < 0:
        start = max(end - 2**16, 0)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        end = start + found + 1
    file.truncate(end)
