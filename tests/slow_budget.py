"""Chooses slow tests that fit a budget: `pytest -m slow --slow-budget=900` (seconds). `.ci/run` does so.

Files of tests are chosen whole, since their tests share fixtures: first those that a change concerns, then others in
an order drawn from the commit, so that over many commits all of them run. tests/slow_costs.json holds the measured
seconds of each slow test; `make test-all` writes it (pytest-split, --store-durations).

A file is concerned if it changed, or if it names a changed module of pe_lab, a changed recipe or a changed helper of
the tests. Changed means: since $CI_BASE, or since the last commit that is at least four hours older than HEAD.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COSTS = Path(__file__).parent / "slow_costs.json"
UNKNOWN_SECONDS = 30.0  # of a test that was never measured
REPORT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-budget", type=float, metavar="SECONDS", help="run no more slow tests than fit")


@pytest.hookimpl(trylast=True)  # after -m has deselected the fast tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    budget = config.getoption("--slow-budget")
    if budget is None:
        return
    measured = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    costs: dict[str, float] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        costs[file] = costs.get(file, 0.0) + measured.get(item.nodeid, UNKNOWN_SECONDS)
    head, changed = git("rev-parse", "HEAD").strip(), changed_files()
    urgent = {file for file in costs if concerns(changed, file, (ROOT / file).read_text(encoding="utf-8"))}
    chosen, left = choose(costs, urgent, budget, head)
    config.stash[REPORT] = [
        f"slow tests: {len(chosen)} files, {sum(costs[f] for f in chosen):.0f} of {budget:.0f} s; "
        f"{len(urgent)} are concerned by {len(changed)} changed files",
        *(f"  runs      {costs[f]:6.0f} s  {f}{'  (changed)' if f in urgent else ''}" for f in chosen),
        *(f"  left out  {costs[f]:6.0f} s  {f}{'  (changed)' if f in urgent else ''}" for f in left),
    ]
    out = [item for item in items if item.nodeid.partition("::")[0] in left]
    items[:] = [item for item in items if item not in set(out)]
    config.hook.pytest_deselected(items=out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return config.stash.get(REPORT, [])


def choose(costs: dict[str, float], urgent: set[str], budget: float, commit: str) -> tuple[list[str], list[str]]:
    """(files to run, files left out): urgent files first, each in an order drawn from `commit`, while they fit."""
    order = sorted(costs, key=lambda f: (f not in urgent, hashlib.sha256(f"{commit} {f}".encode()).digest()))
    chosen, spent = [], 0.0
    for file in order:
        if spent + costs[file] <= budget:
            chosen.append(file)
            spent += costs[file]
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
