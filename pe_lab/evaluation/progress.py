"""Progress of an evaluation, in tokens."""

from __future__ import annotations

import time
from typing import Any

from pe_lab.results.formatting import percent
from pe_lab.terminal import Progress, console


class TokenProgress(Progress):
    """A progress bar of the tokens that are read.

    Args:
      name: what is under way.
      total: tokens in all, about; None: not known.
      out: a console; by default one that prints.

    Attributes:
      read: the tokens read so far.
      done: the part of the total that is done.
    """

    def __init__(self, name: str, total: int | None = None, out: Any = None):
        super().__init__(out or console(), name, total)
        self._tokens, self._start = total, time.monotonic()
        self.read = self.done = 0

    def add(self, tokens: int, name: str | None = None) -> None:
        """Adds tokens that were read; `name` is what they were read for."""
        self.read += tokens
        self.show(self.done + tokens, name)

    def add_up(self, tokens: int) -> None:
        """Adds tokens that were read to what is done."""
        self.read += tokens
        self.show(self.read)

    def show(self, done: int, name: str | None = None) -> None:
        """Shows that `done` of the total is done."""
        self.done = done if self._tokens is None else min(done, self._tokens)
        text = f"{done:,} tokens" if self._tokens is None else percent(self.done / max(self._tokens, 1))
        self.update(self.done, text, name)

    def speed(self) -> str:
        """One line for the end of an evaluation."""
        return describe_speed(self.read, time.monotonic() - self._start)


def describe_speed(tokens: int, seconds: float) -> str:
    return f"Read {tokens:,} tokens in {seconds:.1f} s, compiling included: {tokens / seconds:,.1f} tokens/s"
