"""A file of JSON lines that grows while a program runs, on a disk or on an object store."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from pe_lab.errors import DataError, StoreError
from pe_lab.storage.paths import AnyPath, is_full, is_remote
from pe_lab.storage.segments import SegmentWriter, read_log

FLUSH_SECONDS = 30.0


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
        """Opens the log.

        Args:
          path: the log.
          kept: the records that it then has, in place of those it had; by default all that are whole.
          advice: what to do if it cannot be written, for messages.
          waits: a full disk is no error of `append`: the records wait for space. Then `flush` raises while there is
            none, and `close` drops them.
        """
        self.path, self._advice, self._waits, self._file = path, advice, waits, None
        self._pending: list[bytes] = []  # to a store: what `_sending` is not sending
        self._lock, self._sending, self._closed = threading.Lock(), threading.Lock(), threading.Event()
        if not is_remote(path):
            self._file = self._opened(None if kept is None else b"".join(map(record_line, kept)))
            return
        if kept is None:
            content = b""
            with contextlib.suppress(FileNotFoundError):
                content = read_log(path)
            content = content[: content.rfind(b"\n") + 1]
        else:
            content = b"".join(map(record_line, kept))
        self._writer = SegmentWriter(path, content)
        self._sender = threading.Thread(target=self._send_regularly, daemon=True)
        self._sender.start()

    def _opened(self, content: bytes | None) -> BinaryIO:
        """The local file, open at its end, without the part of a line that a killed process has left."""
        from pe_lab.storage.files import write_file

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                write_file(self.path, content, self._advice)
            file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
            _cut_off_partial_line(file)
            return file
        except OSError as error:
            raise self._unwritten(error) from None

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
