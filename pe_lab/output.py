"""Standard output and standard error of a process: what happens to a command whose reader goes away."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBERS = {"stdout": 1, "stderr": 2}
_protected: list[_Output] = []  # standard output of a command that is a process of its own


class _Output(io.FileIO):
    """A standard stream. Once nobody can read it, what is written goes nowhere.

    Attributes:
      ends: whether the command ends then, since its output is all that it makes: with status 0 if the reader has closed
        it, with an `OSError` if the disk of its file is full. Without, it works on.
      incomplete: whether something did not fit on the disk.
    """

    def __init__(self, name: str, ends: bool):
        super().__init__(_NUMBERS[name], "wb", closefd=False)
        self.name, self.ends, self.incomplete = f"<{name}>", ends, False
        self._closed = False

    def write(self, data: Any) -> int | None:
        if self._closed and self.ends:  # a thread may have met it, which the exception ends alone
            raise SystemExit(0)
        try:
            return super().write(data)
        except OSError as error:
            full, told = error.errno in _FULL, self.incomplete
            if full:  # there may be space again later
                self.incomplete = True
            else:  # /dev/null also for libraries that write past Python, and for processes that are started
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
                self._closed = True
            if full and not told and self.fileno() == 1:
                if self.ends:
                    raise OSError(error.errno, error.strerror, "standard output") from None
                tell_at_once(f"standard output: {error.strerror}. What is printed is lost; the work goes on.")
            elif not full and self.ends:
                raise SystemExit(0) from None  # which rich, threads and `except Exception` let pass
            return len(data)


def open_standard_streams() -> None:
    """Opens the standard streams that are closed on /dev/null, which no other file then takes the numbers of."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def protect_streams() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by streams that may be closed, or full, at any time.

    A command whose output is all that it makes ends when its output does, until `work_on` is called.
    """
    open_standard_streams()
    for name in _NUMBERS:
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):  # None if it was closed
            stream.flush()
        raw = _Output(name, ends=name == "stdout")
        at_once = getattr(stream, "write_through", False)
        made = io.TextIOWrapper(
            raw if at_once else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python does with -u
            encoding=getattr(stream, "encoding", None) or "utf-8",
            errors=getattr(stream, "errors", None) or "backslashreplace",
            newline="\n",
            line_buffering=getattr(stream, "line_buffering", name == "stderr"),
            write_through=at_once,
        )
        setattr(sys, name, made)
        if name == "stdout":
            _protected[:] = [raw]


def work_on() -> None:
    """Lets the command go on when its standard output is closed or full: what it makes is in files, or its status."""
    for output in _protected:
        output.ends = False


def flush_at_the_end() -> bool:
    """Writes what is left of standard output; whether all that was printed fitted on the disk. Raises nothing."""
    ended = [output.ends for output in _protected]
    work_on()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return not (any(ended) and any(output.incomplete for output in _protected))


def tell_at_once(line: str) -> None:
    """Writes a line to standard error past its buffers, which another thread may have locked; it may be closed."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
