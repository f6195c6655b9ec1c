"""Atomic writes: whoever reads, also after a process was killed, finds a file or a directory whole or not at all.

On an object store a file is put whole. A directory is filled on the local disk and put file after file, its marker
last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pe_lab.errors import ConfigError, DataError
from pe_lab.storage.paths import AnyPath, exists, is_remote, listing, put, put_file, remove, remove_tree

INCOMPLETE = ".incomplete"  # in a directory of a store that has no marker, while it is put


def write_file(path: AnyPath, content: bytes | str, advice: str = "") -> AnyPath:
    """Writes one file atomically and returns its path; see `write_files`."""
    return write_files({path: content}, advice)[0]


def write_files(files: Mapping[AnyPath, bytes | str], advice: str = "") -> list[AnyPath]:
    """Writes all files or none, and returns their paths; text is encoded as UTF-8.

    Every file is written to a temporary name in its directory, which is made, and renamed when all are on disk. On an
    object store each file is put whole, one after another.

    Raises:
      DataError: a file cannot be written; the message ends with `advice`.
      StoreError: the store refuses, or does not answer.
    """
    # A lone surrogate, as of a file name that is not UTF-8, becomes its escape, which JSON reads again.
    contents = {
        path: content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        for path, content in files.items()
    }
    _write_local({path: content for path, content in contents.items() if not is_remote(path)}, advice)
    for path, content in contents.items():
        if is_remote(path):
            put(path, content)
    return list(files)


def _write_local(files: Mapping[Path, bytes], advice: str) -> None:
    """`write_files` on a disk."""
    renames: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a directory of that name exists")
            renames.append((path.with_name(f".{path.name}.{os.getpid()}"), path))
            renames[-1][0].write_bytes(content)
        for temporary, path in renames:  # noqa: B007
            temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}). {advice}".rstrip()) from None
    finally:
        for temporary, _ in renames:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: AnyPath, option: str = "", marker: str | None = None) -> Iterator[Path]:
    """A local directory to fill, which becomes `path` when the block ends, and is removed if the block raises.

    On a disk it is renamed. To an object store its files are put when the block ends, the marker last; without a marker
    an object `.incomplete` is put first and removed last. What killed processes have left of earlier attempts is
    removed. Several processes may write the same `path`.

    Args:
      path: the directory to be.
      option: the flag that named it, for messages.
      marker: a file that a finished directory has. If another process finishes first, its directory is kept and this
        one is dropped. None: `path` must not exist, or be empty.

    Raises:
      ConfigError: `path` exists and is something else, or cannot be written.
      StoreError: the store refuses, or does not answer.
    """
    path = path if is_remote(path) else path.absolute()  # "." has no name
    what = f"{option} '{path}'".lstrip()
    with _new_remote(path, what, marker) if is_remote(path) else _new_local(path, what, marker) as filled:
        yield filled


@contextlib.contextmanager
def _new_remote(path: AnyPath, what: str, marker: str | None) -> Iterator[Path]:
    """`new_directory` on an object store."""

    def refuse_existing() -> None:
        if not exists(path / INCOMPLETE) and listing(path):
            raise ConfigError(f"{what} exists and is not empty. Choose another directory, or remove it.")

    if marker is None:
        refuse_existing()
    with tempfile.TemporaryDirectory(prefix="pe_lab-") as temporary:
        filled = Path(temporary) / path.name
        filled.mkdir()
        try:
            yield filled
        except OSError as error:
            raise ConfigError(f"{what} cannot be written ({error.strerror or error}).") from error
        if marker is None:
            refuse_existing()
        elif exists(path / marker):
            return
        remove_tree(path)
        if marker is None:
            put(path / INCOMPLETE, b"")
        names = [p.relative_to(filled).as_posix() for p in sorted(filled.rglob("*")) if p.is_file()]
        for name in sorted(names, key=lambda name: name == marker):
            put_file(path / name, filled / name)
        if marker is None:
            remove(path / INCOMPLETE)


@contextlib.contextmanager
def _new_local(path: Path, what: str, marker: str | None) -> Iterator[Path]:
    """`new_directory` on a disk."""

    def refuse_existing() -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{what} exists and is not empty. Choose another directory, or remove it.")

    if marker is None:
        refuse_existing()
    new_parents = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
    temporary = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    lock = contextlib.ExitStack()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            _remove_abandoned(path)
            temporary.mkdir()
            lock.enter_context(_locked(temporary))
        yield temporary
        try:
            temporary.rename(path)
        except OSError:
            if marker is None or not (path / marker).is_file():
                refuse_existing()
                raise
            shutil.rmtree(temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # not empty: another process uses it
                parent.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(f"{what} cannot be written ({error.strerror or error}).") from error
        raise
    finally:
        lock.close()


def unfinished(path: AnyPath) -> list[AnyPath]:
    """The directories that processes are filling, or have left, to become `path`; none on an object store."""
    return [] if is_remote(path) else list(path.parent.glob(f".{glob.escape(path.name)}.partial-*"))


def _remove_abandoned(path: Path) -> None:
    """Removes the unfinished directories of `path` whose process has ended, which holds its lock no more."""
    for left in unfinished(path):
        with contextlib.suppress(OSError), _locked(left, wait=False):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a directory; `OSError` if another process holds it and not `wait`."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if not wait or error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise  # otherwise a file system without locks: nothing is taken for abandoned there
        yield
    finally:
        os.close(descriptor)
