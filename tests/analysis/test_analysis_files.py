"""The files of an analysis: what is written is read back, and damaged files are named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pe_lab.errors import DataError
from pe_lab.results.figures import HeatMaps, Line, LineCharts, from_arrays, to_arrays
from pe_lab.results.findings import Findings, read_findings, write_findings
from pe_lab.results.runs import read_run
from pe_lab.results.table import TextTable

VALUES = np.array([[[0.5, np.nan, 3.0]], [[-1.0, 2.0, 1e-20]]])
MAPS = HeatMaps(
    "norms", "T", "C", VALUES, ("layer 0", "layer 1"), ("head 0",), ("a", "b", "c"), "layer", "head", "pair", "nats",
    "diverging", (-2.0, 2.0),
)  # fmt: skip
X = np.array([1.0, 2.0, 4.0])
LINES = LineCharts(
    "loss",
    "T",
    "C",
    (
        ("layer 0", (Line("a", X, X**2, X, X**3), Line("b", X[:2], np.array([np.nan, 7.0])))),
        ("layer 1", (Line("a", X, -X),)),
    ),
    "tokens",
    "loss",
    ("p", "q", "r"),
    log_x=True,
    marks=((2.0, "trained"),),
    points=True,
)
FINDINGS = Findings(
    ("One.", "Two."),
    (TextTable("Heads", ("kind", "n"), (("sink", "3"),)),),
    (MAPS, LINES),
    {"all": np.arange(6).reshape(2, 3)},
    {"all": "[L, H]"},
    {"seeds": [1, 2]},
)


def assert_same(one, other):
    assert type(one) is type(other)
    for name, value in vars(one).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, getattr(other, name))
        elif name == "panels" and isinstance(one, LineCharts):
            assert [panel for panel, _ in value] == [panel for panel, _ in other.panels]
            mine, theirs = ([line for _, lines in panels for line in lines] for panels in (value, other.panels))
            for a, b in zip(mine, theirs, strict=True):
                assert_same(a, b)
        else:
            assert value == getattr(other, name), name


@pytest.mark.parametrize("figure", [MAPS, LINES])
def test_a_figure_comes_back_from_json_and_arrays(figure):
    plain, arrays = to_arrays(figure)
    assert_same(from_arrays(json.loads(json.dumps(plain)), arrays), figure)


@pytest.fixture
def written(tmp_path):
    write_findings(tmp_path / "analysis" / "heads", "heads", FINDINGS, {"command": "c", "seconds": 2.5})
    return tmp_path / "analysis" / "heads"


def test_an_analysis_comes_back_from_its_files(written):
    analysis = read_findings(written)
    assert (analysis.name, analysis.about) == ("heads", {"command": "c", "seconds": 2.5})
    found = analysis.findings
    assert (found.sentences, found.tables) == (FINDINGS.sentences, FINDINGS.tables)
    assert (dict(found.shapes), dict(found.metadata)) == ({"all": "[L, H]"}, {"seeds": [1, 2]})
    for one, other in zip(found.figures, FINDINGS.figures, strict=True):
        assert_same(one, other)
    np.testing.assert_array_equal(found.numbers["all"], [[0, 1, 2], [3, 4, 5]])
    assert list(read_run(written.parent.parent).analyses) == ["heads"]


def changed(**keys):
    def change(directory):
        path = directory / "analysis.json"
        path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | keys).items() if v is not None}))

    return change


def shortened(array, length):
    """Cuts an array of analysis.npz; 0 values: leaves it out."""

    def change(directory):
        path = directory / "analysis.npz"
        with np.load(path) as stored:
            arrays = dict(stored)
        values = arrays.pop(array)
        np.savez(path, **arrays, **({array: values[:length]} if length else {}))

    return change


def truncated(directory):
    path = directory / "analysis.npz"
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "no whole analysis"),
        (lambda directory: (directory / "analysis.npz").unlink(), "no whole analysis"),
        (lambda directory: (directory / "analysis.json").write_text('{"format": 1, "stu'), "damaged"),
        (changed(format=99), "format 99"),
        (changed(format=None), "format None"),
        (changed(figures=None), "no whole analysis (KeyError"),
        (changed(sentences=3), "no whole analysis"),
        (changed(figures=[{"kind": "heat_maps", "name": "norms"}]), "no whole analysis"),
        (shortened("figures/norms/values", 0), "no whole analysis"),
        (shortened("figures/norms/values", 1), "no whole analysis"),
        (shortened("figures/loss/1.0.x", 0), "no whole analysis"),
        (shortened("figures/loss/0.1.y", 1), "the figure 'loss' lacks values of 'b'"),
        (shortened("figures/loss/0.0.high", 2), "the figure 'loss' lacks values of 'a'"),
        (changed(tables=[{"title": "Heads", "header": ["a"], "rows": [["1", "2"]], "words": 1}]), "table 'Heads'"),
    ],
)
def test_a_damaged_analysis_is_a_sentence_among_the_problems_of_its_run(written, damage, words):
    damage(written)
    run = read_run(written.parent.parent)
    (problem,) = run.problems
    assert words in problem and str(written) in problem and "again" in problem and not run.analyses
    if "lacks" not in words and "table" not in words:
        with pytest.raises(DataError, match="again"):
            read_findings(written)


def test_a_directory_without_any_file_of_a_run_is_none(tmp_path):
    (tmp_path / "analysis" / "heads").mkdir(parents=True)
    with pytest.raises(DataError, match="analysis"):
        read_run(tmp_path)
