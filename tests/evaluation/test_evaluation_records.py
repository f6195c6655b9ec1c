import json
import math
from pathlib import Path

import pytest

from pe_lab.errors import UserError
from pe_lab.results.records import RecordFile, finite
from pe_lab.results.scores import measure
from pe_lab.results.statistics import wilson


def record(variant="PI", length=64, **more):
    return {
        "checkpoint": "a/checkpoints/1",
        "variant": variant,
        "length": length,
        "seed": 0,
        "source": "t",
    } | more


def test_a_record_replaces_the_one_that_measured_the_same(tmp_path):
    file = RecordFile(tmp_path / "new" / "perplexity.jsonl")
    file.put([record(nll=1.0), record("NTK", nll=2.0)])
    file.put([record(nll=3.0), record(length=128, nll=4.0), record(seed=1, nll=5.0), record(source="u", nll=6.0)])
    assert (
        [r["nll"] for r in RecordFile(file.path).records]
        == [3.0, 2.0, 4.0, 5.0, 6.0]
        == [r["nll"] for r in file.records]
    )


def test_records_written_meanwhile_are_kept(tmp_path):
    ours, theirs = RecordFile(tmp_path / "x.jsonl"), RecordFile(tmp_path / "x.jsonl")
    theirs.put([record("NTK", nll=1.0)])
    ours.put([record(nll=2.0)])
    assert [r["variant"] for r in RecordFile(tmp_path / "x.jsonl").records] == ["NTK", "PI"]


def test_finding_a_record_asks_how_it_was_measured(tmp_path):
    file = RecordFile(tmp_path / "x.jsonl")
    file.put([record(settings={"tokens": 5, "data": ["a"]})])
    assert file.find(record(settings={"tokens": 5, "data": ["a"]})) == file.records[0]
    assert file.find(record(settings={"tokens": 6, "data": ["a"]})) is None
    assert file.find(record("NTK", settings={"tokens": 5, "data": ["a"]})) is None
    assert file.find(record(settings={"tokens": 5, "data": ["a"]}, checkpoint_id="other")) is None


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "x.jsonl")
    file.put([record(nll=1.0)])
    before = file.path.read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        file.put([record(nll=2.0)])
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"] and file.path.read_bytes() == before


def test_a_file_is_never_seen_half_written(tmp_path, monkeypatch):
    """The file changes only by a rename."""
    file = RecordFile(tmp_path / "x.jsonl")
    file.put([record(nll=1.0)])
    inode = file.path.stat().st_ino
    real, seen = Path.write_bytes, []

    def spy(self, *args, **kwargs):
        seen.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_bytes", spy)
    file.put([record(nll=2.0)])
    assert seen and file.path not in seen and file.path.stat().st_ino != inode


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(record()) + "\n[1]\n")
    with pytest.raises(UserError, match="line 2, is no result record"):
        RecordFile(tmp_path / "x.jsonl")


def test_numbers_that_json_has_not():
    value = finite({"a": math.inf, "b": [math.nan, 1.23456789], "c": (2, None, "x"), "d": True})
    assert value == {"a": None, "b": [None, 1.234568], "c": [2, None, "x"], "d": True}


@pytest.mark.parametrize(
    ("record", "low", "high"),
    [
        ({"suite": "needles", "accuracy": 0.5, "stderr": 0.02}, 0.4608, 0.5392),
        ({"suite": "needles", "accuracy": 0.01, "stderr": 0.02}, 0.0, 0.0492),
        ({"suite": "perplexity", "perplexity": 20.0, "stderr": 0.01}, 19.61184, 20.39587),  # the error is of the loss
        ({"suite": "niah", "metric": "fraction_found", "score": 0.5, "stderr": 0.1, "low": 0.3, "high": 0.6}, 0.3, 0.6),
        ({"suite": "lm_eval", "metric": "acc", "score": 0.9, "stderr": 0.1}, 0.704, 1.0),
        ({"suite": "lm_eval", "metric": "bleu", "score": 0.9, "stderr": 0.1}, 0.704, 1.096),
        ({"suite": "lm_eval", "metric": "ppl", "score": 5.0, "stderr": 1.0, "higher_is_better": False}, 3.04, 6.96),
    ],
)
def test_one_interval_for_one_record(record, low, high):
    assert measure(record).ends == pytest.approx((low, high), abs=1e-4)


def test_none_of_256_is_between_0_and_wilsons_end():
    """The terminal and the report used to print two intervals for it."""
    none = {"suite": "needles", "accuracy": 0.0, "stderr": 0.0, "queries": 256}
    cell = measure(none)
    assert cell.ends == wilson(0.0, 256) == (0.0, pytest.approx(0.0148, abs=1e-4))
    assert cell.share and cell.value == 0
    assert measure(none | {"accuracy": None}) is None
    assert measure({"suite": "perplexity", "perplexity": 3}).ends is None
