"""A run in a directory of any name, over commands: what one command writes, the others read, or the first refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import RECIPE, fingerprint

from pe_lab import convert, evaluate, generate, prepare, report, surgery, sweep, train, verify
from pe_lab.lab.sweeps.cells import FILE as SWEEP

SHORT = {"steps=8": "steps=2", "steps=6": "steps=1", "warmup_steps=2": "warmup_steps=0"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a recipe of three steps whose name has a colon, beside the run that a pattern would match."""
    monkeypatch.chdir(tmp_path)
    recipe = RECIPE
    for before, after in SHORT.items():
        recipe = recipe.replace(before, after)
    Path("ti:ny.py").write_text(recipe)
    Path("runs/lr1").mkdir(parents=True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b? {c,d},~\n%20#ü"])
def test_a_round_trip_over_commands(place, capsys, name):
    """One run of three steps for each name: about 25 s of processor time."""
    run, child, out, back = (f"runs/{name}{more}" for more in ("", "-child", "-hf", "-back"))

    def done(module, *arguments: str) -> str:
        status = module.main(list(arguments))
        told = capsys.readouterr()
        assert status == 0, told.err
        return told.out

    done(train, "--config=ti:ny.py", f"--workdir={run}")
    assert "nothing to do" in done(train, "--config=ti:ny.py", f"--workdir={run}")
    assert "damaged" not in done(verify, run)
    done(evaluate, f"--from={run}", "--suite=needles", "--lengths=16")
    assert (place / run / "evaluation" / "needles.jsonl").is_file()
    done(surgery, f"--from={run}/pretrain", f"--to={child}", "--drop")
    done(generate, f"--from={child}", "--prompt=a", "--max-new-tokens=2")
    done(convert, f"--from={child}/checkpoints/0", f"--to=hf:{out}", "--parity=off")
    done(convert, f"--from=hf:{out}", f"--to={back}", "--parity=off")
    done(verify, child, out, back)
    done(report, run, child, f"--out={place}/page [1].html")
    assert (place / "page [1].html").is_file()
    Path(f"runs/{name}/text[1].txt").write_text("some text\n" * 99)
    done(prepare, f"--source=text:{run}/text[1].txt", f"--tokenizer=saved:{run}/tokenizer", f"--out=runs/{name}-data")
    done(verify, f"runs/{name}-data")


@pytest.mark.slow
def test_a_sweep_in_a_directory_with_wildcards(place, capsys):
    """Two cells, as processes: about 40 s of processor time."""
    line = ["--config=ti:ny.py", "--seeds=2", "--jobs=2", "--workdir=runs/s[0-9]"]
    assert sweep.main(line) == 0
    assert (place / "runs/s[0-9]" / SWEEP).is_file() and not (place / "runs/s1").exists()
    assert sweep.main(["--table", "--workdir=runs/s[0-9]"]) == 0
    assert verify.main(["runs/s[0-9]"]) == 0
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a\\b", "\udcff", "x" * 256])
def test_a_name_that_checkpoints_cannot_have_is_refused_first(place, capsys, name):
    before = fingerprint(place)
    for module, arguments in (
        (train, ["--config=ti:ny.py", f"--workdir=runs/{name}"]),
        (sweep, ["--config=ti:ny.py", "--seeds=2", f"--workdir=runs/{name}"]),
        (surgery, ["--from=runs/lr1", f"--to=runs/{name}", "--drop"]),
        (convert, ["--from=hf:none", f"--to=runs/{name}"]),
    ):
        assert module.main(arguments) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and ("cannot take this name" in told or "too long" in told), told
    assert fingerprint(place) == before
