"""HTML and SVG built from elements: whatever is not already markup is escaped, so no run name can break a
page."""

from __future__ import annotations

import html


class Markup(str):
    """Text that is markup already. Only this module, and literals we wrote, make it."""

    __slots__ = ()


def text(value: object) -> Markup:
    """`value` as escaped text; `Markup` passes, None is empty, a list or tuple is joined."""
    if value is None:
        return Markup("")
    if isinstance(value, Markup):
        return value
    if isinstance(value, list | tuple):
        return Markup("".join(text(part) for part in value))
    return Markup(html.escape(str(value), quote=True))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """`<tag ...>children</tag>`. Attribute names: a trailing _ is dropped, _ becomes - (`class_`,
    `aria_label`).

    An attribute that is None or False is left out, one that is True stands alone. Floats are written short.
    """
    written = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        if isinstance(value, float):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        written.append(f" {name}" if value is True else f' {name}="{html.escape(str(value), quote=True)}"')
    opening = f"<{tag}{''.join(written)}"
    if not children and tag in {"path", "line", "rect", "circle", "br", "meta", "polyline"}:
        return Markup(f"{opening}/>" if tag not in {"br", "meta"} else f"{opening}>")
    return Markup(f"{opening}>{text(children)}</{tag}>")
