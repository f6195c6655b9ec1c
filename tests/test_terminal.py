"""What commands print while they work."""

from __future__ import annotations

import errno
import io
import os
import re

import pytest
from rich.console import Console

from pe_lab import terminal
from pe_lab.errors import UserError, excerpt
from pe_lab.terminal import LiveText, Progress


def test_an_excerpt_cuts_no_number():
    assert excerpt("of 12 345", 9) == "of 12 345"
    assert excerpt("of 12 345", 8) == "of 12..."
    assert excerpt("of 12 345", 5) == "of 12..."
    assert excerpt("9" * 50, 10) == "9999999999..."


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left(clock):
    out = io.StringIO()
    with Progress(Console(file=out), "reading", total=1000, done=200) as progress:
        for _ in range(8):
            clock[0] += 3
            progress.update(200 + 50 * (clock[0] - 1000) / 3, text="some")
    # 50 in 3 s; the 200 of an earlier session are no measure of speed. At 6 s 700 are left, at 18 s 500.
    left = re.findall(r"^reading some (\d+):(\d\d) left$", out.getvalue(), re.M)
    assert [60 * int(minutes) + int(seconds) for minutes, seconds in left] == [42, 30]


def test_parts_that_were_found_are_no_measure_of_speed(clock):
    out = io.StringIO()
    progress = Progress(Console(file=out), "reading", total=1000)
    progress.found(600)
    clock[0] += 60
    progress.update(700)  # 100 in 60 s: the 300 that are left take 180 s
    assert out.getvalue() == "reading 3:00 left\n"


@pytest.mark.parametrize(("total", "done"), [(None, 5), (10, 2)])
def test_no_time_is_promised_where_none_is_known(clock, total, done):
    out = io.StringIO()
    progress = Progress(Console(file=out), "reading", total=total, done=2)
    clock[0] += 60
    progress.update(done, name="writing")
    assert out.getvalue() == "writing\n"


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(clock):
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=80), "reading", total=4) as progress:
        progress.update(2, text="two of four")
    erase_the_line_above = "\x1b[1A\x1b[2K"
    assert "two of four" in out.getvalue() and out.getvalue().endswith(erase_the_line_above)


def test_a_live_text_fits_a_terminal_and_is_lines_elsewhere(clock):
    out = io.StringIO()
    with LiveText(Console(file=out, force_terminal=True, width=80, height=6)) as live:
        live.update("\n".join(f"cell {n}" for n in range(9)), "a line")
    assert "cell 3" in out.getvalue() and "cell 4" not in out.getvalue() and "a line" not in out.getvalue()
    out = io.StringIO()
    with LiveText(Console(file=out)) as live:
        for seconds in (0, 6, 3, 8):
            clock[0] += seconds
            live.update("cell 0", f"after {seconds}")
    assert out.getvalue() == "after 6\nafter 8\n"


def test_a_full_disk_is_not_taken_for_full_memory():
    """tensorstore calls both RESOURCE_EXHAUSTED."""
    error = ValueError('RESOURCE_EXHAUSTED: Error writing local file "/run/params": No space left on device')
    assert "Free some space" in terminal.machine_failure(error)
    assert "The memory of this machine" in terminal.machine_failure(ValueError("RESOURCE_EXHAUSTED: 3 GB"))


def wrapped(inner: Exception, outer: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"), "'a/b': No space left on device. Free some space"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "a"), "'a': Read-only file system. Write elsewhere"),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a"),
            "'a': Permission denied. Change its permissions",
        ),
        (wrapped(OSError(errno.ENOSPC, "x", "a"), ValueError("y")), "'a': No space left on device."),
        (
            ValueError("INTERNAL: writing d/0:\nerrno 28: No space left on device [source]\nmore"),
            "errno 28: No space left",
        ),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            "memory of this machine does not suffice",
        ),
        (ValueError("RESOURCE_EXHAUSTED: a No space left on device"), "a No space left on device. Free some space"),
        (MemoryError(), "memory of this machine does not suffice"),
        (wrapped(FileNotFoundError(errno.ENOENT, "x", "a"), KeyError("k")), None),
        (ValueError("another"), None),
    ],
)
def test_failures_of_the_machine_are_one_message(error, says, capsys):
    @terminal.command
    def main(argv):
        raise error

    if says is None:
        with pytest.raises(type(error)):
            main([])
        return
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and says in printed and printed.count("\n") == 1


def test_a_message_with_a_lone_surrogate_or_a_giant_word_is_printed(capsys):
    @terminal.command
    def main(argv):
        raise UserError(f"no file '\udcff' or '{'x' * 9000}'")

    assert main([]) == 2
    printed = capsys.readouterr().err
    assert "no file '\\udcff' or" in printed and len(printed) < 400
