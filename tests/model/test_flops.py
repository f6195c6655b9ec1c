"""FLOPs against a count of every multiplication of a small model, done one product at a time."""

import dataclasses

import pytest

from pe_lab.config import ModelConfig
from pe_lab.model import Model, train_flops_per_token
from pe_lab.positional import LayerStructure

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
    """Of attention alone: what is left when the weights' part, equal in both, is taken off."""
    T = 4096
    weights = train_flops_per_token(CONFIG, T).full - 2 * 12 * 4 * 6 * T
    flops = train_flops_per_token(CONFIG, T)
    assert (flops.causal - weights) / (flops.full - weights) == pytest.approx(0.5, abs=1e-3)
