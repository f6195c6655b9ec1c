"""What a person sees while a phase trains."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def console() -> Console:
    """The terminal on the first process; silence on the others."""
    return Console(quiet=jax.process_index() != 0, soft_wrap=True, highlight=False)


class TrainingProgress:
    """A bar with loss, tokens/s, MFU and time left; where there is no terminal, a line every ten seconds."""

    def __init__(self, out: Console, name: str, step: int, steps: int):
        self._out, self._name, self._steps = out, name, steps
        self._live = out.is_terminal and sys.stdout.isatty() and not out.quiet
        self._next_line = time.monotonic() + 2
        self._bar: Any = None
        if self._live:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=out,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task(name, total=steps, completed=step, numbers="compiling")

    def update(self, step: int, loss: float, tokens_per_second: float, mfu: float | None, seconds_left: float) -> None:
        numbers = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 10
            minutes, seconds = divmod(int(seconds_left), 60)
            self._out.print(f"{self._name} {step}/{self._steps}  {numbers}  {minutes}:{seconds:02d} left")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
