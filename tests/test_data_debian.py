"""Corpora of Debian packages: packages that are read, downloaded, refused. 2 s; no network."""

import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading
import zlib

import pytest

from pe_lab.config import SourceConfig
from pe_lab.data import sources
from pe_lab.data.sources import debian, open_source
from pe_lab.data.sources.debian import Corpus, Package, documents_of, download
from pe_lab.data.sources.manuals import MANUALS
from pe_lab.data.sources.paragraphs import is_english_prose
from pe_lab.errors import ConfigError, DataError, StoreError

SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank every day. " * 4
RFC = f"""



Network Working Group                                          A. Author
Request for Comments: 9999                                  January 2001


1. Introduction ...................................................2

   {SENTENCE.strip()}

   This paragraph goes on with many more words until the end of the
   page and



Author                       Informational                      [Page 1]
\f
RFC 9999                     A Document                     January 2001


   continues on the next one, as it should, without a break in it.

      +--------+--------+
      | a drawing of boxes |
      +--------+--------+
"""
HTML = f"""<html><head><title>No</title><style>p {{}}</style></head><body><nav>{SENTENCE}</nav>
<h1>A heading</h1><p>{SENTENCE}<b>Bold</b> &amp; more words that stay in this paragraph.</p>
<pre>code code code code code code code code code</pre></body></html>"""


