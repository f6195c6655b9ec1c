"""The look of the figures that are written as files, and their bytes."""

from __future__ import annotations

import contextlib
import io
from typing import Any

# Okabe and Ito's colours, which the colour-blind tell apart, without their yellow, which is too pale for a white page.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Fonts and lines of all figures, which are 7 inches, or 1,400 pixels, wide.
STYLE = {
    "figure.dpi": 200,
    "savefig.dpi": 200,
    "savefig.facecolor": "white",  # dark pages show a white card, not black letters on black
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 2,
    "legend.framealpha": 1,
    "legend.edgecolor": "#cccccc",
    "svg.hashsalt": "pe_lab",
    "svg.fonttype": "none",  # letters stay letters, which can be searched and edited
    "pdf.fonttype": 42,
}
# No date and no version of matplotlib, so that equal numbers make equal files.
METADATA = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def look() -> contextlib.AbstractContextManager[None]:
    """Sets fonts and lines of all figures, whatever the user's matplotlibrc."""
    import matplotlib.style

    return matplotlib.style.context(STYLE, after_reset=True)


def render(figure: Any, form: str) -> bytes:
    """A matplotlib figure as the bytes of a `pdf`, `png` or `svg` file; the same bytes each time."""
    buffer = io.BytesIO()
    with look():
        figure.savefig(buffer, format=form, metadata=METADATA[form])
    return buffer.getvalue()
