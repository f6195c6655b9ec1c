import json
import math
from pathlib import Path

import pytest

from pe_lab.errors import UserError
from pe_lab.results.records import RecordFile, finite


def row(method="PI", length=64, **more):
    return {
        "checkpoint": "a/checkpoints/1",
        "method": method,
        "length": length,
        "seed": 0,
        "source": "t",
    } | more


def test_a_row_replaces_the_one_that_measured_the_same(tmp_path):
    file = RecordFile(tmp_path / "new" / "perplexity.jsonl")
    file.put([row(nll=1.0), row("NTK", nll=2.0)])
    file.put([row(nll=3.0), row(length=128, nll=4.0), row(seed=1, nll=5.0), row(source="u", nll=6.0)])
    assert (
        [r["nll"] for r in RecordFile(file.path).records]
        == [3.0, 2.0, 4.0, 5.0, 6.0]
        == [r["nll"] for r in file.records]
    )


def test_rows_written_meanwhile_are_kept(tmp_path):
    ours, theirs = RecordFile(tmp_path / "x.jsonl"), RecordFile(tmp_path / "x.jsonl")
    theirs.put([row("NTK", nll=1.0)])
    ours.put([row(nll=2.0)])
    assert [r["method"] for r in RecordFile(tmp_path / "x.jsonl").records] == ["NTK", "PI"]


def test_finding_a_row_asks_how_it_was_measured(tmp_path):
    file = RecordFile(tmp_path / "x.jsonl")
    file.put([row(settings={"tokens": 5, "data": ["a"]})])
    same = ("settings",)
    assert file.find(row(settings={"tokens": 5, "data": ["a"]}), same) == file.records[0]
    assert file.find(row(settings={"tokens": 6, "data": ["a"]}), same) is None
    assert file.find(row("NTK", settings={"tokens": 5, "data": ["a"]}), same) is None


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "x.jsonl")
    file.put([row(nll=1.0)])
    before = file.path.read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        file.put([row(nll=2.0)])
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"] and file.path.read_bytes() == before


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    """Whatever is written is written beside; the file itself only ever changes by a rename."""
    file = RecordFile(tmp_path / "x.jsonl")
    file.put([row(nll=1.0)])
    inode = file.path.stat().st_ino
    real, seen = Path.write_text, []

    def spy(self, *args, **kwargs):
        seen.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", spy)
    file.put([row(nll=2.0)])
    assert seen and file.path not in seen and file.path.stat().st_ino != inode


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(row()) + "\n[1]\n")
    with pytest.raises(UserError, match="line 2, is no row"):
        RecordFile(tmp_path / "x.jsonl")


def test_numbers_that_json_has_not():
    value = finite({"a": math.inf, "b": [math.nan, 1.23456789], "c": (2, None, "x"), "d": True})
    assert value == {"a": None, "b": [None, 1.234568], "c": [2, None, "x"], "d": True}
