"""`python -m pe_lab.report runs/*`: one self-contained HTML page from run directories, reading files only.

Runs that differ by seed only are one line of it. With --export=DIR, also every figure and table as a file. With
--heat-map=FILE.png, a picture of needles by depth and length instead of the page.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pe_lab import storage
from pe_lab.errors import ConfigError
from pe_lab.page.document import build_page, headline
from pe_lab.page.export import INDEX, export_files, read_formats
from pe_lab.page.figure_files import FORMATS, render
from pe_lab.page.maps import needle_picture, needle_table
from pe_lab.results.runs import RunFiles, read_runs
from pe_lab.storage import AnyPath, check_place, write_file, write_files
from pe_lab.terminal import argument_parser, works_on

SWEEP = "sweep.json"  # what a directory of the runs of a sweep holds


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


def expand(given: Sequence[AnyPath]) -> list[AnyPath]:
    """The run directories among the given paths.

    The directory of a sweep, which holds a sweep.json, stands for the runs in it. `runs/*` also names files that lie
    beside the runs, such as the report that an earlier call wrote there: they are passed over if there are runs, too.

    Raises:
      ConfigError: there is no run, but only files of a report, or a sweep of which no run has begun.
    """
    directories: list[AnyPath] = []
    for path in given:
        if path.is_file() and (path.suffix == ".html" or path.name == SWEEP):
            continue
        if not (path / SWEEP).is_file():
            directories.append(path)
            continue
        inside = sorted(child for child in path.iterdir() if (child / "run.json").is_file())
        if not inside:
            raise ConfigError(f"{path} is a sweep of which no run has begun: no directory in it has a run.json.")
        directories += inside
    among = any((path.parent / SWEEP).is_file() for path in directories)
    if among:  # beside its runs, a sweep has logs and the like
        runs = [path for path in directories if path.is_dir() and (path / "run.json").is_file()]
        directories = runs or directories
    if not directories:
        raise ConfigError(
            "No run directory was given, only HTML files. Give the directories of runs, such as runs/demo."
        )
    return directories


def write_heat_maps(runs: Sequence[RunFiles], path: AnyPath, suite: str | None, task: str | None) -> None:
    """Writes the picture of needles by depth and length."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(f"--heat-map={path} is no picture that can be drawn. End its name in .{', .'.join(FORMATS)}.")
    table = needle_table(runs, suite, task)
    write_file(path, render(needle_picture(table), kind), "Give another file with --heat-map.")
    print(f"Wrote {path}: {table.suite}{f', {table.source}' if table.source else ''}.")


def parser() -> argparse.ArgumentParser:
    """The command line of this command."""
    parser = argument_parser("report", __doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="run directories, such as runs/*")
    parser.add_argument("--out", help="the file to write (default: RUN/report.html; report.html beside several runs)")
    parser.add_argument("--export", metavar="DIR", help="also write every figure and table as files into DIR")
    parser.add_argument("--formats", help="of --export: some of png,svg,csv (default: all)")
    parser.add_argument("--heat-map", metavar="FILE", help="draw needles by depth and length instead (.png)")
    parser.add_argument("--suite", help="of --heat-map, such as niah (default: the first with depths)")
    parser.add_argument("--task", help="of --heat-map, such as standard (default: the suite's first)")
    return parser


@works_on
def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.heat_map is None and (arguments.suite or arguments.task):
        raise ConfigError(
            "--suite and --task are options of --heat-map=FILE, which is missing. The page has all tasks."
        )
    if arguments.export is None and arguments.formats is not None:
        raise ConfigError("--formats is an option of --export=DIR, which is missing.")
    formats = read_formats("png,svg,csv" if arguments.formats is None else arguments.formats)
    runs = read_runs(expand([storage.path("the run", text) for text in arguments.runs]), print)
    if arguments.heat_map is not None:
        write_heat_maps(runs, storage.path("--heat-map", arguments.heat_map), arguments.suite, arguments.task)
        return 0
    path = output_path([run.directory for run in runs], arguments.out)
    export = None if arguments.export is None else storage.path("--export", arguments.export)
    check_place("--out", path, file=True)
    if export is not None:
        check_place("--export", export)
    built = build_page(runs)
    page = built.encode()
    files = {} if export is None else export_files(runs, built, formats)
    if export is not None:  # first: a page that is written last is whole, and so is what belongs to it
        write_files({export / name: content for name, content in files.items()}, "Give another place with --export.")
    write_file(path, page, "Give another file with --out.")
    print(headline(runs))
    analyses = sum(len(run.analyses) for run in runs)
    shown = f", {analyses} {'analysis' if analyses == 1 else 'analyses'}" if analyses else ""
    print(f"Wrote {path} ({len(page) / 1024:.0f} KB{shown}); open it in a browser.")
    if export is not None:
        print(f"Wrote {len(files)} files to {export}, listed in {export / INDEX}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
