"""Directories that appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pe_lab.config import UserError


@contextmanager
def new_directory(path: Path, option: str) -> Iterator[Path]:
    """A directory to fill beside `path`, which becomes `path` when the block ends well, and goes if it does not.

    What a killed process left of an earlier try is removed.

    Raises:
      UserError: there is something at `path`.
    """
    path = path.absolute()  # "." has no name of its own
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{option} '{path}' is there and not empty. Choose another directory, or remove it.")
    beside = path.with_name(f".{path.name}.partial")
    try:
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{option} '{path}' cannot be written ({error.strerror or error}).") from error
    try:
        yield beside
        if path.exists():
            path.rmdir()  # it is empty
        beside.rename(path)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"{option} '{path}' cannot be written ({error.strerror or error}).") from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
