"""`python -m tests.gauntlet`: kills, damages, failures of stores and full disks; prints a table of the outcome."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gauntlet import damages, disk_full, kills, store_failures
from gauntlet.outcome import Row
from gauntlet.world import World

CLASSES = ("kill", "damage", "store", "disk")


class Case(NamedTuple):
    """The command that a case is about, and what runs it."""

    command: str
    run: Callable[[], list[Row]]


def cases(world: World, seed: int, counts: dict[str, int]) -> dict[str, Case]:
    """{name: case}, of as many of each class as `counts` says."""
    found: dict[str, Case] = {}
    for number, (command, count) in enumerate(kills.cases(counts["kill"])):
        run = lambda n=number, c=command, k=count: kills.run_case(world, seed, n, c, k)  # noqa: E731
        found[f"kill-{number}"] = Case(command, run)
    commands = {
        "damage": (damages, lambda number: damages.chosen(seed, number)[0].command),
        "store": (store_failures, lambda number: "train"),
        "disk": (disk_full, lambda number: disk_full.ROUND[number % len(disk_full.ROUND)]),
    }
    for name, (module, command_of) in commands.items():
        for number in range(counts[name]):
            run = lambda n=number, m=module: [m.run_case(world, seed, n)]  # noqa: E731
            found[f"{name}-{number}"] = Case(command_of(number), run)
    return found


def attempt(case: str, run: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a case; a failure of the gauntlet itself is a red one."""
    try:
        return run()
    except Exception as error:
        return [Row(case, "", "", f"{type(error).__name__}: {error}"[:300], "the gauntlet failed")]


def run_all(chosen: dict[str, Case], workers: int, report: Callable[[str], None]) -> list[Row]:
    """Runs cases beside each other, and returns their rows in order."""
    rows: dict[str, list[Row]] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(attempt, name, case.run): name for name, case in chosen.items()}
        for ended in as_completed(running):
            rows[running[ended]] = ended.result()
            report(f"[{len(rows)}/{len(chosen)}, {time.monotonic() - began:.0f} s]")
            for row in ended.result():
                mark = "" if row.green else "  RED"
                report(f"{row.case:10} {row.what}; {row.where}; {row.happened}: {row.verdict}{mark}")
    return [row for case in chosen for row in rows[case]]


def table(rows: Sequence[Row], header: str) -> str:
    """The rows as Markdown, after a summary by class and by moment."""
    lines = ["# The gauntlet", "", header, "", "| class | rows | green | verdicts |", "| --- | --: | --: | --- |"]
    for name in CLASSES:
        of = [row for row in rows if row.case.startswith(name)]
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in of).most_common())
        if of:
            lines.append(f"| {name} | {len(of)} | {sum(row.green for row in of)} | {verdicts} |")
    moments = Counter((r.what.split(" killed")[0], r.where) for r in rows if r.case.startswith("kill"))
    lines += ["", "| killed | moment | kills |", "| --- | --- | --: |"] if moments else []
    lines += [f"| {command} | {moment} | {count} |" for (command, moment), count in sorted(moments.items())]
    lines += ["", "| case | what | where | what happened | verdict |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = [*row[:4], row.verdict if row.green else f"**{row.verdict}**"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gauntlet", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    for name, count in (("kills", 100), ("damages", 60), ("store-failures", 40), ("disk-full", 20)):
        parser.add_argument(f"--{name}", type=int, default=count, help="how many (default: %(default)s)")
    parser.add_argument("--only", help="these classes, of kill,damage,store,disk")
    parser.add_argument("--case", help="these cases, such as kill-17,damage-3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", metavar="DIR", help="a directory to work in, which stays; and is used again")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    args = parser.parse_args(argv)
    counts = dict(zip(CLASSES, (args.kills, args.damages, args.store_failures, args.disk_full), strict=True))
    counts = {name: n if not args.only or name in args.only.split(",") else 0 for name, n in counts.items()}
    root = Path(args.keep).absolute() if args.keep else Path(tempfile.mkdtemp(prefix="gauntlet-"))
    began = time.monotonic()

    def report(text: str) -> None:
        print(text, flush=True)

    try:
        world = World(root)
        chosen = cases(world, args.seed, counts)
        if args.case:
            chosen = {name: chosen[name] for name in args.case.split(",")}
        commands = {"train", *(case.command for case in chosen.values())}
        world.open(commands, any(name.startswith("damage") for name in chosen), report)
        rows = run_all(chosen, args.workers, report)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    given = f"Seed {args.seed}, {len(rows)} rows, {(time.monotonic() - began) / 60:.0f} minutes."
    text = table(rows, given)
    if args.out:
        args.out.write_text(text)
    report("\n" + text)
    return 0 if all(row.green for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
