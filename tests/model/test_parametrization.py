"""muP: against its authors' package, and by what Table 8 of the paper says of each parameter."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from pe_lab.config import ModelConfig, MuonConfig, OptimizerConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model, complete, model_schedule
from pe_lab.positional import layers
from pe_lab.training import optimizer as optimizers
from pe_lab.training.muon import Matrices, mup_scale, update_scale
from pe_lab.training.step import init_state, train_step

GOLDEN = Path(__file__).parent.parent / "data" / "mup_golden.npz"  # of tests/data/make_mup_golden.py
BASE, WIDTH = 8, 32
SHAPE = ModelConfig(
    vocab_size=24, layers=2, d_model=WIDTH, d_ff=2 * WIDTH, heads=4, kv_heads=4, head_dim=8, dtype="float32",
    init_std=0.25, scaled_residual_init=False, mup_base_width=BASE,
)  # fmt: skip
PLAIN = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.1, clip_norm=1e9)


def of_width(width: int, **keys) -> ModelConfig:
    return dataclasses.replace(SHAPE, d_model=width, d_ff=2 * width, heads=width // 8, kv_heads=width // 8, **keys)


def flat(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in traverse_util.flatten_dict(tree, sep=".").items()}


def optimizer_of(model: Model, config: OptimizerConfig = PLAIN):
    return optimizers.make_optimizer(config, 10, model.axes, (), model.encoding_settings, model.config)


def trained(model: Model, params, tokens, config: OptimizerConfig = PLAIN):
    """Parameters and losses after a step on each [B, T + 1] of tokens."""
    schedule, optimizer = model_schedule(model.config, layers("nope", model.config.layers)), optimizer_of(model, config)
    state, losses = init_state(model, optimizer, params), []
    step = jax.jit(lambda state, batch: train_step(model, optimizer, 1, state, batch, schedule))
    for one in tokens:
        one = jnp.asarray(one, jnp.int32)
        state, metrics = step(state, dict(tokens=one[:, :-1], targets=one[:, 1:], weights=jnp.ones(one[:, 1:].shape)))
        losses.append(float(metrics["loss"]))
    return flat(state.params), losses


def test_three_steps_are_those_of_the_authors_package():
    golden, model = np.load(GOLDEN), Model(SHAPE)
    before = {name.removeprefix("before/"): x for name, x in golden.items() if name.startswith("before/")}
    ratio = WIDTH / BASE
    scale = "token_embedder.final_norm.scale"  # which holds the multiplier of the head
    before[scale] = before[scale] / ratio
    shapes = traverse_util.flatten_dict(model.shapes, sep=".")
    assert {name: x.shape for name, x in before.items()} == {name: x.shape for name, x in shapes.items()}
    params = traverse_util.unflatten_dict({name: jnp.asarray(x) for name, x in before.items()}, sep=".")
    after, losses = trained(model, params, golden["tokens"])
    np.testing.assert_allclose(losses, golden["losses"], rtol=2e-6)
    for name, x in after.items():
        wanted = golden[f"after/{name}"] / (ratio if name == scale else 1)
        moved = np.abs(wanted - before[name]).max()
        np.testing.assert_allclose(x, wanted, rtol=0, atol=2e-3 * moved, err_msg=name)


@pytest.mark.parametrize("ratio", [2, 4])
def test_initial_deviations_are_those_of_table_8(ratio: int):
    of_base, wide = flat(Model(of_width(64, mup_base_width=64)).init(jax.random.key(0))), of_width(64 * ratio)
    found = flat(Model(dataclasses.replace(wide, mup_base_width=64)).init(jax.random.key(0)))
    for name, x in found.items():
        if name.endswith("scale"):
            np.testing.assert_array_equal(x, 1 / ratio if "final_norm" in name else 1)
            continue
        expected = of_base[name].std() / (1 if "embedding" in name else ratio**0.5)
        assert x.std() == pytest.approx(expected, rel=0.03), name


def test_the_base_width_is_the_usual_parametrization():
    plain = dataclasses.replace(SHAPE, mup_base_width=0)
    tokens = np.random.default_rng(0).integers(0, 24, (2, 2, 9))
    found = [
        trained(Model(shape), Model(shape).init(jax.random.key(1)), tokens)
        for shape in (plain, dataclasses.replace(SHAPE, mup_base_width=WIDTH))
    ]
    assert found[0][1] == found[1][1]
    assert all((found[0][0][name] == found[1][0][name]).all() for name in found[0][0])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_multiplier_in_the_final_norm_is_one_of_the_logits(name: str):
    """A model with `logit_multiplier` and the rates of muP is the same function after every step."""
    config = dataclasses.replace(PLAIN, name=name, clip_norm=0.5, epsilon=1e-3, muon=MuonConfig(dtype="float32"))
    tokens = np.random.default_rng(0).integers(0, 24, (3, 2, 9))
    params = Model(SHAPE).init(jax.random.key(1))
    folded, losses = trained(Model(SHAPE), params, tokens, config)
    outside = dataclasses.replace(SHAPE, logit_multiplier=BASE / WIDTH)
    own = jax.tree.map(lambda x: x, params)
    own["token_embedder"]["final_norm"]["scale"] = own["token_embedder"]["final_norm"]["scale"] * (WIDTH / BASE)
    model = Model(outside)
    # The rates of muP without its multiplier: those of a shape whose final norm has none to hold.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "folded", lambda path, shape: 1.0)
        found, same = trained(model, own, tokens, config)
    np.testing.assert_allclose(losses, same, rtol=1e-6)
    scale = "token_embedder.final_norm.scale"
    np.testing.assert_allclose(folded[scale] * (WIDTH / BASE), found[scale], rtol=1e-5)
    assert np.abs(found[scale] - 1).max() > 1e-3
    np.testing.assert_allclose(folded["layers.mlp.up"], found["layers.mlp.up"], atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "head"])
def test_wider_heads_have_logits_divided_by_their_channels(norm: str):
    """The paper's 1 / d, equal to 1 / sqrt(d) at the base, with the query's part in its weights or its norm."""
    base = dict(head_dim=8, mup_base_head_dim=8, qk_norm=norm)
    wide = dataclasses.replace(of_width(64, mup_base_width=16), heads=2, kv_heads=2, **(base | {"head_dim": 32}))
    plain = dataclasses.replace(wide, mup_base_head_dim=0)
    found, other = (flat(Model(one).init(jax.random.key(0))) for one in (wide, plain))
    holder = "layers.attention.query_norm.scale" if norm == "head" else "layers.attention.query"
    np.testing.assert_allclose(found[holder], other[holder] * (8 / 32) ** 0.5, rtol=1e-6)
    assert all((found[name] == other[name]).all() for name in found if name != holder)


@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize("matrix", [(16, 16), (16, 32), (32, 16)])
def test_updates_of_muon_keep_their_spectral_norm(scale: str, matrix: tuple[int, int]):
    """In proportion to sqrt(outputs / inputs), the one of the base width where all matrices grow alike."""
    config, norms = MuonConfig(scale=scale), []
    for ratio in (1, 2, 8):
        found = Matrices((0, 1, 2), (2,), matrix[0] * ratio, matrix[1] * ratio)
        shape = complete(of_width(BASE * ratio))
        norms.append(update_scale(config, found.inputs, found.outputs) * mup_scale(config, found, shape))
    np.testing.assert_allclose(norms, norms[0], rtol=1e-12)


def test_heads_that_stay_narrow_get_smaller_updates():
    config, norms = MuonConfig(), []
    for ratio in (1, 4):
        found = Matrices((0, 2, 1, 3), (2, 2 * ratio), BASE * ratio, 8)
        norms.append(update_scale(config, found.inputs, 8) * mup_scale(config, found, complete(of_width(BASE * ratio))))
    assert norms[1] == pytest.approx(norms[0] / 2)  # sqrt(8 / 64) over sqrt(8 / 16)


def test_keys_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="set model.mup_base_width too"):
        complete(dataclasses.replace(SHAPE, mup_base_width=0, mup_base_head_dim=8))
    with pytest.raises(ConfigError, match="model.mup_base_width does not go with model.per_layer_input"):
        complete(dataclasses.replace(SHAPE, per_layer_input=8))
