"""An analysis of `pe_lab.analyze`, and its measured parts, which an analysis that is run again reads."""

from __future__ import annotations

import argparse
import io
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pe_lab.errors import ConfigError, StoreError
from pe_lab.parallel import is_first, on_first
from pe_lab.results.findings import Arrays, Findings, packed
from pe_lab.results.records import digest
from pe_lab.storage import AnyPath, read_bytes, write_file

Identity = Mapping[str, Any]  # of a part: what its numbers depend on


@dataclass(frozen=True)
class Analysis:
    """An analysis of `pe_lab.analyze`.

    A module of `pe_lab.analysis` that measures models has a function `measure(lm, tokens, ...)`, which a notebook
    calls, and this record as `ANALYSIS`. `pe_lab.analyze` lists it, with a line that says what it is.

    Attributes:
      source: the papers' sections and figures.
      options: adds the analysis's own flags.
      run: what it finds; it gets a `session.AnalysisSession` if `models`, else the parsed command line. None: nothing
        was measured (--dry-run), or all is printed, and nothing is written.
      models: whether it measures models, named by `--from`.
    """

    source: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Any], Findings | None]
    models: bool = True


class Parts:
    """Measured parts of an analysis on disk, one file each, so that an analysis that was ended goes on where it was.

    A part is named by a digest of its identity: the weights, the layers' encodings, the sequence, the settings. Equal
    identities have equal results. A file is written whole or not at all; a damaged one is measured again.

    Args:
      directory: of the files.
      again: whether parts that exist are measured again.
    """

    def __init__(self, directory: AnyPath, again: bool = False):
        self.directory, self._again = directory, again
        self._fresh: set[str] = set()

    def path(self, identity: Identity) -> AnyPath:
        """The file of a part."""
        return self.directory / f"{digest(identity)}.npz"

    def find(self, identity: Identity) -> dict[str, np.ndarray] | None:
        """The arrays of a part that was measured; None if it was not, or is to be measured again."""
        path = self.path(identity)
        if self._again and path.name not in self._fresh:
            return None
        try:
            with np.load(io.BytesIO(read_bytes(path))) as stored:
                return dict(stored)
        except StoreError:
            raise
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
            return None

    def find_all(self, identities: Sequence[Identity]) -> dict[str, dict[str, np.ndarray]]:
        """The parts that were measured, by the digest of their identity."""

        def found() -> dict[str, dict[str, np.ndarray]]:
            parts = {digest(identity): self.find(identity) for identity in identities}
            return {name: part for name, part in parts.items() if part is not None}

        return on_first(found)

    def put(self, identity: Identity, arrays: Arrays) -> None:
        """Writes a part. Of several processes the first one does."""
        if not is_first():
            return
        path = self.path(identity)
        write_file(path, packed(arrays), "Give another directory with --out.")
        self._fresh.add(path.name)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers on a command line


def number(option: str, text: str) -> float:
    """A number such as 2, 0.5 or 1e4."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: '{text}' is not a number.") from None


def whole(option: str, text: str) -> int:
    """A whole number such as 2048, 1e4 or 2k, which is 2048."""
    thousands = text.lower().endswith("k")
    value = number(option, text[:-1] if thousands else text) * (1024 if thousands else 1)
    if not value.is_integer():
        raise ConfigError(f"{option}: '{text}' is not a whole number.")
    return int(value)


def items(option: str, text: str) -> tuple[str, ...]:
    """The parts of `a,b,c`."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ConfigError(f"{option}: '{text}' has an empty place; separate the values with commas.")
    return parts


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of `1,0.5,1e4`."""
    return tuple(number(option, part) for part in items(option, text))
