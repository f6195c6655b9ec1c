"""Chooses slow tests that fit a budget: `python tests/slow_budget.py SECONDS` prints arguments of pytest, one a line.

Files are chosen whole, since their tests share fixtures: first those that a change concerns, then others in an order
drawn from the commit, so that over many commits all of them run. Of a file with more than half of the budget, which one
of two workers would run alone, a part is chosen. The report on stderr lists what runs and what is left out.
tests/slow_costs.json holds the measured seconds of each slow test; `make test-all` writes it (pytest-split).

A file is concerned if it changed, or if it names a changed module of pe_lab, a changed recipe, a changed launcher or a
changed helper of the tests. Changed means: since $CI_BASE, or since the last commit that is at least four hours older
than HEAD.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
COSTS = Path(__file__).parent / "slow_costs.json"
UNKNOWN_SECONDS = 60.0  # of a file that was never measured


def main(budget: float) -> None:
    costs = measured_costs()
    commit, changed = git("rev-parse", "HEAD").strip(), changed_files()
    urgent = {file for file in costs if concerns(changed, file, (ROOT / file).read_text(encoding="utf-8"))}
    chosen, left = choose(costs, urgent, budget, commit)
    spent = sum(sum(tests.values()) for tests in chosen.values())
    print(
        f"slow tests: {spent:.0f} of {budget:.0f} s in {len(chosen)} of {len(costs)} files; "
        f"{len(changed)} changed files concern {len(urgent)}",
        file=sys.stderr,
    )
    for what, files in (("runs", chosen), ("left out", {file: costs[file] for file in left})):
        for file, tests in files.items():
            part = f" ({len(tests)} of {len(costs[file])} tests)" * (len(tests) < len(costs[file]))
            said = f"  {what:8} {sum(tests.values()):5.0f} s  {file}{part}{' (changed)' * (file in urgent)}"
            print(said, file=sys.stderr)
    print("\n".join(chosen))
    for file, tests in chosen.items():  # what was never measured runs; what is no more is no error
        print("".join(f"--deselect={test}\n" for test in costs[file] if test not in tests), end="")


def measured_costs() -> dict[str, dict[str, float]]:
    """Seconds by file and test, of the files that have slow tests."""
    measured: dict[str, dict[str, float]] = {}
    for test, seconds in json.loads(COSTS.read_text()).items():
        measured.setdefault(test.partition("::")[0], {})[test] = seconds
    files = (path.relative_to(ROOT).as_posix() for path in sorted(Path(__file__).parent.rglob("test_*.py")))
    slow = (file for file in files if "mark.slow" in (ROOT / file).read_text(encoding="utf-8"))
    return {file: measured.get(file, {file: UNKNOWN_SECONDS}) for file in slow}


def choose(
    costs: dict[str, dict[str, float]], urgent: set[str], budget: float, commit: str
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(tests to run by file, files left out): urgent files first, in an order drawn from `commit`, while they fit."""

    def drawn(name: str) -> bytes:
        return hashlib.sha256(f"{commit} {name}".encode()).digest()

    order = sorted(costs, key=lambda file: (file not in urgent, drawn(file)))
    chosen: dict[str, dict[str, float]] = {}
    left = budget
    for file in order:
        tests, room = costs[file], min(left, budget / 2)
        whole = sum(tests.values()) <= budget / 2
        part: dict[str, float] = {}
        for test in sorted(tests, key=drawn):
            # One test of more than half of the budget runs alone of its file, or it would never run.
            if sum(part.values()) + tests[test] <= (room if part else left):
                part[test] = tests[test]
        if part and (not whole or len(part) == len(tests)):
            chosen[file] = part
            left -= sum(part.values())
    return chosen, [file for file in order if file not in chosen]


def concerns(changed: Sequence[str], file: str, source: str) -> bool:
    """Whether a test file is, or names, something that changed."""
    if file in changed:
        return True
    for path in map(Path, changed):
        if path.suffix == ".py" and path.parts[0] in ("pe_lab", "configs", "tests", "benchmarks"):
            # A package by its name, a recipe or a helper by its file's.
            name = f"pe_lab.{path.with_suffix('').parts[1]}" if path.parts[0] == "pe_lab" else path.stem
            if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", source):
                return True
        if path.parts[0] == "launch" and f"launch/{path.name}" in source:
            return True
    return False


def changed_files() -> list[str]:
    """Paths that differ from the base, in commits and in the working tree."""
    base = os.environ.get("CI_BASE") or git("rev-list", "-1", f"--before={base_time()}", "HEAD").strip()
    base = base or git("rev-list", "--max-parents=0", "HEAD").split()[-1]
    return git("diff", "--name-only", base).split("\n")[:-1]


def base_time() -> int:
    return int(git("show", "-s", "--format=%ct", "HEAD")) - 4 * 3600


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(float(sys.argv[1]))
