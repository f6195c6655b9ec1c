"""Positional bias, its gradients and the prefix spread: against [T, T] weights in float64 and finite differences."""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.analysis import positional_bias
from pe_lab.analysis.positional_bias import PATTERNS, BiasGroup, compare
from pe_lab.analysis.sequences import Sequences
from pe_lab.analysis.session import AnalysisSession, distinct_names, named_by_encoding
from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.store import metadata_of
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.evaluation.variants import Subject, all_variants
from pe_lab.language_model import LanguageModel
from pe_lab.model import Model
from pe_lab.model import layer_pass as module
from pe_lab.model.decoder import layer_arrays
from pe_lab.model.modules import NO_INPUTS
from pe_lab.positional import Alibi, HeadEdit, Layer, NoPE, PartialRope, Rope, alibi_slopes, frequencies

H, G, K, D, T, LONG = 4, 2, 4, 8, 97, 261  # neither length is a multiple of a block
SHAPE = dict(
    vocab_size=64, d_model=D, d_ff=12, heads=H, kv_heads=G, head_dim=K, attention_bias=True, dtype="float32",
    attention_chunk=32,
)  # fmt: skip
PLAIN = (
    Layer(Rope(50.0)),
    Layer(NoPE()),
    Layer(Alibi(), logit_scale=1.5),
    Layer(PartialRope(50.0, 0.5)),
    Layer(Rope(50.0), window=30),
)
SPLIT = (Layer(Rope(50.0), heads=(HeadEdit((1,), NoPE()),)),)


@functools.cache
def language_model(layers=PLAIN, seed: int = 0, **shape) -> LanguageModel:
    """Weights larger than an initialization's, and no bias or norm at its initial value."""
    model = Model(ModelConfig(layers=len(layers), **SHAPE | shape))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(np.float32), model.shapes)
    metadata = metadata_of(
        model.config, layers, id="toy", run="toy", phase="pretrain", step=1, tokens=64, training_length=T, lineage=[]
    )
    return LanguageModel(Checkpoint(Path("toy"), 1, params, model.config, layers, metadata), layers)


def tokens(length: int, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 64, (batch, length)).astype(np.int32)


# ---------------------------------------------------------------------------------------------------------------------
# In float64, by the definitions


def seen_keys(segments: np.ndarray, window: int | None) -> np.ndarray:
    distance = np.subtract.outer(np.arange(len(segments)), np.arange(len(segments)))
    return (distance >= 0) & (distance < (window or len(segments))) & np.equal.outer(segments, segments)


def centred_weights(seen: np.ndarray) -> np.ndarray:
    """c [P, T, T], one query after another: 1 on the pattern's key, -1 / (n - 1) on the other n - 1 visible keys."""
    c = np.zeros((2, *seen.shape))
    for i in range(len(seen)):
        keys = np.flatnonzero(seen[i])
        for p, target in enumerate((i, i - 1)):
            if target in keys and len(keys) > 1:
                c[p, i, keys] = -1 / (len(keys) - 1)
                c[p, i, target] = 1
    np.testing.assert_allclose(c.sum(-1), 0, atol=1e-12)
    return c


def normed(x: np.ndarray, scale, axes=-1) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + 1e-6) * scale


