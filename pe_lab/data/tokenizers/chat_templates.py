"""Chat templates: programs of other people, rendered in a process with bounds on its time and memory.

Jinja's sandbox hides Python from a template. It does not bound what one computes: a template may count to 10^10, double
a string 60 times or recurse. This file is also the program of that process, which imports nothing of pe_lab.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 5  # of a processor, for one chat
MEMORY_BYTES = 2**30  # of the process
MOST_CHARACTERS = 2**26  # of a rendered chat
_MARK = f"<generation {secrets.token_hex(8)}>"  # in a rendered template, before and after an answer


class TemplateFails(Exception):
    """A template cannot be rendered with these messages; the message says why."""


def render(template: str, values: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
    """What a template renders, and the characters [start, stop) in each `{% generation %}`; None without such blocks.

    Args:
      template: of Jinja.
      values: its variables, of which a `datetime.date` is the day that `strftime_now` writes.

    Raises:
      TemplateFails: it fails, or does not end within the bounds.
    """
    with _lock:
        return _renderer(os.getpid()).render(template, values)


class _Renderer:
    """The process, which renders one chat after another."""

    def __init__(self) -> None:
        # Interruptions from the keyboard are for the parent alone. -P: the files beside this one are no modules.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
            start_new_session=True,
        )

    def render(self, template: str, values: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
        try:
            asked = json.dumps([template, values], default=_day)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFails(str(error)) from None
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        try:
            self._process.stdin.write(f"{asked}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:  # such as an interruption: the answer would be taken for that of the next chat
            self.close()
            raise
        if not answer.endswith("\n"):
            self.close()
            raise TemplateFails(f"it does not end within {SECONDS} seconds and {MEMORY_BYTES // 2**20} MiB")
        text, ranges, error = json.loads(answer)
        if error:
            raise TemplateFails(error)
        return text, None if ranges is None else [(start, stop) for start, stop in ranges]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        _renderer.cache_clear()


_lock = threading.Lock()


@functools.lru_cache(1)
def _renderer(process: int) -> _Renderer:
    """The renderer of a process, which after a fork is not that of its parent."""
    made = _Renderer()
    atexit.register(made.close)
    return made


def _day(value: Any) -> Any:
    if isinstance(value, datetime.date):
        return {"day": value.isoformat()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{value!r} is no JSON")


# ---------------------------------------------------------------------------------------------------------------------
# The process


def _serve() -> None:
    """Reads a template and values from each line of standard input, and writes a line with the answer."""
    import contextlib
    import resource
    import signal

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # A process inherits what its parent ignores or blocks, and libraries of the parent may ignore this one.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process, also inside a function in C
        try:
            answer: list[Any] = [*_rendered(*json.loads(line)), None]
        except MemoryError:
            answer = ["", None, f"it needs more than {MEMORY_BYTES // 2**20} MiB"]
        except Exception as error:
            why = str(error) if type(error).__module__.startswith("jinja2") else f"{type(error).__name__} {error}"
            answer = ["", None, why.strip()[:1000]]
        text = json.dumps(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(text, flush=True)


def _rendered(template: str, values: dict[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
    """`render`, without bounds."""
    compiled, marked = _compiled(template)
    if isinstance(day := values.get("strftime_now"), dict):
        values["strftime_now"] = datetime.date.fromisoformat(day["day"]).strftime
    parts, ranges, length = compiled.render(**values).split(_MARK), [], 0
    for i, part in enumerate(parts):  # outside, inside, outside ...
        ranges += [(length, length + len(part))] if i % 2 else []
        length += len(part)
    if length > MOST_CHARACTERS:
        raise ValueError(f"it renders {length:,} characters; a chat has {MOST_CHARACTERS:,} at most")
    return "".join(parts), ranges if marked else None


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> tuple[Any, bool]:
    """The template, compiled in the sandbox, and whether it marks answers."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    marked = False

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}`, which marks the assistant's answers for training: its content, between two marks."""

        tags = {"generation"}

        def parse(self, parser):
            nonlocal marked
            marked = True
            next(parser.stream)
            content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = jinja2.nodes.Output([jinja2.nodes.TemplateData(_MARK)])
            return [mark, *content, mark]

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    del environment.filters["random"], environment.globals["lipsum"]  # a chat would not be the same twice
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template), marked


if __name__ == "__main__":
    _serve()
