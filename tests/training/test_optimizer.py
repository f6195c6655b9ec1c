"""AdamW and its learning rate, against arithmetic written out by hand."""

import jax
import numpy as np
import optax
import pytest

from pe_lab.config import ModelConfig, OptimizerConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model
from pe_lab.training.optimizer import decays, learning_rate, make_optimizer


def at(config: OptimizerConfig, steps: int, *counts: int) -> list[float]:
    rate = learning_rate(config, steps)
    return [float(rate(count)) for count in counts]


def test_warm_up_moves_from_the_first_step_and_reaches_the_peak():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule="constant")
    np.testing.assert_allclose(at(config, 10, 0, 1, 2, 3, 4, 9), [0.25, 0.5, 0.75, 1, 1, 1], rtol=1e-6)
    one = OptimizerConfig(learning_rate=1.0, warmup_steps=1, schedule="constant")
    np.testing.assert_allclose(at(one, 10, 0, 1), [1, 1], rtol=1e-6)
    none = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="constant")
    np.testing.assert_allclose(at(none, 10, 0, 9), [1, 1], rtol=1e-6)


def test_cosine_is_half_way_down_in_the_middle_and_ends_at_its_final_fraction():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=20, final_fraction=0.1)
    np.testing.assert_allclose(at(config, 120, 20, 70, 120), [2.0, 2.0 * 0.55, 0.2], rtol=1e-6)


def test_wsd_holds_the_peak_and_then_falls_in_a_line():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, schedule="wsd", decay_fraction=0.2, final_fraction=0.5)
    np.testing.assert_allclose(at(config, 100, 9, 50, 80, 90, 100), [1, 1, 1, 0.75, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (OptimizerConfig(warmup_steps=10), "warmup_steps is 10, but the phase has 10 steps"),
        (OptimizerConfig(warmup_steps=9, schedule="wsd"), "does not fit beside 9 warm-up steps"),
        (OptimizerConfig(warmup_steps=1, schedule="wsd", decay_fraction=0.01), "is less than one step; increase it"),
        (OptimizerConfig(warmup_steps=1, schedule="linear"), "must be cosine, wsd or constant"),
    ],
)
def test_schedules_that_cannot_be(config, says):
    with pytest.raises(ConfigError, match=says):
        learning_rate(config, 10)


@pytest.mark.parametrize("qk_norm", ["head", "flat"])  # a flat scale has two axes, and is no matrix
def test_decay_is_for_matrices(qk_norm):
    model = Model(
        ModelConfig(
            vocab_size=128,
            layers=2,
            d_model=16,
            d_ff=32,
            heads=2,
            kv_heads=2,
            qk_norm=qk_norm,
            attention_bias=True,
            output_bias=True,
            mlp_bias=True,
            norm="layer",
            tie_embeddings=False,
        )
    )
    mask = jax.tree_util.tree_map_with_path(decays, model.axes, is_leaf=lambda x: isinstance(x, tuple))
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): value
        for path, value in jax.tree_util.tree_leaves_with_path(mask)
    }
    assert {name for name, decayed in flat.items() if decayed} == {
        "token_embedder.embedding", "token_embedder.unembedding",
        "layers.attention.query", "layers.attention.key", "layers.attention.value", "layers.attention.out",
        "layers.mlp.gate", "layers.mlp.up", "layers.mlp.down",
    }  # fmt: skip
    assert {name for name, decayed in flat.items() if not decayed} == {
        "token_embedder.final_norm.scale", "layers.attention_norm.scale", "layers.mlp_norm.scale",
        "token_embedder.final_norm.bias", "layers.attention_norm.bias", "layers.mlp_norm.bias",
        "layers.attention.query_norm.scale", "layers.attention.key_norm.scale",
        "layers.attention.query_bias", "layers.attention.key_bias", "layers.attention.value_bias",
        "layers.attention.out_bias", "layers.mlp.gate_bias", "layers.mlp.up_bias", "layers.mlp.down_bias",
    }  # fmt: skip


@pytest.mark.parametrize("decay_embeddings", [pytest.param(True, marks=pytest.mark.slow), False])
def test_three_steps_are_those_of_adamw_by_hand(decay_embeddings):
    """With a rate for each group, which is also that of its decay."""
    config = OptimizerConfig(
        learning_rate=0.1,
        warmup_steps=2,
        schedule="constant",
        b1=0.8,
        b2=0.9,
        epsilon=1e-6,
        weight_decay=0.3,
        clip_norm=1.0,
        embedding_multiplier=2.0,
        head_multiplier=0.5,
        vector_multiplier=3.0,
        decay_embeddings=decay_embeddings,
    )
    rng = np.random.default_rng(0)
    axes = {"w": ("embed", "mlp"), "scale": ("layers", "embed"), "bias": ("heads", "head_dim")}
    axes |= {"embedding": ("vocab", "embed"), "unembedding": ("vocab", "embed")}
    params = {name: rng.normal(size=3 if name == "scale" else (2, 3)) for name in axes}
    groups = {"w": 1.0, "scale": 3.0, "bias": 3.0, "embedding": 2.0, "unembedding": 0.5}
    # The first gradient is clipped, the others are not.
    gradients = [{k: size * rng.normal(size=v.shape) for k, v in params.items()} for size in (3.0, 0.05, 0.1)]

    optimizer = make_optimizer(config, 10, axes)
    ours = jax.tree.map(np.float32, params)
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(x) for k, x in params.items()}
    clipped = []
    for t, gradient in enumerate(gradients, start=1):
        updates, state = update(jax.tree.map(np.float32, gradient), state, ours)
        ours = optax.apply_updates(ours, updates)

        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        clipped.append(bool(norm > 1.0))
        rate = 0.1 * min(t, 2) / 2
        for k, g in gradient.items():
            g = g / max(norm, 1.0)
            m[k] = 0.8 * m[k] + 0.2 * g
            v[k] = 0.9 * v[k] + 0.1 * g**2
            step = (m[k] / (1 - 0.8**t)) / (np.sqrt(v[k] / (1 - 0.9**t)) + 1e-6)
            decay = 0.3 * params[k] if k == "w" or (decay_embeddings and k.endswith("embedding")) else 0.0
            params[k] = params[k] - groups[k] * rate * (step + decay)
    assert clipped == [True, False, False]
    for k, expected in params.items():
        np.testing.assert_allclose(ours[k], expected, rtol=2e-5, atol=1e-6)