def attention_weights(attention, x, layer: Layer, qk_norm: str, positions, seen) -> np.ndarray:
    """[H, T, T] of one sequence of normalized inputs [T, D]."""
    rotated = []
    for name, heads in (("query", H), ("key", G)):
        z = np.tensordot(x, attention[name], 1) + attention[f"{name}_bias"]
        if qk_norm != "none":
            z = normed(z, attention[f"{name}_norm"]["scale"], (-2, -1) if qk_norm == "flat" else -1)
        z = np.repeat(z, H // heads, axis=1)
        z = z[..., : K // 2] + 1j * z[..., K // 2 :]
        of_head = [next((e.to for e in layer.heads if h in e.heads), layer.encoding) for h in range(H)]
        inv_freq = np.stack([frequencies(encoding, K)[0] for encoding in of_head])
        rotated.append((z * np.exp(1j * positions[:, None, None] * inv_freq)).swapaxes(0, 1))
    logits = np.einsum("htr,hsr->hts", rotated[0], rotated[1].conj()).real * layer.logit_scale / K**0.5
    if isinstance(layer.encoding, Alibi):
        logits -= alibi_slopes(H)[:, None, None] * np.subtract.outer(positions, positions)
    weights = np.exp(np.where(seen, logits, -np.inf))
    return weights / weights.sum(-1, keepdims=True)


def biases(attention, x, layer: Layer, qk_norm: str, positions, seen, c) -> np.ndarray:
    """A [P, H] of one sequence."""
    weights = attention_weights(attention, x, layer, qk_norm, positions, seen)
    return np.einsum("pts,hts->ph", c, weights) / weights.shape[-1]


def layer_output(params, x, weights) -> np.ndarray:
    """The next layer's input [T, D]."""
    attention, mlp = params["attention"], params["mlp"]
    value = np.tensordot(normed(x, params["attention_norm"]["scale"]), attention["value"], 1) + attention["value_bias"]
    value = np.repeat(value, H // G, axis=1)
    x = x + np.einsum("hts,shk,hkd->td", weights, value, attention["out"], optimize=True)
    wide = normed(x, params["mlp_norm"]["scale"])
    gate = wide @ mlp["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (wide @ mlp["up"])) @ mlp["down"]


def gradient_norms(function, attention, flat: bool) -> dict[str, np.ndarray]:
    """[P, H] of each head's A with respect to its own W_Q and the W_K that it reads, by central differences."""
    found = {}
    for name, of_head in (("query", np.arange(H)), ("key", np.arange(H) // (H // G))):
        squares, step = np.zeros((2, H)), 1e-4
        # One head's weights move another head's A under a flat QK-norm alone.
        for part in np.unique(of_head)[:, None] if flat else [np.unique(of_head)]:
            mine = np.isin(of_head, part)
            for d, k in np.ndindex(D, K):
                values = []
                for sign in (1, -1):
                    weights = attention[name].copy()
                    weights[d, part, k] += sign * step
                    values.append(function({**attention, name: weights}))
                squares[:, mine] += (((values[0] - values[1]) / (2 * step)) ** 2)[:, mine]
        found[name] = np.sqrt(squares)
    return found


def spread(x: np.ndarray, segments: np.ndarray) -> float:
    """Theorem 3.4, all differences of a mean of a prefix and a hidden state in it."""
    seen = seen_keys(segments, None)
    means = seen @ x / seen.sum(-1, keepdims=True)
    return np.where(seen, np.linalg.norm(means[:, None] - x[None], axis=-1), 0).max()


PACKED = np.repeat([[1] * 90 + [2] + [3] * 170, [1] * 200 + [2] * 61], 1, axis=0).astype(np.int32)
PLACES = dict(segments=PACKED, positions=np.concatenate([[[*range(90), 0, *range(170)]], [[*range(200), *range(61)]]]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "qk_norm", "length"),
    [
        pytest.param(PLAIN, "none", T, id="five encodings"),
        pytest.param(SPLIT, "head", LONG, id="packed, per query head"),
        pytest.param(PLAIN[:1], "flat", T, id="flat QK-norm"),
    ],
)
def test_it_is_what_all_weights_and_finite_differences_say(layers, qk_norm, length):
    lm, ids = language_model(layers, qk_norm=qk_norm), tokens(length, 2 if length == LONG else 1)
    places = {}
    segments, positions = np.ones((1, length), int), np.arange(length)[None]
    if length == LONG:
        places = {name: value.astype(np.int32) for name, value in PLACES.items()}
        segments, positions = PLACES["segments"], PLACES["positions"]
    found = positional_bias.measure(lm, ids, **places)
    assert found.bias.shape == (len(ids), len(layers), H, 2) and found.spread.shape == (len(ids), len(layers))
    wide = functools.partial(jax.tree.map, lambda a: np.asarray(a, np.float64))
    inputs = wide(lm.checkpoint.params["token_embedder"]["embedding"])[ids]
    for n, layer in enumerate(layers):
        params = jax.tree.map(lambda a, n=n: a[n], wide(lm.checkpoint.params["layers"]))
        for b, x in enumerate(inputs):
            np.testing.assert_allclose(found.spread[b, n], spread(x, segments[b]), rtol=1e-4)
            np.testing.assert_allclose(found.hidden_norm[b, n], np.sqrt((x**2).sum(-1).mean()), rtol=1e-4)
            seen = seen_keys(segments[b], layer.window)
            x_normed = normed(x, params["attention_norm"]["scale"])
            of = dict(x=x_normed, layer=layer, qk_norm=qk_norm, positions=positions[b], seen=seen)
            function = functools.partial(biases, **of, c=centred_weights(seen))
            np.testing.assert_allclose(found.bias[b, n].T, function(params["attention"]), atol=3e-6, rtol=1e-3)
            inputs[b] = layer_output(params, x, attention_weights(params["attention"], **of))
        expected = gradient_norms(function, params["attention"], qk_norm == "flat")  # of the last sequence
        assert min(values.min() for values in expected.values()) > 1e-4
        np.testing.assert_allclose(found.query_gradient[-1, n].T, expected["query"], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found.key_gradient[-1, n].T, expected["key"], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_constant_sequence_has_a_bias_with_an_encoding_alone():
    """DroPE, Propositions 3.2 and 3.3, and Remark B.1: hidden states stay constant, whatever the encoding."""
    lm = language_model(qk_norm="none")
    found = positional_bias.measure(lm, np.full((1, T), 7))
    assert np.abs(found.spread).max() < 1e-4 * found.hidden_norm.min()
    for n, layer in enumerate(PLAIN):
        bias, query, key = (x[:, n] for x in found[:3])
        if isinstance(layer.encoding, NoPE):
            assert np.abs(bias).max() < 1e-6 and query.max() < 1e-5 and key.max() < 1e-5
        else:
            assert np.abs(bias).max() > 1e-3
        if isinstance(layer.encoding, Rope):
            assert query.min() > 1e-4 and key.min() > 1e-4


def test_a_heads_bias_is_one_less_the_first_token_if_all_its_weight_is_on_the_pattern():
    """And ALiBi's penalty, at its steepest, puts nearly all on the token itself."""
    lm = language_model(qk_norm="none").with_positional(Layer(Alibi(), logit_scale=1e-6))
    view = lm.layer_pass(tokens(T, 1), _biases_of, [0], jnp.asarray([1e3, 1e3, 0.0, 0.0]))[0]
    np.testing.assert_allclose(view[0], [[(T - 1) / T] * 2 + [0, 0]], atol=1e-5)
    assert (view[1][:, :2] < 0).all()


def _biases_of(view, slopes):
    encoding = dataclasses.replace(view.encoding, slope=slopes)
    key = jnp.repeat(view.key, H // G, axis=2)
    return positional_bias._biases(1e-6 * view.query, key, encoding, view)


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """The whole program of a layer, values and gradients: half the memory at half the length, and no [T, T] array."""
    lm = language_model(qk_norm="none")
    model, schedule = Model(lm.config, backward=False), lm.schedule_for(T)
    measure = positional_bias._BiasOfLayer(positional_bias._model(lm.config))

    def needed(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, D), jnp.float32)
        blocks, arrays = lm.checkpoint.params["layers"], layer_arrays(jax.tree.map(jnp.asarray, schedule))
        stacked = (blocks, jnp.int32(0)), (arrays, jnp.int32(0))
        traced = module._layer.lower(model, schedule.structure[0], measure, x, stacked, {}, NO_INPUTS, None, None, None)
        return traced.compile().memory_analysis().temp_size_in_bytes

    half, whole = needed(2048), needed(4096)
    assert whole < 2.6 * half and whole < 4 * 4096**2


# ---------------------------------------------------------------------------------------------------------------------
# The analysis


def rope(seed: int) -> LanguageModel:
    """Other weights of `language_model()`, all layers with RoPE; its programs are compiled already."""
    lm, layers = language_model(seed=seed, qk_norm="none"), (Layer(Rope(50.0)),) * len(PLAIN)
    return dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, layers=layers), layers=layers)


@pytest.fixture
def session(tmp_path) -> AnalysisSession:
    """Two initializations, with RoPE and without; of which two layers are measured."""
    subjects = [Subject(rope(seed), "toy", f"initialization {seed}") for seed in range(2)]
    for n, one in enumerate(subjects):
        one.checkpoint.metadata["id"] = f"init-{n}"
    variants = list(map(named_by_encoding, all_variants(subjects, ("as trained",), ["nope"])))
    session = AnalysisSession(
        "positional_bias", argparse.Namespace(layers="0,1", init=2, again=False), tmp_path, variants,
        distinct_names(variants, False),
    )  # fmt: skip
    session.__dict__["sequences"] = Sequences("toy", tokens(T), np.array([T, T]))
    return session


@pytest.mark.slow
def test_initializations_of_an_encoding_are_one_line(session):
    found = positional_bias.ANALYSIS.run(session)
    names = ["RoPE (initializations 0 to 1)", "NoPE (initializations 0 to 1)"]
    assert [group["name"] for group in found.metadata["groups"]] == names
    assert found.numbers["bias_0"].shape == (2, 2, 2, H, 2)  # initializations, sequences, layers, heads, patterns
    for seed in range(2):
        alone = positional_bias.measure(rope(seed), tokens(T)[:1], [0, 1])
        np.testing.assert_allclose(found.numbers["query_gradient_0"][seed, 0], alone.query_gradient[0], rtol=1e-5)
    assert sum("RoPE" in text and " over NoPE" in text and "Figure 4" in text for text in found.sentences) == 2
    figures = {figure.name: figure for figure in found.figures}
    lines = dict(figures["gradient_by_layer"].panels)["diagonal"]
    both = np.sqrt(found.numbers["query_gradient_0"] ** 2 + found.numbers["key_gradient_0"] ** 2)[..., 0].mean((1, 3))
    assert [line.label for line in lines] == names
    np.testing.assert_allclose(lines[0].y, np.sqrt(both[0] * both[1]), rtol=1e-5)
    assert (lines[0].low < lines[0].y).all() and (lines[0].y < lines[0].high).all()
    assert figures["query_gradient_by_head_previous"].values.shape == (2, 2, H)
    assert "gradient_by_step" not in figures


def test_what_cannot_be_measured_is_an_error(session):
    session.__dict__["sequences"] = Sequences("toy", tokens(2), np.array([2, 2]))
    with pytest.raises(UserError, match="needs sequences of at least 3 tokens, not 2"):
        positional_bias.ANALYSIS.run(session)
    with pytest.raises(UserError, match="at least 3 tokens, not 2"):
        positional_bias.measure(rope(0), tokens(2))
    with pytest.raises(UserError, match="no layer 5 to measure; the model has 5"):
        positional_bias.measure(rope(0), tokens(T), [5])


def group(name: str, gradients: np.ndarray, encoded: bool, **more) -> BiasGroup:
    """A group whose gradients with respect to W_Q and W_K together are [N, L], in every head and pattern."""
    values = np.broadcast_to(gradients[:, None, :, None, None], (len(gradients), 1, gradients.shape[1], 3, 2))
    found = {"query_gradient": 0.6 * values, "key_gradient": 0.8 * values, "bias": values}
    found |= {"spread": gradients[:, None], "hidden_norm": gradients[:, None]}
    return BiasGroup(name, tuple(range(gradients.shape[1])), found, "same", encoded, **more)


def test_the_comparison_confirms_what_intervals_exclude_chance_for():
    depth = np.arange(4)
    noise = 0.01 * np.outer([2, -2, 1, -1, 0], depth - 1.5)  # growth that is none on average
    bare = group("without", np.ones((5, 4)), False)
    for factor, growth, chance, everywhere, grows in (
        (2, 0.5, 1, "confirmed", "confirmed"),
        (3, -0.2, 1, "confirmed", "not confirmed"),
        (0.5, 0.0, 20, "not confirmed", "undecided"),
    ):
        one = group("with", factor * np.exp(growth * depth + chance * noise), True)
        diagonal, previous = compare(one, bare)
        assert f"larger in every layer: {everywhere}." in diagonal and f"with depth: {grows}" in previous
        assert f"and larger in {4 * (factor > 1)} of 4 layers" in diagonal
    single = compare(group("with", np.full((1, 4), 2.0), True), group("without", np.ones((1, 4)), False))[0]
    assert "2 in layer 0" in single and "undecided (so on average)" in single and "[" not in single


def test_a_training_is_a_line_over_its_steps():
    groups = [
        group(f"step {step}", np.full((1, 3), step / 10), True, series="run pretrain", progress=(64 * step, step))
        for step in (20, 10, 30)
    ]
    (figure,) = positional_bias._by_step(groups)
    assert [name for name, _ in figure.panels] == [f"run pretrain: {pattern}" for pattern in PATTERNS]
    lines = figure.panels[0][1]
    assert [line.label for line in lines] == ["layer 0", "layer 1", "layer 2", "mean of all layers"]
    assert lines[0].x.tolist() == [640, 1280, 1920] and lines[3].y == pytest.approx([1, 2, 3])
    assert {g.name for g in positional_bias._without_middle_steps(groups)} == {"step 10", "step 30"}
