"""Atomic writes of directories: whoever reads, also after a process was killed, finds one whole or not at all.

On an object store a directory is filled on the local disk and put file after file, its marker last, by one process at a
time. What lies on a store, and is read by something that needs a file of this machine, is copied to the local disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pe_lab.errors import ConfigError, DataError, StoreError
from pe_lab.storage.leases import LeaseTaken, lease
from pe_lab.storage.paths import (
    AnyPath,
    Entry,
    absolute,
    at_home,
    entry,
    exists,
    filesystem,
    is_remote,
    listing,
    put_file,
    remove,
    store_errors,
)

INCOMPLETE = ".incomplete"  # in a directory of a store while it is put: the lease of the process that does
WHOLE = ".whole"  # in the directory of a copy that is complete
RESERVED_BYTES = 2**30  # bytes of the disk that copies leave free
NOT_EMPTY = "exists and is not empty. Choose another directory, or remove it."
PATH_BYTES, NAME_BYTES = 4095, 255  # of a path, and of a name in it, on Linux
BELOW_BYTES = 200  # of the path of a checkpoint's file below the directory of the steps, while it is written
WRITER_SECONDS = 1.0  # between two looks whether another process has put a directory


@contextlib.contextmanager
def new_directory(path: AnyPath, option: str = "", marker: str | None = None) -> Iterator[Path]:
    """A local directory to fill, which becomes `path` when the block ends, and is removed if the block raises.

    On a disk it is renamed. To an object store its files are put when the block ends, the marker last; a lease,
    `.incomplete`, is put first and removed last. What killed processes have left of earlier attempts is removed.

    Args:
      option: the flag that named `path`, for messages.
      marker: a file that a finished directory has. Of several processes that write `path` the first to finish wins.
        None: `path` must not exist, or be empty.

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
    """`ConfigError` if a directory or a `file` cannot be written, or a `new` directory exists and is not empty.

    On a disk, directories that are missing are made under another name in the one that is there, and removed. In a
    directory that is to be filled nothing is made: another process may check that it is empty.
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


def check_checkpoints(option: str, directory: AnyPath) -> None:
    """`ConfigError` for a directory below which Orbax cannot write checkpoints, by its name or the length of its name.

    tensorstore takes a backslash for a slash, and refuses names that are not UTF-8 or end in its own suffixes.
    """
    if is_remote(directory):
        return
    import tensorstore as ts

    path = f"{absolute(directory)}/"
    try:
        taken = ts.KvStore.Spec({"driver": "file", "path": path}).to_json()["path"]
    except (ValueError, RuntimeError):  # the latter for what is not UTF-8
        taken = ""
    what = f"{option} '{directory}'"
    if taken != path:
        raise ConfigError(
            f"{what}: tensorstore, which writes checkpoints, cannot take this name. Choose one of UTF-8 text, without "
            "a backslash."
        )
    longest = max(len(os.fsencode(part)) for part in absolute(directory).parts)
    if len(os.fsencode(path)) + BELOW_BYTES > PATH_BYTES or longest > NAME_BYTES:
        raise ConfigError(f"{what}: the names of the checkpoints' files would be too long. Choose a shorter one.")


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
            for left in unfinished(path):
                with contextlib.suppress(OSError), _locked(left, wait=False):  # else its process lives
                    shutil.rmtree(left, ignore_errors=True)
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


# ---------------------------------------------------------------------------------------------------------------------
# Local copies


def copies_directory() -> Path:
    """Where copies are kept: `$PE_LAB_CACHE` or ~/.cache/pe_lab. It may be deleted when nothing runs."""
    return at_home(os.environ.get("PE_LAB_CACHE") or "~/.cache/pe_lab") / "objects"


def local_copy(path: AnyPath, check: Callable[[Path], None] = lambda copied: None) -> Path:
    """A local file or directory with the content of a remote one; a local path itself.

    It is fetched once for each content that the store has under the name, and is whole or not there. `check` is called
    with the copy before anyone else sees it, and raises if it is damaged.

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
    where, size = copies_directory(), sum(e.size for e in files.values())
    where.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(where).free
    if size + RESERVED_BYTES > free:
        raise DataError(
            f"'{path}' takes {size / 1e9:.2f} GB, and {where}, to which it is copied, has {free / 1e9:.2f} GB free. "
            "Free space there, or name another directory with PE_LAB_CACHE."
        )
    with new_directory(directory, marker=WHOLE) as building:
        for name, expected in files.items():
            source, target = (path / name, building / path.name / name) if name else (path, building / path.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            _fetch(source, target, expected)
        check(building / path.name)
        (building / WHOLE).touch()
    return copy


def _fetch(source: AnyPath, target: Path, expected: Entry) -> None:
    """Downloads one file, and compares it with its entry."""
    with store_errors(source):
        filesystem(source).get_file(str(source), str(target))
    with open(target, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest() if expected.md5 else None
    if target.stat().st_size != expected.size or found != expected.md5:
        raise DataError(f"'{source}' arrived damaged: its size or MD5 is not that of the store. Repeat the command.")
