"""What a command shows: errors, tables and progress. Every command and library prints through this module."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from pe_lab.errors import (
    ConfigError,
    SaveFailed,
    SilentCorruption,
    TrainingDiverged,
    UserError,
    causes,
    excerpt,
    redacted,
    store_failure,
)
from pe_lab.output import flush_at_the_end, protect_streams, tell_at_once, work_on

Number = TypeVar("Number", int, float)
_shell: list[bool] = []  # not empty: a shell started the command, also through `python -m pe_lab`
LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Wraps a command's `main`, which gets a list of arguments, by default those of the command line.

    A `UserError` becomes one message on stderr and exit status 2, and so does a failure of an object store or of the
    machine: a full disk, a directory that cannot be written, memory that does not suffice. `TrainingDiverged` and
    `SilentCorruption` are status 1, `SaveFailed` status 3, an interruption from the keyboard one line and status 130.
    As a process, a command ends with status 0 when the reader of its standard output closes it; see `works_on`.
    """

    @functools.wraps(main)
    def wrapper(argv: Sequence[str] | None = None) -> int:
        if argv is not None:
            return _run(main, list(argv))
        _shell.append(True)
        protect_streams()
        try:
            status = _run(main, sys.argv[1:])
        except BaseException:
            flush_at_the_end()
            raise
        return status if flush_at_the_end() else status or 2

    return wrapper


def works_on(main: Callable[..., int]) -> Callable[..., int]:
    """`command` for one that makes files, or a status: it works on when its standard output is closed, or full."""

    @functools.wraps(main)
    def working(argv: Sequence[str]) -> int:
        work_on()
        return main(argv)

    return command(working)


def _run(main: Callable[..., int], argv: list[str]) -> int:
    """`main`, whose errors become messages."""
    for stream in (sys.stdout, sys.stderr):
        # A file name need not be UTF-8, and a terminal need not know every character: print shows an escape.
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    encodings = os.environ.get(ENCODINGS, "")
    try:
        return main(argv)
    except (UserError, TrainingDiverged, SilentCorruption, SaveFailed) as error:
        print(f"error: {shortened(redacted(str(error)))}", file=sys.stderr)
        return {TrainingDiverged: 1, SilentCorruption: 1, SaveFailed: 3}.get(type(error), 2)
    except KeyboardInterrupt:
        if not _shell:
            print("interrupted", file=sys.stderr, flush=True)
            return 128 + signal.SIGINT
        # What an interrupted compilation has left crashes Python's own ending. A second interruption changes nothing.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        flush_at_the_end()
        tell_at_once("interrupted")
        os._exit(128 + signal.SIGINT)
    except Exception as error:
        reason = store_failure(error) or machine_failure(error)
        if reason is None:
            raise
        if _shell:  # the process ends: threads and writers that meet the same failure say nothing more
            threading.excepthook = sys.unraisablehook = lambda *_: None
        print(f"error: {shortened(redacted(str(reason)))}", file=sys.stderr)
        return 2
    finally:
        os.environ[ENCODINGS] = encodings


