"""The decoder against a numpy decoder in float64, and against equivalent calls of itself."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.model.projections import _wide_product
from pe_lab.positional import (
    PI,
    Alibi,
    HeadEdit,
    Layer,
    NoPE,
    PartialRope,
    Rope,
    Yarn,
    alibi_slopes,
    build_schedule,
    frequencies,
    layers,
)

TINY = ModelConfig(
    vocab_size=64, layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, norm_epsilon=1e-5, dtype="float32"
)


def schedule_of(model: Model, description):
    c = model.config
    return build_schedule(layers(description, c.layers), c.heads, c.kv_heads, c.head_dim)


def random_params(model: Model, seed: int = 0):
    """Wider than an initialization, so that attention is peaked and every norm and bias matters."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        names = [p.key for p in path]
        values = rng.standard_normal(leaf.shape)
        if names[-1] == "scale":
            values = 1 + 0.3 * values
        elif names[0] == "token_embedder" or "bias" in names[-1]:
            values = 0.5 * values
        else:
            values = values * 1.5 / np.prod(leaf.shape[1:-1]) ** 0.5
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.shapes)


def tokens_of(model: Model, B: int, T: int, seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, model.config.vocab_size, (B, T)), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, positions, segments, schedule):
    return model.apply(params, tokens, positions, segments, schedule)


# --- numpy --------------------------------------------------------------------------------------------------


