"""Manifests: the size and the digest of every file of a directory, so that damage is found before it is used.

A digest has a CRC-32C, which finds any change of up to 32 consecutive bits and which GCS lists, and a hash of another
kind. The nodes of an OCDBT database, which Orbax writes, end with a CRC-32C of their own. A file of such nodes has a
CRC-32C that depends only on their sizes, so that another file in its place is found by the hash alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pe_lab.errors import DataError
from pe_lab.storage.files import write_file
from pe_lab.storage.json_files import json_object, set_aside
from pe_lab.storage.paths import AnyPath, Entry, exists, listing, read_bytes, store_errors

MANIFEST = "manifest.json"
FORMAT = 1
SEAL = "crc32c"  # key of a JSON object's own digest
SMALL_BYTES = 2**20  # files up to this size are digested also where the sizes of the others are enough
_BLOCK_BYTES = 2**20  # fits the cache of a core: larger ones are digested more slowly
_THREADS = 4


class Digest(NamedTuple):
    """The size of a file in bytes, the CRC-32C of its content as 8 hex digits, and another hash of it.

    That is `xxh3:` and hex digits of a file that was read, `md5:` of one that a store listed, "" if it is not known.
    """

    size: int
    crc32c: str
    hash: str = ""


class Damage(NamedTuple):
    """A file and what is wrong with it, such as `is missing`."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


def crc32c(content: bytes) -> str:
    """The CRC-32C of some bytes, as 8 hex digits."""
    import google_crc32c

    return f"{google_crc32c.value(content):08x}"


def digest_file(path: AnyPath, done: Callable[[int], None] = lambda size: None, kind: str = "xxh3") -> Digest:
    """The digest of a file, with a hash `xxh3` or `md5`; `done` is called with the bytes of each block."""
    import google_crc32c
    import xxhash

    checksum, size = google_crc32c.Checksum(), 0
    other = {"xxh3": xxhash.xxh3_64, "md5": hashlib.md5}[kind]()
    with store_errors(path), path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            other.update(block)
            size += len(block)
            done(len(block))
    return Digest(size, checksum.hexdigest().decode(), f"{kind}:{other.hexdigest()}")


def digest_files(root: AnyPath, chosen: Callable[[str], bool] = lambda name: True) -> dict[str, Digest]:
    """The digests of the files under a directory, by their names relative to it; without its manifest.

    Several files are read at a time. Where an object store lists digests, nothing is read.
    """

    def digest(item: tuple[str, Entry]) -> Digest:
        name, entry = item
        return _listed(entry) if entry.crc32c and entry.md5 else digest_file(root / name)

    entries = {name: entry for name, entry in listing(root).items() if name != MANIFEST and chosen(name)}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(entries, pool.map(digest, entries.items()), strict=True))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own digest under `SEAL`."""
    plain = json.loads(json.dumps({key: value for key, value in content.items() if key != SEAL}))
    return {**plain, SEAL: crc32c(json.dumps(plain, sort_keys=True).encode())}


def seal_broken(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object that `sealed` made has changed since."""
    return sealed(content)[SEAL] != content.get(SEAL)


def salvage_sealed(path: AnyPath, show: Callable[[str], None]) -> dict[str, Any]:
    """The JSON object that `sealed` made in a file; {} without one. A damaged file is set aside, and told."""
    if not exists(path):
        return {}
    content = read_bytes(path)
    value = json_object(content)
    if value is None or seal_broken(value):
        show(f"{path} is damaged, and is now {set_aside(path, content).name}")
        return {}
    return value


@dataclass(frozen=True)
class Manifest:
    """What a directory holds: the digests of its files, by their names relative to it, and `about`, any JSON."""

    files: Mapping[str, Digest]
    about: Mapping[str, Any] = field(default_factory=dict)

    def write(self, directory: AnyPath) -> AnyPath:
        """Writes manifest.json, atomically. It comes last: a directory with a manifest is complete."""
        files = {name: digest._asdict() for name, digest in sorted(self.files.items())}
        content = sealed({"format": FORMAT, "about": self.about, "files": files})
        return write_file(directory / MANIFEST, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, directory: AnyPath) -> Manifest:
        """The manifest of a directory; `DataError` if it has none, or a damaged one."""
        path = directory / MANIFEST
        try:
            content = json_object(read_bytes(path))
        except OSError as error:
            raise DataError(f"'{path}' cannot be read ({error.strerror or type(error).__name__}).") from None
        if content is None or seal_broken(content):
            raise DataError(f"'{path}' is damaged: it does not have the content that was written.")
        if content.get("format") != FORMAT:
            raise DataError(f"'{path}' has format {content.get('format')!r}; this version reads {FORMAT}.")
        files, about = content.get("files"), content.get("about")
        if not (isinstance(about, dict) and isinstance(files, dict) and all(map(_is_digest, files.values()))):
            raise DataError(f"'{path}' is damaged: it lacks files with a size and a CRC-32C, or what they are.")
        return cls({name: Digest(**digest) for name, digest in files.items()}, about)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(digest.size for digest in self.files.values())

    def damage(
        self,
        directory: AnyPath,
        chosen: Callable[[str, Digest], bool] = lambda name, digest: True,
        done: Callable[[int], None] = lambda size: None,
    ) -> list[Damage]:
        """What differs in a directory: files that are missing, of another size, or changed.

        Of files that are not `chosen` only the size is compared; `done` is called with the bytes of each block.

        Raises:
          StoreError: the object store does not answer, which tells nothing of the files.
        """
        entries = listing(directory)

        def check(item: tuple[str, Digest]) -> str:
            name, digest = item
            if (entry := entries.get(name)) is None:
                return "is missing"
            if entry.size != digest.size:
                return f"has {entry.size:,} bytes; it was written with {digest.size:,}"
            if not chosen(name, digest):
                return _change(digest, _listed(entry)) if entry.crc32c else ""
            try:
                return _change(digest, digest_file(directory / name, done, _kind(digest) or "xxh3"))
            except OSError as error:
                return f"cannot be read ({error.strerror or error})"

        with ThreadPoolExecutor(_THREADS) as pool:
            found = zip(self.files, pool.map(check, self.files.items()), strict=True)
            return [Damage(name, what) for name, what in found if what]


def _listed(entry: Entry) -> Digest:
    """The digest of a file with a listed CRC-32C."""
    return Digest(entry.size, entry.crc32c or "", f"md5:{entry.md5}" if entry.md5 else "")


def _kind(digest: Digest) -> str:
    return digest.hash.partition(":")[0]


def _change(written: Digest, found: Digest) -> str:
    """What differs between two digests of a file; hashes of different kinds are not compared."""
    if found.crc32c != written.crc32c:
        return f"has changed: its CRC-32C is {found.crc32c}, was {written.crc32c}"
    if _kind(found) == _kind(written) and found.hash != written.hash:
        return f"has changed: its hash is {found.hash}, was {written.hash}"
    return ""


def _is_digest(value: Any) -> bool:
    if not (isinstance(value, dict) and {"size", "crc32c"} <= value.keys() <= set(Digest._fields)):
        return False
    digest = Digest(**value)
    texts = isinstance(digest.crc32c, str) and isinstance(digest.hash, str)
    return texts and type(digest.size) is int and _kind(digest) in ("xxh3", "md5", "")


def manifest_of(directory: AnyPath, about: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a directory as it is now."""
    return Manifest(digest_files(directory), about or {})
