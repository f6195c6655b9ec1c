"""Figures as data: what an analysis draws. `pe_lab.page` draws them as PDF, SVG and PNG files and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

Numbers = Float[np.ndarray, "..."]


@dataclass(frozen=True)
class HeatMaps:
    """Small multiples: one heat map for each panel (a layer, a head), all on one scale of colours.

    Attributes:
      name: of its files, such as `query_norms`.
      title, caption: a line, and a sentence or two that say how to read the figure.
      values: [P, Y, X] by panel, row and column; NaN where nothing was measured.
      panels, rows, columns: the names of the P panels, Y rows and X columns.
      panel_label, row_label, column_label, value_label: what these names and the values are, with units.
      scale: `sequential` colours, `diverging` ones around 0, or those of needles that were `found`, shares of 1.
      limits: the values of the first and the last colour; None: the smallest and the largest value.
      framed: the column of the training length, which has a frame.
      texts: whether files have the value of each cell, in per cent.
    """

    kind: ClassVar[str] = "heat_maps"

    name: str
    title: str
    caption: str
    values: Numbers
    panels: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    panel_label: str
    row_label: str
    column_label: str
    value_label: str
    scale: Literal["sequential", "diverging", "found"] = "sequential"
    limits: tuple[float, float] | None = None
    framed: int | None = None
    texts: bool = False

    def __post_init__(self) -> None:
        expected = (len(self.panels), len(self.rows), len(self.columns))
        if self.values.shape != expected:
            raise ValueError(f"figure {self.name}: values of shape {self.values.shape} for names of {expected}.")


@dataclass(frozen=True)
class Line:
    """One line of a panel: y [X] over x [X], with a 95% interval [X] where there is one; NaN breaks the line.

    `faint`: thin, and without a name.
    """

    label: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    faint: bool = False


@dataclass(frozen=True)
class LineCharts:
    """Small multiples: one chart for each panel, all on the same axes. A label has one colour in all panels.

    Attributes:
      name, title, caption: as in `HeatMaps`.
      panels: (the panel's name, its lines).
      x_label, y_label: of the axes, with units.
      x_names: names of x = 0, 1, 2 ..., where x counts things (heads, bands) instead of measuring.
      log_x, log_y: logarithmic axes.
      marks: (x, text) of vertical lines, such as the training length.
      points: markers without lines between them.
      bars: lines with a marker and a bar at each point, instead of a band.
      x_unit, y_unit: how numbers are written: `bytes`, `tokens`, `length`, `share` or as they are.
      x_ticks: the only ticks of x; none: round numbers.
      y_limits: the ends of y; None: of the values.
    """

    kind: ClassVar[str] = "line_charts"

    name: str
    title: str
    caption: str
    panels: tuple[tuple[str, tuple[Line, ...]], ...]
    x_label: str
    y_label: str
    x_names: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    points: bool = False
    bars: bool = False
    x_unit: str = ""
    y_unit: str = ""
    x_ticks: tuple[float, ...] = ()
    y_limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Effect:
    """A row of `Effects`: a difference with its interval, the margins that count, and its outcome in words."""

    text: str
    mean: float
    low: float
    high: float
    margins: tuple[float, ...]
    words: str
    colour: str


@dataclass(frozen=True)
class Effects:
    """Differences on one axis, a row for each, with 0 marked (a forest plot)."""

    name: str
    title: str
    rows: tuple[Effect, ...]
    x_label: str


Figure = HeatMaps | LineCharts | Effects


def to_arrays(figure: Figure) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """A figure as JSON without its arrays, and the arrays by name; `from_arrays` reads both."""
    fields = {name: value for name, value in vars(figure).items() if name not in ("values", "panels")}
    plain: dict[str, Any] = {"kind": figure.kind, **fields}
    arrays: dict[str, Numbers] = {}
    if isinstance(figure, HeatMaps):
        plain["panels"] = figure.panels
        arrays["values"] = figure.values
        return plain, arrays
    plain["panels"] = []
    for p, (panel, lines) in enumerate(figure.panels):
        plain["panels"].append([panel, [line.label for line in lines]])
        for n, line in enumerate(lines):
            parts = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
            arrays |= {f"{p}.{n}.{part}": value for part, value in parts.items() if value is not None}
    return plain, arrays


def from_arrays(plain: Mapping[str, Any], arrays: Mapping[str, Numbers]) -> Figure:
    """The figure that `to_arrays` wrote.

    Raises:
      KeyError, TypeError, ValueError: these are not a figure's.
    """
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    if fields.pop("kind") == HeatMaps.kind:
        return HeatMaps(**fields, values=arrays["values"])
    fields["marks"] = tuple((float(x), str(text)) for x, text in fields["marks"])
    panels = []
    for p, (panel, labels) in enumerate(plain["panels"]):
        parts = [{k: arrays.get(f"{p}.{n}.{k}") for k in ("x", "y", "low", "high")} for n in range(len(labels))]
        panels.append((panel, tuple(Line(label, **part) for label, part in zip(labels, parts, strict=True))))
    return LineCharts(**fields | {"panels": tuple(panels)})


def layer_names(layers: Sequence[int]) -> tuple[str, ...]:
    """Names of panels: `layer 3`."""
    return tuple(f"layer {n}" for n in layers)
