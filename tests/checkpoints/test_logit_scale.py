"""The fitted logit scale: kept with its checkpoint, found again, and built into a child."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
import tiny  # noqa: E402

import pe_lab  # noqa: E402
from pe_lab import surgery  # noqa: E402
from pe_lab.checkpoints.checkpoint import (  # noqa: E402
    SCALE_FILE,
    how_to_fit,
    open_checkpoint,  # noqa: E402
    read_logit_scale,
    write_logit_scale,
)
from pe_lab.errors import UserError
from pe_lab.positional import Beta, NoPE  # noqa: E402


@pytest.fixture
def phase(tmp_path):
    tiny.save(tiny.checkpoint(NoPE(), None, ("random", tiny.DROPPED)), tmp_path / "run" / "recalibrate")
    return tmp_path / "run" / "recalibrate"


@pytest.mark.slow
def test_what_was_fitted_is_found_by_the_checkpoint_it_was_fitted_for(phase):
    checkpoint = open_checkpoint(phase)
    assert read_logit_scale(checkpoint) is None
    assert write_logit_scale(checkpoint, 0.3, {64: 1.4, 32: 1.2}, "text") == phase / SCALE_FILE
    assert read_logit_scale(open_checkpoint(phase)) == Beta(0.3, tiny.LENGTH)
    kept = json.loads((phase / SCALE_FILE).read_text())[checkpoint.metadata["id"]]
    assert list(kept["scales"].items()) == [("32", 1.2), ("64", 1.4)] and kept["fitted_on"] == "text"
    other = tiny.checkpoint(NoPE(), None, seed=5)
    tiny.save(other, phase.parent / "further")
    assert read_logit_scale(open_checkpoint(phase.parent / "further")) is None
    (phase / SCALE_FILE).write_text("{")
    with pytest.raises(UserError, match="is damaged.*fit again"):
        read_logit_scale(checkpoint)


def test_a_model_reads_with_the_scale_that_was_fitted_for_it(phase):
    lm = pe_lab.load(phase)
    with pytest.raises(UserError, match="--suite=beta"):
        lm.with_fitted_scale()
    write_logit_scale(lm.checkpoint, 0.3, {}, "text")
    scaled, tokens = lm.with_fitted_scale(), np.arange(4 * tiny.LENGTH)
    by_hand = lm.with_positional("nope", logit_scale=1 + 0.3 * np.log(4))
    np.testing.assert_allclose(scaled.logits(tokens), by_hand.logits(tokens), atol=1e-5)
    assert np.abs(np.asarray(scaled.logits(tokens)) - np.asarray(lm.logits(tokens))).max() > 1e-3


def test_surgery_builds_it_into_a_child(phase, tmp_path, capsys):
    assert surgery.main([f"--from={phase}", f"--to={tmp_path / 'child'}", "--logit-scale=fitted"]) == 2
    assert "no logit scale was fitted" in capsys.readouterr().err and not (tmp_path / "child").exists()
    write_logit_scale(open_checkpoint(phase), 0.3, {}, "text")
    assert surgery.main([f"--from={phase}", f"--to={tmp_path / 'child'}", "--logit-scale=fitted"]) == 0
    assert "logit scale 1 + 0.3 ln(n / 16)" in capsys.readouterr().out
    assert {layer.logit_scale for layer in open_checkpoint(tmp_path / "child").layers} == {Beta(0.3, tiny.LENGTH)}
    assert surgery.main([f"--from={phase}", f"--to={tmp_path / 'other'}", "--logit-scale=0.1"]) == 0
    assert surgery.main([f"--from={phase}", f"--to={tmp_path / 'none'}", "--logit-scale=much"]) == 2
    assert "is no number" in capsys.readouterr().err


def test_others_checkpoints_keep_no_scale_and_it_is_said_what_to_do(phase):
    elsewhere = dataclasses.replace(open_checkpoint(phase), path=phase.parent / "model.gguf")
    assert write_logit_scale(elsewhere, 0.3, {}, "text") is None
    assert "pe_lab.convert --from=" in how_to_fit(elsewhere) and "--suite=beta" in how_to_fit(open_checkpoint(phase))
