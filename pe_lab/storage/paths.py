"""Paths of files: on this machine, or on an object store (gs://BUCKET/KEY, s3://BUCKET/KEY).

A remote path is an `epath.Path`, which has the methods of a `pathlib.Path` except that `resolve` and `absolute` are
wrong for it, and that it cannot be renamed atomically or appended to. A directory of a store is a common prefix of
objects: it exists as soon as one of them does.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pe_lab.errors import ConfigError, StoreError, StoreRefuses, UserError, store_failure

AnyPath = PurePath  # a pathlib.Path, or an epath.Path, which is a PurePosixPath
STORES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # scheme -> the library, and the extra that installs it
STALL_SECONDS = 60.0  # without a byte, until a request is repeated
NOT_IN_KEYS = "*?[]#"  # fsspec reads wildcards also where it copies and deletes; `#` begins a generation
CONNECT_SECONDS = 10.0
FIRST_SECONDS = 45.0  # for the first answer of a bucket
S3_ATTEMPTS = 10  # of s3fs, with pauses of 0.1 s x 1.7^n: 28 s in all, as the 6 of gcsfs have 33 s
IN_PARTS = 50 * 2**20  # bytes from which gcsfs uploads an object in several requests, each a part of the content


_answered: set[str] = set()  # the buckets that did


def path(option: str, given: str | AnyPath, pattern: bool = False) -> AnyPath:
    """The path of a text, of this machine (`~`: the home directory) or of an object store; a path as it is.

    The bucket of gs://BUCKET/KEY or s3://BUCKET/KEY is asked for an answer once. `option` names the path in messages;
    the address of a `pattern`, a glob, may have wildcards.

    Raises:
      ConfigError: the text is empty, or the address has another scheme, no key, or a character of `NOT_IN_KEYS`.
      StoreError: the library of the store is not installed, or the bucket is missing, refuses or does not answer.
    """
    if isinstance(given, PurePath):
        return given
    if not (text := given):
        raise ConfigError(f"{option} is empty: give a path, or '.' for the working directory.")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return at_home(text)
    if scheme not in STORES:
        raise ConfigError(f"{option} '{text}': addresses begin with {' or '.join(f'{s}://' for s in STORES)}.")
    bucket, _, key = rest.partition("/")
    if not bucket or not key.strip("/"):
        raise ConfigError(f"{option} '{text}' is a whole bucket; give a directory in it: {scheme}://BUCKET/DIRECTORY.")
    wrong = next((sign for sign in key if sign in NOT_IN_KEYS or not sign.isprintable()), "")
    if wrong and not pattern:
        raise ConfigError(
            f"{option} '{text}': the libraries of object stores do not take {wrong!r} for a character of a name. "
            "Choose a name without it."
        )
    library, extra = STORES[scheme]
    if importlib.util.find_spec(library) is None:
        raise StoreError(f"{option} '{text}' needs {library}, which is not installed: pip install 'pe-lab[{extra}]'.")
    os.environ.setdefault("EPATH_USE_TF", "false")  # TensorFlow's own client would ignore the settings below
    from etils import epath

    found = epath.Path(f"{scheme}://{rest}")
    if f"{scheme}://{bucket}" not in _answered:
        _check_bucket(found, f"{scheme}://{bucket}")
        _answered.add(f"{scheme}://{bucket}")
    return found


def at_home(text: str) -> Path:
    """The local path of a text that may begin with `~` or `~USER`; where there is no such user, that is a name."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _check_bucket(directory: AnyPath, bucket: str) -> None:
    """Lists the bucket or, where only a part of it may be listed, the directory."""
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError

    store = filesystem(directory)
    try:
        with store_errors(bucket):
            try:
                sync(store.loop, store._ls, bucket, timeout=FIRST_SECONDS)
            except FSTimeoutError:
                waited = f"the store has not answered for {FIRST_SECONDS:.0f} s"
                raise StoreError(f"'{bucket}': {waited}. Check the address and the network.") from None
    except FileNotFoundError:
        raise StoreError(f"There is no bucket '{bucket}'. Make it, or check the address.") from None
    except StoreRefuses as refused:
        try:
            store.ls(str(directory))
        except FileNotFoundError:
            return
        except Exception:
            raise refused from None


