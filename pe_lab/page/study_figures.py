"""The figures of studies as files. (Replaced by the page branch.)"""

from __future__ import annotations

from pe_lab.analysis.figures import Figure


def render(figure: Figure, form: str) -> bytes:
    """The figure as a file of `form`."""
    return b""
