"""`python -m pe_lab.report runs/*`: one self-contained HTML page from run directories, reading files only.

With --heat-map=FILE.png, a picture of needles by depth and length instead of the page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pe_lab import storage
from pe_lab.analysis.runs import Run, read_runs
from pe_lab.errors import ConfigError
from pe_lab.page.document import build_page, headline
from pe_lab.page.heat_picture import KINDS, draw_heat_maps, needle_table
from pe_lab.storage import AnyPath, write_file
from pe_lab.terminal import argument_parser, command


def output_path(directories: Sequence[AnyPath], out: str | None) -> AnyPath:
    """The file of the page: `out`, else in the one run, else in the common parent of the runs."""
    if out:
        path = storage.path("--out", out)
        return path / "report.html" if path.is_dir() else path
    if len(directories) == 1:
        return directories[0] / "report.html"
    parents = [str(storage.absolute(directory).parent) for directory in directories]
    if len({parent.partition("://")[0] if "://" in parent else "" for parent in parents}) > 1:
        raise ConfigError("The runs are on different stores: give the file of the report with --out.")
    common = os.path.commonpath(parents)  # which takes the slashes of an address for one
    return storage.path("the report", common.replace(":/", "://", 1) if "://" in parents[0] else common) / "report.html"


def write_heat_maps(runs: Sequence[Run], path: AnyPath, suite: str | None, task: str | None) -> None:
    """Writes the picture of needles by depth and length."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise ConfigError(f"--heat-map={path} is no picture that can be drawn. End its name in .{', .'.join(KINDS)}.")
    table = needle_table(runs, suite, task)
    write_file(path, draw_heat_maps(table, kind), "Give another file with --heat-map.")
    print(f"Wrote {path}: {table.suite}{f', {table.source}' if table.source else ''}.")


@command
def main(argv: Sequence[str]) -> int:
    parser = argument_parser("report", __doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run directories, such as runs/*")
    parser.add_argument("--out", help="the file to write (default: RUN/report.html; report.html beside several runs)")
    parser.add_argument("--heat-map", metavar="FILE", help="draw needles by depth and length instead (.png)")
    parser.add_argument("--suite", help="of --heat-map, such as niah (default: the first with depths)")
    parser.add_argument("--task", help="of --heat-map, such as standard (default: the suite's first)")
    arguments = parser.parse_args(argv)
    if arguments.heat_map is None and (arguments.suite or arguments.task):
        raise ConfigError(
            "--suite and --task are options of --heat-map=FILE, which is missing. The page has all tasks."
        )
    # `runs/*` also names the report that an earlier call wrote there.
    given = [storage.path("the run", text) for text in arguments.runs]
    directories = [path for path in given if not (path.suffix == ".html" and path.is_file())]
    if not directories:
        raise ConfigError(
            "No run directory was given, only HTML files. Give the directories of runs, such as runs/demo."
        )
    runs = read_runs(directories)
    if arguments.heat_map is not None:
        write_heat_maps(runs, storage.path("--heat-map", arguments.heat_map), arguments.suite, arguments.task)
        return 0
    path = output_path([run.directory for run in runs], arguments.out)
    page = build_page(runs).encode()
    write_file(path, page, "Give another file with --out.")
    print(headline(runs))
    studies = sum(len(run.studies) for run in runs)
    shown = f", {studies} {'study' if studies == 1 else 'studies'}" if studies else ""
    print(f"Wrote {path} ({len(page) / 1024:.0f} KB{shown}); open it in a browser.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
