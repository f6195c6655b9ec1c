"""Manifests: the size and the digest of every file of a directory, so that damage is found before it is used.

A digest is a CRC-32C: it finds any change of up to 32 consecutive bits, and any other one with probability 1 - 2^-32.
Object stores compute the same one, and processors have an instruction for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pe_lab.errors import DataError
from pe_lab.storage.files import write_file
from pe_lab.storage.json_files import json_object

MANIFEST = "manifest.json"
FORMAT = 1
SEAL = "crc32c"  # key of a JSON object's own digest
SMALL_BYTES = 2**20  # files up to this size are digested also where the sizes of the others are enough
_BLOCK_BYTES = 2**23
_THREADS = 4


class Digest(NamedTuple):
    """The size of a file in bytes, and the CRC-32C of its content as 8 hex digits."""

    size: int
    crc32c: str


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


def digest_file(path: Path, done: Callable[[int], None] = lambda size: None) -> Digest:
    """The digest of a file; `done` is called with the number of bytes of each block. Raises `OSError`."""
    import google_crc32c

    checksum, size = google_crc32c.Checksum(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            size += len(block)
            done(len(block))
    return Digest(size, checksum.hexdigest().decode())


def digest_files(root: Path, names: Iterable[str]) -> dict[str, Digest]:
    """The digests of some files under `root`, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(root / name), names), strict=True))


def files_under(root: Path) -> list[str]:
    """The names of all files under a directory, relative to it, sorted; without its manifest."""
    return sorted(name for name in _names(root, "") if name != MANIFEST)


def _names(directory: Path, prefix: str) -> Iterator[str]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _names(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own digest under `SEAL`."""
    plain = json.loads(json.dumps({key: value for key, value in content.items() if key != SEAL}))
    return {**plain, SEAL: crc32c(json.dumps(plain, sort_keys=True).encode())}


def seal_broken(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object that `sealed` made has changed since."""
    return sealed(content)[SEAL] != content.get(SEAL)


@dataclass(frozen=True)
class Manifest:
    """What a directory holds: the digests of its files, by their names relative to it, and `about`, any JSON."""

    files: Mapping[str, Digest]
    about: Mapping[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        """Writes manifest.json, atomically. It comes last: a directory with a manifest is complete."""
        files = {name: digest._asdict() for name, digest in sorted(self.files.items())}
        content = sealed({"format": FORMAT, "about": self.about, "files": files})
        return write_file(directory / MANIFEST, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a directory; `DataError` if it has none, or a damaged one."""
        path = directory / MANIFEST
        try:
            content = json_object(path.read_bytes())
        except OSError as error:
            raise DataError(f"'{path}' cannot be read ({error.strerror or type(error).__name__}).") from None
        if content is None or seal_broken(content):
            raise DataError(f"'{path}' is damaged: it does not have the content that was written.")
        if content.get("format") != FORMAT:
            raise DataError(f"'{path}' has format {content.get('format')!r}; this version reads {FORMAT}.")
        return cls({name: Digest(**digest) for name, digest in content["files"].items()}, content["about"])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(digest.size for digest in self.files.values())

    def damage(
        self,
        directory: Path,
        chosen: Callable[[str, Digest], bool] = lambda name, digest: True,
        done: Callable[[int], None] = lambda size: None,
    ) -> list[Damage]:
        """What differs from the manifest: files that are missing, of another size, or changed.

        Args:
          directory: where the files are.
          chosen: which files are read; of the others only the size is compared.
          done: called with the number of bytes of each block.
        """

        def check(item: tuple[str, Digest]) -> str:
            name, digest = item
            path = directory / name
            try:
                size = path.stat().st_size
                if size != digest.size:
                    return f"has {size:,} bytes; it was written with {digest.size:,}"
                if not chosen(name, digest):
                    return ""
                found = digest_file(path, done)
            except FileNotFoundError:
                return "is missing"
            except OSError as error:
                return f"cannot be read ({error.strerror or type(error).__name__})"
            return "" if found == digest else f"has changed: its CRC-32C is {found.crc32c}, was {digest.crc32c}"

        with ThreadPoolExecutor(_THREADS) as pool:
            found = zip(self.files, pool.map(check, self.files.items()), strict=True)
            return [Damage(name, what) for name, what in found if what]

    def quick_damage(self, directory: Path) -> list[Damage]:
        """As `damage`, without reading large files: what can be found in milliseconds."""
        return self.damage(directory, lambda name, digest: digest.size <= SMALL_BYTES)


def manifest_of(directory: Path, about: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a directory as it is now."""
    return Manifest(digest_files(directory, files_under(directory)), about or {})
