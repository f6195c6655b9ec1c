"""Surgery on QK-norm: constants by least squares, scales kept, and what it says it did."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.checkpoints.surgery import change_qk_norm
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.model.layer_pass import embed
from pe_lab.positional import NoPE, Rope, build_schedule, layers

T, H, G, K = 12, 4, 2, 8
CONFIG = ModelConfig(
    vocab_size=32, layers=2, d_model=24, d_ff=32, heads=H, kv_heads=G, head_dim=K, attention_bias=True, dtype="float32"
)
KINDS = ("none", "head", "flat", "query_head", "query_flat")


def schedule_of(description):
    return build_schedule(layers(description, 2), H, G, K)


def random_params(config: ModelConfig, seed: int = 0):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = rng.standard_normal(leaf.shape)
        if path[-1].key == "scale":
            return jnp.asarray(1 + 0.3 * values, jnp.float32)
        if "bias" in path[-1].key:
            return jnp.asarray(0.3 * values, jnp.float32)
        width = 1.0 if path[0].key == "token_embedder" else np.prod(leaf.shape[1:-1]) ** 0.5
        return jnp.asarray(values * 1.2 / width, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, Model(config).shapes)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    tokens, targets = jnp.asarray(rng.integers(0, 32, (2, 3, T)), jnp.int32)
    return {"tokens": tokens, "targets": targets, "weights": jnp.ones((3, T))}


def pairs_of_layer(config, params, x, n):
    """Queries and keys [B, T, heads, K] of layer n for its input x, as the model has them before rotation."""
    block = Model(config).block(jax.tree.map(lambda a: a[n], params["layers"]))
    return tuple(np.asarray(a, np.float64) for a in block.attention.queries_keys_values(block.attention_norm(x))[:2])


def visible_logits(q, k, inv_freq):
    """[H, B * visible]: rotated products of every query with the keys it sees."""
    n = np.arange(T)
    z_q, z_k = (
        (x[..., : K // 2] + 1j * x[..., K // 2 :]) * np.exp(1j * n[:, None] * inv_freq)[:, None] for x in (q, k)
    )
    z_k = np.repeat(z_k, H // z_k.shape[2], axis=2)
    logits = np.einsum("bthr,bshr->bhts", z_q, z_k.conj()).real
    return np.stack([logits[:, h][:, n[:, None] >= n].ravel() for h in range(H)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", *KINDS[2:]])
def test_an_added_norm_is_as_close_as_a_constant_makes_it(batch, kind):
    params, schedule = random_params(CONFIG), schedule_of(Rope())
    config, child, told = change_qk_norm(CONFIG, params, kind, schedule, batch)
    assert config == dataclasses.replace(Model(CONFIG).config, qk_norm=kind)
    assert jax.tree.map(lambda a: a.shape, child) == jax.tree.map(lambda a: a.shape, Model(config).shapes)
    x = embed(Model(CONFIG), params, batch["tokens"], schedule)  # layer 0 reads what it read before
    inv_freq = np.asarray(schedule.inv_freq[0, 0], np.float64)
    before = visible_logits(*pairs_of_layer(CONFIG, params, x, 0), inv_freq)
    after = visible_logits(*pairs_of_layer(config, child, x, 0), inv_freq)
    # The least squares that are left admit no better constant: the residual is orthogonal to what was fitted.
    for a, b in [(before, after)] if kind.endswith("head") else zip(before, after, strict=True):
        assert np.vdot(b, a) / np.vdot(b, b) == pytest.approx(1, abs=1e-4)
    assert np.abs(before - after).max() > 0.1  # a norm is not undone by a constant
    unit = jax.tree.map(lambda a: a, child)
    for side in ("query_norm", "key_norm"):
        if side in unit["layers"]["attention"]:
            unit["layers"]["attention"][side] = {"scale": jnp.ones_like(unit["layers"]["attention"][side]["scale"])}
    ones = visible_logits(*pairs_of_layer(config, unit, x, 0), inv_freq)
    assert np.linalg.norm(before - after) < np.linalg.norm(before - ones)


@pytest.mark.slow
def test_a_norm_that_starts_at_ones_has_scale_1_and_changes_nothing_else(batch):
    """As DroPE's code adds it, also where a learned scale was before."""
    for before in ("none", "flat"):
        start = dataclasses.replace(CONFIG, qk_norm=before)
        params = random_params(start)
        config, child, _ = change_qk_norm(start, params, "head", schedule_of(Rope()), batch, init="ones")
        attention = dict(child["layers"]["attention"])
        for side in ("query", "key"):
            assert (attention.pop(f"{side}_norm")["scale"] == 1).all()
            assert (attention.pop(side) == params["layers"]["attention"][side]).all()
        matched = change_qk_norm(start, params, "head", schedule_of(Rope()), batch)[1]["layers"]["attention"]
        assert (np.abs(matched["query_norm"]["scale"] - 1) > 0.01).any()
    with pytest.raises(UserError, match="no QK-norm is added"):
        change_qk_norm(start, params, "none", schedule_of(Rope()), batch, init="ones")


