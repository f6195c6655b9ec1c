"""Code blocks of the README and of docs/: their lines, whether each is valid, and running them in a sandbox.

    python tests/documented_code.py sandbox DIR                # makes a sandbox
    python tests/documented_code.py docs/evaluation.md DIR     # runs the page's blocks in it; 1/2: the first half

A block is `shell` or `python`, or it is shown and not run: `text`, `json`. A line of a shell block runs a command of
pe_lab, a launcher, a target of make, or a program of `OUTSIDE`. `documented_sizes` says what is replaced,
`documented_sandbox` makes what the pages name.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from documented_sizes import QUICK_PYTHON, quick, quick_training

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "launch/README.md", "benchmarks/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
SHOWN = {"text", "json", "yaml", "toml", "html"}  # languages of blocks that nothing runs

# Programs that are not pe_lab's: why a line of them is not run. Their words are not checked.
OUTSIDE = {
    "git clone": "fetches this repository",
    "cd": "into the directory that git clone made",
    "source": "activates .venv in an interactive shell",
    "pip install": "changes the environment; extras are checked against pyproject.toml",
    "docker": "needs a registry",
    "wandb sync": "needs an account",
}


class Block(NamedTuple):
    """A fenced block: the page, the line of its fence, its language and its content."""

    page: str
    line: int
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    found, opened, content = [], None, []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fence = re.fullmatch(r" {0,3}(```+|~~~+)\s*(\S*).*", line)
        if opened is None and fence:
            opened, content = (number, fence[1], fence[2]), []
        elif opened and line.strip() == opened[1]:
            found.append(Block(page, opened[0], opened[2], "\n".join(content) + "\n"))
            opened = None
        elif opened:
            content.append(line)
    assert opened is None, f"{page}:{opened}: the block does not end"
    return found


class Statement(NamedTuple):
    """One command of a shell block, its variables expanded: `page:line` of its first line, and its words."""

    where: str
    words: list[str]
    variables: dict[str, str] = {}

    @property
    def line(self) -> str:
        return shlex.join(self.words)


def statements(block: Block) -> list[Statement]:
    """The commands of a shell block. Lines that end with a backslash go on, `&&` separates, `#` starts a comment."""
    found: list[Statement] = []
    variables: dict[str, str] = {}
    number, pending = block.line, ""
    for text in block.code.splitlines():
        number += 1
        start = start if pending else number  # noqa: F821
        if text.endswith("\\"):
            pending += text[:-1]
            continue
        line, pending = string.Template(pending + text).safe_substitute(variables), ""
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word != "&&":
                assert not re.fullmatch(r"[&|;<>]+", word), f"{block.page}:{start}: write it without {word}"
                words.append(word)
                continue
            words = words[1:] if words[:1] == ["export"] else words
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):  # also the environment of a command
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words[:2] == ["/usr/bin/time", "-v"]:
                words = words[2:]
            if words:
                found.append(Statement(f"{block.page}:{start}", words, dict(variables)))
            words = []
    return found


def program(words: Sequence[str]) -> tuple[str, list[str]]:
    """What a command runs and its arguments: a module ("pe_lab.train"), "launch", "make", or a key of `OUTSIDE`.

    Raises:
      ValueError: the line runs something else.
    """
    name = words[0].removeprefix(".venv/bin/")
    if name == "python" and words[1] == "-m" and re.fullmatch(r"pe_lab(\.\w+)*", words[2]):
        return words[2], list(words[3:])
    if name == "pe_lab":
        return "pe_lab", list(words[1:])
    if name == "python" and words[1].startswith("tests/"):
        return "script", list(words[1:])
    if re.fullmatch(r"launch/\w+\.sh", name):
        return "launch", list(words)
    if words[:4] == ["python", "-m", "zipfile", "-e"]:
        return "unpack", list(words[4:])
    if name == "make":
        return name, list(words[1:])
    if words[:2] == ["pip", "download"]:
        return "download", list(words[2:])
    for key in OUTSIDE:
        if list(words[: len(key.split())]) == key.split():
            return key, list(words[len(key.split()) :])
    raise ValueError(f"'{shlex.join(words)}' is neither pe_lab's nor among OUTSIDE")


# ---------------------------------------------------------------------------------------------------------------------
# Is a line valid?


class _Parsed(BaseException):
    pass


def parse(module: str, argv: Sequence[str]) -> Any:
    """What the parser of a command makes of its arguments; nothing else of the command runs."""
    from pe_lab import terminal

    class Stops(terminal._Parser):
        def parse_args(self, *given: Any, **named: Any) -> Any:
            raise _Parsed(super().parse_args(*given, **named))

    imported = importlib.import_module(f"{module}.__main__" if module == "pe_lab.attention" else module)
    before, terminal._Parser = terminal._Parser, Stops
    try:
        imported.main.__wrapped__(argv)
    except _Parsed as parsed:
        return parsed.args[0]
    finally:
        terminal._Parser = before
    raise AssertionError(f"{module} ran without parsing its arguments")


def check(words: Sequence[str]) -> None:
    """Raises if a command line has an unknown flag, recipe, key, suite, variant, make target, launcher or extra."""
    from pe_lab.analysis.dope import parse_grid
    from pe_lab.evaluation.command_line import parse_variants
    from pe_lab.evaluation.suites import parse_suites
    from pe_lab.lab.sweeps import make_sweep, parse_axes, parse_seeds
    from pe_lab.positional import Layer, Rope
    from pe_lab.recipes import load_config, split_overrides
    from pe_lab.training.plan import plan_phases

    kind, arguments = program(words)
    if kind == "pe_lab" and arguments and not arguments[0].startswith("-"):
        kind, arguments = f"pe_lab.{arguments[0]}", arguments[1:]
    if kind == "pe_lab":
        assert arguments in ([], ["--help"], ["--version"])
    elif kind == "pe_lab.evaluation.lm_eval":
        assert "--tasks" in arguments  # lm-evaluation-harness has the parser
    elif kind.startswith("pe_lab."):
        if "--help" in arguments:
            return
        args = parse(kind, arguments)
        if getattr(args, "config", None):
            config = load_config(args.config, split_overrides(arguments)[1])
            edited = {n: (Layer(Rope()),) * config.model.layers for n, one in enumerate(config.phases) if one.init_from}
            plan_phases(config, edited)  # of a checkpoint that is not here
        if getattr(args, "grid", None) and kind == "pe_lab.analyze":
            parse_grid(args.grid, heads=32)
        if getattr(args, "grid", None) and kind == "pe_lab.sweep":
            make_sweep(
                args.config, parse_axes(args.grid), parse_seeds(args.seeds), "none", split_overrides(arguments)[1]
            )
        if kind == "pe_lab.evaluate":
            parse_suites(args.suite or "perplexity")
            parse_variants(args.variants or "as-trained")
    elif kind == "launch":
        assert (ROOT / arguments[0]).is_file()
        if "--" in arguments:
            check(arguments[arguments.index("--") + 1 :])
    elif kind == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in arguments), arguments
    elif kind == "script":
        assert (ROOT / arguments[0]).is_file()
    elif kind == "pip install":
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name in arguments:
            extra = re.fullmatch(r"pe-lab(?:\[(\w+)\])?", name)
            assert extra and (extra[1] is None or extra[1] in project["optional-dependencies"]), name


# ---------------------------------------------------------------------------------------------------------------------
# Running


def run(statement: Statement) -> None:
    """Runs a command in the current directory, a sandbox."""
    kind, arguments = program(statement.words)
    if kind == "pe_lab" and arguments and arguments[0] not in ("--help", "--version"):
        kind, arguments = f"pe_lab.{arguments[0]}", arguments[1:]
    if kind in OUTSIDE:
        check(statement.words)
    elif kind == "launch":
        options = arguments if "--dry-run" in arguments else [arguments[0], "--dry-run", *arguments[1:]]
        follows = {"--attach", "--stop", "--delete"} & set(arguments)
        if not follows:
            _succeeds(["bash", str(ROOT / arguments[0]), *options[1:]], cwd=ROOT, **statement.variables)
            check(arguments[arguments.index("--") + 1 :])  # other lines run the same programs
    elif kind == "make":
        _succeeds(["make", "--dry-run", *arguments], cwd=ROOT)
    elif kind == "unpack":
        (wheel,) = glob.glob(arguments[0])
        _succeeds([sys.executable, "-m", "zipfile", "-e", wheel, arguments[1]])
    elif kind == "download":
        for name in (one for one in arguments if not one.startswith("-")):
            shutil.copy(f"downloads/{name.replace('-', '_')}-1-py3-none-any.whl", ".")
    elif kind == "script":
        _succeeds([sys.executable, str(ROOT / arguments[0]), *arguments[1:]])
    elif kind == "pe_lab.evaluation.lm_eval" or "--suite=lm_eval:droPE-six" in arguments:
        check(statement.words)  # its tasks are on the hub; tests/evaluation/test_harness.py runs it on local ones
    elif any(one.startswith(("--suite=helmet", "--lm-eval-data=")) for one in arguments):
        check(statement.words)  # at 8,192 tokens, or on datasets of the hub; tests/evaluation runs both on small files
    elif {"--on=slurm", "--on=ray"} & set(arguments):
        check(statement.words)  # there is no cluster; tests/lab/sweeps runs both on stand-ins
    else:
        arguments = quick(kind, arguments)
        line = (kind, *(one for one in arguments if not one.startswith("--out=")))
        out = next((one.partition("=")[2] for one in arguments if one.startswith("--out=")), "")
        if (
            kind == "pe_lab.analyze"
            and (done := _ran.get(line))
            and Path(done).is_dir()
            and not Path(out or ".").exists()
        ):
            check(statement.words)  # at quick size, it is an earlier line of the page
            shutil.copytree(done, out)
            return
        _ran[line] = out
        for one in arguments:
            flag, _, value = one.partition("=")
            if flag == "--to" or (kind, flag) in (("pe_lab.train", "--workdir"), ("pe_lab.prepare", "--out")):
                made = Path(value.removeprefix("hf:"))
                if made not in _made and made.is_dir():  # the stand-in, for pages that only use it
                    shutil.rmtree(made)
                _made.add(made)
        module = importlib.import_module(f"{kind}.__main__" if kind in ("pe_lab", "pe_lab.attention") else kind)
        print("   ", shlex.join([kind, *arguments]), flush=True)
        status = module.main(arguments)
        assert status == 0, f"{statement.where}: status {status}"


_made: set[Path] = set()  # directories that lines of this page have written
_ran: dict[tuple[str, ...], str] = {}  # the lines of this page without their --out, and that


def _succeeds(command: Sequence[str], cwd: Path | None = None, **variables: str) -> None:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"


def part_of(page: str, part: str) -> list[Block]:
    """The blocks of a part of a page: "2/3" is the second of three parts with about as many lines each."""
    index, count = map(int, part.split("/"))
    found = blocks(page)
    sizes = [len(statements(block)) if block.language == "shell" else 1 for block in found]
    middles = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]
    return [block for block, middle in zip(found, middles, strict=True) if middle * count // sum(sizes) == index - 1]


def run_page(page: str, part: str = "1/1") -> int:
    """Runs the blocks of a page in the current directory, in order; returns how many lines and blocks failed."""
    from pe_lab.recipes import split_overrides

    failed = 0
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.py")]
    names: dict[str, Any] = {"small": split_overrides(quick_training("configs/table1.py:size=laptop"))[1]}
    for block in part_of(page, part):
        steps: Iterator[tuple[str, Any]]
        if block.language == "shell":
            steps = iter([(f"{s.where}: {s.line}", s) for s in statements(block)])
        else:  # a file that a page shows whole is run by the lines that name it
            runs = block.language == "python" and block.code not in files
            steps = iter([(f"{page}:{block.line}: python", block)] if runs else [])
        for title, step in steps:
            print(title, flush=True)
            began = time.monotonic()
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    if isinstance(step, Statement):
                        run(step)
                    else:
                        code = step.code
                        for words, small in QUICK_PYTHON.items():
                            code = code.replace(words, small)
                        exec(compile("\n" * step.line + code, step.page, "exec"), names)
            except (Exception, SystemExit):
                failed += 1
                print(out.getvalue()[-3000:], traceback.format_exc()[-2000:], f"FAILED: {title}", sep="\n")
            print(f"    {time.monotonic() - began:.1f} s", flush=True)
    return failed


def main(page: str, directory: str, part: str = "1/1") -> int:
    """Runs a page, or makes the sandbox (page `sandbox`)."""
    if page == "sandbox":
        from documented_sandbox import make_sandbox

        make_sandbox(Path(directory).absolute())
        return 0
    os.chdir(directory)
    sys.path.insert(0, "")  # as `python -m` has it: an unpacked wheel can be imported
    return min(run_page(page, part), 100)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
