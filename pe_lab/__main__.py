"""`pe_lab COMMAND ...` and `python -m pe_lab COMMAND ...`: runs a command, or lists them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.recipes import split_overrides
from pe_lab.terminal import command, leave, stop_while_importing

COMMANDS = (
    *("train", "plan", "prepare", "evaluate", "report", "analyze", "surgery", "convert", "generate", "verify"),
    *("sweep", "claims", "audit", "extend"),
)
STOPPED = ("train", "sweep", "claims", "extend")  # which SIGTERM and SIGINT stop with status 75


def summary(name: str) -> str:
    """What a command does, from its module's docstring; the module is not imported."""
    source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
    return first.rpartition("`: ")[2]


@command
def main(argv: Sequence[str]) -> int:
    """Runs the command that the first argument names. Without one, lists the commands."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print("pe_lab COMMAND [options]; pe_lab COMMAND --help lists the options\n")
        print("\n".join(f"  {one:10}{summary(one)}" for one in COMMANDS))
        return 0
    if name == "--version":
        print(importlib.import_module("pe_lab").__version__)
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"pe_lab has no command '{name}'. {did_you_mean(name, COMMANDS)}")
    if name in STOPPED:
        stop_while_importing()
    split_overrides(rest)  # a misspelt key is told before the slow imports of a command
    return importlib.import_module(f"pe_lab.{name}").main(rest)


if __name__ == "__main__":
    leave(main())
