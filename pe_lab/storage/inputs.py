"""Files to read, wherever they lie: found by a glob, opened at any byte, never copied.

A file is named by its path, or by its address on an object store (gs://, s3://) or a web server (https://, http://).
"""

from __future__ import annotations

import functools
import glob
import io
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pe_lab.errors import ConfigError, DataError, StoreError
from pe_lab.storage.paths import STALL_SECONDS, STORES, at_home, entry_of, filesystem, path, store_errors

WEB = ("https", "http")
READ_BYTES = 8 * 2**20  # of a request
ATTEMPTS = 5  # of a request to a web server, with pauses that double
FIRST_PAUSE = 1.0  # seconds
MOST_NAMES = 10**6  # that braces expand to


class InputFile(NamedTuple):
    """A file: its name, its size in bytes, and a version, another for each content, where a store tells one.

    The size is -1 where a server tells none, or serves no part of a file; it is then read from its beginning.
    """

    name: str
    size: int
    version: str = ""


def find_files(what: str, pattern: str) -> list[InputFile]:
    """The files that match a glob, a path or an address, sorted; `what` names it in messages.

    `~`, `**` and braces ({a,b}, {000..127}) are allowed; web servers list no files, so their addresses have braces and
    no other wildcard. On a disk a part that is the name of a file or a directory means that one: `lr[1]/*.txt` are the
    files in `lr[1]`, if there is such a directory.

    Raises:
      ConfigError: the address has another scheme, or a wildcard where nothing can be listed.
      DataError: no file matches, or all that match are empty.
      StoreError: the store is not there, refuses or does not answer.
    """
    scheme, separator, _ = pattern.partition("://")
    if not separator:
        files = _local_files(what, pattern)
    elif scheme in WEB:
        files = [_web_file(what, address) for address in expand_braces(pattern)]
    elif scheme in STORES:
        files = [file for each in expand_braces(pattern) for file in _stored_files(what, each)]
    else:
        known = ", ".join(f"{each}://" for each in (*STORES, *WEB))
        raise ConfigError(f"{what}: there are no files at {scheme}://; addresses begin with one of {known}.")
    if not files:
        raise DataError(f"No file matches {what}. Look at what the store has there.")
    if not any(file.size for file in files):
        raise DataError(f"{what} is empty: its {len(files)} file(s) have 0 bytes.")
    return files


def local_matches(pattern: str) -> list[Path]:
    """The local files and directories that a glob matches, sorted; see `find_files` for names with wildcards."""
    there, parts = Path(), list(at_home(pattern).parts)
    while parts and os.path.lexists(there / parts[0]):
        there /= parts.pop(0)
    return sorted(Path(p) for p in glob.glob(os.path.join(glob.escape(str(there)), *parts), recursive=True))


def _local_files(what: str, pattern: str) -> list[InputFile]:
    expanded = str(at_home(pattern))
    found = local_matches(expanded)
    if not found:
        each = (map(str, local_matches(one)) for one in expand_braces(expanded))
        found = list(map(Path, dict.fromkeys(name for names in each for name in sorted(names))))
    files = [p for p in found if p.is_file()]
    if not files:
        base = found[0] if found else Path(expanded)
        hint = f"{base} is a directory; {base}/**/* matches the files in it." if found else f"Looked from {Path.cwd()}."
        raise DataError(f"No file matches {what}. {hint}")
    return [InputFile(str(p), p.stat().st_size) for p in files]


def _stored_files(what: str, pattern: str) -> Iterator[InputFile]:
    scheme = pattern.partition("://")[0]
    path(what, pattern, pattern=True)  # checks the library and the bucket
    store = filesystem(pattern)
    with store_errors(pattern):
        found = store.glob(pattern, detail=True)
    for name, information in sorted(found.items()):
        if information["type"] == "file" and not name.endswith("/"):
            listed = entry_of(information)
            yield InputFile(f"{scheme}://{name}", listed.size, listed.version)


def expand_braces(pattern: str) -> list[str]:
    """The names that braces stand for: `{a,b}`, `{008..010}`; `ConfigError` for more than `MOST_NAMES`."""
    parts: list[list[str] | range] = []
    count = 1
    for part in re.split(r"(\{[^{}]*\})", pattern):
        choices: list[str] | range = [part]
        if numbers := re.fullmatch(r"\{(\d{1,9})\.\.(\d{1,9})\}", part):
            first, last = int(numbers[1]), int(numbers[2])
            width = len(numbers[1]) if numbers[1].startswith("0") else 0
            steps = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            choices = [f"{number:0{width}}" for number in steps] if len(steps) <= MOST_NAMES else steps
        elif part.startswith("{") and "," in part:
            choices = part[1:-1].split(",")
        count *= len(choices)
        if count > MOST_NAMES:
            raise ConfigError(f"{pattern!r} stands for more than {MOST_NAMES:,} files. Write smaller ranges in braces.")
        parts.append(choices)
    return list(map("".join, itertools.product(*parts)))


