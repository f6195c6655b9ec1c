"""The pages of the documentation site: their order, their links, and what is wrong with either.

A page is a Markdown file of the repository, which GitHub shows as it is. On the site, a link to a file that is no page
leads to that file's page under `source/`, with its lines numbered. This module needs no package.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
INDEX = "README.md"

# Every docs/*.md has to be in one of these lists. `reference/` is generated: generated.py.
NAVIGATION = {
    "Tutorials": ["docs/scale.md"],
    "How-to": [
        "docs/recipes.md",
        "docs/data.md",
        "docs/sweeps.md",
        "docs/your-own-encoding.md",
        "docs/reports.md",
        "docs/checkpoints.md",
        "docs/extend.md",
        "docs/audit.md",
        "docs/evaluation.md",
        "docs/dope.md",
        "docs/object_stores.md",
        "launch/README.md",
    ],
    "Reference": [
        "docs/claims.md",
        "docs/manuals.md",
        "docs/encodings.md",
        "docs/attention.md",
        "reference/commands.md",
        "reference/analyses.md",
        "reference/config.md",
        "reference/api.md",
    ],
    "Explanation": ["docs/architecture.md", "docs/frequencies.md", "docs/inside.md", "docs/reliability.md"],
    "Project": ["CONTRIBUTING.md", "docs/decisions.md", "docs/compared.md", "docs/log.md", "benchmarks/README.md"],
}


def pages() -> list[str]:
    """The Markdown files of the site that are in the repository."""
    listed = [page for group in NAVIGATION.values() for page in group if not page.startswith("reference/")]
    return [INDEX, *listed]


class Link(NamedTuple):
    """A link of a page: its line, its text and its target, such as `../pe_lab/train.py#L55`."""

    line: int
    text: str
    target: str


_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def _prose(text: str) -> Iterator[tuple[int, str, bool]]:
    """(number, line, whether it is prose): lines of fenced blocks are not."""
    fence = ""
    for number, line in enumerate(text.split("\n"), 1):
        mark = re.match(r" {0,3}(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
            yield number, line, False
        elif fence:
            fence = "" if line.strip() == fence else fence
            yield number, line, False
        else:
            yield number, line, True


def links(page: str) -> list[Link]:
    """The links and images of a page, without those in code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Link(number, match[1], match[2])
        for number, line, prose in _prose(text)
        if prose
        for match in _LINK.finditer(re.sub(r"(?<!\[)`[^`]*`(?!\])", "", line))
    ]


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for _, line, prose in _prose((ROOT / page).read_text(encoding="utf-8")):
        heading = re.match(r"#{1,6} +(.*?) *#*$", line) if prose else None
        if heading:
            slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()).replace(
                " ", "-"
            )
            copies = sum(1 for one in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one))
            found.add(f"{slug}-{copies}" if copies else slug)
    return found


def is_external(target: str) -> bool:
    """Whether a link leads out of the repository."""
    return re.match(r"[a-z]+:", target) is not None


def path_of(page: str, target: str) -> str:
    """The path in the repository that a link of a page leads to."""
    inside = (ROOT / page).parent / target if target else ROOT / page
    return inside.resolve().relative_to(ROOT).as_posix()


def problems() -> list[str]:
    """What is wrong with the navigation and with internal links, a line each."""
    found = []
    listed = pages()
    written = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    found += [f"{page} is not in NAVIGATION of docs/site/pages.py" for page in written if page not in listed]
    found += [
        f"docs/site/pages.py lists {page}, which does not exist" for page in listed if not (ROOT / page).is_file()
    ]
    found += [f"docs/site/pages.py lists {page} twice" for page in sorted(set(listed)) if listed.count(page) > 1]
    tracked = set(subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n"))
    for page in dict.fromkeys(page for page in listed if (ROOT / page).is_file()):
        for link in links(page):
            if is_external(link.target):
                continue
            where = f"{page}:{link.line}: [{link.text}]({link.target})"
            target, _, fragment = link.target.partition("#")
            try:
                path = path_of(page, target)
            except ValueError:
                found.append(f"{where} leads out of the repository")
                continue
            directory = any(one.startswith(f"{path}/") for one in tracked)
            if path not in tracked and path not in listed and not directory:
                found.append(f"{where}: there is no {path}")
            elif fragment and path.endswith(".md"):
                if fragment not in anchors(path):
                    found.append(f"{where}: {path} has no heading '{fragment}'")
            elif fragment:
                lines = (ROOT / path).read_text(encoding="utf-8").count("\n") if not directory else 0
                numbered = re.fullmatch(r"L(\d+)", fragment)
                if not numbered or not 1 <= int(numbered[1]) <= lines:
                    found.append(f"{where}: {path} has {lines} lines")
    return found


def for_site(page: str) -> tuple[str, set[str]]:
    """The text of a page with the site's links, and the files that it links to and that are no pages."""
    listed, sources = pages(), set()
    depth = page.count("/")

    def rewritten(match: re.Match[str]) -> str:
        text, whole = match[1], match[2]
        target, _, fragment = whole.partition("#")
        if is_external(whole) or not target or text.startswith("!["):
            return match[0]
        path = path_of(page, target)
        if path == INDEX:
            return f"[{text}]({'../' * depth}index.md{'#' * bool(fragment)}{fragment})"
        if path in listed or path.endswith(".png"):
            return match[0]
        if (ROOT / path).is_dir():
            return text
        sources.add(path)
        line = fragment.replace("L", "#L-") if fragment else ""
        return f"[{text}](source{depth}:{path}{line})"

    lines = []
    for _, line, prose in _prose((ROOT / page).read_text(encoding="utf-8")):
        lines.append(_LINK.sub(rewritten, line) if prose else line)
    return "\n".join(lines), sources
