"""The bounds and measurements behind the statements of papers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pe_lab.lab.theory import (
    dope,
    drope,
    drope_models,
    notebook,
    p_rope,
)
from pe_lab.lab.theory.p_rope import CASES, attending_sequence, breaking_swaps, first_swap, predicted_distance
from pe_lab.lab.theory.rotary import (
    BASE,
    HEAD_DIM,
    key_for_distance,
    logits_by_distance,
    octave_means,
    rotated,
)
from pe_lab.positional import NoPE, Rope, apply_rope, frequencies
from pe_lab.positional.notebook import NotebookYarn, warped_angles
from pe_lab.positional.rotation import fixed_point_frequencies

INV_FREQ = frequencies(Rope(BASE), HEAD_DIM)[0]

# ---------------------------------------------------------------------------------------------------------------------
# Bounds: random and adversarial inputs, and constants that are 1% off

SEEDS = st.integers(0, 2**32 - 1)
quick = settings(max_examples=60)


@quick
@given(SEEDS, st.floats(0.05, math.pi / 2))
def test_cone_bound(seed, widest):
    band = dope.random_cone(np.random.default_rng(seed), widest)
    assert dope.cone_ratio(band, dope.AXIS) <= dope.SLACK
    assert dope.cone_ratio(dope.two_directions(2 + 2 * (seed % 50), widest), dope.AXIS) <= dope.SLACK


@pytest.mark.parametrize("degrees", [0, 1, 30, 45])
def test_cone_bound_is_tight_up_to_45_degrees(degrees):
    ratio = dope.cone_ratio(dope.two_directions(10, math.radians(degrees)), dope.AXIS)
    assert ratio <= dope.SLACK < 1.01 * ratio
    beyond = dope.cone_ratio(dope.two_directions(10, math.radians(degrees + 46)), dope.AXIS)
    assert 1.01 * beyond < 1


@quick
@given(SEEDS)
def test_bounds_on_scores(seed):
    rng = np.random.default_rng(seed)
    q, k = (dope.random_cone(rng) @ rng.standard_normal((2, 2)) for _ in range(2))
    assert dope.product_ratio(q, k) <= dope.SLACK
    assert dope.mean_ratio(q, k) <= dope.SLACK
    np.testing.assert_allclose(dope.score_norm(q, k), np.linalg.norm(q @ k.T, 2))
    line = rng.uniform(0.1, 1, (2, 5, 1)) * rng.standard_normal((2, 1, 2))
    ratio = dope.product_ratio(*line)
    assert ratio <= 1 + 1e-6 and 1.01 * ratio > dope.SLACK


MATRICES = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(-9, 9).map(float))


@quick
@given(MATRICES.filter(np.any), SEEDS)
def test_entry_bound(matrix, seed):
    assert dope.entry_ratio(matrix) <= dope.SLACK
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (2, 7))
    ratio = dope.entry_ratio(np.multiply.outer(signs[0], signs[1, : 1 + seed % 7]))
    assert ratio <= dope.SLACK < 1.01 * ratio


@quick
@given(arrays(np.float64, (2, 5), elements=st.floats(-50, 50).map(lambda x: round(x, 3))))
def test_lipschitz_constant_of_softmax(ab):
    if np.abs(ab[1]).max() > 0:
        assert drope_models.softmax_change(*ab) <= 1 + 1e-12
    tight = drope_models.softmax_change(*drope_models.tightest_change(1e-3))
    assert tight <= 1 < 1.01 * tight


@quick
@given(SEEDS, st.sampled_from([1e-4, 1e-1, 10.0]))
def test_bounds_by_prefix_spread(seed, deviation):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal(8) + deviation * rng.standard_normal((12, 8))
    hidden *= math.sqrt(8) / np.linalg.norm(hidden, axis=1, keepdims=True)
    projections = rng.standard_normal((3, 8, 4)) * 10 ** rng.uniform(-1, 1, (3, 1, 1))
    assert max(drope_models.spread_ratios(*projections, hidden)) <= drope_models.SLACK


def test_bound_on_logits_is_tight():
    projection, states = drope_models.opposite_states()
    ratio = drope_models.spread_ratios(projection, projection, projection, states).logits
    assert ratio <= drope_models.SLACK < 1.01 * ratio


@quick
@given(st.integers(2, 300), st.floats(1e-6, 0.49), st.sampled_from([1, 4, 32]))
def test_norm_of_positional_heads(tokens, epsilon, count):
    spectrum, distances = INV_FREQ[:count], np.arange(1, tokens)
    norm = p_rope.required_norm_squared(tokens, epsilon, float(p_rope.misalignment(spectrum, distances).min()))
    assert p_rope.peak_weight(spectrum, norm, distances) >= 1 - epsilon * (1 + 1e-6)
    # With one other token the bound is an equality, so that a norm 1% too small is not enough.
    norm = p_rope.required_norm_squared(2, epsilon, float(p_rope.misalignment(spectrum, np.arange(1, 2))[0]))
    assert p_rope.peak_weight(spectrum, 0.99 * norm, np.arange(1, 2)) < 1 - epsilon


@quick
@given(SEEDS, st.integers(2, 12))
def test_entropies(seed, size):
    rng = np.random.default_rng(seed)
    gram = dope.gram(rng.standard_normal((rng.integers(1, 20), size)) * rng.exponential(1, size))
    spectrum = dope.spectrum(gram)
    entropy = dope.entropy(spectrum)
    assert -1e-12 <= entropy <= math.log(size) + 1e-12
    assert spectrum[0] >= math.exp(-entropy) * (1 - 1e-9)
    np.testing.assert_allclose(spectrum, np.linalg.svd(gram)[1] / np.trace(gram), atol=1e-9)
    assert dope.truncated_rank(spectrum, 1) == 1.0
    assert dope.truncated_rank(spectrum, size) == pytest.approx(math.exp(entropy))


def test_entropy_bounds_are_tight():
    assert dope.entropy(np.array([0.5, 0.5])) > 0.99 * math.log(2)
    flat_spectrum = np.full(8, 1 / 8)
    assert flat_spectrum[0] < 1.01 * math.exp(-dope.entropy(flat_spectrum))
    ratios = [p * math.exp(dope.entropy(np.array([p, 1 - p]))) for p in np.linspace(0.5, 0.999, 200)]
    assert 0.99 * dope.BAND_LIMIT < max(ratios) < dope.BAND_LIMIT


# ---------------------------------------------------------------------------------------------------------------------
# RoPE


@quick
@given(SEEDS, st.integers(0, 10_000))
def test_a_key_is_found_at_its_distance(seed, distance):
    query = np.random.default_rng(seed).standard_normal(HEAD_DIM)
    key = key_for_distance(query, INV_FREQ, distance)
    near = distance + np.arange(-20, 21)
    logits = logits_by_distance(query, key, INV_FREQ, near)
    assert logits.argmax() == 20 and logits[20] == pytest.approx(query @ query)


@pytest.mark.slow
def test_logits_are_those_of_pe_labs_rotation():
    rng, at = np.random.default_rng(0), np.array([0, 1, 5, 900])
    q, k = rng.standard_normal((2, HEAD_DIM))
    exact = logits_by_distance(q, k, INV_FREQ, 900 - at)
    keys = apply_rope(jnp.asarray(np.tile(k, (1, 4, 1, 1)).reshape(1, 4, 1, -1), jnp.float32), jnp.asarray(at)[None])
    query = apply_rope(jnp.asarray(q, jnp.float32)[None, None, None], jnp.asarray([[900]]))
    np.testing.assert_allclose(np.asarray(keys[0, :, 0] @ query[0, 0, 0]), exact, atol=2e-4)
    np.testing.assert_allclose(rotated(np.tile(k, (4, 1)), INV_FREQ, at), keys[0, :, 0], atol=1e-5)


def test_a_small_mean_is_noticed():
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4096, 40)) * 8
    limit = p_rope.z_threshold(40)
    assert np.abs(p_rope.z_scores(draws)).max() < limit < np.abs(p_rope.z_scores(draws + 0.015 * 64)).min()
    # An alarm of 40 normal variables: 1 - (1 - p)^40, with p of one.
    assert 40 * math.erfc(limit / math.sqrt(2)) == pytest.approx(p_rope.FALSE_ALARM)


def test_octave_means():
    np.testing.assert_allclose(octave_means(np.arange(9.0)), [1, 2.5, 5.5])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("omega", [1.0, 0.31, 0.07])
def test_swaps_against_trying_all(case, omega):
    sequence = attending_sequence(omega, math.ceil(2 * math.pi / omega) + 9, case)
    assert sequence.attended() and sequence.weight() >= 0.99 - 1e-9
    swaps = breaking_swaps(sequence, case)
    after = sequence.swapped(*swaps)
    assert not after.attended() and after.weight() <= 0.5
    assert swaps[-1][1] - swaps[-1][0] == predicted_distance(sequence, case)
    before_last = sequence.swapped(*swaps[:-1])
    assert before_last.attended()
    first = swaps[-1][0]
    tried = [
        second
        for second in range(first + 1, len(sequence.phase) - 1)
        if second != before_last.target and not before_last.swapped((first, second)).attended()
    ]
    assert first_swap(before_last, first) == (first, tried[0])


def test_no_swap_breaks_a_head_without_encoding():
    sequence = attending_sequence(0.31, 30, "positive")
    same = sequence._replace(omega=1e-12, phase=sequence.phase + np.arange(30) * 0.31)
    np.testing.assert_allclose(same.logits(), sequence.logits(), atol=1e-9)
    assert all(first_swap(same, first) is None for first in range(29))


# ---------------------------------------------------------------------------------------------------------------------
# Positional bias


def test_positional_weights_are_centred():
    """DroPE, Definition 3.1: 1 on the diagonal, -1/(i - 1) otherwise."""
    np.testing.assert_allclose(drope_models.positional_weights(3, "diagonal"), [[0, 0, 0], [-1, 1, 0], [-0.5, -0.5, 1]])
    for pattern in ("diagonal", "previous"):
        c = drope_models.positional_weights(9, pattern)
        np.testing.assert_allclose(c.sum(1), 0, atol=1e-15)
        assert (c[1:].argmax(1) == np.arange(1, 9) - (pattern == "previous")).all() and not np.triu(c, 1).any()


def test_prefix_spread_against_its_definition():
    h = np.random.default_rng(0).standard_normal((11, 3))
    spread = max(np.linalg.norm(h[: i + 1].mean(0) - h[j]) for i in range(11) for j in range(i + 1))
    assert drope_models.prefix_spread(h) == pytest.approx(spread)
    tiny = 5 + 1e-9 * h
    assert drope_models.prefix_spread(tiny) == pytest.approx(1e-9 * spread, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [NoPE(), Rope()])
def test_gradients_of_the_bias_by_the_papers_formula(encoding):
    """Appendix B.3: dA/dW_Q = sum_ij g_ij k_j h_i^T / sqrt(d_k), g_ij = alpha_ij (c_ij - sum_p alpha_ip c_ip) / T."""
    params, c = drope_models.initial_parameters(0), drope_models.patterns()
    embedded = drope_models.embeddings_near_one_vector(3, np.array([0.5]))
    K = drope_models.WIDTH // drope_models.HEADS
    for n, measured in enumerate(drope_models.measured_layers(params, encoding, embedded, c)):
        w_q, w_k = (np.asarray(params["layers"]["attention"][x][n], np.float64) for x in ("query", "key"))
        h, alpha = measured.hidden[0].astype(np.float64), measured.weights[0].astype(np.float64)
        inv_freq, at = frequencies(encoding, K)[0], np.arange(drope_models.LENGTH)
        for head in range(drope_models.HEADS):
            q, k = (rotated(h @ w[:, head], inv_freq, at) for w in (w_q, w_k))
            logits = np.where(np.tri(len(h)), q @ k.T / math.sqrt(K), -np.inf)
            np.testing.assert_allclose(drope_models.softmax(logits), alpha[head], atol=1e-5)
            for i in (0, 2, 5):
                g = alpha[head] * (c[i] - (alpha[head] * c[i]).sum(1, keepdims=True))
                of_query = h.T @ rotated(g @ k, inv_freq, -at) / math.sqrt(K)
                of_key = h.T @ rotated(g.T @ q, inv_freq, -at) / math.sqrt(K)
                assert measured.bias[0, i, head] == pytest.approx((alpha[head] * c[i]).sum(), abs=1e-6)
                assert measured.query_gradient[0, i, head] == pytest.approx(np.linalg.norm(of_query), rel=1e-3)
                assert measured.key_gradient[0, i, head] == pytest.approx(np.linalg.norm(of_key), rel=1e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_a_fitted_exponent_is_the_planted_one(exponent):
    x = np.geomspace(1e-4, 1e-1, 7)
    assert drope_models.slope(x, 3 * x**exponent) == pytest.approx(exponent)


def test_the_papers_formulas_by_hand():
    np.testing.assert_allclose(drope.yarn_formula(np.array([0.5, 1, 16.5, 32, 99]), 4.0), [0.25, 0.25, 0.625, 1, 1])
    np.testing.assert_allclose(drope.ntk_formula(2.0, 0)[[0, 31]], [1, 0.5])


# ---------------------------------------------------------------------------------------------------------------------
# The notebook


def test_the_notebooks_yarn_is_pe_labs():
    scheme, at = NotebookYarn(), np.array([0, 3, 111, 112, 120, 128, 143, 144, 5000])
    fixed = jnp.asarray(fixed_point_frequencies(INV_FREQ))
    angle = np.asarray(warped_angles(fixed, jnp.asarray(at)[None], scheme))[0]
    exact = np.multiply.outer(notebook.warped(at, scheme), INV_FREQ)
    np.testing.assert_allclose(np.exp(1j * angle), np.exp(1j * exact), atol=1e-4)


@quick
@given(SEEDS)
def test_no_rotation_fails_the_notebooks_test_and_others_can(seed):
    rng = np.random.default_rng(seed)
    vector = rng.standard_normal(8)
    assert notebook.scrambled_accuracy(rng, 50, vector) == 1
    for scheme in (Rope(), NotebookYarn()):
        assert notebook.accuracy(scheme, 50, vector) == 1
    assert notebook.accuracy(NoPE(), 50, vector) == 1 / 50


def test_accuracies_of_sampled_queries_are_those_of_all():
    ones = np.ones(HEAD_DIM)
    for scheme in (notebook.SCHEMES["notebook_bias"], Rope()):
        every = notebook.own_position_is_largest(scheme, 700, ones, np.arange(700)).mean()
        assert notebook.accuracy(scheme, 700, ones) == pytest.approx(every)


def test_rope_attends_to_a_distance_everywhere():
    for distance in (0, 1, 17):
        assert notebook.at_distance_accuracy(Rope(), np.array([100, 5000]), distance) == 1