class _Ranges(io.RawIOBase):
    """A file of `size` bytes, of which `fetch(start, stop)` gets a part."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int):
        self._fetch, self._size, self._position = fetch, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        if stop <= self._position:
            return 0
        content = self._fetch(self._position, stop)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def open_file(name: str, size: int, buffered: bool = True) -> io.IOBase:
    """The file of an `InputFile`, opened to be read from any byte on; `buffered`: requests to a store read ahead.

    Raises:
      OSError: a local file cannot be opened.
      StoreError: while it is read: the store is not there, refuses, does not answer, or has another file by now.
    """
    scheme, separator, _ = name.partition("://")
    if not separator:
        return open(name, "rb")
    if scheme in WEB and size < 0:
        content = _request(name, {}).raw
        content.auto_close = False  # which would make the end of the file an error
        return io.BufferedReader(content, READ_BYTES)
    ranges = _Ranges(functools.partial(_web_range if scheme in WEB else _stored_range, name), size)
    return io.BufferedReader(ranges, READ_BYTES) if buffered else ranges


def _stored_range(name: str, start: int, stop: int) -> bytes:
    try:
        with store_errors(name):
            content = filesystem(name).cat_file(name, start=start, end=stop)
    except FileNotFoundError:
        raise StoreError(f"'{name}' is no longer there.") from None
    return _whole(name, content, start, stop)


def _whole(name: str, content: bytes, start: int, stop: int) -> bytes:
    if len(content) != stop - start:
        raise StoreError(
            f"'{name}': bytes {start:,} to {stop:,} were asked for, and {len(content):,} bytes came. The file has "
            "changed since it was listed, or the server serves no parts of files: repeat the command, or download it."
        )
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Web servers


@functools.cache
def _session(process: int) -> Any:
    """Connections that are kept open, one set for each process."""
    import requests

    return requests.Session()


def _request(address: str, headers: dict[str, str]) -> Any:
    """The answer to a GET, its content not read yet; repeated where a server fails for a moment."""
    import requests

    pause, failure = FIRST_PAUSE, ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(pause)
            pause *= 2
        try:
            sent = {"Accept-Encoding": "identity", **_login(address), **headers}
            answer = _session(os.getpid()).get(address, headers=sent, stream=True, timeout=STALL_SECONDS)
        except requests.exceptions.InvalidURL as error:
            raise ConfigError(f"'{address}' is no address of a file ({error}).") from None
        except requests.RequestException as error:
            failure = type(error).__name__
            continue
        if answer.status_code < 400 or answer.status_code == 416:
            return answer
        failure = f"{answer.status_code} {answer.reason}"
        answer.close()
        if answer.status_code in (401, 403):
            raise StoreError(
                f"'{address}' needs a login, or refuses this one ({failure}). For files of the Hugging Face hub: run "
                "`hf auth login` or set HF_TOKEN, and accept the dataset's terms on its page. No run stores the "
                "credentials of addresses: give them again, or keep them in ~/.netrc."
            )
        if answer.status_code in (404, 410):
            raise StoreError(f"There is no '{address}' ({failure}). Check the address.")
        if answer.status_code not in (408, 429) and answer.status_code < 500:
            break
    raise StoreError(f"'{address}' does not answer as it should ({failure}). Repeat the command once it does.")


def _login(address: str) -> dict[str, str]:
    """The header with the token of the Hugging Face hub, for addresses there."""
    if not address.startswith(os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + "/"):
        return {}
    try:
        from huggingface_hub import get_token
    except ImportError:
        return {}
    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _web_file(what: str, address: str) -> InputFile:
    """A file of a web server: the answer to a request for its first byte tells its size."""
    if any(sign in address for sign in "*[]"):
        raise ConfigError(
            f"{what}: a web server lists no files. Write their numbers in braces, as in {{00000..00127}}."
        )
    with _request(address, {"Range": "bytes=0-0"}) as answer:
        headers = answer.headers
        version = headers.get("ETag") or headers.get("Last-Modified") or ""
        total = re.fullmatch(r"bytes (?:0-0|\*)/(\d+)", headers.get("Content-Range", ""))
        if answer.status_code in (206, 416) and total:
            return InputFile(address, int(total[1]), version)
        return InputFile(address, 0 if headers.get("Content-Length") == "0" else -1, version)


def _web_range(address: str, start: int, stop: int) -> bytes:
    import requests

    for attempt in range(ATTEMPTS):
        with _request(address, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            if answer.status_code != 206:
                return _whole(address, b"", start, stop)
            try:
                return _whole(address, answer.content, start, stop)
            except requests.RequestException as error:
                failure = type(error).__name__
        time.sleep(FIRST_PAUSE * 2**attempt)
    raise StoreError(f"'{address}': the connection breaks each time ({failure}). Repeat the command once it does not.")