def is_remote(path: AnyPath) -> bool:
    """Whether a path is one of an object store."""
    return not isinstance(path, Path) and path.parts[:1] == ("/",) and path.parts[1:2] in (("gs",), ("s3",))


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk is full, or a quota used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def absolute(path: AnyPath) -> AnyPath:
    """The path from the root, without links; a remote path is that already."""
    return path.resolve() if isinstance(path, Path) else path


def filesystem(path: AnyPath | str) -> Any:
    """The fsspec file system of a remote path. Listings are never cached; requests that stall are repeated."""
    import fsspec

    scheme = str(path).partition("://")[0]
    settings: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "gs":
        import aiohttp

        # Failures are raised; gcsfs also logs their tracebacks, and google.auth every place that has no credentials.
        for name in ("gcsfs", "fsspec.prefetcher", "google.auth"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
        settings["session_kwargs"] = {"timeout": timeout}
    else:
        import s3fs

        # botocore repeats for 5 s, and s3fs not every answer of 5xx: s3fs alone repeats here, and all of them.
        s3fs.S3FileSystem.retries = S3_ATTEMPTS
        s3fs.core.set_custom_error_handler(_s3_may_recover)
        settings["config_kwargs"] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": STALL_SECONDS,
            "retries": {"total_max_attempts": 1},
        }
    # The configuration, and not arguments: epath and Orbax make file systems of their own.
    fsspec.config.conf.setdefault({"gs": "gcs"}.get(scheme, scheme), {}).update(settings)
    return fsspec.filesystem(scheme)


def _s3_may_recover(error: Exception) -> bool:
    """Whether a request to S3 that failed so is repeated, beside those that s3fs repeats by itself."""
    from botocore.exceptions import ClientError, ConnectionError, SSLError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or error.response.get("Error", {}).get("Code") == "RequestTimeout"
    return isinstance(error, ConnectionError) and not isinstance(error, SSLError)


@contextlib.contextmanager
def store_errors(where: object) -> Iterator[None]:
    """Raises what a store's library raises as `StoreError`, except `FileNotFoundError` and `FileExistsError`."""
    try:
        yield
    except (UserError, FileNotFoundError, FileExistsError):
        raise
    except Exception as error:
        failure = store_failure(error, str(where))
        if failure is None:
            raise
        raise failure from error


def read_bytes(path: AnyPath) -> bytes:
    """The content of a file; `OSError` of a local one, `FileNotFoundError` or `StoreError` of a remote one."""
    if not is_remote(path):
        return path.read_bytes()
    with store_errors(path):
        return filesystem(path).cat_file(str(path))


def put(path: AnyPath, content: bytes) -> None:
    """Writes an object of a store, whole; its bucket exists."""
    try:
        with store_errors(path):
            if str(path).startswith("gs://") and len(content) < IN_PARTS:
                post(path, content)
            else:
                filesystem(path).pipe_file(str(path), content)
    except FileNotFoundError as error:
        raise StoreError(f"'{path}' cannot be written: there is no such bucket ({error}).") from None


def put_file(path: AnyPath, source: Path) -> None:
    """Writes an object of a store from a local file; see `put`."""
    if source.stat().st_size < IN_PARTS:
        put(path, source.read_bytes())
        return
    with store_errors(path):
        filesystem(path).put_file(str(source), str(path))


def post(path: AnyPath, content: bytes, **conditions: str) -> None:
    """Writes an object of GCS in one request, whose body is the content.

    gcsfs wraps small objects in MIME parts and ends each with a bare line feed. A server that takes the end of line
    before a boundary as MIME defines it (RFC 2046, 5.1.1), with its carriage return, drops that byte of a content that
    ends in one. `conditions` are query parameters, as `ifGenerationMatch`.

    Raises:
      FileNotFoundError: there is no such bucket.
      FileExistsError: a condition does not hold.
      StoreError: the store has other bytes than were sent.
    """
    store = filesystem(path)
    bucket, key, _ = store.split_path(str(path))
    stored = store.call(
        "POST",
        f"{store.base.removesuffix('/storage/v1/')}/upload/storage/v1/b/{bucket}/o",
        uploadType="media",
        name=key,
        data=content,
        headers={"Content-Type": "application/octet-stream"},
        json_out=True,
        **conditions,
    )
    if base64.b64decode(stored["md5Hash"]) != hashlib.md5(content, usedforsecurity=False).digest():
        raise StoreError(f"'{path}': the store has other bytes than were sent. Write it again.")


def remove(path: AnyPath) -> None:
    """Removes a file, if it exists."""
    with store_errors(path), contextlib.suppress(FileNotFoundError):
        filesystem(path).rm_file(str(path)) if is_remote(path) else path.unlink()