def numpy_decoder(config: ModelConfig, params, tokens, positions, segments, described, heads_on) -> np.ndarray:
    """The whole forward pass, row by row and head by head; `heads_on` [N, H] says which heads rotate."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    at = p["layers"]
    H, G, K, T = config.heads, config.kv_heads, config.head_dim, tokens.shape[1]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def rotated(x, angle, gain):  # [T, K] by [T, R]
        z = (x[:, : K // 2] + 1j * x[:, K // 2 :]) * np.exp(1j * angle) * gain
        return np.concatenate([z.real, z.imag], -1)

    out = []
    for row in range(tokens.shape[0]):
        x, position = p["token_embedder"]["embedding"][tokens[row]], positions[row].astype(np.float64)
        distance = position[:, None] - position[None]
        index = np.arange(T)[:, None] - np.arange(T)[None]
        same = segments[row][:, None] == segments[row][None]
        for n, layer in enumerate(described):
            a = jax.tree.map(lambda w, n=n: w[n], at["attention"])
            y = norm(x, at["attention_norm"]["scale"][n])
            q, k, v = (np.einsum("td,dhk->thk", y, a[w]) + a[f"{w}_bias"] for w in ("query", "key", "value"))
            q, k = norm(q, a["query_norm"]["scale"]), norm(k, a["key_norm"]["scale"])
            inv_freq, gain = frequencies(layer.encoding, K)
            slopes = alibi_slopes(H) if isinstance(layer.encoding, Alibi) else np.zeros(H)
            visible = (index >= 0) & (index < (layer.window or T)) & same
            heads = []
            for h in range(H):
                g = h * G // H
                angle, size = position[:, None] * inv_freq * heads_on[n][h], gain if heads_on[n][h] else 1
                logits = rotated(q[:, h], angle, size) @ rotated(k[:, g], angle, size).T * layer.logit_scale / K**0.5
                logits = np.where(visible, logits - slopes[h] * distance, -np.inf)
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, g])
            x = x + np.einsum("thk,hkd->td", np.stack(heads, 1), a["out"])
            y = norm(x, at["mlp_norm"]["scale"][n])
            gate, up = y @ at["mlp"]["gate"][n], y @ at["mlp"]["up"][n]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ at["mlp"]["down"][n]
        out.append(norm(x, p["token_embedder"]["final_norm"]["scale"]) @ p["token_embedder"]["unembedding"].T)
    return np.stack(out)


# All layers differ. Heads 1 and 2 of layer 1 are masked below, so that rotations differ within groups.
MIXED = (
    Layer(Rope(100.0, scaling=Yarn(4.0, 16)), logit_scale=1.2),
    Layer(Rope(50.0)),
    Layer(Rope(100.0, fraction=0.5), window=5),
    Layer(PartialRope(100.0, 0.5, PI(2.0))),
    Layer(NoPE(), window=3, logit_scale=0.8),
    Layer(Alibi()),
)
MIXED_MODEL = Model(
    ModelConfig(
        vocab_size=31,
        layers=6,
        d_model=24,
        d_ff=40,
        heads=4,
        kv_heads=2,
        head_dim=8,
        qk_norm="head",
        attention_bias=True,
        tie_embeddings=False,
        dtype="float32",
        attention_chunk=8,
    )
)


def mixed_schedule():
    masked = dataclasses.replace(MIXED[1], heads=(HeadEdit((1, 2), NoPE()),))
    return schedule_of(MIXED_MODEL, [MIXED[0], masked, *MIXED[2:]])


def packed_batch(T: int):
    """Two rows of documents: segment ids, and positions that restart with each."""
    cuts = [[T // 3, T // 2], [T // 5, T - 2]]
    segments = np.stack([1 + np.searchsorted(c, np.arange(T), side="right") for c in cuts]).astype(np.int32)
    starts = np.stack([np.searchsorted(s, s) for s in segments])
    return segments, (np.arange(T)[None] - starts).astype(np.int32)


@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.slow), "chunked"])
def test_a_model_of_six_different_layers_equals_numpy(attention):
    model = Model(dataclasses.replace(MIXED_MODEL.config, attention=attention))
    params, tokens = random_params(model), tokens_of(model, 2, 21)
    segments, positions = packed_batch(21)
    schedule = mixed_schedule()
    assert {s.heads for s in schedule.structure} == {"shared", "split"}
    heads_on = np.ones((6, 4))
    heads_on[1, 1:3] = 0
    expected = numpy_decoder(model.config, params, np.asarray(tokens), positions, segments, MIXED, heads_on)
    logits = logits_of(model, params, tokens, jnp.asarray(positions), jnp.asarray(segments), schedule)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=3e-5)


# --- ourselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "description",
    ["rope", pytest.param("nope", marks=pytest.mark.slow), "alibi", ("rope/window=4", "nope")],
    ids=["rope", "nope", "alibi", "windows"],
)
def test_packed_documents_are_separate_documents(description):
    """Each document alone, from position 0, gives the logits it has within the packed row."""
    model, T = Model(TINY), 21
    params, tokens, schedule = random_params(model), tokens_of(model, 2, T), schedule_of(model, description)
    segments, positions = packed_batch(T)
    at, within = jnp.asarray(positions), jnp.asarray(segments)
    packed = np.asarray(logits_of(model, params, tokens, at, within, schedule))
    # One document a row, padded at the end, where causality hides the padding: one shape, one compilation.
    documents = [
        (row, *np.flatnonzero(segments[row] == s)[[0, -1]]) for row in range(2) for s in np.unique(segments[row])
    ]
    alone = np.zeros((len(documents), T), np.int32)
    for i, (row, first, last) in enumerate(documents):
        alone[i, : last - first + 1] = np.asarray(tokens)[row, first : last + 1]
    separate = np.asarray(logits_of(model, params, jnp.asarray(alone), None, None, schedule))
    for i, (row, first, last) in enumerate(documents):
        np.testing.assert_allclose(packed[row, first : last + 1], separate[i, : last - first + 1], atol=2e-5)
    joined = logits_of(model, params, tokens, None, None, schedule)
    assert np.abs(packed - joined).max() > 0.1, "segments changed nothing"


def loss_and_gradients(config: ModelConfig):
    """Of four layers: two periods of a pattern, so that there is something to scan."""
    model = Model(dataclasses.replace(config, layers=4))
    tokens = tokens_of(model, 2, 18)
    schedule = schedule_of(model, ("rope:base=100/window=6", "nope"))
    return jax.jit(jax.value_and_grad(lambda p, b, s: model.token_loss(p, b, s).mean()))(
        random_params(model), {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, schedule
    )


@pytest.fixture(scope="module")
def scanned():
    return loss_and_gradients(TINY)


@pytest.mark.parametrize(
    "changes",
    [
        dict(scan=False),
        pytest.param(dict(remat="full"), marks=pytest.mark.slow),
        pytest.param(dict(remat="dots"), marks=pytest.mark.slow),
        pytest.param(dict(remat="dots_attention"), marks=pytest.mark.slow),
        pytest.param(dict(remat="dots_offload"), marks=pytest.mark.slow),
        pytest.param(dict(remat="full", scan=False), marks=pytest.mark.slow),
    ],
    ids=["unrolled", "remat full", "remat dots", "remat dots_attention", "remat dots_offload", "unrolled with remat"],
)
def test_scan_unroll_and_rematerialization_agree(scanned, changes):
    loss, grads = loss_and_gradients(dataclasses.replace(TINY, **changes))
    np.testing.assert_allclose(loss, scanned[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), grads, scanned[1])
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_token_loss_is_the_cross_entropy_of_the_logits():
    model = Model(dataclasses.replace(TINY, loss_chunks=4))
    params, tokens = random_params(model), tokens_of(model, 2, 9)
    schedule = schedule_of(model, "rope")
    logits = np.asarray(logits_of(model, params, tokens[:, :-1], None, None, schedule), np.float64)
    at_target = np.take_along_axis(logits, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    expected = np.log(np.exp(logits).sum(-1)) - at_target
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    np.testing.assert_allclose(jax.jit(model.token_loss)(params, batch, schedule), expected, atol=2e-5)


def test_bfloat16_computes_near_float32_over_the_same_parameters():
    model = Model(TINY)
    params, tokens, schedule = random_params(model), tokens_of(model, 2, 16), schedule_of(model, "rope")
    exact = np.asarray(logits_of(model, params, tokens, None, None, schedule))
    narrow = Model(dataclasses.replace(TINY, dtype="bfloat16"))
    rounded = logits_of(narrow, params, tokens, None, None, schedule)
    assert rounded.dtype == jnp.float32
    error = np.abs(rounded - exact)
    assert 0 < error.max() < 0.05 * np.abs(exact).max()


def test_products_of_bfloat16_are_wide_on_a_cpu():
    """Value and gradients are numpy's in float64, rounded once; compiled for the processor's bfloat16 instructions."""
    draw = np.random.default_rng(0).standard_normal
    x, weights, upstream = (jnp.asarray(draw(shape), jnp.bfloat16) for shape in ((2, 5, 16), (16, 24), (2, 5, 24)))
    value, gradients = jax.vjp(_wide_product, x, weights)
    exact = [np.asarray(one, np.float64) for one in (x, weights, upstream)]
    expected = (
        exact[0] @ exact[1],
        exact[2] @ exact[1].T,
        np.einsum("bti,bto->io", exact[0], exact[2]),
    )
    for got, want in zip((value, *gradients(upstream)), expected, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5)
    model = Model(dataclasses.replace(TINY, dtype="bfloat16"))
    arguments = (model.shapes, jax.ShapeDtypeStruct((1, 8), jnp.int32), None, None, schedule_of(model, Rope()))
    jaxpr = str(jax.make_jaxpr(model.hidden)(*arguments))
    assert "custom_vjp_call" in jaxpr and not re.search(r"bf16\[[\d,]+\] = dot_general", jaxpr)


@pytest.mark.parametrize("scaled", [True, False])
def test_init_is_decided_by_the_key_and_sized_as_documented(scaled):
    """Weights ~ N(0, init_std), output projections smaller by sqrt(2 N) if scaled, norms one, biases zero."""
    config = dataclasses.replace(TINY, layers=8, attention_bias=True, qk_norm="head", tie_embeddings=False)
    assert config.scaled_residual_init  # the default
    config = dataclasses.replace(config, scaled_residual_init=scaled)
    model = Model(config)
    init = jax.jit(model.init)
    params = init(jax.random.key(1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), params, init(jax.random.key(1)))
    assert (init(jax.random.key(2))["token_embedder"]["embedding"] != params["token_embedder"]["embedding"]).all()
    assert model.num_parameters == sum(a.size for a in jax.tree.leaves(params))
    for path, a in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        a = np.asarray(a)
        assert a.dtype == np.float32
        if name.endswith("scale"):
            assert (a == 1).all(), name
        elif "bias" in name:
            assert (a == 0).all(), name
        else:
            std = 0.02 / (4 if scaled and name.endswith(("attention.out", "mlp.down")) else 1)
            assert abs(a.std() / std - 1) < 0.05 and abs(a.mean()) < std / 10, name
            if name.startswith("layers"):
                assert len(np.unique(a.reshape(8, -1)[:, 0])) == 8, name


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(head_dim=7), "model.head_dim is 7"),
        (dict(d_model=36, heads=12, kv_heads=12), "model.head_dim is 3"),
        (dict(d_model=30), "model.d_model 30 does not divide into 4 heads"),
        (dict(kv_heads=3), "model.heads is 4 and model.kv_heads 3"),
        (dict(kv_heads=0), "model.kv_heads is 0"),
        (dict(vocab_size=0), "model.vocab_size"),
        (dict(remat="fuly"), "model.remat is 'fuly'"),
        (dict(remat="auto"), "are 'auto' only in a recipe"),
        (dict(loss_chunks="auto"), "are 'auto' only in a recipe"),
        (dict(dtype="float16"), "model.dtype is 'float16'"),
    ],
    ids=str,
)
def test_an_impossible_shape_names_its_field(changes, field):
    with pytest.raises(UserError, match=field):
        Model(dataclasses.replace(TINY, **changes))


def test_a_schedule_of_another_model_is_refused():
    model, tokens = Model(TINY), jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def trace(config: ModelConfig):
        schedule = schedule_of(Model(config), "rope")
        jax.eval_shape(lambda p, t, s: model.apply(p, t, None, None, s), model.shapes, tokens, schedule)

    trace(TINY)
    with pytest.raises(UserError, match="The schedule has 3 layers and the model 2"):
        trace(dataclasses.replace(TINY, layers=3))
    with pytest.raises(UserError, match="8 heads of 4 channels, and the model has 4 of 8"):
        trace(dataclasses.replace(TINY, heads=8))


def test_an_unknown_attention_is_refused():
    with pytest.raises(UserError, match="'flsh'"):
        model = Model(dataclasses.replace(TINY, attention="flsh"))
        arguments = model.shapes, jax.ShapeDtypeStruct((1, 4), jnp.int32), schedule_of(model, "rope")
        jax.eval_shape(lambda p, t, s: model.apply(p, t, None, None, s), *arguments)
