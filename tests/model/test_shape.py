"""Runs of layers, and FLOPs against a count of every multiplication of a small model."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pe_lab.config import ModelConfig
from pe_lab.model import Model, train_flops_per_token
from pe_lab.model.shape import Repetition, repetitions
from pe_lab.positional import LayerStructure

stacks = st.one_of(
    st.lists(st.sampled_from("abc"), max_size=24),
    # Repeated patterns between other layers, which random letters rarely produce.
    st.tuples(
        st.lists(st.sampled_from("abc"), max_size=3),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        st.integers(1, 6),
        st.lists(st.sampled_from("abc"), max_size=3),
    ).map(lambda t: t[0] + t[1] * t[2] + t[3]),
).map(tuple)


@given(stacks)
def test_runs_repeated_are_the_stack(stack):
    """The first periods, repeated one after another, are the stack: no layer lost, doubled or moved."""
    repeated = ()
    for repetition in repetitions(stack):
        assert repetition.start == len(repeated) and repetition.period >= 1 and repetition.repeats >= 1
        repeated += stack[repetition.start : repetition.start + repetition.period] * repetition.repeats
    assert repeated == stack


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(2, 8))
def test_a_repeated_pattern_compiles_no_more_than_its_period(pattern, repeats):
    assert sum(repetition.period for repetition in repetitions(tuple(pattern * repeats))) <= len(pattern)


def test_common_patterns():
    assert repetitions("r" * 48) == [Repetition(0, 1, 48)]
    assert repetitions(("w", "w", "w", "f") * 12) == [Repetition(0, 4, 12)]
    assert repetitions("r" * 12 + "n" * 12) == [Repetition(0, 1, 12), Repetition(12, 1, 12)]
    assert repetitions("n") == [Repetition(0, 1, 1)]
    assert repetitions("abc") == [Repetition(0, 1, 1), Repetition(1, 1, 1), Repetition(2, 1, 1)]
    assert repetitions("") == []


CONFIG = ModelConfig(vocab_size=11, layers=2, d_model=12, d_ff=20, heads=4, kv_heads=2, head_dim=6)


def counted(T: int, windows: list[int | None], causal: bool, gated: bool = True) -> float:
    """Multiply-adds of one sequence, product by product; x 2 operations, x 3 with the gradient, per token."""

    def product(rows: int, inner: int, columns: int) -> int:
        return rows * inner * columns

    total = 0
    for window in windows:
        total += product(T, 12, 4 * 6) + 2 * product(T, 12, 2 * 6) + product(T, 4 * 6, 12)  # q, k and v, out
        total += (2 if gated else 1) * product(T, 12, 20) + product(T, 20, 12)  # gate and up, down
        for t in range(T):
            seen = range(T)
            if causal:
                seen = [s for s in range(t + 1) if window is None or t - s < window]
            for _head in range(4):
                total += product(1, 6, len(seen)) + product(1, len(seen), 6)  # q k^T, weights v
    total += product(T, 12, 11)  # logits
    return 2 * 3 * total / T


@pytest.mark.parametrize("T, windows", [(1, [None, None]), (7, [None, None]), (7, [3, None]), (7, [1, 50])])
def test_both_conventions_count_what_the_matrix_products_cost(T, windows):
    structure = [LayerStructure(window=window) for window in windows]
    flops = train_flops_per_token(Model(CONFIG).config, T, structure)
    assert flops.full == pytest.approx(counted(T, windows, causal=False))
    assert flops.causal == pytest.approx(counted(T, windows, causal=True))


def test_a_feed_forward_without_a_gate_has_two_products():
    flops = train_flops_per_token(dataclasses.replace(CONFIG, gated_mlp=False), 7)
    assert flops.full == pytest.approx(counted(7, [None, None], causal=False, gated=False))


def test_without_a_structure_every_layer_sees_everything():
    whole = [LayerStructure()] * 2
    assert train_flops_per_token(CONFIG, 9) == train_flops_per_token(CONFIG, 9, whole)


def test_long_sequences_cost_half_under_the_causal_count():
    """Attention alone, without the part of the weights, which is equal in both counts."""
    T = 4096
    weights = train_flops_per_token(CONFIG, T).full - 2 * 12 * 4 * 6 * T
    flops = train_flops_per_token(CONFIG, T)
    assert (flops.causal - weights) / (flops.full - weights) == pytest.approx(0.5, abs=1e-3)
