"""The sample records of a suite: a line of JSON for every answered sample, in the order of the answers.

Records are appended a batch at a time and are on disk before the next batch begins. A process that is killed leaves
whole lines and perhaps a part of one, which the next process cuts off: no finished sample is answered again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pe_lab.results.records import hashable
from pe_lab.storage import AnyPath, AppendedLog, read_records

SampleRecord = dict[str, Any]
# `fingerprint` is that of the encoding.
KEY = ("checkpoint_id", "fingerprint", "suite", "task", "length", "seed", "settings", "index")


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a record the answer to one question and to no other."""
    return tuple(hashable(record.get(name)) for name in KEY)


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
        if self._log is None:
            self._log = AppendedLog(self.path, advice="Give another directory with --out.")
        self._log.append(*new)
        self._log.flush()

    def forget(self, unwanted: Sequence[tuple[Any, ...]]) -> None:
        """Removes records, so that their samples are answered again."""
        from pe_lab.parallel import is_first

        removed = set(unwanted) & set(self.records)
        if not removed:
            return
        if is_first():
            if self._log is not None:
                self._log.close()
            kept = [record for record in self._read() if key(record) not in removed]
            self._log = AppendedLog(self.path, kept, "Give another directory with --out.")
        self.records = {name: record for name, record in self.records.items() if name not in removed}
