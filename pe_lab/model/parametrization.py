"""The maximal update parametrization (muP): initial weights and rates that keep activations alike over widths.

Yang & Hu et al. 2022, "Tensor Programs V" (arXiv:2203.03466), Table 8 for Adam, and Definition 4.1 for attention. With
m = d_model / mup_base_width, and all widths (d_ff, heads x head_dim) growing with d_model:

| parameters | initial deviation | output multiplied by | Adam's rate |
|---|---|---|---|
| embedding, norms, biases | init_std | 1 | 1 |
| matrices of the layers | init_std / sqrt(m) | 1 | 1 / m |
| output embedding, also a tied one | init_std | 1 / m | 1 |
| queries, where head_dim grows from mup_base_head_dim | | sqrt(mup_base_head_dim / head_dim) | |

At m = 1 it is the usual parametrization. The model is an ordinary one, and what it computes has no new factor: a
multiplier is part of the initial scale of the norm before it, which is trained as if it were outside (`folded`). The
weight decay of a step is that of the base width, as in the authors' package. The spectral norm of Muon's updates stays
in proportion to sqrt(outputs / inputs) (Yang, Simon & Bernstein 2023, arXiv:2310.17813).
"""

from __future__ import annotations

import math
from typing import Any

from pe_lab.config import ModelConfig
from pe_lab.errors import ConfigError


def check(config: ModelConfig) -> None:
    """`ConfigError` for a model that has no such parametrization; `config` has its head_dim."""
    if config.mup_base_head_dim and not config.mup_base_width:
        raise ConfigError("model.mup_base_head_dim is a key of muP: set model.mup_base_width too.")
    if not config.mup_base_width:
        return
    for key in ("per_layer_input", "layer_shapes"):
        if getattr(config, key):
            raise ConfigError(f"model.mup_base_width does not go with model.{key}. Leave one of them out.")


def width_ratio(config: ModelConfig) -> float:
    """m, how many times as wide as the base the model is; 1 without muP."""
    return config.d_model / config.mup_base_width if config.mup_base_width else 1.0


def hidden_std(config: ModelConfig) -> float:
    """The initial standard deviation of matrices of the layers."""
    return config.init_std / math.sqrt(width_ratio(config))


def logit_factor(config: ModelConfig) -> float:
    """What the final norm's scale starts with: the multiplier of the output embedding."""
    return 1 / width_ratio(config)


def query_factor(config: ModelConfig) -> float:
    """What queries start with, as a factor on their norm's scale or else on their weights."""
    return math.sqrt(config.mup_base_head_dim / config.head_dim) if config.mup_base_head_dim else 1.0


def folded(path: tuple[Any, ...], config: ModelConfig) -> float:
    """The multiplier c of a parameter p = c w that holds it; w is trained, with the gradient c dL/dp."""
    names = [str(getattr(key, "key", key)) for key in path]
    if "final_norm" in names:
        return logit_factor(config)
    query = ("query_norm",) if config.qk_norm != "none" else ("query", "query_bias")
    return query_factor(config) if names[0] == "layers" and any(name in query for name in names) else 1.0
