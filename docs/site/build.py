"""Builds the documentation site into build/docs; fails on the first pass at a warning or a link that leads nowhere.

python docs/site/build.py            # make docs
python docs/site/build.py --links    # also asks the servers of external links
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import generated
import pages

BUILD = pages.ROOT / "build"


def assemble(source: Path, extra: Path) -> None:
    """Writes the pages for Sphinx below `source`, and a page of each linked file below `extra`."""
    for directory in (source, extra):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    linked: set[str] = set()
    for page in pages.pages():
        text, files = pages.for_site(page)
        linked |= files
        if page == pages.INDEX:
            page, text = "index.md", text + _toctrees()
        _write(source / page, text)
    for page, text in generated.all_pages().items():
        _write(source / page, text)
    for pictures in ("docs/pictures", "claims/results"):
        shutil.copytree(pages.ROOT / pictures, source / pictures, ignore=shutil.ignore_patterns("*.json"))
    for path in sorted(linked):
        _write(extra / "source" / f"{path}.html", _numbered(path))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _toctrees() -> str:
    parts = []
    for title, listed in pages.NAVIGATION.items():
        names = "\n".join(page.removesuffix(".md") for page in listed)
        parts.append(f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n\n{names}\n```\n")
    return "".join(parts)


def _numbered(path: str) -> str:
    """A file as a page whose lines have the anchors L-1, L-2, ..."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import TextLexer, get_lexer_for_filename
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    shown = HtmlFormatter(
        full=True, title=path, linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True,
        cssstyles=f"</style>{viewport}<style>:target {{ background: #ffefb0 }}",
    )  # fmt: skip
    return highlight((pages.ROOT / path).read_text(encoding="utf-8"), lexer, shown)


def main(check_links: bool) -> int:
    wrong = pages.problems()
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
        from sphinx.cmd.build import build_main
    except ImportError as error:
        print(f"error: {error.name} is not installed: pip install 'pe-lab[docs]'", file=sys.stderr)
        return 2
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    source, extra = BUILD / "docs_source", BUILD / "docs_extra"
    assemble(source, extra)
    here, cache, out = Path(__file__).parent, BUILD / "docs_cache", BUILD / "docs"
    shutil.rmtree(out, ignore_errors=True)
    common = ["-q", "-c", str(here), "-d", str(cache), "-D", f"html_extra_path={extra}", "--fail-on-warning"]
    status = build_main([*common, "-b", "html", str(source), str(out)])
    if status == 0 and check_links:
        status = build_main([*common, "-b", "linkcheck", str(source), str(BUILD / "docs_links")])
    if status == 0:
        print(f"the site: {out / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main("--links" in sys.argv[1:]))
