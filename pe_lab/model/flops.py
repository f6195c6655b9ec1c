"""What a step costs, from the model's arithmetic: compilers count the body of a scan once, so they are not asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pe_lab.config import ModelConfig
from pe_lab.positional import LayerStructure


class Flops(NamedTuple):
    """Floating-point operations per trained token, under the two conventions people report MFU in.

    `full` counts every query against every key, as PaLM's MFU and MaxText's headline do; `causal` counts the half
    (or window) of them that the mask leaves. Rematerialization counts in neither: these are the model's FLOPs.
    """

    full: float
    causal: float


def train_flops_per_token(
    config: ModelConfig, sequence_length: int, structure: Sequence[LayerStructure] | None = None
) -> Flops:
    """FLOPs per token of a train step: 6 per weight of a matrix product, and attention's two products three times.

    Args:
      config: a completed model config (`model.complete`).
      sequence_length: T of the training windows.
      structure: the layers' windows, for the causal count; None is full attention everywhere.
    """
    D, H, G, K, T = config.d_model, config.heads, config.kv_heads, config.head_dim, sequence_length
    mlp = (3 if config.gated_mlp else 2) * D * config.d_ff
    weights = config.layers * (2 * D * H * K + 2 * D * G * K + mlp) + D * config.vocab_size
    full = causal = 6.0 * weights
    for n in range(config.layers):
        window = structure[n].window if structure else None
        seen = min(window or T, T)
        # Mean number of keys a query sees: the first `seen` queries see 1, 2, ... keys, the others `seen`.
        mean_keys = (seen * (seen + 1) / 2 + (T - seen) * seen) / T
        full += 12.0 * H * K * T
        causal += 12.0 * H * K * mean_keys
    return Flops(full, causal)
