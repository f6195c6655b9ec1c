"""The paragraphs of documentation: of HTML, text, Info, manual pages, dictionaries and the comments of programs.

Each function takes the text of a file and yields its paragraphs, each on one line, without code and menus. What is no
prose is for `is_prose` and `is_english_prose` to tell.
"""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

LEAST_LETTERS = 0.7  # share of letters and spaces of a paragraph: less is a table, a drawing or code
LEAST_WORDS = 8  # of a paragraph
LEAST_FUNCTION_WORDS = 0.15  # share of a paragraph's words: less is a list of names, or another language
# fmt: off
FUNCTION_WORDS = frozenset([
    "a", "all", "also", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "could", "do", "does",
    "each", "for", "from", "had", "has", "have", "he", "her", "his", "if", "in", "into", "is", "it", "its", "may",
    "more", "must", "no", "not", "of", "on", "one", "only", "or", "other", "our", "out", "shall", "should", "so",
    "some", "such", "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to",
    "up", "use", "used", "was", "we", "were", "what", "when", "where", "which", "who", "will", "with", "would", "you",
    "your",
])
# fmt: on
# What Doxygen adds to each member: it differs by a number or a list of names.
GENERATED = re.compile(r"(Definition at line|References|Referenced by|Reimplemented) ")
Paragraphs = Callable[[str], Iterator[str]]


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is mostly words: no table, drawing, code or table of contents."""
    if len(paragraph.split()) < LEAST_WORDS or ". . ." in paragraph or "...." in paragraph:
        return False
    return sum(map(str.isalpha, paragraph)) + paragraph.count(" ") >= LEAST_LETTERS * len(paragraph)


def is_english(paragraph: str) -> bool:
    """Whether a paragraph has as many function words as English sentences have."""
    words = paragraph.lower().split()
    return sum(word in FUNCTION_WORDS for word in words) >= LEAST_FUNCTION_WORDS * len(words)


def is_english_prose(paragraph: str) -> bool:
    """Whether a paragraph is prose, English, decoded, and not what a generator adds to each entry of a reference."""
    return (
        is_prose(paragraph) and is_english(paragraph) and "\ufffd" not in paragraph and not GENERATED.match(paragraph)
    )


def paragraphs_of(file: str) -> Paragraphs | None:
    """What reads a file of that name, without the suffix of its compression; None if nothing here does."""
    name = file.rpartition("/")[2].lower()
    if re.search(r"/man/man\w+/", file):
        return manual_page_paragraphs
    if re.search(r"\.info(-\d+)?$", name):
        return info_paragraphs
    return FORMATS.get(name.rpartition(".")[2])


def text_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a plain text; of an RFC without the headers and footers of pages."""
    joined = ""
    for page in _pages(text.replace("\r", "")):
        page = page.strip("\n\f")
        # A paragraph that a page break cuts goes on in lower case.
        goes_on = joined and not joined.rstrip().endswith((".", ":")) and page.lstrip()[:1].islower()
        joined = joined + ("\n" if goes_on else "\n\n") + page
    for paragraph in re.split(r"\n[ \t]*\n", joined):
        lines = paragraph.split("\n")
        if not any("   " in line.strip() and re.search(r"\S {3,}\S", line) for line in lines[1:]):  # columns
            yield " ".join(paragraph.split())


# The footer of a page of an RFC and the header of the next one.
_FOOTER = r"[^\n]*\[Page [0-9ivx]+\][^\n]*\n+\f?[ \t]*(?:\n*RFC [0-9]+ [^\n]*\n)?"
_BREAK_HERE, _BREAK = re.compile(rf"\n*{_FOOTER}"), re.compile(rf"\n+{_FOOTER}")


def _pages(text: str) -> Iterator[str]:
    """The pages of an RFC; a search by lines takes a third of the time of one by characters."""
    start = 0
    while found := _BREAK_HERE.match(text, start) or _BREAK.search(text, start):
        yield text[start : found.start()]
        start = found.end()
    yield text[start:]


class _Page(html.parser.HTMLParser):
    """Collects the text of a page of HTML, or of OSIS, by paragraphs."""

    # fmt: off
    ENDS = frozenset([
        "p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "div", "td", "th", "br", "blockquote", "table", "ul",
        "ol", "dl", "section", "body",
        "item", "para",  # of OSIS, and of DocBook in descriptions of AWS
    ])
    # fmt: on
    LEFT_OUT = frozenset(["script", "style", "pre", "nav", "header", "footer", "head", "title", "info"])

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


# Tags within a paragraph, most of a page: the parser takes half the time without them.
_INLINE = re.compile(
    rf"</?(?!(?:{'|'.join(sorted(_Page.ENDS | _Page.LEFT_OUT))})\b)[a-z](?:[^<>\"']|\"[^\"<]*\"|'[^'<]*')*>",
    re.IGNORECASE,
)


def html_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of an HTML page, or of OSIS, the XML of SWORD modules."""
    parser = _Page()
    parser.feed(_INLINE.sub("", text))
    parser.close()
    parser.end()
    yield from parser.found


def info_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of an Info file, whose nodes begin with a line of their own."""
    yield from text_paragraphs(re.sub(r"\x1f\n[^\n]*\n", "\n\n", text))


def dictionary_paragraphs(text: str) -> Iterator[str]:
    """The entries of a dictionary of dictd, whose headwords begin a line, without marks of references and sources."""
    for entry in re.split(r"\n(?=\S)|\n[ \t]*\n", text):
        yield " ".join(re.sub(r"[{}]|\[(?:1913 Webster|WordNet 1\.5|PJC)\]", "", entry).split())