def stop_while_importing() -> None:
    """Ends this process with status 75 at SIGTERM and SIGINT, until the command takes them: nothing is to be saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))


def shortened(message: str) -> str:
    """A message in which words of more than 300 characters, such as a value that was given, lack their middle."""
    return re.sub(r"(\S{200})\S{80,}(\S{20})", r"\1...\2", message)


def _several_processes() -> bool:
    import jax

    return jax.distributed.is_initialized()


def leave(status: int) -> NoReturn:
    """Ends the process with the status of a command."""
    if status == os.EX_TEMPFAIL and not _several_processes():
        # The request to stop may have come in the middle of a compilation, whose threads Python's end does not survive.
        flush_at_the_end()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# What to do about an error of the system. Libraries repeat the text of the first of them in errors of their own.
_SPACE, _WRITE = "Free some space, or write elsewhere.", "Change its permissions, or give another path."
_WRAPPED = {errno.ENOSPC: _SPACE, errno.EDQUOT: _SPACE, errno.EROFS: "Write elsewhere.", errno.EACCES: _WRITE}
_ADVICE = _WRAPPED | {errno.EPERM: _WRITE, errno.EMFILE: "Raise the limit of open files: ulimit -n 65536."}
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "Unable to allocate")


def machine_failure(error: BaseException) -> str | None:
    """The message for an error that a disk, a file system or the memory caused; None for any other error.

    Orbax, tensorstore and XLA wrap such errors in others, or repeat their text: the chain of causes is searched.
    """
    chain = causes(error)
    for one in chain:
        lines = str(one).strip().splitlines() or ["it is exhausted"]
        if isinstance(one, ValueError) and "embedded null" in str(one):
            return "A path has a NUL character, which no path may have."
        # Of other errors of the system only the one that ended the command: others were met and dealt with.
        if isinstance(one, OSError) and (one.errno in _ADVICE or (one is chain[0] and one.errno is not None)):
            where = f"'{one.filename}': " if one.filename is not None else ""
            advice = _ADVICE.get(one.errno, "Check the path, and run the command again.")
            return f"{where}{os.strerror(one.errno)}. {advice}"
        for code, advice in _WRAPPED.items():  # before the memory: tensorstore calls a full disk RESOURCE_EXHAUSTED too
            line = next((line.strip() for line in lines if os.strerror(code) in line), None)
            if line is not None:
                return f"{excerpt(line)}. {advice}"
        # tensorstore calls a full disk exhausted, too.
        if isinstance(one, MemoryError) or any(words in str(one) for words in _OUT_OF_MEMORY):
            shown = excerpt(lines[0], 200)
            return f"The memory of this machine does not suffice ({shown}). Ask for less, or use a larger one."
    return None


def bounded(kind: type[Number], least: Number, most: Number) -> Callable[[str], Number]:
    """The type of a numeric flag, for argparse: an int or a float in these bounds, ends included."""

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:  # NaN lies nowhere
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{excerpt(text, 40)}' is not {what} from {least:,} to {most:,}")
        return value

    return parse


# Counts of tokens, samples and steps are int32 on the devices, seeds uint32.
positive, natural, any_seed = bounded(int, 1, 2**31 - 1), bounded(int, 0, 2**31 - 1), bounded(int, 0, 2**32 - 1)


def any_text(text: str) -> str:
    """The type of an argument that may be empty."""
    return text


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of pe_lab, and that refuses an empty value where `any_text` does not allow it.

    `--layers="$LAYERS"` with a variable that is not set would mean what the flag means without a value, or nothing.
    """

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings and action.type is not any_text:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise ConfigError(f"{name} is empty: give a value (--help lists the options)")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the options)")


# Files and modules of encodings, as a JSON list, for this process and those that it starts.
ENCODINGS = "PE_LAB_ENCODINGS"
_importers: list[Callable[[str], Any]] = []
_imported: set[str] = set()


def import_encodings_by(function: Callable[[str], Any]) -> None:
    """Imports the encodings that `--encodings` named so far by this function, once, and those that it will name."""
    _importers[:] = [function]
    for reference in _passed_on():
        if reference not in _imported:
            _imported.add(reference)
            function(reference)


def pass_on_encodings(reference: str) -> None:
    """Lets the processes that a command starts import a file or a module of encodings."""
    os.environ[ENCODINGS] = json.dumps(list(dict.fromkeys([*_passed_on(), reference])))


def _passed_on() -> list[str]:
    return json.loads(os.environ.get(ENCODINGS) or "[]")


