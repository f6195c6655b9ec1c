"""Atomic writes: whoever reads, also after a process was killed, finds a file or a directory whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from pe_lab.errors import ConfigError, DataError


def local_path(option: str, text: str) -> Path:
    """A directory to write, from a command line; `ConfigError` for the address of an object store (gs://bucket/x)."""
    if "://" in text:
        raise ConfigError(
            f"{option} '{text}' is an address, and a path is needed: files are appended to and renamed there. Mount a "
            "file system that all hosts share, and give the path of that (launch/README.md)."
        )
    return Path(text).expanduser()


def write_file(path: Path, content: bytes | str, advice: str = "") -> Path:
    """Writes one file atomically and returns its path; see `write_files`."""
    return write_files({path: content}, advice)[0]


def write_files(files: Mapping[Path, bytes | str], advice: str = "") -> list[Path]:
    """Writes all files or none, and returns their paths; text is encoded as UTF-8.

    Every file is written to a temporary name in its directory, which is made, and renamed when all are on disk.

    Raises:
      DataError: a file cannot be written; the message ends with `advice`.
    """
    renames: list[tuple[Path, Path]] = []
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a directory of that name exists")
            renames.append((path.with_name(f".{path.name}.{os.getpid()}"), path))
            # A lone surrogate, as of a file name that is not UTF-8, becomes its escape, which JSON reads again.
            data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
            renames[-1][0].write_bytes(data)
        for temporary, path in renames:  # noqa: B007
            temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}). {advice}".rstrip()) from None
    finally:
        for temporary, _ in renames:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    return [path for _, path in renames]


@contextlib.contextmanager
def new_directory(path: Path, option: str = "", marker: str | None = None) -> Iterator[Path]:
    """A directory to fill, which is renamed to `path` when the block ends, and removed if the block raises.

    What killed processes have left of earlier attempts is removed. Several processes may write the same `path`.

    Args:
      path: the directory to be.
      option: the flag that named it, for messages.
      marker: a file that a finished directory has. If another process finishes first, its directory is kept and this
        one is dropped. None: `path` must not exist, or be empty.

    Raises:
      ConfigError: `path` exists and is something else, or cannot be written.
    """
    path = path.absolute()  # "." has no name
    what = f"{option} '{path}'".lstrip()

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


def unfinished(path: Path) -> list[Path]:
    """The directories that processes are filling, or have left, to become `path`."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.partial-*"))


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
