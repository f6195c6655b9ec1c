"""The heat maps of needles as a picture file, with the maps and colours of the page."""

from __future__ import annotations

import io
from collections.abc import Sequence

from pe_lab.errors import ConfigError, DataError, did_you_mean
from pe_lab.page.heat_maps import STEPS, HeatMap, cell_text, colours, depth_name, heat_maps, in_sight, step
from pe_lab.page.suites import suite_title, task_suites
from pe_lab.results.formatting import shortened
from pe_lab.results.runs import RunFiles
from pe_lab.results.table import Table
from pe_lab.results.scores import build_tables

INK, SOFT, MARK, BLANK = "#1c2024", "#5c636b", "#8a6d1d", "#d9dbd7"
KINDS = ("png", "svg", "pdf")


def needle_table(runs: Sequence[RunFiles], suite: str | None = None, task: str | None = None) -> Table:
    """The results to draw: those of `suite` and `task` if they are named, else the first with depths.

    Raises:
      DataError: the runs have no needle results by depth.
      ConfigError: they have none of this suite or task.
    """
    found: dict[str, list[Table]] = {}
    for name in sorted(task_suites({name for run in runs for name in run.evaluation}), key=lambda n: n == "needles"):
        if tables := [table for table in build_tables(name, runs) if heat_maps(table)]:
            found[name] = tables
    where = ", ".join(str(run.directory) for run in runs)
    if not found:
        raise DataError(
            f"--heat-map: {where} has no needle results by depth. Measure some: "
            f"python -m pe_lab.evaluate --from={runs[0].directory} --suite=niah"
        )
    if suite is not None and suite not in found:
        raise ConfigError(
            f"--suite='{suite}' has no needle results by depth in {where}. {did_you_mean(suite, [*found])}"
        )
    tables = found[suite or next(iter(found))]
    if task is None:
        return tables[0]
    if task not in (sources := [table.source for table in tables]):
        raise ConfigError(f"--task='{task}' has no needle results by depth in {where}. {did_you_mean(task, sources)}")
    return tables[sources.index(task)]


def draw_heat_maps(table: Table, kind: str) -> bytes:
    """The maps that the page shows first, side by side, as a file of `kind`: png, svg or pdf."""
    maps, _ = in_sight(heat_maps(table))
    from matplotlib.figure import Figure

    rows, columns = len(maps[0].depths), len(maps[0].columns)
    # Ten inches are about the width of a page on GitHub, so points are about pixels there.
    figure = Figure(figsize=(10, 1.45 + 0.25 * rows), dpi=200, layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for one, ax in zip(maps, axes, strict=True):
        _draw_map(one, ax, labelled=ax is axes[0], size=9 if columns <= 6 else 7)
    name = "Needles in filler" if table.suite == "needles" else f"{suite_title(table.suite)}, {table.source}"
    bold = {"fontweight": "bold", "color": INK, "parse_math": False}  # a name with a $ is no formula
    figure.suptitle(f"{name}: per cent found", x=0.008, ha="left", fontsize=12.5, **bold)
    figure.supxlabel("sequence length (framed: the training length)", fontsize=9, color=SOFT)
    _add_scale(figure, axes)
    written = io.BytesIO()
    figure.savefig(written, format=kind, facecolor="white")
    return written.getvalue()


def _draw_map(one: HeatMap, ax, labelled: bool, size: float) -> None:
    """One variant: cells with their figures, the training length framed; hatched if not measured."""
    from matplotlib.patches import Rectangle

    for y, depth in enumerate(one.depths):
        for x, column in enumerate(one.columns):
            found = one.cells.get((depth, column.key))
            if found is None:
                box = Rectangle((x, y), 1, 1, facecolor="#f6f7f5", edgecolor=BLANK, hatch="////", linewidth=0)
                ax.add_patch(box)
                continue
            background, ink = colours(step(found[0]))
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=background, edgecolor="white", linewidth=0.8))
            ax.text(x + 0.5, y + 0.53, cell_text(found[0]), ha="center", va="center", fontsize=size, color=ink)
    for x, column in enumerate(one.columns):
        if column.factor == 1:
            frame = Rectangle((x, 0), 1, len(one.depths), fill=False, edgecolor=MARK, linewidth=1.8, clip_on=False)
            ax.add_patch(frame)
    ax.set(xlim=(0, len(one.columns)), ylim=(len(one.depths), 0))
    names = [c.title.removesuffix(" tokens") + (f"\n{c.small}" if c.small else "") for c in one.columns]
    ax.set_xticks([x + 0.5 for x in range(len(names))], names, fontsize=size - 0.5, color=INK)
    depths = [depth_name(depth) for depth in one.depths] if labelled else []
    ax.set_yticks([y + 0.5 for y in range(len(depths))], depths, fontsize=size - 0.5, color=SOFT)
    if labelled:
        ax.set_ylabel("depth of the needle", fontsize=9, color=SOFT)
    ax.set_title(shortened(one.label, 36), fontsize=10.5, fontweight="bold", color=INK, loc="left", parse_math=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _add_scale(figure, axes) -> None:
    """Draws the bar of colours beside the maps."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    steps = ListedColormap([colours(index)[0] for index in range(STEPS + 1)])
    bar = figure.colorbar(ScalarMappable(Normalize(0, 100), steps), ax=list(axes), fraction=0.02, pad=0.015, aspect=26)
    bar.set_ticks([0, 50, 100], labels=["0%", "50%", "100%"])
    bar.ax.tick_params(length=0, labelsize=8.5, labelcolor=SOFT)
    bar.outline.set_visible(False)
