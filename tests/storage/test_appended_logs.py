"""Logs on a disk that is full: /dev/full takes no byte."""

from pathlib import Path

import pytest

from pe_lab.errors import DataError
from pe_lab.storage import AppendedLog, read_records

RECORDS = [{"step": step} for step in range(5)]


class Filled:
    """A log whose file goes to /dev/full until `free`."""

    def __init__(self, log: AppendedLog):
        self._log, self._file = log, log._file
        log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115

    def free(self) -> None:
        self._log._file.close()
        self._log._file = self._file


def stored(path: Path) -> list[dict]:
    return list(read_records(path, partial=True))


def test_records_wait_for_space(tmp_path):
    log = AppendedLog(tmp_path / "metrics.jsonl", waits=True)
    log.append(RECORDS[0])
    disk = Filled(log)
    log.append(RECORDS[1])
    log.append(*RECORDS[2:4])
    with pytest.raises(DataError, match=r"metrics.jsonl cannot be written \(No space left on device\)"):
        log.flush()
    assert stored(log.path) == RECORDS[:1]
    disk.free()
    log.append(RECORDS[4])
    assert stored(log.path) == RECORDS
    Filled(log)
    log.append(RECORDS[0])
    log.close()  # without an error
    assert stored(log.path) == RECORDS


def test_a_line_that_the_disk_took_in_parts_is_whole_in_the_end(tmp_path):
    log = AppendedLog(tmp_path / "metrics.jsonl", waits=True)
    file = log._file

    class Slow:
        def write(self, content: bytes) -> int:
            return file.write(content[:3])

    log._file = Slow()
    log.append(*RECORDS)
    assert stored(log.path) == RECORDS


def test_a_log_that_does_not_wait_says_that_the_disk_is_full(tmp_path):
    log = AppendedLog(tmp_path / "records.jsonl", advice="Write elsewhere.")
    Filled(log)
    with pytest.raises(DataError, match=r"\(No space left on device\). Write elsewhere."):
        log.append(RECORDS[0])