def restructured_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a reStructuredText file, without directives, titles and the marks of roles and links."""
    for paragraph in text_paragraphs(text):
        if not paragraph.startswith((".. ", ":")) and not re.search(r"([=~^#*\"'-])\1{3}", paragraph):
            paragraph = re.sub(r"(?::[\w:+-]+:)?`+~?([^`<]*?)(?: *<[^>`]*>)?`+_{0,2}", r"\1", paragraph)
            yield re.sub(r"(?<!\w)\*{1,2}(\w[^*]*)\*{1,2}", r"\1", paragraph).replace("::", ":")


_COMMENT = re.compile(r"/\*(.*?)\*/|((?:^[ \t]*//[^\n]*\n)+)", re.DOTALL | re.MULTILINE)


def comment_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of the comments of a program in C or a language with its comments."""
    for comment in _COMMENT.finditer(text):
        yield from text_paragraphs(
            re.sub(r"^[ \t]*(?:\*+|//+)", "", comment[1] or comment[2] or "", flags=re.MULTILINE)
        )


def json_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of the descriptions in JSON, which are HTML."""

    def found(value: Any) -> Iterator[str]:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                yield from found(inner)
            elif key in ("documentation", "description") and isinstance(inner, str):
                yield from html_paragraphs(inner)

    yield from found(json.loads(text))


# Of man(7) and mdoc(7): macros that begin a paragraph, those whose arguments are part of the text, and blocks of code.
# fmt: off
BREAKS = frozenset([
    "SH", "SS", "PP", "P", "LP", "TP", "TQ", "IP", "HP", "RS", "RE", "br", "sp", "Sh", "Ss", "Pp", "Lp", "It", "Bl",
    "El", "D1", "Dl",
])
# fmt: on
FONTS = frozenset(["B", "I", "R", "SM", "SB", "BR", "BI", "RB", "RI", "IB", "IR", "UR", "MT"])
BLOCKS = {"nf": "fi", "EX": "EE", "Vb": "Ve", "TS": "TE", "EQ": "EN", "Bd": "Ed", "de": ".", "ig": ".", "am": "."}
# fmt: off
INLINE = frozenset([
    "Ad", "An", "Ar", "Ap", "At", "Bx", "Cd", "Cm", "Dq", "Dv", "Em", "Er", "Ev", "Fa", "Fl", "Fn", "Ft", "Fx", "Ic",
    "Li", "Lk", "Mt", "Nd", "Nm", "Ns", "Nx", "Op", "Ox", "Pa", "Po", "Pq", "Ql", "Sq", "St", "Sx", "Sy", "Tn", "Ux",
    "Va", "Vt", "Xr", "Aq", "Bq",
])
# fmt: on
ESCAPES = (
    (re.compile(r"\\f(?:\(..|\[[^]]*\]|.)|\\s[-+]?\d|\\[&|^%:/,)]|\\c$|\\\".*"), ""),
    (re.compile(r"\\\*\(lq|\\\*\(rq|\\\([lr]q|\\\[[lr]q\]"), '"'),
    (re.compile(r"\\\((?:aq|cq|oq)|\\\[(?:aq|cq|oq)\]|\\\*\(Aq"), "'"),
    (re.compile(r"\\\(em|\\\[em\]"), " - "),
    (re.compile(r"\\\(en|\\\[en\]|\\\(mi|\\\(hy|\\-"), "-"),
    (re.compile(r"\\\*?(?:\(..|\[[^]]*\])|\\\*."), ""),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\e|\\\\"), r"\\"),
)


def manual_page_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a manual page in man(7) or mdoc(7), without code, tables and equations."""
    gathered: list[str] = []
    until = ""
    for line in text.split("\n"):
        macro = re.match(r"[.'][ \t]*([^\s\\]+)[ \t]*(.*)", line)
        name, rest = (macro[1], macro[2]) if macro else ("", line)
        if until:
            until = "" if name == until else until
            continue
        if name in BLOCKS:
            until = BLOCKS[name]
        if name in BREAKS or name in BLOCKS or not line.strip():
            yield _unescaped(gathered)
            gathered = []
            continue
        if not macro and not line.startswith((".", "'\\")):
            gathered.append(rest)
        elif name in FONTS:
            arguments = re.findall(r'"([^"]*)"|(\S+)', rest)
            gathered.append(("" if len(name) == 2 and name != "SM" else " ").join(a or b for a, b in arguments))
        elif name in INLINE:
            gathered.append(re.sub(r"(?<!\S)(?:[A-Z][a-z]|\|) ?", "", rest.replace('"', "")))
    yield _unescaped(gathered)


def _unescaped(lines: list[str]) -> str:
    """Lines of a manual page as one paragraph, without roff's escapes."""
    for escape, character in ESCAPES:
        lines = [escape.sub(character, line) for line in lines]
    return " ".join(" ".join(lines).split())


FORMATS: dict[str, Paragraphs] = {
    "html": html_paragraphs,
    "htm": html_paragraphs,
    "nt": html_paragraphs,  # the testaments of a SWORD module
    "ot": html_paragraphs,
    "txt": text_paragraphs,
    "dict": dictionary_paragraphs,
    "rst": restructured_paragraphs,
    "json": json_paragraphs,
    **dict.fromkeys(["c", "cc", "cpp", "d", "go", "h", "js", "php", "s"], comment_paragraphs),
}
