"""Attention statistics of a model: against full attention weights layer by layer, and against theory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.analysis import attention_use as module
from pe_lab.analysis.attention_use import attention_use
from pe_lab.attention.statistics import Statistics
from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.model.decoder import layer_arrays
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import (
    Alibi,
    Gaussian,
    HeadEdit,
    Layer,
    NoPE,
    Rope,
    Uniform,
    alibi_slopes,
    build_schedule,
    frequencies,
)

CONFIG = ModelConfig(
    vocab_size=64, layers=3, d_model=32, d_ff=48, heads=4, kv_heads=2, dtype="float32", attention_chunk=8
)
MODEL = Model(CONFIG)
H, G, K, T = 4, 2, 8, 21
MIXED = (
    Layer(Rope(100.0)),
    Layer(Alibi(), logit_scale=1.5),
    Layer(NoPE(), window=5),
)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, T)).astype(np.int32)
SPANS = ((0, 2), (5, 12))


@pytest.fixture(scope="module")
def params():
    """Wider than an initialization, so that attention is peaked and heads differ."""
    return jax.tree.map(lambda a: 8 * a if a.ndim > 2 else a, jax.jit(MODEL.init)(jax.random.key(0)))


def schedule_of(described):
    return build_schedule(described, H, G, K)


@functools.partial(jax.jit, static_argnums=(0,))
def queries_and_keys(structure, params, tokens, positions, segments, schedule):
    """Of every layer, by the forward pass that the model has without anybody watching."""
    model = Model(dataclasses.replace(CONFIG, attention="reference"))
    x, found = model.embed(params, tokens), []
    for n, layer in enumerate(structure):
        block = model.block(jax.tree.map(lambda a, n=n: a[n], params["layers"]))
        found.append(block.attention.queries_keys_values(block.attention_norm(x))[:2])
        row = model.layer_encoding(tuple(a[n] for a in layer_arrays(schedule)), layer, positions)
        x = block(x, row, positions, segments, layer.window)
    return found


def full_weights(q, k, layer: Layer, positions, segments):
    """[B, H, T, T] in float64, of one encoding for all heads."""
    q, k = (np.asarray(x, np.float64) for x in (q, np.repeat(k, H // G, axis=2)))
    if isinstance(layer.encoding, Rope):
        rotation = np.exp(1j * positions[:, :, None, None] * frequencies(layer.encoding, K)[0])
        q, k = ((x[..., : K // 2] + 1j * x[..., K // 2 :]) * rotation for x in (q, k))
    logits = np.einsum("bthk,bshk->bhts", q, np.conj(k)).real * layer.logit_scale / K**0.5
    if isinstance(layer.encoding, Alibi):
        logits -= alibi_slopes(H)[:, None, None] * (positions[:, None, :, None] - positions[:, None, None, :])
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    seen = (distance >= 0) & (distance < (layer.window or T)) & (segments[:, :, None] == segments[:, None, :])
    weights = np.where(seen[:, None], np.exp(logits - logits.max(-1, keepdims=True)), 0)
    return weights / weights.sum(-1, keepdims=True)


def test_every_layer_is_what_all_its_weights_say(params):
    segments = np.array([[1] * 9 + [2] * 12, [1] * 21])
    positions = np.array([[*range(0, 27, 3), *range(12)], [*range(0, 42, 2)]])  # spread: distances count, not these
    schedule = schedule_of(MIXED)
    at, of = jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32)
    found = attention_use(
        MODEL, params, TOKENS, schedule, positions=at, segments=of, spans=SPANS, rows={0: [20, 4], 2: [7, 0]}
    )
    assert found.layers == (0, 1, 2) and found.octaves == (0, 2, 4, 8, 16, 21) and set(found.rows) == {0, 2}
    for n, (q, k) in enumerate(queries_and_keys(schedule.structure, params, jnp.asarray(TOKENS), at, of, schedule)):
        weights = full_weights(q, k, MIXED[n], positions, segments)
        entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
        index = np.arange(T)
        distance = (weights * (index[:, None] - index)).sum(-1)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        close(found.mean.entropy[n], entropy.mean((0, 2)))
        close(found.mean.distance[n], distance.mean((0, 2)))
        close(found.mean.largest[n], weights.max(-1).mean((0, 2)))
        for s, (a, b) in enumerate(SPANS):
            mass = weights[..., a:b].sum(-1)
            close(found.mean.in_ranges[s, n], mass.mean((0, 2)))
            close(found.by_octave.in_ranges[s, n, :, 3], mass[..., 8:16].mean((0, 2)))
        close(found.by_octave.distance[n, :, 4], distance[..., 16:].mean((0, 2)))
        if n in found.rows:
            close(found.rows[n], weights[:, :, {0: [20, 4], 2: [7, 0]}[n]])
    octaves = np.diff(found.octaves) / T
    for mean, by_octave in zip(found.mean, found.by_octave, strict=True):
        assert isinstance(mean, np.ndarray) and mean.dtype == np.float32
        np.testing.assert_allclose((by_octave * octaves).sum(-1), mean, rtol=1e-4, atol=1e-5)


def test_chosen_queries_and_layers_are_as_among_all(params):
    schedule = schedule_of([Layer(Rope(base)) for base in (10.0, 20.0, 30.0)])
    every = attention_use(MODEL, params, TOKENS, schedule, spans=SPANS, queries=[16, 18])
    some = attention_use(MODEL, params, TOKENS, schedule, spans=SPANS, queries=[16, 18], layers=[2, 0])
    assert some.layers == (0, 2)
    for name, a, b in zip(Statistics._fields, some.mean, every.mean, strict=True):
        np.testing.assert_allclose(a, np.take(b, (0, 2), axis=int(name == "in_ranges")), atol=1e-6)
    assert np.isnan(every.by_octave.entropy[..., :4]).all()
    np.testing.assert_allclose(every.by_octave.entropy[..., 4], every.mean.entropy, atol=1e-6)


def test_a_head_without_encoding_attends_by_what_tokens_are_and_others_by_where(params):
    """Earlier tokens in another order: a NoPE head of the first layer gives each the same weight as before.

    Head 1 of a rotary layer loses its encoding (DoPE-by-all), though the other query head of its key head keeps it.
    """
    T = 40
    tokens = np.random.default_rng(1).permutation(64)[None, :T].astype(np.int32)
    order = np.append(np.random.default_rng(2).permutation(T - 1), T - 1)
    use = functools.partial(attention_use, MODEL, params, queries=[T - 1], layers=[0], rows={0: [T - 1]})
    edited = Layer(Rope(100.0), heads=(HeadEdit((1,), NoPE()),))
    schedule = schedule_of((edited, *MIXED[1:]))
    before, after = (use(tokens=one, schedule=schedule) for one in (tokens, tokens[:, order]))
    moved = np.abs(after.rows[0][0, :, 0] - before.rows[0][0, :, 0][:, order]).max(-1)
    assert moved[1] < 1e-6 and (moved[[0, 2, 3]] > 1e-3).all()
    same = np.abs(after.mean.entropy - before.mean.entropy)[0]
    assert same[1] < 1e-5 and (same[[0, 2, 3]] > 1e-4).all()
    assert abs(after.mean.distance[0, 1] - before.mean.distance[0, 1]) > 0.1
    # And it is the head that a model has which never knew positions.
    bare = use(tokens=tokens, schedule=schedule_of((Layer(NoPE()), *MIXED[1:])))
    np.testing.assert_allclose(before.rows[0][:, 1], bare.rows[0][:, 1], atol=1e-6)


def test_denoised_heads_and_no_others_are_what_dope_makes_of_them(params):
    """A uniform head averages what it sees: entropy log(t + 1), distance t / 2. A head of noise changes as well."""
    plain = Layer(Rope(100.0))
    tokens = jnp.asarray(TOKENS)
    edited = Layer(Rope(100.0), heads=(HeadEdit((2,), Uniform()), HeadEdit((0,), Gaussian(7))))
    a = attention_use(MODEL, params, tokens, schedule_of((plain, plain, plain)), layers=[0])
    b = attention_use(MODEL, params, tokens, schedule_of((edited, plain, plain)), layers=[0])
    np.testing.assert_allclose(b.mean.entropy[0, 2], np.log(np.arange(T) + 1).mean(), rtol=1e-5)
    np.testing.assert_allclose(b.mean.distance[0, 2], (T - 1) / 4, rtol=1e-5)
    for name in ("entropy", "largest", "distance", "logsumexp"):
        changed = np.abs(getattr(b.mean, name) - getattr(a.mean, name))[0]
        assert (changed[[0, 2]] > 1e-3).all() and (changed[[1, 3]] < 1e-5).all(), name


def test_depth_is_not_compiled(params):
    """All layers of one structure share a program, for any measured layers and for models of any depth."""
    deep = Model(dataclasses.replace(CONFIG, layers=7))
    deeper = jax.tree.map(lambda a: jnp.concatenate([a, a, a[:1]]), params["layers"])
    before = module._layer._cache_size()
    found = attention_use(
        deep,
        {**params, "layers": deeper},
        TOKENS,
        schedule_of([Layer(Rope(b)) for b in (10.0, 20.0, 30.0)] + 4 * [Layer(Rope(9.0))]),
    )
    assert module._layer._cache_size() == before + 1
    assert found.mean.entropy.shape == (7, H) and len(np.unique(found.mean.entropy)) == 7 * H


def test_a_layers_memory_is_linear_in_the_length(params):
    """The whole program of a layer: attention, statistics, and the output in place of the input."""

    def needed(length: int) -> int:
        shape = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
        model = Model(dataclasses.replace(CONFIG, attention_chunk=128))
        schedule = schedule_of(MIXED)
        memory = module._layer.lower(
            model, schedule.structure[0], True, shape(1, length, 32, dtype=jnp.float32),
            (params["layers"], layer_arrays(jax.tree.map(jnp.asarray, schedule))), jnp.int32(0), shape(1, length),
            None, shape(1, 2), None, None,
        ).compile().memory_analysis()  # fmt: skip
        return memory.temp_size_in_bytes

    per_token = [needed(length) / length for length in (8192, 32768)]
    assert per_token[1] < 1.05 * per_token[0] and per_token[1] < 64 * 32 * 4


def test_a_mesh_that_cuts_texts_is_refused(params):
    mesh = make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])
    with use_mesh(mesh, AxisRules()), pytest.raises(UserError, match=r"not measured on .* over 2 devices: use a mesh"):
        attention_use(MODEL, params, TOKENS, schedule_of(MIXED))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(spans=[(0, 22)]), r"0 to 22 is no range within a \w+ of 21 tokens"),
        (dict(queries=[21]), "queries: there is no token 21"),
        (dict(rows={0: [21]}), "rows: there is no token 21"),
        (dict(rows={3: [0]}), "There is no layer 3 to measure; the model has 3, counted from 0"),
        (dict(layers=[0, -1]), "There is no layer -1"),
        (dict(layers=[]), "There is no layer to measure"),
        (dict(schedule=schedule_of(MIXED[:2])), "The schedule has 2 layers and the model 3"),
    ],
)
def test_what_is_not_there_is_an_error(params, arguments, message):
    with pytest.raises(UserError, match=message):
        attention_use(MODEL, params, TOKENS, **{"schedule": schedule_of(MIXED), **arguments})
