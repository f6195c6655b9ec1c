"""The documentation site: the navigation has every page, links lead somewhere, and it builds without a warning."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs/site"))
import generated  # noqa: E402
import pages  # noqa: E402

from pe_lab import config  # noqa: E402


def test_navigation_and_internal_links_are_whole():
    assert pages.problems() == []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of two pages and a module of three lines."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "pe_lab").mkdir()
    (tmp_path / "README.md").write_text("# Home\n\n[a](docs/a.md#one-two), [code](pe_lab/x.py#L3)\n")
    (tmp_path / "docs/a.md").write_text("# A\n\n## One, two\n\n```text\n[no](link.md)\n```\n`[nor](this.md)`\n")
    (tmp_path / "pe_lab/x.py").write_text("1\n2\n3\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "NAVIGATION", {"Reference": ["docs/a.md", "reference/config.md"]})
    return tmp_path


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("docs/b.md", "there is no docs/b.md"),
        ("docs/a.md#three", "docs/a.md has no heading 'three'"),
        ("#nowhere", "README.md has no heading 'nowhere'"),
        ("pe_lab/x.py#L4", "pe_lab/x.py has 3 lines"),
        ("pe_lab/x.py#main", "pe_lab/x.py has 3 lines"),
        ("../elsewhere", "leads out of the repository"),
        ("build/page.html", "there is no build/page.html"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(repository, link, says):
    assert pages.problems() == []
    (repository / "README.md").write_text(f"# Home\n\n![a picture]({link})\n")
    (found,) = pages.problems()
    assert found.startswith("README.md:3: ") and says in found


def test_a_page_outside_the_navigation_is_found(repository, monkeypatch):
    (repository / "docs/new.md").write_text("# New\n")
    assert pages.problems() == ["docs/new.md is not in NAVIGATION of docs/site/pages.py"]
    monkeypatch.setattr(pages, "NAVIGATION", {"A": ["docs/a.md", "docs/new.md", "docs/old.md", "docs/a.md"]})
    assert [line.partition(" lists ")[2] for line in pages.problems()] == [
        "docs/old.md, which does not exist",
        "docs/a.md twice",
    ]


def test_links_are_rewritten_for_the_site(repository):
    text, files = pages.for_site("README.md")
    assert "[a](docs/a.md#one-two), [code](source0:pe_lab/x.py#L-3)" in text and files == {"pe_lab/x.py"}
    (repository / "docs/a.md").write_text(
        "[home](../README.md#home) [m](../pe_lab/x.py) [d](../pe_lab) [w](https://w.org)\n"
    )
    text, files = pages.for_site("docs/a.md")
    assert text == "[home](../index.md#home) [m](source1:pe_lab/x.py) d [w](https://w.org)\n"


def test_every_key_of_a_config_is_in_the_table():
    table = generated.config()
    assert "| `spike_sigma` | `float` | `6.0` | a spike is so many deviations above" in table
    assert "| `layers` | `int` | `12` | 1 to 2,048 |" in table
    for kind in vars(config).values():
        if dataclasses.is_dataclass(kind) and kind.__module__ == config.__name__:
            section = table.partition(f"## {kind.__name__}\n")[2].partition("\n## ")[0]
            keys = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
            assert keys == [field.name for field in dataclasses.fields(kind)]


class _Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links += [found[key] for key in ("href", "src") if found.get(key)]


@pytest.mark.slow
def test_the_site_builds_and_each_of_its_links_leads_to_a_page_and_an_anchor():
    """20 s: Sphinx with warnings as errors, then every link of every page as a browser resolves it."""
    done = subprocess.run([sys.executable, "docs/site/build.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    site = ROOT / "build/docs"
    read = {path: _Page(path) for path in site.rglob("*.html")}
    assert len(read) > 60
    broken = []
    for path, page in read.items():
        for link in page.links:
            target, _, fragment = link.partition("#")
            if re.match(r"[a-z]+:|//", link):
                continue
            there = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            if not there.exists() or (fragment and there in read and unquote(fragment) not in read[there].ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
    api = (site / "reference/api/positional.html").read_text(encoding="utf-8")
    assert "Float" in api and "&#39;N H&#39;" in api.replace("'", "&#39;")  # annotations as written
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "spike_sigma" in index and "reference/config" in index  # the search works without a server
