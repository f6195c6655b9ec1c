"""Files written atomically: whoever reads, also after a process was killed, finds a file whole or not at all.

Of several processes one creates a file if it is absent, or replaces it if it is unchanged: a lease is made of these.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from pe_lab.errors import ConfigError, DataError
from pe_lab.storage.paths import AnyPath, filesystem, is_remote, post, put, read_bytes, store_errors


def write_file(path: AnyPath, content: bytes | str, advice: str = "", private: bool = False) -> AnyPath:
    """Writes one file atomically and returns its path; see `write_files`."""
    return write_files({path: content}, advice, private)[0]


def write_files(files: Mapping[AnyPath, bytes | str], advice: str = "", private: bool = False) -> list[AnyPath]:
    """Writes all files or none, and returns their paths; directories are made, and text is encoded as UTF-8.

    Temporary files are renamed when all are on disk. On an object store each file is put whole, one after another.
    `private` files on a disk are for their owner alone.

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


@contextlib.contextmanager
def new_file(path: Path, option: str) -> Iterator[Path]:
    """A name for a file to fill, which becomes `path` when the block ends, and is removed if the block raises.

    For files that are too large for `write_file`, on a disk. `option` is the flag that named it, for messages.

    Raises:
      ConfigError: `path` exists, or cannot be written.
    """
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "it exists")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if os.path.lexists(path):  # made in the meantime
            raise FileExistsError(errno.EEXIST, "it exists")
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(
            f"{option} '{path}' cannot be written ({error.strerror or error}). Give another place."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Files of one of several processes


def create_file(path: AnyPath, content: bytes) -> bool:
    """Writes a file, whole where there are hard links; False if there is one. Contents of several processes differ."""
    if not is_remote(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(content)
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                _create_in_place(path, content)
        except FileExistsError:
            return _content(path) == content  # it may be gone again
        finally:
            temporary.unlink(missing_ok=True)
        return True
    try:
        with store_errors(path):
            if str(path).startswith("gs://"):
                post(path, content, ifGenerationMatch="0")
            else:
                filesystem(path).pipe_file(str(path), content, mode="create")
    except FileExistsError:  # also where an answer was lost, and the request repeated
        return _content(path) == content
    return True


def _create_in_place(path: Path, content: bytes) -> None:
    """`create_file` where a whole file cannot be given a name that is free: for a moment it has no content."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def replace_file(path: AnyPath, content: bytes, expected: bytes) -> bool:
    """Replaces a file that holds `expected`; False if it is gone or holds anything else but `content`."""
    if not is_remote(path):
        return _replace_local(path, content, expected)
    store = filesystem(path)
    try:
        with store_errors(path):
            if str(path).startswith("gs://"):
                # The generation first: content that is read after it is of it or of a later one.
                generation = store.info(str(path))["generation"]
                if _content(path) != expected:
                    return _content(path) == content
                post(path, content, ifGenerationMatch=generation)
            else:
                tag = store.info(str(path))["ETag"]
                if _content(path) != expected:
                    return _content(path) == content
                bucket, key, _ = store.split_path(str(path))
                store.call_s3("put_object", Bucket=bucket, Key=key, Body=content, IfMatch=tag)
    except FileNotFoundError:
        return False
    except Exception:
        # A precondition that failed; or an answer that was lost, and the request repeated.
        found = _content(path)
        if found not in (expected, None):
            return found == content
        raise
    return True


def _content(path: AnyPath) -> bytes | None:
    """The content of a file; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return read_bytes(path)
    return None


def _replace_local(path: Path, content: bytes, expected: bytes) -> bool:
    """`replace_file` on a disk: under the lock of the directory."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        found = _content(path)
        if found != expected:
            return found == content
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return True
    finally:
        os.close(directory)
