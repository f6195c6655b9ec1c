"""Corpora of Debian packages, each downloaded at its first use and kept as JSON lines, a document each.

Nothing of a package is in pe_lab: each machine downloads them. A package is named by its file and SHA-256, so that
every machine has the same documents.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import re
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pe_lab.data.sources.files import JsonLines
from pe_lab.data.sources.paragraphs import is_prose, paragraphs_of
from pe_lab.data.sources.records import Records
from pe_lab.errors import DataError, StoreError
from pe_lab.storage import find_files, write_file
from pe_lab.terminal import Progress, console

# Beside the machine's own mirrors. Mirrors drop a release some years after it, the archive of snapshots keeps all: of
# Debian 12 as it was in October 2023, and after its last point release.
MIRRORS = (
    "http://ftp.debian.org/debian",
    "http://snapshot.debian.org/archive/debian/20231007T000000Z",
    "http://snapshot.debian.org/archive/debian/20260801T000000Z",
)
APT = Path("/etc/apt")
LEAST_CHARACTERS = 200  # of a document
MOST_CHARACTERS = 100_000  # of a document of a corpus whose documents are cut
ZLIB = b"x\x9c"  # begins a block of zlib


def _blocks(raw: bytes) -> bytes:
    """The text of a SWORD module: deflated blocks, one after another, some with free space behind them."""
    blocks, at = [], raw.find(ZLIB)
    while at >= 0:
        block = zlib.decompressobj()
        try:
            blocks.append(block.decompress(raw[at:]))
            at = raw.find(ZLIB, len(raw) - len(block.unused_data))
        except zlib.error:  # two bytes of free space that look like the beginning of a block
            at = raw.find(ZLIB, at + 1)
    return b"".join(blocks)


DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".dz": gzip.decompress,
    ".bzz": _blocks,
    ".czz": _blocks,
}


class Package(NamedTuple):
    """A Debian package: its file in the pool, the file's SHA-256, and which files in it are documents."""

    path: str
    sha256: str
    files: str  # patterns, with spaces between them; `!` begins one of files that are none
    licence: str = ""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2].partition("_")[0]

    def has(self, file: str) -> bool:
        """Whether a file is a document."""
        patterns = self.files.split()
        return any(fnmatch(file, one) for one in patterns) and not any(
            fnmatch(file, one[1:]) for one in patterns if one[0] == "!"
        )


class Corpus(NamedTuple):
    """The packages of a source, and what of their text is left out."""

    name: str
    packages: Sequence[Package]
    is_text: Callable[[str], bool] = is_prose  # of a paragraph
    repeats: bool = True  # whether a paragraph is kept that was in the package before, but for numbers
    cuts: bool = False  # whether a document of more than `MOST_CHARACTERS` is cut at ends of paragraphs

    @property
    def directory(self) -> Path:
        return Path("data") / self.name


def open_packages(corpus: Corpus, records: Records) -> JsonLines:
    """The documents of a corpus; downloads and reads the packages that are not in its directory.

    Raises:
      StoreError: a package cannot be downloaded.
      DataError: a package is not the one that its digest names, or the directory cannot be written.
    """
    files = {corpus.directory / f"{package.name}.jsonl": package for package in corpus.packages}
    missing = {path: package for path, package in files.items() if not path.is_file()}
    if missing:
        with Progress(console(stderr=True), corpus.name, len(missing)) as progress:
            for number, (path, package) in enumerate(missing.items()):
                name = f"{corpus.name}, package {number + 1} of {len(missing)}:"
                report, lines = partial(progress.update, number, name=name), []
                for text in documents_of(corpus, package, download(corpus, package, report)):
                    lines.append(json.dumps({"text": text}) + "\n")
                    report(f"{package.name}, {len(lines):,} documents")
                write_file(path, "".join(lines), f"Run the command where {corpus.directory} can be written.")
    found = [one for path in files for one in find_files(f"data source {corpus.name!r}", str(path))]
    return JsonLines(corpus.name, found, records)


def mirrors(apt: Path = APT) -> tuple[str, ...]:
    """Debian mirrors: those that this machine's apt uses, if it has one, then `MIRRORS`."""
    own = []
    for file in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if file.is_file():
            own += re.findall(r"https?://[^\s\]]+/debian/?(?=\s|$)", file.read_text("utf-8", "replace"), re.MULTILINE)
    return tuple(dict.fromkeys([*(one.rstrip("/") for one in own), *MIRRORS]))


