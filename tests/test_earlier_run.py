"""A run, prepared data and results that an earlier version wrote (tests/data/make_earlier_run.py) open and go on."""

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

import pe_lab
import pe_lab.evaluate
import pe_lab.train
from pe_lab.training import open_run

EARLIER = Path(__file__).parent / "data" / "earlier"

pytestmark = pytest.mark.slow  # the fixture trains: 6 s


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The run after it was resumed: its recalibration went on from step 20 of 40."""
    directory = tmp_path_factory.mktemp("earlier")
    with tarfile.open(EARLIER / "run.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(pe_lab.train, "open_run", lambda *args: open_run(*args, devices=jax.devices()[:1]))
        assert pe_lab.train.main(["--config=recipe.py", "--workdir=run"]) == 0
        yield directory


@pytest.mark.parametrize("phase", ["pretrain", "recalibrate"])
def test_a_resumed_run_logs_the_same_losses(earlier, phase):
    """The golden log was computed by another build of XLA's code: 1e-5 of rounding."""
    expected = [json.loads(line) for line in (EARLIER / "expected" / f"{phase}.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (earlier / "run" / phase / "metrics.jsonl").read_text().splitlines()]
    for one, other in zip(found, expected, strict=True):
        new = {name: one.pop(name) for name in [*one] if name.partition("/")[0] in ("read_tokens", "expected_tokens")}
        # The tokens of the steps before the resume, which the earlier version did not count, are counted too.
        assert set(new.values()) <= {one["tokens"]}
        assert one.keys() == other.keys()
        np.testing.assert_allclose(list(one.values()), list(other.values()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("phase", ["pretrain", "recalibrate"])
def test_logits_are_the_same(earlier, phase):
    expected = json.loads((EARLIER / "expected" / "logits.json").read_text())[phase]
    lm = pe_lab.load(f"run/{phase}")
    logits = np.asarray(lm.logits(np.arange(40) * 7 % 256)[0, [0, 5, 39], :8])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_evaluation_measures_the_same(earlier):
    """About 10 s."""
    assert pe_lab.evaluate.main(["--from=run", "--suite=perplexity"]) == 0
    name = "evaluation/perplexity.jsonl"
    records = [
        {(r["checkpoint"], r["variant"], r["length"]): r["nll"] for r in map(json.loads, path.read_text().splitlines())}
        for path in (EARLIER / "expected" / name, earlier / "run" / name)
    ]
    expected, found = records
    assert found.keys() <= expected.keys() and len(found) >= 12
    for key, nll in found.items():
        # A scale that is fitted on a flat loss amplifies rounding.
        assert nll == pytest.approx(expected[key], abs=1e-4 if key[1] == "beta" else 2e-6), key
