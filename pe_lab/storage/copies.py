"""Local copies of what lies on an object store, for readers that need a file of this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pe_lab.errors import DataError
from pe_lab.storage.directories import new_directory
from pe_lab.storage.paths import AnyPath, Entry, at_home, entry, filesystem, is_remote, listing, store_errors

WHOLE = ".whole"  # in the directory of a copy that is complete
RESERVED_BYTES = 2**30  # bytes of the disk that copies leave free


def copies_directory() -> Path:
    """Where copies are kept: `$PE_LAB_CACHE` or ~/.cache/pe_lab. It may be deleted when nothing runs."""
    return at_home(os.environ.get("PE_LAB_CACHE") or "~/.cache/pe_lab") / "objects"


def local_copy(path: AnyPath, check: Callable[[Path], None] = lambda copied: None) -> Path:
    """A local file or directory with the content of a remote one; a local path itself.

    It is fetched once for each content that the store has under the name, and is whole or not there.

    Args:
      path: a file or a directory.
      check: is called with the copy before anyone else sees it, and raises if it is damaged.

    Raises:
      DataError: there is no such file, it does not fit the disk, or what arrived is not what the store lists.
      StoreError: the store refuses, or does not answer.
    """
    if not is_remote(path):
        return path
    single = entry(path)
    files = {"": single} if single else listing(path)
    if not files:
        raise DataError(f"There is no '{path}'.")
    key = hashlib.sha256(repr((str(path), sorted((n, e.size, e.version) for n, e in files.items()))).encode())
    directory = copies_directory() / key.hexdigest()[:24]
    copy = directory / path.name
    if (directory / WHOLE).is_file():
        return copy
    _check_space(path, sum(e.size for e in files.values()))
    with new_directory(directory, marker=WHOLE) as building:
        for name, expected in files.items():
            source, target = (path / name, building / path.name / name) if name else (path, building / path.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch(source, target, expected)
        check(building / path.name)
        (building / WHOLE).touch()
    return copy


def _check_space(path: AnyPath, size: int) -> None:
    """`DataError` if a copy does not fit the disk."""
    where = copies_directory()
    where.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(where).free
    if size + RESERVED_BYTES > free:
        raise DataError(
            f"'{path}' takes {size / 1e9:.2f} GB, and {where}, to which it is copied, has {free / 1e9:.2f} GB free. "
            "Free space there, or name another directory with PE_LAB_CACHE."
        )


def _fetch(source: AnyPath, target: Path, expected: Entry) -> None:
    """Downloads one file, and compares it with its entry."""
    with store_errors(source):
        filesystem(source).get_file(str(source), str(target))
    with open(target, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest() if expected.md5 else None
    if target.stat().st_size != expected.size or found != expected.md5:
        raise DataError(f"'{source}' arrived damaged: its size or MD5 is not that of the store. Repeat the command.")
