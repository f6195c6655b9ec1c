"""`python -m pe_lab.report runs/*`: one self-contained HTML page from run directories, reading files only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pe_lab.analysis.page import build_page, headline
from pe_lab.analysis.run_files import read_runs
from pe_lab.config import UserError, command


def output_path(directories: Sequence[Path], out: str | None) -> Path:
    """Where the page goes: `out`, else into the one run, else beside the runs, in their common parent."""
    if out:
        path = Path(out)
        return path / "report.html" if path.is_dir() else path
    if len(directories) == 1:
        return directories[0] / "report.html"
    parents = [str(directory.resolve().parent) for directory in directories]
    return Path(os.path.commonpath(parents)) / "report.html"


def write_whole(path: Path, page: str) -> None:
    """Writes the page in one move: a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise UserError(f"{path} could not be written ({error.strerror}). Give another file with --out.") from None


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the verb."""
    parser = argparse.ArgumentParser(prog="python -m pe_lab.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, such as runs/*")
    parser.add_argument("--out", help="the file to write (default: RUN/report.html; report.html beside several runs)")
    arguments = parser.parse_args(argv)
    # `runs/*` also names the report that an earlier call wrote there.
    directories = [path for path in arguments.runs if not (path.is_file() and path.suffix == ".html")]
    if not directories:
        raise UserError("No run directory was given, only HTML files. Give the directories of runs, such as runs/demo.")
    runs = read_runs(directories)
    path = output_path([run.directory for run in runs], arguments.out)
    write_whole(path, build_page(runs))
    print(headline(runs))
    print(f"Wrote {path} ({path.stat().st_size / 1024:.0f} KB); open it in a browser.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