def exists(path: AnyPath) -> bool:
    """Whether there is a file or a directory."""
    with store_errors(path):
        return path.exists()


def is_file(path: AnyPath) -> bool:
    """Whether there is a file. Raises `StoreError` where fsspec's own answer is no: if the store does not answer."""
    return entry(path) is not None if is_remote(path) else path.is_file()


def children(directory: AnyPath) -> list[AnyPath]:
    """The files and directories in a directory, if there is one; `StoreError` where a remote `is_dir` is just False."""
    with store_errors(directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(directory.iterdir())
    return []


@dataclass(frozen=True)
class Entry:
    """A file in a listing: its size, and the digests that a store knows without reading it, in hexadecimal."""

    size: int
    crc32c: str | None = None
    md5: str | None = None
    version: str = ""  # another for each content that a store had under the name


def listing(directory: AnyPath) -> dict[str, Entry]:
    """The files below a directory at any depth, by their path relative to it; without those deleted meanwhile.

    GCS lists CRC32C and MD5, S3 an MD5 for objects that were put whole and unencrypted, a local disk neither.
    """
    if not is_remote(directory):
        found = {}
        for folder, _, names in os.walk(directory):  # Path.rglob raises for a directory that is deleted meanwhile
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISREG((status := path.stat()).st_mode):
                        found[path.relative_to(directory).as_posix()] = Entry(status.st_size)
        return dict(sorted(found.items()))
    with store_errors(directory):
        found = filesystem(directory).find(str(directory), detail=True)
    base = str(directory).partition("://")[2].rstrip("/") + "/"
    files = {name: info for name, info in found.items() if info["type"] == "file" and name.startswith(base)}
    return {name.removeprefix(base): entry_of(info) for name, info in sorted(files.items())}


def entry(path: AnyPath) -> Entry | None:
    """The entry of one remote file; None if it is a directory, or does not exist."""
    with store_errors(path), contextlib.suppress(FileNotFoundError):
        info = filesystem(path).info(str(path))
        return entry_of(info) if info["type"] == "file" else None
    return None


def entry_of(info: dict[str, Any]) -> Entry:
    """The entry that a listing of fsspec describes."""

    def from_base64(name: str) -> str | None:
        return base64.b64decode(info[name]).hex() if info.get(name) else None

    etag = str(info.get("ETag", "")).strip('"')
    md5 = from_base64("md5Hash") or (etag if len(etag) == 32 and etag.isalnum() else None)
    return Entry(int(info["size"]), from_base64("crc32c"), md5, str(info.get("generation", etag)))


def remove_tree(directory: AnyPath, first: str = "") -> None:
    """Removes a directory, if it exists; the file `first`, which says that it is whole, before the others."""
    if not is_remote(directory):
        if first:
            (directory / first).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=not directory.exists())
        return
    if first:
        remove(directory / first)
    with store_errors(directory), contextlib.suppress(FileNotFoundError):
        store = filesystem(directory)
        names = [name for name in store.find(str(directory)) if name]
        if names:
            store.rm(names)


def move_tree(directory: AnyPath, to: AnyPath, first: str = "") -> None:
    """Moves a directory to another place on the same disk or bucket, whose parent is made; `first` as `remove_tree`."""
    if not is_remote(directory):
        to.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(to)
        return
    with store_errors(directory):
        filesystem(directory).copy(str(directory), str(to), recursive=True)
    remove_tree(directory, first)


def kvstore(path: AnyPath) -> dict[str, Any]:
    """The tensorstore key-value store of a directory."""
    if not is_remote(path):
        return {"driver": "file", "path": f"{absolute(path)}/"}  # which refuses `..`
    scheme, _, rest = str(path).partition("://")
    bucket, _, key = rest.partition("/")
    spec: dict[str, Any] = {"driver": "gcs", "bucket": bucket, "path": f"{key.rstrip('/')}/"}
    return s3_driver(spec) if scheme == "s3" else spec


def s3_driver(spec: dict[str, Any]) -> dict[str, Any]:
    """A key-value store of tensorstore's GCS driver as one of its S3 driver, with the settings of the environment.

    That driver does not read them itself, and prints about a missing ~/.aws/config unless it is told of credentials.
    """
    named = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        "aws_credentials": {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else None,
    }
    return {**spec, "driver": "s3", **{name: value for name, value in named.items() if value}}
