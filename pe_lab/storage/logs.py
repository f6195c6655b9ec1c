"""Logs: files of JSON lines that grow while a program runs, on a disk or on an object store.

On a store nothing can be appended to: there a log is a directory of segments.

    metrics.jsonl.segments/SESSION.SEGMENT      such as 00001795449186494-3fa2.000002

A session's segments follow each other without a gap; each holds whole lines. Only the last one is written again,
longer, until it is full. Segment 0 of a session begins with all records that the session keeps of earlier ones, whose
segments it then deletes. So the newest session that has a segment 0 is a consistent prefix of the log, whenever a
process died.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from pe_lab.errors import DataError, StoreError
from pe_lab.storage.files import write_file
from pe_lab.storage.paths import AnyPath, exists, is_full, is_remote, listing, put, read_bytes, remove

FLUSH_SECONDS = 30.0
SUFFIX = ".segments"
SEGMENT_BYTES = 2**18
_NAME = re.compile(r"(\d{16}-[0-9a-f]{4})\.(\d{6})")


class AppendedLog:
    """Appends records to a log, which `read_records(path, partial=True)` reads at any time.

    On a disk each record is a line in the file at once. To an object store they are sent every `FLUSH_SECONDS` by a
    thread, which tries again later if the store does not answer, and by `flush` and `close`. Whenever the process is
    killed, the log holds the first records, whole, and perhaps a part of the next line.

    Raises:
      DataError: the file cannot be written.
      StoreError: the store refuses, or does not answer.
    """

    def __init__(
        self, path: AnyPath, kept: Iterable[Mapping[str, Any]] | None = None, advice: str = "", waits: bool = False
    ):
        """Opens the log with the records `kept`, by default all whole ones that it has; `advice` is for messages.

        With `waits` a full disk is no error of `append`: the records wait for space. Then `flush` raises while there is
        none, and `close` drops them.
        """
        self.path, self._advice, self._waits = path, advice, waits
        self._file: BinaryIO | None = None
        self._pending: list[bytes] = []  # to a store: what `_sending` is not sending
        self._lock, self._sending, self._closed = threading.Lock(), threading.Lock(), threading.Event()
        content = None if kept is None else b"".join(map(record_line, kept))
        if not is_remote(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if content is not None:
                    write_file(path, content, advice)
                self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
                _cut_off_partial_line(self._file)
            except OSError as error:
                raise self._unwritten(error) from None
            return
        if content is None:
            content = b""
            with contextlib.suppress(FileNotFoundError):
                content = read_log(path)
            content = content[: content.rfind(b"\n") + 1]
        self._writer = SegmentWriter(path, content)
        self._sender = threading.Thread(target=self._send_regularly, daemon=True)
        self._sender.start()

    def _unwritten(self, error: OSError) -> DataError:
        return DataError(f"{self.path} cannot be written ({error.strerror or error}). {self._advice}".rstrip())

    def append(self, *records: Mapping[str, Any]) -> None:
        """Appends records."""
        with self._lock:
            self._pending.append(b"".join(map(record_line, records)))
        if self._file is not None:
            try:
                self._write()
            except OSError as error:
                if not (self._waits and is_full(error)):
                    raise self._unwritten(error) from None

    def _write(self) -> None:
        """Writes what is pending to the file; the end of a line may have to wait for the next call."""
        lines = b"".join(self._pending)
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        finally:
            self._pending = [lines] if lines else []

    def flush(self) -> None:
        """Returns when all records are on disk, or in the store."""
        if self._file is None:
            self._send()
            return
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritten(error) from None

    def _send(self) -> None:
        with self._sending:
            with self._lock:  # which no upload holds: `append` never waits for the store
                lines, self._pending = self._pending, []
            try:
                if lines:
                    self._writer.write(b"".join(lines))
            except BaseException:
                with self._lock:
                    self._pending[:0] = lines
                raise

    def _send_regularly(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            with contextlib.suppress(StoreError):  # it stays pending; `flush` and `close` raise
                self._send()

    def close(self) -> None:
        """Stores what is pending, and ends the thread."""
        self._closed.set()
        if self._file is not None:
            with contextlib.suppress(OSError):  # `append` has raised it, or the records were to wait
                self._write()
            self._file.close()
            return
        self._sender.join()
        self._send()

    def __enter__(self) -> AppendedLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def record_line(record: Mapping[str, Any]) -> bytes:
    """The line of a record in a log."""
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _cut_off_partial_line(file: BinaryIO) -> None:
    """Truncates what a killed process left after the last complete line."""
    end, found = file.seek(0, os.SEEK_END), -1
    while end and found < 0:
        start = max(end - 2**16, 0)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        end = start + found + 1
    file.truncate(end)


# ---------------------------------------------------------------------------------------------------------------------
# On an object store


def read_log(path: AnyPath) -> bytes:
    """The content of a file of JSON lines, or of the segments of a remote log; `FileNotFoundError` without either."""
    if not is_remote(path):
        return path.read_bytes()
    try:
        return read_bytes(path)
    except FileNotFoundError:
        pass
    for attempt in range(4):
        sessions = _sessions(path)
        for session in sorted(sessions, reverse=True):
            content = _session_content(path, session)
            if content is not None:
                return content
        if not any(0 in numbers for numbers in sessions.values()):
            raise FileNotFoundError(f"{path} does not exist")
        time.sleep(attempt)  # the listing names deleted sessions, and not yet the one that replaced them
    raise DataError(f"{path} cannot be read: the segments that the store lists are not there. Try again later.")


def log_exists(path: AnyPath) -> bool:
    """Whether there is a file of JSON lines, or the segments of a remote log."""
    return exists(path) or (is_remote(path) and exists(path.with_name(path.name + SUFFIX)))


def _sessions(path: AnyPath) -> dict[str, list[int]]:
    """The listed sessions of a log, and the numbers of their segments."""
    found: dict[str, list[int]] = {}
    for name in listing(path.with_name(path.name + SUFFIX)):
        if match := _NAME.fullmatch(name):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


def _session_content(path: AnyPath, session: str) -> bytes | None:
    """The joined segments of a session; None if it has no first one."""
    parts: list[bytes] = []
    while True:
        try:
            parts.append(read_bytes(_segment(path, session, len(parts))))
        except FileNotFoundError:
            return b"".join(parts) if parts else None


def _segment(path: AnyPath, session: str, number: int) -> AnyPath:
    return path.with_name(path.name + SUFFIX) / f"{session}.{number:06d}"


class SegmentWriter:
    """A session that writes a remote log. Once the whole lines that it `kept` are stored, earlier ones are deleted."""

    def __init__(self, path: AnyPath, kept: bytes):
        self._path = path
        earlier = _sessions(path)
        # By the clock, and after those that are listed, should a clock go wrong.
        number = max([int(time.time() * 1000), *(int(session[:16]) + 1 for session in earlier)])
        self._session, self._number, self._open = f"{number:016d}-{secrets.token_hex(2)}", 0, b""
        self.write(kept)
        for session, numbers in earlier.items():
            for number in sorted(numbers, reverse=True):  # a session without its end is a prefix still
                remove(_segment(path, session, number))
        remove(path)  # a whole file, such as a local run that was copied to the store

    def write(self, lines: bytes) -> None:
        """Appends whole lines; on return they are stored. At an error they are not, and may be written again."""
        put(_segment(self._path, self._session, self._number), self._open + lines)
        self._open += lines
        if len(self._open) >= SEGMENT_BYTES:
            self._number, self._open = self._number + 1, b""
