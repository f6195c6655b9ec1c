"""Words that have a better one, and the names in docs/architecture.md."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# pattern, what to write, only in these paths, not in these paths
WORDS = [
    (r"\b[Tt]urn(s|ed|ing)?\b", "rotate", "", ""),
    (r"\bstands? still\b", "is not rotated", "", ""),
    (r"\blog_sums?\b", "logsumexp", "", ""),
    (r"\b\w*spans?\b", "key block", r"pe_lab/(attention|model)/", ""),
    (r"\bSide\b|\bPartial\b(?! RoPE)", "attention inputs, partial attention", r"pe_lab/(attention|model)/", ""),
    (r"\bPast\b|\bStored\b", "KV cache, cache view", r"pe_lab/(attention|model)/", ""),
    (r"\bRow\b", "layer encoding", r"pe_lab/(attention|model|positional)/", ""),
    (r"\b(cut|spread) over\b", "sharded over", "", ""),
    (r"\b[Tt]runk\b", "embedder", "", ""),
    (r"\b[Ss]elf[ _-]bias\b", "diagonal bias", "", ""),
    (r"\b[Ww]ays? of reading\b|\bReaders?\b|(?<!\")\bread_as\b", "variant", "", ""),
    (r"\b[Aa]nswerers?\b|\b[Hh]eard\b", "generation backend, on_tokens", "", ""),
    (r"\bsaid\b", "display_name, or a plain verb", "", ""),
    (r"\bheld\b(?![- ]out)", "slot positions, kept, stored", "", ""),
    (r"(?<!\")\bfacts\b", "metadata", r"pe_lab/", r"data/needles|suites/needles"),  # an option of the needles source
    (r"\b[Ff]oreign\b", "external", "", ""),
    (r"\b(bring|take)_(in|out)\b|\b([Bb]rings?|[Bb]rought|[Tt]akes?|[Tt]ook) (in|out)\b", "import, export", "", ""),
    (r"\b[Vv]erbs?\b|\b[Nn]ouns?\b", "command, library", "", r"suites/(niah|ruler)"),  # parts of speech
    (r"\b[Rr]ooms?\b", "package", "", ""),
    (r"\bas it comes\b|\bwhat there is\b|\bwhat differs\b", "say the thing", "", ""),
    (r"\b[Ll]ong(er)? texts?\b|\btexts? of [\w ,]{0,24}tokens\b|\bcut (a|the) texts?\b", "sequence", "", ""),
    (r"\b[Ss]tud(y|ies|ied|ying)\b", "analysis (of a model), claim (of a paper)", "", ""),
    (
        r"--extend\b|\bon_extend\b|\b[Ee]xtended? (a |the )?(run|phase)s?\b|\brun (is|was) extended\b",
        "until",
        "",
        r"docs/log\.md",
    ),
    (
        r"\"(reading|read_as|facts)\"",
        "fingerprint, length, metadata",
        r"pe_lab/(evaluation|results|page|analysis|lab)/",
        "",
    ),
    (r"\.get\(\"method\"|\[\"method\"\]|\"method\": ", "variant", r"pe_lab/(evaluation|results|page|lab)/", ""),
    (
        r"\b[Cc]laim(s|ed|ing)? (a|the|its|each) (cell|file|directory|lease|lock)\b|\bclaims? (of|on) (a )?cells?\b",
        "lease",
        "",
        "",
    ),
    (
        r"\bSchedulePath\b|\b[Pp]aths? between (two )?(schedules|encodings)\b|phases?(\[\w+\]|\.\w+)?\.path\b",
        "transition",
        "",
        "",
    ),
    (r"\b[Ll]evels?\b", "stage", r"pe_lab/(claims|lab/claims/running)\.py", ""),
    (r"\bother people's\b|\b[Ss]ome(body|one)( else)?'s\b", "external", r"pe_lab/", ""),
]


def found(path: str, text: str) -> list[str]:
    applied = [
        (pattern, word)
        for pattern, word, only, but in WORDS
        if re.search(only, path) and not (but and re.search(but, path))
    ]
    return [
        f"{path}:{number}: '{match.group()}' -> {word}: {line.strip()[:90]}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, word in applied
        for match in re.finditer(pattern, line)
    ]


def test_no_word_has_a_better_one():
    listing = ["git", "ls-files", "pe_lab", "docs", "README.md", "configs", "launch", "CONTRIBUTING.md", "Makefile"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [f for f in files if f.endswith((".py", ".md", ".sh", "Makefile")) and (ROOT / f).is_file()]
    assert len(files) > 100
    assert [line for f in files for line in found(f, (ROOT / f).read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "text",
    ["the pairs that turn", "a foreign checkpoint", "log_sum = 1", "spread over devices", "a study of heads",
     "train --extend=40", "another sweep has claimed the cell", "a path between two schedules"],
)  # fmt: skip
def test_the_scan_catches(text):
    assert len(found("pe_lab/model/a.py", text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [("pe_lab/results/a.py", 'record.get("method")'), ("pe_lab/evaluation/a.py", '"read_as": length'),
     ("pe_lab/lab/claims/running.py", "the cells of a level")],
)  # fmt: skip
def test_the_scan_catches_in_some_packages(path, text):
    assert len(found(path, text)) == 1 and found("pe_lab/positional/a.py", text) == []


def test_the_scan_lets_pass():
    assert found("pe_lab/model/a.py", "rotated pairs; held-out data; functools.partial; returns; broom") == []
    assert (
        found("docs/a.md", "Student's t; a student; the paper claims a gain; extend the context; method=rope; a path")
        == []
    )
