"""The corpus `prose`: packages that are read, downloaded, refused. 2 s; no network."""

import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading

import pytest

from pe_lab.config import SourceConfig
from pe_lab.data.sources import open_source, prose
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
PACKAGE = prose.Package("main/d/doc/doc-rfc-x_1_all.deb", hashlib.sha256(CONTENT).hexdigest(), "*.txt.gz")


def test_paragraphs_of_an_rfc_are_prose_on_one_line():
    (found,) = prose.documents_of(PACKAGE, CONTENT)
    assert found.split("\n\n") == [
        " ".join(SENTENCE.split()),
        "This paragraph goes on with many more words until the end of the page and continues on the next one, as it "
        "should, without a break in it.",
    ]


def test_paragraphs_of_a_page_leave_out_code_and_menus():
    found = [one for one in prose.html_paragraphs(HTML) if prose.is_prose(one)]
    assert found == [f"{' '.join(SENTENCE.split())} Bold & more words that stay in this paragraph."]


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
    assert prose.download(PACKAGE, (f"{address}/first", f"{address}/second")) == CONTENT
    with pytest.raises(StoreError, match="doc-rfc-x cannot be downloaded .*404"):
        prose.download(PACKAGE, (f"{address}/first",))


def test_the_machines_own_mirrors_come_first(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "deb [arch=amd64] http://one.example/debian bookworm main # and not/debian\n"
    )
    deb822 = "Types: deb\nURIs: https://two.example/debian/\nSuites: bookworm\n"
    (tmp_path / "sources.list.d/two.sources").write_text(deb822 + "URIs: http://three.example/ubuntu\n")
    assert prose.mirrors(tmp_path) == ("http://one.example/debian", "https://two.example/debian", *prose.MIRRORS)
    assert prose.mirrors(tmp_path / "none") == prose.MIRRORS


def test_a_package_that_was_changed_is_refused(mirror):
    address, served = mirror
    served[f"/pool/{PACKAGE.path}"] = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=f"not {PACKAGE.sha256}: it is damaged"):
        prose.download(PACKAGE, (address,))
    with pytest.raises(DataError, match="is no Debian package"):
        list(prose.documents_of(PACKAGE, b"something else"))


def test_the_source_reads_each_package_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    downloads = []
    monkeypatch.setattr(prose, "PACKAGES", (PACKAGE,))
    monkeypatch.setattr(prose, "download", lambda one: downloads.append(one) or CONTENT)
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
