"""The loaded model from inside: attention weights, hidden states, queries, keys and values, heads of their own."""

from __future__ import annotations

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import LAYERS

from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.model.decoder import layer_arrays
from pe_lab.positional import Bands, HeadEdit, NoPE, Rope, Uniform

T = 33
TOKENS = dense.tokens(T)


@pytest.fixture(scope="module")
def lm():
    return dense.language_model()


@pytest.mark.slow
def test_attention_weights_are_those_of_float64(lm):
    q, k, _ = lm.queries_keys_values(TOKENS)
    positions, segments = np.broadcast_to(np.arange(T), (2, T)), np.ones((2, T), int)
    found = lm.attention_weights(TOKENS)
    assert found.shape == (6, 2, 4, T, T) and found.dtype == np.float32
    for n, layer in enumerate(LAYERS):
        expected = dense.weights(q[n], k[n], layer, positions, segments)
        np.testing.assert_allclose(found[n], expected, atol=2e-5)
    some = lm.attention_weights(TOKENS, layers=[4, 1], heads=[3, 0], queries=[-1, 5])
    np.testing.assert_allclose(some, found[[1, 4]][:, :, [3, 0]][..., [T - 1, 5], :], atol=1e-6)
    one = lm.attention_weights(TOKENS[0], layers=[0])
    np.testing.assert_allclose(one, found[:1, :1], atol=1e-6)


@pytest.mark.slow
def test_hidden_states_are_the_inputs_of_layers(lm):
    """The last layer and the head, applied to its input by hand, are the model's logits."""
    hidden = lm.hidden_states(TOKENS)
    assert hidden.shape == (6, 2, T, 32)
    params = lm.checkpoint.params
    embedded = np.asarray(params["token_embedder"]["embedding"])[TOKENS]
    np.testing.assert_allclose(hidden[0], embedded, atol=1e-6)
    model, n = Model(lm.config), len(LAYERS) - 1
    arrays = tuple(a[n] for a in layer_arrays(jax.tree.map(jnp.asarray, lm.schedule)))
    encoding = model.layer_encoding(arrays, lm.schedule.structure[n], jnp.arange(T)[None])
    block = model.block(jax.tree.map(lambda a: a[n], params["layers"]))
    x, _, _ = block(jnp.asarray(hidden[n]), encoding, None, None, None, False)
    logits = model.logits(params, model.output(params, x))
    np.testing.assert_allclose(logits, lm.logits(TOKENS), atol=2e-4)
    np.testing.assert_array_equal(lm.hidden_states(TOKENS, layers=[3, 1]), hidden[[1, 3]])


@pytest.mark.slow
def test_queries_keys_and_values_with_and_without_their_encoding(lm):
    plain, rotated = lm.queries_keys_values(TOKENS), lm.queries_keys_values(TOKENS, rotated=True)
    assert plain.query.shape == (6, 2, T, 4, 8) and plain.key.shape == plain.value.shape == (6, 2, T, 2, 8)
    assert rotated.key.shape == (6, 2, T, 4, 8)  # the heads of a group differ in the last layer
    positions = np.broadcast_to(np.arange(T), (2, T))
    for n, layer in enumerate(LAYERS):
        np.testing.assert_allclose(rotated.query[n], dense.rotated(plain.query[n], layer, positions), atol=2e-5)
        repeated = np.repeat(plain.key[n], 2, axis=2)
        np.testing.assert_allclose(rotated.key[n], dense.rotated(repeated, layer, positions), atol=2e-5)
    np.testing.assert_allclose(plain.value, rotated.value, atol=1e-5)


@pytest.mark.slow
def test_heads_can_have_encodings_of_their_own(lm):
    edited = lm.with_heads(0, [2, 3], "nope")
    assert edited.layers[0].heads == (HeadEdit((2, 3), NoPE()),) and edited.layers[1:] == lm.layers[1:]
    assert edited.checkpoint.params is lm.checkpoint.params
    before, after = (one.attention_weights(TOKENS, layers=[0]) for one in (lm, edited))
    changed = np.abs(after - before).max((0, 1, 3, 4))
    assert (changed[:2] < 1e-5).all() and (changed[2:] > 1e-2).all()
    twice = edited.with_heads(0, [0], Uniform())
    assert [edit.heads for edit in twice.layers[0].heads] == [(2, 3), (0,)]
    uniform = twice.attention_weights(TOKENS, layers=[0], heads=[0], queries=[9])[0, :, 0, 0]
    np.testing.assert_allclose(uniform[:, :10], 0.1, atol=1e-6)
    assert twice.with_heads(1, [1], Rope(50.0)).with_heads(2, [0], Bands(0.1)).layers[2].heads[0].to == Bands(0.1)
    assert lm.with_heads(0, [1], "uniform").layers[0].heads[0].to == Uniform()


@pytest.mark.slow
def test_random_weights_have_the_shape_and_are_those_of_the_seed(lm):
    one, same, other = lm.initialized(3), lm.initialized(3), lm.initialized(4)
    assert one.layers == lm.layers and one.checkpoint.step == 0
    assert one.checkpoint.metadata["id"] != lm.checkpoint.metadata["id"]
    expected = jax.jit(Model(lm.config).init)(jax.random.key(3))
    for a, b, c in zip(*map(jax.tree.leaves, (one.checkpoint.params, same.checkpoint.params, expected)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    embeddings = (x.checkpoint.params["token_embedder"]["embedding"] for x in (one, other))
    assert not np.array_equal(*embeddings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.attention_weights(TOKENS, heads=[4]), "There is no query head 4; the model has 4"),
        (lambda lm: lm.attention_weights(TOKENS, queries=[T]), "queries: there is no token 33"),
        (lambda lm: lm.attention_weights(TOKENS, queries=[-T - 1]), "queries: there is no token -1"),
        (lambda lm: lm.hidden_states(TOKENS, layers=[6]), "There is no layer 6 to measure; the model has 6"),
        (lambda lm: lm.hidden_states("text"), "came without a tokenizer"),
        (lambda lm: lm.with_heads(6, [0], "nope"), "There is no layer 6; the model has 6, counted from 0"),
        (lambda lm: lm.with_heads(0, [4], "nope"), "There is no query head 4; the model has 4"),
        (lambda lm: lm.with_heads(0, [0], "nop"), "nop"),
    ],
)
def test_what_is_not_there_is_an_error(lm, call, message):
    with pytest.raises(UserError, match=message):
        call(lm)
