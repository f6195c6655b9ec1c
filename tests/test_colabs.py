"""The notebooks: clean, thin, and running from top to bottom on a fresh run."""

import ast
import importlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from tiny_runs import REPOSITORY, start

COLABS = sorted((REPOSITORY / "colabs").glob("*.ipynb"))
QUICKSTART = REPOSITORY / "colabs/quickstart.ipynb"
PATIENCE = 400  # seconds for one process

each_notebook = pytest.mark.parametrize("path", COLABS, ids=lambda path: path.name)


def nodes(path: Path) -> Iterator[ast.AST]:
    """Everything in a notebook's code, its `!` and `%` lines turned into calls."""
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            yield from ast.walk(ast.parse(TransformerManager().transform_cell(cell.source)))


def test_the_quickstart_is_among_the_notebooks():
    assert QUICKSTART in COLABS


@each_notebook
def test_it_is_valid_and_committed_without_outputs(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert "attachments" not in cell
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@each_notebook
def test_it_defines_nothing(path):
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    assert [ast.unparse(node) for node in nodes(path) if isinstance(node, definitions)] == []


@each_notebook
def test_what_it_imports_exists(path):
    found = list(nodes(path))
    taken = [(node.module, alias.name) for node in found if isinstance(node, ast.ImportFrom) for alias in node.names]
    taken += [
        ("pe_lab", node.attr)
        for node in found
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pe_lab"
    ]
    ours = [(module, name) for module, name in taken if module.partition(".")[0] == "pe_lab"]
    assert ("pe_lab", "load") in ours
    assert [f"{m}.{n}" for m, n in ours if not hasattr(importlib.import_module(m), n)] == []


@pytest.mark.slow
def test_the_quickstart_runs_and_what_it_saves_can_be_trained(tmp_path, monkeypatch):
    cache = f"--config.data.cache_dir={tmp_path / 'cache'}"
    recipe = f"--config={REPOSITORY / 'configs/drope_laptop.py'}:quick"
    training = start(["pe_lab.train", recipe, cache, f"--workdir={tmp_path / 'run'}"], tmp_path)
    out = training.communicate(timeout=PATIENCE)[0]
    assert training.returncode == 0, out[-3000:]

    monkeypatch.setenv("PE_LAB_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the child is saved there
    notebook = nbformat.read(QUICKSTART, 4)
    # From its own directory, as Jupyter starts it. An error in a cell raises here.
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(QUICKSTART.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4

    # The command that the last cell prints, but for its length and where it writes.
    printed = "".join(output.text for output in notebook.cells[-1].outputs)
    command = shlex.split(printed[printed.index("python -m") :].replace("\\\n", " "))
    assert command[:3] == ["python", "-m", "pe_lab.train"]
    short = ["--config.phases.0.steps=4", "--config.phases.0.optimizer.warmup_steps=1"]
    training = start([*command[2:], *short, cache, f"--workdir={tmp_path / 'mixture'}"], REPOSITORY)
    out = training.communicate(timeout=PATIENCE)[0]
    assert training.returncode == 0, out[-3000:]
    phase = json.loads((tmp_path / "mixture/recalibrate/phase.json").read_text())
    history = [ancestor["what"] for ancestor in phase["lineage"]]
    assert "rope(base=200) -> nope on layer 1" in history  # the child that the notebook saved
    assert history[-1].startswith("trained 4 steps")
