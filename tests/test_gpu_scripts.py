"""The scripts of benchmarks/gpu, tiny and on a CPU; two minutes in all."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer
from pe_lab.model import Model

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks/gpu").glob("*.sh"))


def run_tiny(script: str, out: Path) -> str:
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", f"benchmarks/gpu/{script}", "--tiny"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_names_every_script_with_its_command():
    page = (ROOT / "benchmarks/gpu/README.md").read_text()
    commands = re.findall(r"`(sh benchmarks/gpu/(\S+\.sh)[^`]*)`", page)
    assert {name for _, name in commands if name != "SCRIPT"} == {path.name for path in SCRIPTS}
    assert all(len(command) < 2000 for command, _ in commands)


def test_every_model_of_the_train_step_can_be_made(monkeypatch):
    """Their shapes alone; a tiny one takes their place below. 2 s."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.train_step_gpu import cells, shape_of

    args = argparse.Namespace(tiny=False, scan=False, loss_chunks=8)
    sizes = {name: Model(shape_of(cell, args).model).num_parameters for name, cell in cells().items()}
    assert {size // 10**6 for size in sizes.values()} == {134, 361, 494}


@pytest.mark.slow
def test_kernels(tmp_path):
    said = run_tiny("kernels.sh", tmp_path)
    assert re.search(r"\d+ passed", said) and (tmp_path / "kernels.xml").exists()


@pytest.mark.slow
def test_attention(tmp_path):
    said = run_tiny("attention.sh", tmp_path)
    found = json.loads((tmp_path / "attention-tiny.json").read_text())["features"]
    assert {one["feature"] for one in found} >= {"plain", "ALiBi", "8 documents", "a sink"}
    assert all(row["error"] < 2e-2 and "seconds" in row for one in found for row in one["rows"].values())
    assert "auto / fastest" in said and (tmp_path / "attention-tiny.md").exists()


@pytest.mark.slow
def test_train_step(tmp_path):
    said = run_tiny("train_step.sh", tmp_path)
    found = json.loads((tmp_path / "train_step-tiny.json").read_text())["results"]
    assert [one["cell"] for one in found][:3] == ["135m@8192", "135m@2048", "494m@1024"]
    first = {one["cell"]: one["rows"]["pe_lab"]["first_losses"] for one in found}
    # What differs is what the cell says: the same weights and tokens under another encoding, or in documents.
    assert len({tuple(losses) for name, losses in first.items() if name.startswith("494m")}) == 5
    assert "tokens/s" in said and (tmp_path / "train_step-tiny.md").exists()


@pytest.mark.slow
def test_decode(tmp_path):
    said = run_tiny("decode.sh", tmp_path)
    (path,) = tmp_path.glob("decode-*.json")
    found = json.loads(path.read_text())
    assert [(one["batch"], one["length"]) for one in found["cases"]] == [(1, 16), (2, 40)]
    assert all(one["rows"][0]["decode"] > 0 and one["copy_limit"] > 0 for one in found["cases"])
    assert said.count("the limit of a copy") == 2


@pytest.mark.slow
def test_stack(tmp_path):
    """Two sweeps, of one cell and of a stack of two; 40 s."""
    said = run_tiny("stack.sh", tmp_path)
    single, stack = json.loads((tmp_path / "stack-tiny.json").read_text())["results"]
    assert (single["how"], stack["how"], stack["cells"]) == ("1 single", "stack", 2) and stack["loss"] < 1e-5
    assert "tokens/s of all" in said


def with_checkpoint(tmp_path: Path, monkeypatch) -> None:
    """Sets FROM, DATA and WORK of scripts that start from a checkpoint: a tiny one, and prepared text."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/evaluation"))
    import tiny

    from pe_lab.data.mixture import open_mixture

    data = tiny.corpus(tmp_path / "texts", 6000)
    start = tiny.save_run(tmp_path / "run", data) / "pretrain"
    prepared = next(one.prepared.directory for one in open_mixture(data).sources if one.prepared is not None)
    monkeypatch.setenv("FROM", str(start))
    monkeypatch.setenv("DATA", str(prepared))
    monkeypatch.setenv("WORK", str(tmp_path / "work"))


@pytest.mark.slow
def test_smollm2_drop(tmp_path, monkeypatch):
    """Three runs from a tiny checkpoint, and what is kept of them; 60 s."""
    with_checkpoint(tmp_path, monkeypatch)
    run_tiny("smollm2_drop.sh", tmp_path)
    losses = {}
    for run in ("control", "ten_layers", "all_layers"):
        records = [json.loads(line) for line in (tmp_path / "smollm2_drop" / run / "metrics.jsonl").open()]
        losses[run] = [one["validation_loss"] for one in records if "validation_loss" in one]
        assert max(one["step"] for one in records) == 10
    assert len({found[0] for found in losses.values()}) == 3 and (tmp_path / "smollm2_drop/report.html").exists()


@pytest.mark.slow
def test_extend_smollm2(tmp_path, monkeypatch):
    """From a tiny checkpoint and prepared text to an answer; 60 s."""
    with_checkpoint(tmp_path, monkeypatch)
    said = run_tiny("extend_smollm2.sh", tmp_path)
    answer = json.loads((tmp_path / "extend/answer.json").read_text())
    assert answer["answer"] in said and {one["variant"] for one in answer["arms"]} == {"unchanged", "yarn"}
    assert (tmp_path / "extend/search.jsonl").exists() and (tmp_path / "extend/report.html").exists()


@pytest.mark.slow
def test_dope_smollm2(tmp_path, monkeypatch):
    """A tiny model's cells under both scalings, with random heads; 60 s."""
    with_checkpoint(tmp_path, monkeypatch)
    save_tokenizer(load_tokenizer("bytes"), tmp_path / "run" / "tokenizer")
    run_tiny("dope_smollm2.sh", tmp_path)
    cells = json.loads((tmp_path / "dope_smollm2/cells.json").read_text())
    assert {one["order"] for one in cells} == {"ascending", "descending", "random"} and len(cells) == 2 * 2 * 2 * 3
    assert len({one["variant"] for one in cells}) == 2 and {one["task"] for one in cells} == {
        "niah:noisy",
        "niah:clean",
    }
    assert all(len(one["chosen"]) == 1 and one["samples"] == 2 for one in cells)
    assert (tmp_path / "dope_smollm2/analysis.json").exists() and list((tmp_path / "dope_smollm2").glob("*.svg"))
