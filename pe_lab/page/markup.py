"""HTML and SVG built from elements; `markupsafe` escapes every string that is not markup."""

from __future__ import annotations

from markupsafe import Markup, escape

__all__ = ["Markup", "element", "folded", "note", "text"]


def text(value: object) -> Markup:
    """A value as escaped text; `Markup` stays as it is, None is empty, the parts of a list or tuple are joined."""
    if value is None:
        return Markup("")
    if isinstance(value, list | tuple):
        return Markup("".join(text(part) for part in value))
    return escape(value)


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """`<tag ...>children</tag>`.

    In an attribute's name a trailing _ is dropped and _ becomes - (`class_`, `aria_label`). An attribute that is None
    or False is left out, True is written without a value, and a float has two decimals at most.
    """
    written = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        if isinstance(value, float):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        written.append(f" {name}" if value is True else f' {name}="{escape(value)}"')
    opening = f"<{tag}{''.join(written)}"
    if not children and tag in {"path", "line", "rect", "circle", "br", "meta", "polyline", "img", "input"}:
        return Markup(f"{opening}/>" if tag not in {"br", "meta"} else f"{opening}>")
    return Markup(f"{opening}>{text(children)}</{tag}>")


def folded(title: str, *children: object, unfolded: bool = False) -> Markup:
    """A part of the page below a title that opens it; "" without content."""
    body = text(children)
    return element("details", element("summary", title), body, open=unfolded) if body else Markup("")


def note(words: object, *more: object) -> Markup:
    """A box with a remark."""
    return element("div", element("p", words), *more, class_="note")
