"""Atomic writes of directories: whoever reads, also after a process was killed, finds one whole or not at all.

On an object store a directory is filled on the local disk and put file after file, its marker last, by one process at a
time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pe_lab.errors import ConfigError, StoreError
from pe_lab.storage.leases import LeaseTaken, lease
from pe_lab.storage.paths import AnyPath, exists, is_remote, listing, put_file, remove

INCOMPLETE = ".incomplete"  # in a directory of a store while it is put: the lease of the process that does
NOT_EMPTY = "exists and is not empty. Choose another directory, or remove it."
WRITER_SECONDS = 1.0  # between two looks whether another process has put a directory


@contextlib.contextmanager
def new_directory(path: AnyPath, option: str = "", marker: str | None = None) -> Iterator[Path]:
    """A local directory to fill, which becomes `path` when the block ends, and is removed if the block raises.

    On a disk it is renamed. To an object store its files are put when the block ends, the marker last; a lease,
    `.incomplete`, is put first and removed last. What killed processes have left of earlier attempts is removed.
    Several processes may write the same `path`.

    Args:
      path: the directory to be.
      option: the flag that named it, for messages.
      marker: a file that a finished directory has. If another process finishes first, its directory is kept and this
        one is dropped. None: `path` must not exist, or be empty.

    Raises:
      ConfigError: `path` exists and is something else, another process is putting it and it has no marker, or it
        cannot be written.
      StoreError: the store refuses, or does not answer.
    """
    path = path if is_remote(path) else path.absolute()  # "." has no name
    what = f"{option} '{path}'".lstrip()
    with _new_remote(path, what, marker) if is_remote(path) else _new_local(path, what, marker) as filled:
        yield filled


def check_place(option: str, path: AnyPath, new: bool = False, file: bool = False) -> None:
    """Refuses a place where a directory or a file cannot be written, before what is to be written is computed.

    On a disk, directories that are missing are made under another name in the one that is there, and removed. In a
    directory that is to be filled nothing is made: another process may check that it is empty.

    Args:
      option: the flag that named it, for messages.
      path: of the directory or the file.
      new: whether it may not exist, or must be empty.
      file: whether it is a file, which may exist.

    Raises:
      ConfigError: it cannot be written, or exists.
    """
    what = f"{option} '{path}'"
    if is_remote(path):
        if new:
            _refuse_filled(path, what)
        return
    path = path.absolute()
    try:
        if new:
            _refuse_filled(path, what)
        if file and path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory of that name exists")
        filled = path.parent if file else path
        if filled.is_dir():
            if not os.access(filled, os.W_OK | os.X_OK):
                read_only = os.statvfs(filled).f_flag & os.ST_RDONLY
                code = errno.EROFS if read_only else errno.EACCES
                raise OSError(code, os.strerror(code))
            with contextlib.suppress(FileNotFoundError):
                path.lstat()  # fails for a name that is too long
            return
        there = next(place for place in (filled, *filled.parents) if os.path.lexists(place))
        with tempfile.TemporaryDirectory(prefix=".pe_lab-", dir=there) as probe:
            Path(probe, filled.relative_to(there)).mkdir(parents=True, exist_ok=True)
            if file:
                Path(probe, path.relative_to(there)).touch()
    except OSError as error:
        raise ConfigError(f"{what} cannot be written ({error.strerror or error}). Give another place.") from None


def _refuse_filled(path: AnyPath, what: str) -> None:
    """`ConfigError` if a path is there, but for an empty directory, or one of a store that is not yet whole."""
    if is_remote(path):
        filled = bool(listing(path)) and not exists(path / INCOMPLETE)
    else:
        filled = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if filled:
        raise ConfigError(f"{what} {NOT_EMPTY}")


@contextlib.contextmanager
def _new_remote(path: AnyPath, what: str, marker: str | None) -> Iterator[Path]:
    """`new_directory` on an object store."""
    if marker is None:
        _refuse_filled(path, what)
    with tempfile.TemporaryDirectory(prefix="pe_lab-") as temporary:
        filled = Path(temporary) / path.name
        filled.mkdir()
        try:
            yield filled
        except OSError as error:
            raise ConfigError(f"{what} cannot be written ({error.strerror or error}).") from error
        while marker is None or not exists(path / marker):
            try:
                return _put_directory(path, filled, what, marker)
            except LeaseTaken as taken:
                if marker is None:
                    raise ConfigError(
                        f"{what}: {taken.owner} is writing there. Choose another directory, or wait until it has ended."
                    ) from None
                time.sleep(WRITER_SECONDS)


def _put_directory(path: AnyPath, filled: Path, what: str, marker: str | None) -> None:
    """Puts a filled directory, under a lease, which is removed last; `LeaseTaken` if another process puts one."""
    lost: list[str] = []
    show = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with lease(path / INCOMPLETE, show, lost.append, kept_after_errors=True) as unfinished:
        there = [name for name in listing(path) if name != INCOMPLETE]
        if there and not unfinished and (marker is None or marker in there):  # since this process looked
            remove(path / INCOMPLETE)
            if marker is None:
                raise ConfigError(f"{what} {NOT_EMPTY}")
            return
        for name in sorted(there, key=lambda name: name != marker):
            remove(path / name)
        names = [p.relative_to(filled).as_posix() for p in sorted(filled.rglob("*")) if p.is_file()]
        for name in (*sorted(names, key=lambda name: name == marker), INCOMPLETE):
            if lost:
                raise StoreError(f"{what} is not written. {lost[0]}")
            remove(path / name) if name == INCOMPLETE else put_file(path / name, filled / name)


@contextlib.contextmanager
def _new_local(path: Path, what: str, marker: str | None) -> Iterator[Path]:
    """`new_directory` on a disk."""
    if marker is None:
        _refuse_filled(path, what)
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
                _refuse_filled(path, what)
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
