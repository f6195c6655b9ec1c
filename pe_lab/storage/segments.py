"""Logs on object stores, where nothing can be appended to: a log is a directory of segments.

    metrics.jsonl.segments/SESSION.SEGMENT      such as 00001795449186494-3fa2.000002

A session's segments follow each other without a gap; each holds whole lines. Only the last one is written again,
longer, until it is full. Segment 0 of a session begins with all records that the session keeps of earlier ones, whose
segments it then deletes. So the newest session that has a segment 0 is a consistent prefix of the log, whenever a
process died.
"""

from __future__ import annotations

import re
import secrets
import time

from pe_lab.errors import DataError
from pe_lab.storage.paths import AnyPath, exists, is_remote, listing, put, read_bytes, remove

SUFFIX = ".segments"
SEGMENT_BYTES = 2**18
_NAME = re.compile(r"(\d{16}-[0-9a-f]{4})\.(\d{6})")


def read_log(path: AnyPath) -> bytes:
    """The content of a file of JSON lines, or of the segments of a remote log; `FileNotFoundError` if there is neither.

    Segments that a lagging listing does not name yet are asked for by name.
    """
    if not is_remote(path):
        return path.read_bytes()
    try:
        return read_bytes(path)
    except FileNotFoundError:
        pass
    for attempt in range(4):
        sessions = _sessions(path)
        for session in sorted(sessions, reverse=True):
            content = _content(path, session)
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


def _content(path: AnyPath, session: str) -> bytes | None:
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
    """A session that writes a remote log.

    Args:
      path: the log.
      kept: what it keeps of earlier sessions, in whole lines. Once that is stored, theirs is deleted.
    """

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