def download(
    corpus: Corpus,
    package: Package,
    report: Callable[[str], None] = lambda text: None,
    chosen: Sequence[str] | None = None,
) -> bytes:
    """The bytes of a package, from the first mirror that has it; `report` is told how much is there.

    Raises:
      StoreError: none has it, or none can be reached.
      DataError: it is not the package that its digest names.
    """
    reasons = []
    for mirror in mirrors() if chosen is None else chosen:
        url = f"{mirror}/pool/{package.path}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                size, content = int(answer.headers.get("Content-Length") or 0), io.BytesIO()
                while part := answer.read(2**20):
                    content.write(part)
                    report(f"{package.name}, {content.tell() / 2**20:.0f} of {size / 2**20:.0f} MiB")
        except (OSError, http.client.HTTPException) as error:
            reasons.append(f"{url}: {error}")
            continue
        if (found := hashlib.sha256(content.getvalue()).hexdigest()) != package.sha256:
            raise DataError(
                f"data source {corpus.name!r}: {url} has SHA-256 {found}, not {package.sha256}: it is damaged, or was "
                "changed on the way. Repeat the command."
            )
        return content.getvalue()
    raise StoreError(
        f"data source {corpus.name!r}: {package.name} cannot be downloaded ({'; '.join(reasons)}). Check the network, "
        f"or copy '{corpus.directory}' from a machine that has it."
    )


def documents_of(corpus: Corpus, package: Package, content: bytes) -> Iterator[str]:
    """The documents of a package, in the order of its archive, each as paragraphs with an empty line between them."""
    seen: set[bytes] = set()

    def is_new(paragraph: str) -> bool:
        if corpus.repeats:
            return True
        # Without numbers: "... the current status of this document is at http://www.rfc-editor.org/info/rfc8120".
        digest = hashlib.blake2b(re.sub(r"\d+", "0", paragraph).encode("utf-8", "replace"), digest_size=8).digest()
        is_first = digest not in seen
        seen.add(digest)
        return is_first

    with tarfile.open(fileobj=io.BytesIO(_member(corpus, package, content, b"data.tar"))) as archive:
        for name, raw in _files(archive, package):
            for suffix, decompress in DECOMPRESS.items():
                if name.endswith(suffix):
                    raw, name = decompress(raw), name.removesuffix(suffix)
            if read := paragraphs_of(name):
                found = (one for one in read(raw.decode("utf-8", "replace")) if corpus.is_text(one) and is_new(one))
                for text in _cut(found) if corpus.cuts else ["\n\n".join(found)]:
                    if len(text) >= LEAST_CHARACTERS:
                        yield text


def _files(archive: tarfile.TarFile, package: Package) -> Iterator[tuple[str, bytes]]:
    """The name and the content of each file of an archive that is a document, also of those in an archive in it."""
    for file in archive:
        if file.isfile() and package.has(file.name) and (opened := archive.extractfile(file)):
            if file.name.endswith(".tar.xz"):
                with tarfile.open(fileobj=opened, mode="r|xz") as inner:
                    yield from _files(inner, package)
            else:
                yield file.name, opened.read()


def _cut(paragraphs: Iterator[str]) -> Iterator[str]:
    """Documents of about `MOST_CHARACTERS` at most, from the paragraphs of one."""
    gathered: list[str] = []
    characters = 0
    for paragraph in paragraphs:
        if characters + len(paragraph) > MOST_CHARACTERS:
            yield "\n\n".join(gathered)
            gathered, characters = [], 0
        gathered.append(paragraph)
        characters += len(paragraph)
    yield "\n\n".join(gathered)


def _member(corpus: Corpus, package: Package, content: bytes, prefix: bytes) -> bytes:
    """The member of a .deb, an `ar` archive, whose name begins with `prefix`."""
    position = 8 if content.startswith(b"!<arch>\n") else len(content)
    while position + 60 <= len(content):
        header, position = content[position : position + 60], position + 60
        size = int(header[48:58])
        if header.startswith(prefix):
            return content[position : position + size]
        position += size + size % 2
    raise DataError(f"data source {corpus.name!r}: {package.name} is no Debian package with a {prefix.decode()}.")
