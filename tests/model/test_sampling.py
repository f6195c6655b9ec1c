"""Which tokens filters leave, against numpy; how often tokens are drawn; what the draws depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.errors import UserError
from pe_lab.model import Sampling
from pe_lab.model.sampling import choose, remaining

chosen = jax.jit(choose)
left = jax.jit(remaining)


def numpy_remaining(logits, top_k, top_p):
    """By sorting, row by row: the k likeliest, then the shortest prefix that reaches p."""
    kept = np.zeros(logits.shape, bool)
    for row, keep in zip(logits.astype(np.float64), kept, strict=True):
        order = np.argsort(-row)
        order = order[: top_k or None]
        weights = np.exp(row[order] - row.max())
        before = np.cumsum(weights) - weights
        keep[order[(before < top_p * weights.sum()) | (top_p == 1)]] = True
    return kept


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.integers(0, 60), st.floats(0.01, 1.0), st.sampled_from([0.1, 1.0, 30.0]))
def test_filters_leave_what_sorting_leaves(seed, top_k, top_p, spread):
    logits = (spread * np.random.default_rng(seed).standard_normal((3, 50))).astype(np.float32)
    ours = np.asarray(left(logits, np.int32(top_k), np.float32(top_p)))
    expected = numpy_remaining(logits, top_k, np.float32(top_p))
    # At the very edge of p, sums in float32 may fall on either side: one token a row, at most, of no weight there.
    differs = ours != expected
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    total = np.where(expected | ours, weights, 0).sum(-1)
    assert differs.sum(-1).max() <= 1
    for row in np.flatnonzero(differs.any(-1)):
        kept = np.where(ours[row] & expected[row], weights[row], 0).sum()
        goal = top_p * np.where(numpy_remaining(logits, top_k, 1.0), weights, 0).sum(-1)[row]
        assert abs(kept - goal) < 1e-5 * total[row]
    assert ours.any(-1).all()


def test_filters_compose_as_named():
    logits = np.log(np.asarray([[0.4, 0.3, 0.15, 0.1, 0.05]], np.float32))
    cases = {(0, 1.0): 5, (3, 1.0): 3, (0, 0.69): 2, (0, 0.71): 3, (0, 0.3): 1, (1, 0.01): 1, (9, 1.0): 5}
    # Top-p reads what top-k left: 0.4 of 0.7 is 0.57.
    cases |= {(2, 0.57): 1, (2, 0.58): 2}
    for (top_k, top_p), count in cases.items():
        assert left(logits, top_k, top_p).tolist() == [[i < count for i in range(5)]], (top_k, top_p)
    assert left(np.asarray([[1.0, 2.0, 2.0, -0.0, 0.0]], np.float32), 1, 1.0).tolist() == [[0, 1, 1, 0, 0]]  # a tie


def draws(sampling: Sampling, logits, count: int):
    """Token counts over so many positions of one row."""
    rows = jnp.zeros(count, jnp.int32)
    tokens = chosen(jnp.broadcast_to(logits, (count, len(logits))), sampling.arrays(), rows, jnp.arange(count))
    return np.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, seed=1), [0.5, 0.3, 0.2]),
        (Sampling(0.5, seed=2), [25 / 38, 9 / 38, 4 / 38]),  # squares
        (Sampling(1.0, top_k=2, seed=3), [5 / 8, 3 / 8, 0]),
        (Sampling(1.0, top_p=0.7, seed=4), [5 / 8, 3 / 8, 0]),
        # Temperature comes first: at 0.5 the likeliest two hold 0.89, at 1 they hold 0.8.
        (Sampling(0.5, top_p=0.85, seed=5), [25 / 34, 9 / 34, 0]),
        (Sampling(3.0, top_k=1, seed=6), [1, 0, 0]),
        (Sampling(0.0, top_k=2, top_p=0.1, seed=7), [1, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(sampling, expected):
    found = draws(sampling, np.log(np.asarray([0.5, 0.3, 0.2], np.float32)), 20000)
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / 20000))  # four standard deviations
    assert (found[np.asarray(expected) == 0] == 0).all()


def test_a_draw_is_a_function_of_seed_row_and_position():
    logits = np.zeros((4, 1000), np.float32)
    pick = functools.partial(chosen, logits)
    base = pick(Sampling(1.0, seed=5).arrays(), np.arange(4), np.full(4, 9)).tolist()
    assert len(set(base)) == 4
    assert pick(Sampling(1.0, seed=5).arrays(), np.arange(4)[::-1], np.full(4, 9)).tolist() == base[::-1]
    assert pick(Sampling(1.0, seed=6).arrays(), np.arange(4), np.full(4, 9)).tolist() != base
    assert pick(Sampling(1.0, seed=5).arrays(), np.arange(4), np.full(4, 10)).tolist() != base


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": 2**40}, "seed is"),
    ],
)
def test_settings_that_mean_nothing(settings, says):
    with pytest.raises(UserError, match=says):
        Sampling(**settings)
