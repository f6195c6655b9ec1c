"""Atomic writes of files: whoever reads, also after a process was killed, finds a file whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Mapping
from pathlib import Path

from pe_lab.errors import DataError
from pe_lab.storage.paths import AnyPath, is_remote, put


def write_file(path: AnyPath, content: bytes | str, advice: str = "", private: bool = False) -> AnyPath:
    """Writes one file atomically and returns its path; see `write_files`."""
    return write_files({path: content}, advice, private)[0]


def write_files(files: Mapping[AnyPath, bytes | str], advice: str = "", private: bool = False) -> list[AnyPath]:
    """Writes all files or none, and returns their paths; text is encoded as UTF-8.

    Every file is written to a temporary name in its directory, which is made, and renamed when all are on disk. On an
    object store each file is put whole, one after another. `private` files on a disk are for their owner alone.

    Raises:
      DataError: a file cannot be written; the message ends with `advice`.
      StoreError: the store refuses, or does not answer.
    """
    # A lone surrogate, as of a file name that is not UTF-8, becomes its escape, which JSON reads again.
    contents = {
        path: content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        for path, content in files.items()
    }
    _write_local({path: content for path, content in contents.items() if not is_remote(path)}, advice, private)
    for path, content in contents.items():
        if is_remote(path):
            put(path, content)
    return list(files)


def _write_local(files: Mapping[Path, bytes], advice: str, private: bool) -> None:
    """`write_files` on a disk."""
    renames: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a directory of that name exists")
            renames.append((path.with_name(f".{path.name}.{secrets.token_hex(4)}"), path))
            if private:
                renames[-1][0].touch(mode=0o600)
            renames[-1][0].write_bytes(content)
        for temporary, path in renames:  # noqa: B007
            temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}). {advice}".rstrip()) from None
    finally:
        for temporary, _ in renames:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
