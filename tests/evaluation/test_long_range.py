"""Tokens that need a far context, and the suite that scores them."""

import dataclasses
import importlib.util
import json
import math
import types
from pathlib import Path

import numpy as np
import pytest
import tiny

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.errors import UserError
from pe_lab.evaluation.live import LiveEvaluation
from pe_lab.evaluation.measure import Evaluation, EvaluationPlan
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.suites import long_range
from pe_lab.evaluation.variants import Subject
from pe_lab.positional import Rope, layers

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "key_tokens_golden.json").read_text())


@pytest.fixture(scope="module")
def copy_model():
    """`losses` of the script that made the golden values: the model that judged there."""
    spec = importlib.util.spec_from_file_location("make_key_tokens_golden", DATA / "make_key_tokens_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda windows: np.stack([module.losses(window) for window in windows])


@pytest.mark.parametrize("case", GOLDEN["key_tokens"], ids=lambda case: f"{case['document']}-{case['short']}")
def test_key_tokens_are_those_of_longppl(copy_model, case):
    """The reference implementation's tokens on three documents; 0.5 s each."""
    document = np.frombuffer(GOLDEN["documents"][case["document"]].encode(), np.uint8).astype(np.int32)
    found = long_range.key_tokens(document, copy_model, len(document), case["short"], case["stride"])
    assert found.tolist() == case["positions"] and len(found)


def test_a_reference_that_reads_less_than_the_document_slides(copy_model):
    """Each token's far context is what lies before it in a window of `reach` tokens, which advances by a quarter."""
    document = np.frombuffer(GOLDEN["documents"]["make_niah_golden.py"].encode(), np.uint8).astype(np.int32)
    reach, short, stride = 1000, 256, 64
    found, asked = [], range(short, len(document), 5)
    for at in asked:
        start = (at - short) // stride * stride  # of the short context
        begin = max(0, -(-(at + 1 - reach) // (reach // 4)) * (reach // 4))
        near = copy_model(document[None, start : at + 1])[0, -1]
        far = copy_model(document[None, begin : at + 1])[0, -1]
        found += [at] * bool(near - far > 2 and far < 2)
    slid = long_range.key_tokens(document, copy_model, reach, short, stride)
    assert [at for at in slid.tolist() if at in asked] == found
    assert slid.tolist() != long_range.key_tokens(document, copy_model, len(document), short, stride).tolist()


def test_the_numbers_of_a_record():
    losses = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], np.float32)
    keys = long_range.KeyTokens((0, 9), 4, (np.array([2, 4]), np.array([3])), {})
    found = long_range.summarize(losses, keys.weights(4))
    assert found["nll"] == (2 + 4 + 7) / 3 and found["perplexity"] == math.exp(found["nll"])
    assert found["nll_by_document"] == [3.0, 7.0] and found["tokens_by_document"] == [2, 1]
    assert found["share"] == 3 / 8 and found["all_nll"] == 4.5 and found["all_nll_by_document"] == [2.5, 6.5]
    assert (
        long_range.summarize(losses[:, :3], keys.weights(3))["tokens"] == 2
    )  # a key token after the length is not scored
    nothing = long_range.summarize(losses[:, :1], keys.weights(1))
    assert nothing["nll"] is nothing["perplexity"] is nothing["stderr"] is None and nothing["all_nll"] == 3.0


# --------------------------------------------------------------------------------------------------------------------
# The suite


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 200 bytes that repeat a line of their own."""
    directory, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for i in range(40):
        line = "".join(rng.choice(list("abcdefgh"), 19)) + "\n"
        (directory / f"{i}.txt").write_text(line * 10)
    source = SourceConfig(f"text:{directory}/*.txt")
    return DataConfig((source,), cache_dir=str(directory / "cache"), validation_fraction=0.5)


def evaluation(data, directory, lengths=(16, 64), descriptions=(), **options):
    subject = Subject(tiny.language_model(tiny.checkpoint(Rope(), data)), "tiny", "pretrain/checkpoints/3")
    plan = EvaluationPlan(lengths, ("long_range",), ("as trained",), descriptions, {"documents": 5} | options)
    return Evaluation([subject], data, plan, directory, devices=tiny.one_device(), quiet=True)


def sharpen(monkeypatch):
    """Random weights know no token: every gain counts."""
    monkeypatch.setattr(long_range, "GAIN", 0.0)
    monkeypatch.setattr(long_range, "KNOWN", 100.0)


@pytest.mark.slow  # 4 s
def test_records_and_the_file_of_key_tokens(data, tmp_path, monkeypatch):
    """A file of key tokens is a reference that gives the same records; 4 s."""
    sharpen(monkeypatch)
    first = evaluation(data, tmp_path / "one").run()
    (file,) = (tmp_path / "one/long_range.key_tokens").iterdir()
    again = evaluation(data, tmp_path / "two", reference=str(file)).run()
    assert [one["length"] for one in first] == [16, 64]
    for one, two in zip(first, again, strict=True):
        assert one["nll"] == two["nll"] and one["tokens"] == two["tokens"] > 0
        assert one["short"] == 4 and one["reference"]["reads"] == tiny.LENGTH
        assert len(one["nll_by_document"]) == 5
    # Of several sources that hold long documents, it is of one, and the others are not measured.
    texts = Path(data.sources[0].source.removeprefix("text:")).parent
    (texts / "more").mkdir()
    for n, path in enumerate(sorted(texts.glob("*.txt"))):
        (texts / f"more/{n}.md").write_text(path.read_text().upper())
    two = dataclasses.replace(data, sources=(*data.sources, SourceConfig(f"text:{texts}/more/*.md")))
    third = evaluation(two, tmp_path / "three", reference=str(file)).run()
    assert [one["nll"] for one in third] == [one["nll"] for one in first]
    stored = long_range.read_key_tokens(file)
    assert stored.length == 64 and all(0 < p <= 64 for positions in stored.positions for p in positions)
    assert first[1]["tokens"] == sum(map(len, stored.positions))
    assert first[0]["tokens"] == sum((positions <= 16).sum() for positions in stored.positions)


@pytest.mark.slow  # 5 s
def test_progress_counts_what_finds_the_key_tokens(data, tmp_path, monkeypatch):
    """The bar never goes back, and its total is what is read, whoever the reference is; 4 s."""
    shown = []
    monkeypatch.setattr(TokenProgress, "update", lambda self, done, *text: shown.append((done, self)))
    other = Subject(tiny.language_model(tiny.checkpoint(Rope(), data)), "other", "pretrain/checkpoints/3")
    monkeypatch.setattr(long_range, "_load", lambda evaluation, given: other)
    for name, given in (("own", {}), ("other", {"reference": "runs/other"})):
        shown.clear()
        evaluation(data, tmp_path / name, **given).run()
        done, progress = [one for one, _ in shown], shown[-1][1]
        scored = 5 * (16 + 64)
        assert progress.read > 5 * scored and done == sorted(done) and done[-1] >= progress.read
        assert abs(progress._total / progress.read - 1) < 0.3  # windows are short here: of 5 tokens 4 are read
        again = evaluation(data, tmp_path / name, **given)
        again.plan = dataclasses.replace(again.plan, again=True)
        shown.clear()
        again.run()
        assert shown[-1][1]._total == scored  # the key tokens are in their file


def test_what_cannot_be_measured_is_said(data, tmp_path, monkeypatch):
    """Documents too short, a short context that reaches everything, a file of other data; 2 s."""
    with pytest.raises(UserError, match="no held-out document has 301 tokens; the longest has 201"):
        evaluation(data, tmp_path, lengths=(16, 300))
    with pytest.raises(UserError, match="--short=15: the reference .* reads 16 tokens, and nothing is further away"):
        evaluation(data, tmp_path, short=15)
    (tmp_path / "bad.json").write_text('{"positions": [[1]]}')
    with pytest.raises(UserError, match="is no file of key tokens, or is damaged"):
        evaluation(data, tmp_path, reference=str(tmp_path / "bad.json"))
    about = {"source": "other", "data": "other", "reference": {}, "short": 4, "starts": [0], "length": 64}
    (tmp_path / "other.json").write_text(json.dumps(about | {"positions": [[1]]}))
    with pytest.raises(UserError, match="has key tokens of other data"):
        evaluation(data, tmp_path, reference=str(tmp_path / "other.json"))
    assert any(
        "documents of more than 64 tokens are scored, not 5,000" in s
        for s in evaluation(data, tmp_path, documents=5000).skipped
    )


def test_no_document_is_scored_and_fitted_on_whatever_the_lengths():
    sizes = np.random.default_rng(0).integers(10, 200, 99)
    stream = types.SimpleNamespace(ends=np.cumsum(sizes))
    starts = dict(zip((np.cumsum(sizes) - sizes).tolist(), sizes.tolist(), strict=True))
    cases = [(part, longest) for part in ("score", "fit") for longest in (50, 100, 180)]
    chosen = {(part, longest): long_range.choose_documents(stream, longest, 99, part) for part, longest in cases}
    for (part, longest), found in chosen.items():
        assert all(starts[start] > longest for start in found) and found == sorted(found)
        assert abs(len(found) - (sizes > longest).sum() / 2) <= 0.5
        others = {start for (other, _), one in chosen.items() if other != part for start in one}
        assert not others & set(found)
    assert set(chosen["score", 180]) < set(chosen["score", 50])


def test_in_training_its_tokens_are_those_of_a_reference(data):
    """Otherwise each step would choose its own, and the curve would be of other tokens at each point."""
    settings = (tiny.MODEL, layers("rope", 2), tiny.LENGTH, data, {"long_range": ()}, (16, 64))
    with pytest.raises(UserError, match="long_range is not measured in training: .* evaluation.options.reference"):
        LiveEvaluation(*settings)
    assert LiveEvaluation(*settings, options={"reference": "runs/rope"}).cost() > 0
