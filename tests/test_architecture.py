"""docs/architecture.md: every name in its walks is defined in the file it links to, and the core is short."""

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)(?:#L(\d+))?\)")


def definitions(path: Path) -> dict[str, int]:
    """Names that a module defines, and `Class.method`, by line."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[prefix + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found.update({prefix + t.id: node.lineno for t in targets if isinstance(t, ast.Name)})

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_every_name_is_where_the_page_says():
    links = LINK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(links) > 50
    wrong = [f"{name} in {path}" for name, path, _ in links if name not in definitions(ROOT / path)]
    assert wrong == []


def test_the_core_is_short():
    """The spine and the companions that the reading order names, in lines."""
    text = PAGE.read_text(encoding="utf-8")
    order = text[text.index("## An order to read the core in") : text.index("## The way of a token")]
    modules = re.findall(r"\]\(\.\./(pe_lab/[\w/]+\.py)\)", order)
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules}
    assert len(lines) > 20
    assert sum(lines.values()) < 7500, lines


def test_every_package_is_on_the_map():
    text = PAGE.read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "pe_lab").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "pe_lab").glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(packages) if f"| `{name}/` |" not in text] == []
    assert [name for name in sorted(modules) if f"`{name}`" not in text] == []


def test_every_link_leads_to_the_definition():
    """Lines move with every change: PE_LAB_WRITE_DOCS=1 writes them anew."""

    def with_line(match: re.Match[str]) -> str:
        name, path, _ = match.groups()
        return f"[`{name}`](../{path}#L{definitions(ROOT / path)[name]})"

    text = PAGE.read_text(encoding="utf-8")
    expected = LINK.sub(with_line, text)
    if os.environ.get("PE_LAB_WRITE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
    assert text == expected or os.environ.get("PE_LAB_WRITE_DOCS")
