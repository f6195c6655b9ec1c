"""The package as it is imported and run: its names, its version, its list of commands."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
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
    assert {path.stem for path in package.glob("*.py") if re.search("@(command|works_on)\n", path.read_text())} == {
        *COMMANDS,
        "__main__",
    }


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


def _run(*words: str | Path, cwd: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_trains_evaluates_and_reports_without_the_checkout(tmp_path):
    """50 s: the wheel in an environment of its own, which sees the dependencies of this one."""
    root = Path(pe_lab.__file__).parents[1]
    _run(sys.executable, "-m", "build", f"--outdir={tmp_path / 'dist'}", root, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("pe_lab-*.whl")
    (source,) = (tmp_path / "dist").glob("pe_lab-*.tar.gz")
    assert source.stat().st_size < 3e6
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"pe_lab/{p.relative_to(root / 'pe_lab')}" for p in (root / "pe_lab").rglob("*.py")}
    sources |= {f"pe_lab/page/fonts/{p.name}" for p in (root / "pe_lab/page/fonts").iterdir()}
    sources |= {"pe_lab/data/sources/manuals.tsv"}
    sources |= {f"pe_lab/configs/{p.name}" for p in (root / "configs").glob("*.py")}
    sources |= {f"pe_lab/lab/claims/files/{p.name}" for p in (root / "claims").glob("*.py")}
    sources |= {f"pe_lab/lab/claims/files/results/{p.name}" for p in (root / "claims/results").glob("*.json")}
    assert {name for name in names if ".dist-info/" not in name} == sources

    venv = tmp_path / "venv"
    _run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    _run(venv / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # A .pth line adds the path alone: the editable pe_lab of that environment, which is a .pth file too, stays out.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    assert str(site) in _run(venv / "bin/python", "-c", "import pe_lab; print(pe_lab.__file__)", cwd=tmp_path)

    command = venv / "bin/pe_lab"
    assert _run(command, "--version", cwd=tmp_path).strip() == pe_lab.__version__
    recipe = "--config=pe_lab/configs/drope_laptop.py:quick"
    _run(command, "train", recipe, cwd=tmp_path)
    _run(command, "evaluate", "--from=runs/drope_laptop_quick", "--suite=needles", "--lengths=1x", cwd=tmp_path)
    _run(command, "report", "runs/drope_laptop_quick", cwd=tmp_path)
    assert "DroPE" in (tmp_path / "runs/drope_laptop_quick/report.html").read_text(encoding="utf-8")
    run = json.loads((tmp_path / "runs/drope_laptop_quick/run.json").read_text())
    assert recipe in run["command"]