@pytest.mark.slow
@pytest.mark.filterwarnings("error")  # no division by zero
def test_losses_are_those_of_parent_and_child(batch):
    params, schedule = random_params(CONFIG), schedule_of(NoPE())
    for name in ("query", "query_bias"):  # no logits in layer 0, and so no constant
        params["layers"]["attention"][name] = params["layers"]["attention"][name].at[0].set(0.0)
    config, child, told = change_qk_norm(CONFIG, params, "head", schedule, batch)
    for c, p, loss in ((CONFIG, params, told.loss_before), (config, child, told.loss_after)):
        assert float(jax.jit(Model(c).token_loss)(p, batch, schedule).mean()) == pytest.approx(loss, rel=1e-5)
    scale = child["layers"]["attention"]["query_norm"]["scale"]
    assert (scale[0] == 1).all() and (scale[1] != 1).all()
    assert told.loss_before != told.loss_after and told.tokens == 3 * T and 0 < told.error < 1
    assert str(told).startswith(f"QK-norm none -> head: loss {told.loss_before:.4f} -> {told.loss_after:.4f} on 36")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "flat", "query_head"])
def test_removed_the_scale_and_a_constant_are_in_the_projections(batch, kind):
    """Where all queries and all keys are equally long, a norm is a constant, and removing it changes nothing."""
    config = dataclasses.replace(CONFIG, qk_norm=kind, attention_bias=False, layers=1, norm_epsilon=1e-12)
    params = random_params(config)
    # Orthogonal projections (one head as wide as the stream) keep the length that the norm before them gives.
    config = dataclasses.replace(config, d_model=K, heads=1, kv_heads=1)
    params = random_params(config)
    attention = params["layers"]["attention"]
    rng = np.random.default_rng(0)
    for side in ("query", "key"):
        attention[side] = jnp.asarray(np.linalg.qr(rng.standard_normal((K, K)))[0].reshape(1, K, 1, K), jnp.float32)
    params["layers"]["attention_norm"]["scale"] = jnp.ones((1, K))
    schedule = build_schedule(layers(Rope(), 1), 1, 1, K)
    bare, child, told = change_qk_norm(config, params, "none", schedule, batch)
    assert bare.qk_norm == "none" and not {"query_norm", "key_norm"} & set(child["layers"]["attention"])
    before = jax.jit(Model(config).apply)(params, batch["tokens"], None, None, schedule)
    after = jax.jit(Model(bare).apply)(child, batch["tokens"], None, None, schedule)
    np.testing.assert_allclose(before, after, atol=2e-5)
    assert told.error < 1e-3 and told.loss_before == pytest.approx(told.loss_after, abs=1e-5)


@pytest.mark.parametrize(
    "before", ["none", "head", "query_head", *(pytest.param(k, marks=pytest.mark.slow) for k in ("flat", "query_flat"))]
)
@pytest.mark.parametrize("after", ["head", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "flat"))])
def test_any_kind_into_any_other(batch, before, after):
    config = dataclasses.replace(CONFIG, qk_norm=before)
    params = random_params(config)
    if before == after:
        with pytest.raises(UserError, match=f"qk_norm is '{after}' already"):
            change_qk_norm(config, params, after, schedule_of(Rope()), batch)
        return
    kept = jax.tree.map(np.asarray, params)
    changed, child, told = change_qk_norm(config, params, after, schedule_of(Rope()), batch)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), child) == jax.tree.map(
        lambda a: (a.shape, a.dtype), Model(changed).shapes
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(child))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), kept, params))  # the source is as it was
    assert 0 <= told.error < 1


def test_a_kind_that_there_is_not(batch):
    with pytest.raises(UserError, match="model.qk_norm is 'heads'.*'head'"):
        change_qk_norm(CONFIG, random_params(CONFIG), "heads", schedule_of(Rope()), batch)
