"""The figures of the analysis `frequencies`: DroPE's Figures 6 and 11, and Partial RoPE's Figure 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pe_lab.analysis.frequencies import CACHE_LENGTHS, Numbers, size_text
from pe_lab.page.figure_axes import tokens_text
from pe_lab.page.figure_style import look, render

__all__ = ["LOOKS", "draw", "render"]

# Okabe and Ito's colours, which the colour-blind tell apart, and a dash pattern for readers without colours.
LOOKS = {
    "pi": ("#0072B2", (6, 2)),
    "ntk": ("#D55E00", (6, 2, 1.5, 2)),
    "yarn": ("#000000", ()),
    "ntk_by_parts": ("#009E73", (1.5, 1.5)),
    "dynamic_ntk": ("#CC79A7", (3, 1.5)),
    "dynamic_yarn": ("#56B4E9", (1.5, 3)),
    "llama3": ("#E69F00", (4, 1.5, 1, 1.5, 1, 1.5)),
}


def draw(numbers: Numbers) -> dict[str, Any]:
    """The matplotlib figures: `frequency_scaling` (6), `frequency_scaling_by_factor` (11) and `rotation_cache` (1)."""
    with look():
        return {
            "frequency_scaling": _draw_scaling(numbers, numbers.settings.factors[:1]),
            "frequency_scaling_by_factor": _draw_scaling(numbers, numbers.settings.factors),
            "rotation_cache": _draw_cache(numbers),
        }


def _draw_scaling(numbers: Numbers, factors: Sequence[float]) -> Any:
    """gamma by pair, a panel for each factor: DroPE's Figure 6 (one factor) and Figure 11 (several)."""
    from matplotlib.figure import Figure

    settings = numbers.settings
    pairs = np.arange(settings.head_dim // 2)
    columns = min(len(factors), 3)
    rows = -(-len(factors) // columns)
    alone = len(factors) == 1
    figure = Figure(figsize=(7, 4.2 if alone else 0.9 + 2.5 * rows), layout="constrained")
    heading = "RoPE's frequencies under each scaling"
    described = f"{settings.head_dim} channels, base {settings.base:,.10g}, trained on {settings.length:,} tokens"
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel in panels[len(factors) :]:
        panel.remove()
    for i, (panel, factor) in enumerate(zip(panels, factors, strict=False)):
        for curve in numbers.scaling:
            if curve.factor == factor:
                colour, dashes = LOOKS[curve.method]
                # Dashed lines are drawn above solid ones: YaRN ends on PI, and both must be visible.
                (line,) = panel.plot(pairs, curve.gamma, color=colour, label=curve.label, zorder=3 if dashes else 2)
                if dashes:
                    line.set_dashes(dashes)
        panel.set_ylim(0, 1.06)
        panel.margins(x=0.02)
        panel.set_title(f"{heading} at s = {factor:g}\n{described}" if alone else f"s = {factor:g}")
        if i % columns == 0:
            panel.set_ylabel("new frequency / old frequency" if alone else "new / old frequency")
        if i + columns >= len(factors):
            panel.set_xlabel(
                "pair of channels, from the fastest to the slowest" if alone else "pair, from fast to slow"
            )
            panel.tick_params(labelbottom=True)  # also above an empty place in the last row
    if alone:
        panels[0].legend(loc="best", handlelength=3.5)
    else:
        figure.suptitle(f"{heading}\n{described}", fontsize=11)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), handlelength=3.5)
    return figure


def _draw_cache(numbers: Numbers) -> Any:
    """Bytes of the cache by length, a line for each fraction, on logarithmic axes: Partial RoPE's Figure 1."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    # From dark to light; the lightest fifth of the map is too pale for a white page.
    map_ = matplotlib.colormaps["viridis"]
    curves = sorted(numbers.cache, key=lambda curve: -curve.fraction)
    for i, curve in enumerate(curves):
        label = f"{curve.label}: {curve.rotated_channels} channels"
        colour = map_(0.8 * i / max(len(curves) - 1, 1))
        # A logarithmic axis has no place for 0.
        drawn = curve.bytes if curve.rotated_channels else [math.nan] * len(CACHE_LENGTHS)
        axes.plot(CACHE_LENGTHS, drawn, color=colour, marker="osD^vPX*"[i], markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator([2**12, 2**14, 2**16, 2**18, 2**20, 2**22, CACHE_LENGTHS[-1]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.set_xlabel("longest sequence, tokens (4k = 4,096)")
    axes.set_ylabel("size of the stored sines and cosines")
    axes.set_title(f"A stored rotary cache, by the share of {numbers.settings.cache_head_dim} channels that rotates")
    axes.legend(title="rotated", loc="upper left")
    return figure
