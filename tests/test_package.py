"""The package as it is imported and run: its names, its version, its list of commands."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import pe_lab
from pe_lab.__main__ import COMMANDS, main, summary
from pe_lab.generate import why_empty


def test_the_package_lists_what_it_offers():
    assert {"LanguageModel", "__version__", "load"} <= set(dir(pe_lab))
    assert pe_lab.__version__ == importlib.metadata.version("pe-lab")
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        pe_lab.lod  # noqa: B018


def test_the_commands_are_listed_and_run(capsys):
    assert main([]) == main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in listed and summary(name)
    assert main(["--version"]) == 0 and capsys.readouterr().out.strip() == pe_lab.__version__
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    assert "pe_lab.report" in capsys.readouterr().out
    assert main(["tran"]) == 2 and "Did you mean 'train'?" in capsys.readouterr().err


def test_every_command_is_listed():
    package = Path(pe_lab.__file__).parent
    assert {path.stem for path in package.glob("*.py") if "@command\n" in path.read_text()} == {*COMMANDS, "__main__"}


def test_python_dash_m(tmp_path):
    """A second: nothing heavy is imported for the list."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pe_lab"],
        cwd=Path(pe_lab.__file__).parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "  train " in done.stdout
    assert not {"jax", "flax", "orbax", "rich"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_an_empty_reply_is_explained():
    assert "first token ends the text" in why_empty(1)
    assert "the 7 tokens that were generated" in why_empty(7)
