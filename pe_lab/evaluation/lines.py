"""The file of a prompted suite: a line of JSON for every sample, in the order in which they were answered.

Lines are only ever added, a batch at a time, and are on disk before the next batch begins. A process that is killed
leaves whole lines and perhaps a part of one, which the next one cuts off: nothing that was finished is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.config import UserError

Line = dict[str, Any]
KEY = ("checkpoint_id", "reading", "suite", "task", "length", "seed", "settings", "index")  # what a line answers


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a line the answer to a question, and not to another."""
    return tuple(line.get(name) for name in KEY)


class LineFile:
    """One suite's lines.

    Raises:
      UserError: a line that is whole is no JSON object, or the file cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines: dict[tuple[Any, ...], Line] = {key(line): line for line in self._read()}

    def _read(self) -> Iterator[Line]:
        if not self.path.exists():
            return
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}).") from None
        whole = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict):
                raise UserError(f"{self.path}, line {number}, is no sample. Move the file away and evaluate again.")
            yield line

    def add(self, lines: Sequence[Line]) -> None:
        """Writes lines that are not there yet; on return they are on disk."""
        new = [line for line in lines if key(line) not in self.lines]
        if not new:
            return
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                _cut_off_half_a_line(file)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}). Give another directory with --out."
            ) from None
        self.lines.update({key(line): line for line in new})

    def forget(self, unwanted: Sequence[tuple[Any, ...]]) -> None:
        """Takes lines out of the file, so that their samples are answered again."""
        gone = set(unwanted) & set(self.lines)
        if not gone:
            return
        kept = [line for line in self._read() if key(line) not in gone]
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise UserError(f"{self.path} cannot be written ({error.strerror}).") from None
        self.lines = {key(line): line for line in kept}


def _cut_off_half_a_line(file: Any) -> None:
    """What a killed process left of a line after the last whole one."""
    size = file.seek(0, os.SEEK_END)
    back = 0
    while back < size:
        step = min(size - back, 2**16)
        file.seek(size - back - step)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            file.truncate(size - back - step + found + 1)
            break
        back += step
    else:
        file.truncate(0)
    file.seek(0, os.SEEK_END)
