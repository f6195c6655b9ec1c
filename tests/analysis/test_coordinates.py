"""The coordinate check: coordinates keep their size under muP, and grow without it. 20 s."""

import dataclasses
import json

import numpy as np
import pytest

from pe_lab.analysis.coordinates import at_width, exponents, measure_widths
from pe_lab.analyze import main
from pe_lab.config import Config, ModelConfig, OptimizerConfig, PhaseConfig
from pe_lab.errors import ConfigError

SHAPE = ModelConfig(
    vocab_size=64, layers=2, d_model=32, d_ff=64, heads=2, kv_heads=2, dtype="float32", init_std=32**-0.5
)
WIDTHS = (1, 2, 4)


def batches(count: int = 4):
    """Tokens of a chain in which each token says much about the next."""
    rng = np.random.default_rng(0)
    following = rng.integers(0, 64, (64, 2))
    found = np.zeros((count, 8, 33), np.int32)
    for t in range(32):
        found[..., t + 1] = following[found[..., t], rng.integers(0, 2, (count, 8))]
        found[..., 0] = rng.integers(0, 64, (count, 8)) if t == 0 else found[..., 0]
    return [dict(tokens=x[:, :-1], targets=x[:, 1:], weights=np.ones((8, 32), np.float32)) for x in found]


@pytest.mark.slow  # 16 s
@pytest.mark.parametrize("mup", [True, False])
def test_coordinates_grow_without_mup_alone(mup: bool):
    phase = PhaseConfig(sequence_length=32, batch_size=8, optimizer=OptimizerConfig(learning_rate=4e-3))
    shape = dataclasses.replace(SHAPE, mup_base_width=32 if mup else 0)
    found = measure_widths(Config(model=shape, phases=(phase,)), batches(), WIDTHS, seeds=2)
    assert found.kinds == ("embedding", "attention logits", "outputs of layers", "logits")
    assert found.size.shape == (3, 4, 4)
    np.testing.assert_array_equal(found.change[:, 0], 0)
    largest = np.maximum(exponents(found.size[:, -1], WIDTHS), exponents(found.change[:, -1], WIDTHS))
    if mup:
        assert largest.max() < 0.2
    else:
        # Of a matrix whose entries move by the rate, D of them add up: the outputs of layers grow by the width, and
        # attention logits, products of two such sums, faster (Yang & Hu, section 5).
        assert largest[1] > 0.7 and largest[2] > 0.7
        assert largest[0] < 0.1  # an embedding moves by the rate at any width


def test_exponents_are_those_of_powers():
    values = np.stack([3.0 * np.asarray(WIDTHS) ** e for e in (-0.5, 0.0, 1.0)], 1)
    np.testing.assert_allclose(exponents(values, WIDTHS), (-0.5, 0.0, 1.0), atol=1e-12)


def test_widths_are_more_heads_or_wider_ones():
    wide = at_width(SHAPE, 4)
    assert (wide.d_model, wide.d_ff, wide.heads, wide.kv_heads, wide.head_dim) == (128, 256, 8, 8, 16)
    wide = at_width(dataclasses.replace(SHAPE, mup_base_width=32, mup_base_head_dim=16), 4)
    assert (wide.d_model, wide.heads, wide.head_dim) == (128, 2, 64)
    with pytest.raises(ConfigError, match=r"--widths: 0.1 times model.d_model 32 is 3.2"):
        at_width(SHAPE, 0.1)


@pytest.mark.slow
def test_the_command_fails_where_coordinates_grow(tmp_path, capsys):
    arguments = ["coordinates", "--config=configs/drope_laptop.py:quick", "--widths=1,4", "--steps=2", "--seeds=1"]
    keys = ["--config.phases.0.optimizer.learning_rate=1e-2", "--config.phases.0.batch_size=2"]
    out = [f"--out={tmp_path / 'out'}", "--format=svg"]
    assert main([*arguments, *keys, *out]) == 1
    assert "grows in" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert len(written["metadata"]["exponents"]) == 4
    assert main([*arguments, *keys, *out, "--config.model.mup_base_width=64"]) == 0
    assert main([*arguments[:1], "--widths=1,2"]) == 2
    assert "coordinates trains a recipe" in capsys.readouterr().err
