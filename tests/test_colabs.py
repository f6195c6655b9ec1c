"""The notebooks: clean, thin, and running from top to bottom on a fresh run."""

import ast
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from tiny_runs import REPOSITORY, start

COLABS = sorted((REPOSITORY / "colabs").glob("*.ipynb"))
QUICKSTART = REPOSITORY / "colabs/quickstart.ipynb"
INSIDE = REPOSITORY / "colabs/inside.ipynb"
CLAIMS = REPOSITORY / "colabs/claims.ipynb"
DROP = REPOSITORY / "colabs/drop_your_model.ipynb"
PATIENCE = 400  # seconds for one process

each_notebook = pytest.mark.parametrize("path", COLABS, ids=lambda path: path.name)


def nodes(path: Path) -> Iterator[ast.AST]:
    """Everything in a notebook's code, its `!` and `%` lines turned into calls."""
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            yield from ast.walk(ast.parse(TransformerManager().transform_cell(cell.source)))


def test_no_notebook_is_missing():
    assert COLABS == [CLAIMS, DROP, INSIDE, QUICKSTART]


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
    for module, name in ours:
        pkgutil.resolve_name(f"{module}.{name}")  # raises where there is no such name or module


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory) -> Path:
    """The run of the demo's recipe in seconds; its `cache` lies beside it."""
    directory = tmp_path_factory.mktemp("quick")
    recipe = f"--config={REPOSITORY / 'configs/drope_laptop.py'}:quick"
    cache = f"--config.data.cache_dir={directory / 'cache'}"
    training = start(["pe_lab.train", recipe, cache, f"--workdir={directory / 'run'}"], directory)
    out = training.communicate(timeout=PATIENCE)[0]
    assert training.returncode == 0, out[-3000:]
    return directory / "run"


def execute(path: Path, run: Path, images: int, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """The notebook after its execution, from its own directory, as Jupyter starts it; an error in a cell raises."""
    monkeypatch.setenv("PE_LAB_RUN", str(run))
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == images
    return notebook


@pytest.mark.slow  # 40 s
def test_the_inside_of_a_model_is_shown(quick_run, monkeypatch):
    notebook = execute(INSIDE, quick_run, 5, monkeypatch)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("<table" in output.get("data", {}).get("text/html", "") for output in shown)  # the schedule


@pytest.mark.slow
def test_claims_are_shown_and_one_is_measured_again(tmp_path, monkeypatch):
    """2 minutes: trains a run at quick size."""
    monkeypatch.setenv("PE_LAB_CLAIMS", str(tmp_path / "claims"))
    notebook = execute(CLAIMS, tmp_path, 3, monkeypatch)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    papers, ours = [text for o in shown if "| claim |" in (text := o.get("data", {}).get("text/markdown", ""))]
    assert "[drop_needles](../docs/claims.md#drop-needles)" in papers and "| which_layers |" in ours
    in_both = 4 + len(list((REPOSITORY / "claims/results").glob("*.json")))  # each table has two lines more
    assert len([*papers.splitlines(), *ours.splitlines()]) == in_both
    # The committed numbers are of the same initial weights, and of other text.
    now = json.loads((tmp_path / "claims/results/bias_gradient.json").read_text())["values"]["rope"]
    committed = json.loads((REPOSITORY / "claims/results/bias_gradient.json").read_text())["values"]["rope"]
    assert now["ratio previous token"][0] == pytest.approx(committed["ratio previous token"][0], abs=0.1)


@pytest.mark.slow
def test_half_of_a_model_is_dropped_and_distilled(quick_run, tmp_path, monkeypatch):
    """2 minutes: sensitivity, surgery, four steps with a teacher, and a comparison."""
    settings = dict(MODEL=quick_run / "pretrain", TEXT="stdlib", LENGTH=32, STEPS=4, OUT=tmp_path / "out")
    for name, value in settings.items():
        monkeypatch.setenv(f"PE_LAB_{name}", str(value))
    notebook = execute(DROP, quick_run, 2, monkeypatch)
    printed = [o.text for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "stream"]
    assert any("1 of 3 layers cost least" in text for text in printed)
    assert any("half dropped, distilled, YaRN" in text for text in printed)
    history = json.loads((tmp_path / "out/distilled/finetune/phase.json").read_text())["lineage"]
    assert any("-> nope on layer" in one["what"] for one in history)


@pytest.mark.slow
def test_the_quickstart_runs_and_trains_what_it_saves(quick_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the child is saved there
    monkeypatch.setenv("PE_LAB_STEPS", "4")
    notebook = execute(QUICKSTART, quick_run, 4, monkeypatch)
    (phase_file,) = tmp_path.glob("*/mixture/recalibrate/phase.json")
    history = [ancestor["what"] for ancestor in json.loads(phase_file.read_text())["lineage"]]
    assert "rope(base=200) -> nope on layer 1" in history  # the child that the notebook saved
    assert history[-1].startswith("trained 4 steps")
    shown = notebook.cells[-1].outputs[-1]["data"]["text/plain"]
    assert shown.startswith("Run(") and "recalibrate: step 4 of 4 with" in shown
