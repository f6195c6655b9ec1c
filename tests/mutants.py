"""Draws one-token mutants of pe_lab and runs the fast tests that cover them: `make mutants`.

A mutant changes one operator, number, comparison or keyword of a line that code runs; docstrings, annotations and
messages are left alone. The tests of a mutant are those whose coverage has its line (all that touch the file, if the
line runs on import), the cheapest first, then the others of their files: a test that runs what an earlier one compiled
with jax.jit does not run the line again. A mutant that no test kills is printed, for a person to judge: either it is
equivalent (no input tells it from the original), or a test is missing.

  python tests/mutants.py --coverage=build/coverage --junit=build/junit.xml [--count=200] [--seed=0] [--workers=2]
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
SWAPS = {
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "//", "**": "*"},
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+=": "-=", "-=": "+="},
    **{"and": "or", "or": "and", "True": "False", "False": "True", "min": "max", "max": "min", "any": "all"},
    **{"all": "any", "is": "is not", "not": "", "in": "not in", "break": "continue", "continue": "break"},
}
TESTS_SECONDS = 90.0  # of measured cost, per mutant
TIMEOUT_SECONDS = 600.0


class Mutant(NamedTuple):
    """One change of one token; columns count characters."""

    file: str
    line: int
    column: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        lines[self.line - 1] = text[: self.column] + self.after + text[self.column + len(self.before) :]
        return "".join(lines)


def candidates(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file that compiles to another program."""
    tree, left_alone = ast.parse(source), set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (part := getattr(node, name, None)) is not None:
                left_alone |= set(
                    range(part.lineno * 1000 + part.col_offset, part.end_lineno * 1000 + part.end_col_offset)
                )
        if isinstance(node, ast.Raise) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            left_alone |= {line * 1000 + c for line in range(node.lineno, node.end_lineno + 1) for c in range(130)}
    found, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (line, column), text, after = token.start, token.string, None
        if token.type == tokenize.NUMBER and text.isdigit():
            after = str(int(text) + 1)
        elif token.type in (tokenize.OP, tokenize.NAME) and not (text in "+-*/**" and before in "(,=[:{"):
            after = SWAPS.get(text)
        before = text
        if after is None or line * 1000 + column in left_alone:
            continue
        mutant = Mutant(file, line, column, text, after)
        try:
            if ast.dump(ast.parse(mutant.apply(source))) != ast.dump(tree):
                found.append(mutant)
        except SyntaxError:
            pass
    return found


def covering(data: CoverageData, mutant: Mutant, seconds: dict[str, float]) -> list[str]:
    """Node ids of the fast tests for a mutant: those that run its line, then the others of their files.

    The cheapest come first, up to TESTS_SECONDS.
    """
    by_line = data.contexts_by_lineno(str(ROOT / mutant.file))
    contexts = {c for c in by_line.get(mutant.line, []) if c}
    if not contexts and mutant.line in by_line:  # runs on import
        contexts = {c for several in by_line.values() for c in several if c}
    running = {c.partition("|")[0] for c in contexts}
    files = {test.partition("::")[0] for test in running}
    beside = {test for test in seconds if test.partition("::")[0] in files} - running
    chosen, spent = [], 0.0
    for test in [*sorted(running, key=lambda t: seconds.get(t, 1.0)), *sorted(beside, key=lambda t: seconds[t])]:
        spent += seconds.get(test, 1.0)
        if chosen and spent > TESTS_SECONDS:
            break
        chosen.append(test)
    return chosen


def test_seconds(junit: Path) -> dict[str, float]:
    """Seconds by node id, from a JUnit report with the family xunit1."""
    return {
        f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0))
        for case in ElementTree.parse(junit).iter("testcase")
    }


def killed(mutant: Mutant, tests: list[str], tree: Path) -> bool:
    """Whether a test fails, or hangs, in the copy `tree` of the repository with the mutant in it."""
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(original), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "NPROC": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--junit", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    args = parser.parse_args()
    data = CoverageData(str(args.coverage))
    data.read()
    seconds = test_seconds(args.junit)
    files = sorted((ROOT / "pe_lab").rglob("*.py"))
    every = [m for f in files for m in candidates(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8"))]
    drawn = random.Random(args.seed).sample(every, args.count)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.workers) as pool:
        trees: Queue[Path] = Queue()
        for n in range(args.workers):
            for name in filter(None, listed):
                (target := Path(directory, str(n), name)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
            subprocess.run(["git", "init", "-q"], cwd=Path(directory, str(n)), check=True)
            trees.put(Path(directory, str(n)))

        def judge(mutant: Mutant) -> None:
            tests = covering(data, mutant, seconds)
            tree, began = trees.get(), time.monotonic()
            try:
                dead = bool(tests) and killed(mutant, tests, tree)
            finally:
                trees.put(tree)
            line = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
            results.append({**mutant._asdict(), "killed": dead, "tests": len(tests), "source": line})
            print(
                f"{len(results):3}/{len(drawn)} {'killed  ' if dead else 'SURVIVED'} {time.monotonic() - began:4.0f} s "
                f"{mutant.file}:{mutant.line} {mutant.before!r} -> {mutant.after!r} ({len(tests)} tests): {line[:70]}",
                flush=True,
            )

        list(pool.map(judge, drawn))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1))
    print(f"\n{'package':14} drawn killed survived   ({len(every)} candidates, seed {args.seed})")
    packages = sorted({Path(r["file"]).parts[1].removesuffix(".py") for r in results})
    for package in [*packages, ""]:
        mine = [r for r in results if not package or Path(r["file"]).parts[1].removesuffix(".py") == package]
        dead = sum(r["killed"] for r in mine)
        print(f"{package or 'all':14} {len(mine):5} {dead:6} {len(mine) - dead:8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