def package(files: dict[str, bytes]) -> bytes:
    """A .deb: an `ar` archive with a compressed tar."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", tar.getvalue())):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        found += header + content + b"\n" * (len(content) % 2)
    return found


CONTENT = package(
    {
        "./usr/share/doc/RFC/rfc9999.txt.gz": gzip.compress(RFC.encode()),
        "./usr/share/doc/RFC/short.txt.gz": gzip.compress(b"Too short to be a document."),
        "./usr/share/doc/RFC/rfc1.json": b"{}",
    }
)
PACKAGE = Package("main/d/doc/doc-rfc-x_1_all.deb", hashlib.sha256(CONTENT).hexdigest(), "*.txt.gz")
PROSE = Corpus("prose", (PACKAGE,))


def test_paragraphs_of_an_rfc_are_prose_on_one_line():
    (found,) = documents_of(PROSE, PACKAGE, CONTENT)
    assert found.split("\n\n") == [
        " ".join(SENTENCE.split()),
        "This paragraph goes on with many more words until the end of the page and continues on the next one, as it "
        "should, without a break in it.",
    ]


@pytest.fixture
def mirror():
    """A mirror on loopback, and what it serves by path."""
    served: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            content = served.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", served
    server.shutdown()


def test_a_package_comes_from_the_first_mirror_that_has_it(mirror):
    address, served = mirror
    served[f"/second/pool/{PACKAGE.path}"] = CONTENT
    assert download(PROSE, PACKAGE, chosen=(f"{address}/first", f"{address}/second")) == CONTENT
    with pytest.raises(StoreError, match="doc-rfc-x cannot be downloaded .*404"):
        download(PROSE, PACKAGE, chosen=(f"{address}/first",))


def test_the_machines_own_mirrors_come_first(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "deb [arch=amd64] http://one.example/debian bookworm main # and not/debian\n"
    )
    deb822 = "Types: deb\nURIs: https://two.example/debian/\nSuites: bookworm\n"
    (tmp_path / "sources.list.d/two.sources").write_text(deb822 + "URIs: http://three.example/ubuntu\n")
    assert debian.mirrors(tmp_path) == ("http://one.example/debian", "https://two.example/debian", *debian.MIRRORS)
    assert debian.mirrors(tmp_path / "none") == debian.MIRRORS


def test_a_package_that_was_changed_is_refused(mirror):
    address, served = mirror
    served[f"/pool/{PACKAGE.path}"] = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=f"not {PACKAGE.sha256}: it is damaged"):
        download(PROSE, PACKAGE, chosen=(address,))
    with pytest.raises(DataError, match="is no Debian package"):
        list(documents_of(PROSE, PACKAGE, b"something else"))


def test_the_source_reads_each_package_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    downloads = []
    monkeypatch.setitem(sources.OF_PACKAGES, "prose", PROSE)
    monkeypatch.setattr(debian, "download", lambda corpus, one, report: downloads.append(one) or CONTENT)
    for _ in range(2):
        source = open_source(SourceConfig("prose"))
        (document,) = source.documents()
        assert document.text.startswith("The quick brown fox")
    assert downloads == [PACKAGE]
    assert json.loads((tmp_path / "data/prose/doc-rfc-x.jsonl").read_text())["text"] == document.text
    with pytest.raises(ConfigError, match="is incomplete"):
        open_source(SourceConfig("prose:x"))
    with pytest.raises(ConfigError, match="has no columns"):
        open_source(SourceConfig("prose", template="{text}"))


def test_what_was_interrupted_goes_on_with_the_packages_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    second = PACKAGE._replace(path="main/o/other_1_all.deb")
    corpus, downloads = Corpus("manuals", (PACKAGE, second)), []

    def failing(corpus, one, report):
        downloads.append(one.name)
        if downloads == ["doc-rfc-x", "other"]:
            raise StoreError("the network is down")
        return CONTENT

    monkeypatch.setattr(debian, "download", failing)
    monkeypatch.setitem(sources.OF_PACKAGES, "manuals", corpus)
    with pytest.raises(StoreError, match="the network is down"):
        open_source(SourceConfig("manuals"))
    assert [one.name for one in (tmp_path / "data/manuals").iterdir()] == ["doc-rfc-x.jsonl"]
    assert len(list(open_source(SourceConfig("manuals")).documents())) == 2
    assert downloads == ["doc-rfc-x", "other", "other"]


def test_a_paragraph_that_the_package_had_before_is_left_out():
    again = f"<p>{SENTENCE}</p><p>This sentence is on each of the two pages, and it is kept once.</p>"
    content = package({"./usr/share/doc/a.html": again.encode(), "./usr/share/doc/b.html": f"{again}{HTML}".encode()})
    named = Package("main/a/a_1_all.deb", "", "*.html")
    kept = list(documents_of(Corpus("manuals", (named,)), named, content))
    once = list(documents_of(Corpus("manuals", (named,), repeats=False), named, content))
    assert [one.count("\n\n") for one in kept] == [1, 2]
    assert once[0] == kept[0] and once[1] == kept[1].split("\n\n")[-1]


def test_a_dictionary_is_cut_into_documents(monkeypatch):
    monkeypatch.setattr(debian, "MOST_CHARACTERS", 500)
    entries = "".join(f"word{i}\n   {SENTENCE.strip()} It is of the {i}th kind. [1913 Webster]\n" for i in range(5))
    content = package({"./usr/share/dictd/x.dict.dz": gzip.compress(entries.encode())})
    named = Package("main/x/dict-x_1_all.deb", "", "*.dict.dz")
    found = list(documents_of(Corpus("manuals", (named,), cuts=True), named, content))
    assert [one.split()[0] for one in found] == [f"word{i}" for i in range(5)]
    assert all(one.endswith("th kind.") for one in found)


def test_an_archive_in_a_package_and_the_blocks_of_a_sword_module_are_read():
    program = f"/* {SENTENCE}It is the comment of a program. */".encode()
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        info = tarfile.TarInfo("linux-6.1/kernel/a.c")
        info.size = len(program)
        archive.addfile(info, io.BytesIO(program))
    texts = [f"<div>{SENTENCE} It is the {n} block.</div>".encode() for n in ("first", "second")]
    blocks = zlib.compress(texts[0]) + b"free space x\x9c of a block" + zlib.compress(texts[1])
    content = package({"./usr/src/linux.tar.xz": inner.getvalue(), "./usr/share/sword/ot.czz": blocks})
    named = Package("main/x/x_1_all.deb", "", "*.tar.xz *.c *.czz")
    source, module = documents_of(Corpus("manuals", (named,)), named, content)
    assert source.endswith("It is the comment of a program.")
    assert [one.rpartition(" It is ")[2] for one in module.split("\n\n")] == ["the first block.", "the second block."]


def test_patterns_say_which_files_are_documents():
    named = Package("main/x/x_1_all.deb", "", "*.html *.txt !*.??.html")
    assert [named.has(one) for one in ("a/b.html", "a/b.txt", "a/b.de.html", "a/b.pdf")] == [True, True, False, False]


def test_the_packages_of_manuals_are_named_once_and_have_a_licence():
    """What the table says of a package is checked where it is downloaded; here that it is a table."""
    assert MANUALS.is_text is is_english_prose and not MANUALS.repeats
    names = [one.name for one in MANUALS.packages]
    assert len(set(names)) == len(names)
    for one in MANUALS.packages:
        assert one.path.endswith(".deb") and len(one.sha256) == 64 and one.files and one.licence