class _Encodings(argparse.Action):
    """`--encodings=FILE`. A command may import `pe_lab.positional`, which reads the file, before or after."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values.endswith(".py"):
            values = os.path.abspath(values)
            if not os.path.isfile(values):
                raise ConfigError(f"--encodings: there is no file '{values}'.")
        pass_on_encodings(values)
        for function in _importers:
            _imported.add(values)
            function(values)


def argument_parser(
    command: str, description: str, epilog: str | None = None, **options: Any
) -> argparse.ArgumentParser:
    """The parser of `python -m pe_lab.COMMAND`. Its help wraps the texts, unless they have lines of their own.

    `parse_args` raises `ConfigError` for a bad command line.
    """
    own_lines = "\n" in description + (epilog or "")
    parser = _Parser(
        prog=f"python -m pe_lab.{command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if own_lines else argparse.HelpFormatter,
        **options,
    )
    parser.add_argument(
        "--encodings",
        action=_Encodings,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="a Python file, or a module, that registers positional encodings; may be repeated",
    )
    return parser


def console(quiet: bool = False, stderr: bool = False) -> Any:
    """A rich console that prints text as it is, but for credentials: no wrapping, no highlighting, no markup."""
    from rich.console import Console

    class Redacting(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(redacted(one) if isinstance(one, str) else one for one in objects), **options)

    return Redacting(quiet=quiet, stderr=stderr, soft_wrap=True, highlight=False, markup=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table as text, without a frame: `words` columns of words, aligned to the left, then columns of numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for n, title in enumerate(header):
        drawn.add_column(Text(title), justify="left" if n < words else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    screen = Console(width=100_000, color_system=None, legacy_windows=False)
    with screen.capture() as captured:
        screen.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


@contextlib.contextmanager
def waiting(out: Any, name: str, at_once: bool = True) -> Iterator[None]:
    """Prints a line every ten seconds while a call runs that reports no progress, such as a compiler.

    `at_once`: the first one now, and not only where ten seconds have passed.
    """
    done, begun = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(LINE_SECONDS):
            out.print(f"{name}: {time.monotonic() - begun:.0f} s")

    if at_once:
        out.print(f"{name} ...")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


class Progress:
    """Progress towards a total: a bar with the time left in a terminal, elsewhere a line every ten seconds.

    Args:
      out: a rich console.
      name: what is under way.
      total: how much there is to do; None if that is not known.
      done: how much of it was done before.
    """

    def __init__(self, out: Any, name: str, total: float | None, done: float = 0):
        self._out, self._name, self._total, self._begun = out, redacted(name), total, (time.monotonic(), done)
        self._next_line = time.monotonic() + LINE_SECONDS / 2
        self._bar: Any = None
        if out.is_terminal and not out.quiet:
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}")
            self._bar = Bar(*columns, TimeRemainingColumn(), console=out, refresh_per_second=4, transient=True)
            self._task = self._bar.add_task(name, total=total, completed=done, text="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, text: str = "", name: str | None = None) -> None:
        """Shows that `done` of the total is done; `text` says it in the caller's units, `name` what is under way."""
        self._name = self._name if name is None else name
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text, description=self._name)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._out.print(" ".join(filter(None, [self._name, text, self._left(done)])))

    def found(self, amount: float) -> None:
        """Some of what will be `done` was found done: it takes no time, and is no measure of speed."""
        start, before = self._begun
        self._begun = start, before + amount

    def _left(self, done: float) -> str:
        start, before = self._begun
        if self._total is None or done <= before:
            return ""
        seconds = (time.monotonic() - start) * (self._total - done) / (done - before)
        return "{}:{:02d} left".format(*divmod(max(int(seconds), 0), 60))


@contextlib.contextmanager
def byte_progress(name: str, size: int) -> Iterator[Callable[[int], None]]:
    """Progress towards `size` bytes, on standard error; the function is called with the bytes of each block."""
    done = 0
    with Progress(console(stderr=True), name, size) as progress:

        def update(more: int) -> None:
            nonlocal done
            done += more
            progress.update(done, f"{done / 1e9:.1f} of {size / 1e9:.1f} GB")

        yield update


class LiveText:
    """A text that is drawn anew in its place in a terminal; elsewhere `line` is printed every ten seconds.

    Args:
      out: a rich console.
    """

    def __init__(self, out: Any):
        self._out, self._live = out, None
        self._next_line = time.monotonic() + LINE_SECONDS / 2

    def __enter__(self) -> LiveText:
        if self._out.is_terminal and not self._out.quiet:
            from rich.live import Live

            self._live = Live(console=self._out, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, text: str, line: str) -> None:
        """Shows the text, cut to the terminal's height."""
        if self._live is not None:
            from rich.text import Text

            lines = text.split("\n")[: max(self._out.height - 2, 1)]
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._out.print(line)
