"""A runtime in numpy for the self-test of the audit: float64, and with one fault of the positional encoding if asked.

It shares no line with what it is compared with: it has the formulas of transformers' configs, rotates channels where
they lie, and reads the weights in the layout of their files. So a hypothesis of the audit that finds a fault of this
runtime has another definition of that fault than it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int
from scipy.special import erf

from pe_lab.config import ModelConfig


@dataclass(frozen=True)
class RotaryKeys:
    """The rope parameters of one layer, as a config names them, and how the runtime misunderstands them.

    Attributes:
      theta: the base; 0: this layer is not rotated.
      scaling: default, linear, yarn, llama3, dynamic or longrope.
      rotated: the part of the channels that rotates.
      proportional: its frequencies are the first of the whole head's, and channels i and i + K/2 a pair.
      window: tokens that a query sees; 0: all.
      scaled: how often the frequencies are scaled.
      factored: to which power the attention factor is taken.
      ramp_part: YaRN's ramp is computed for this part of the channels.
      interleaved: channels 2i and 2i + 1 are a pair.
      keys_permuted_by: a converter interleaved the pairs of queries, and those of keys as if they had so many heads;
        0: it did not.
      query_offset: positions that queries stand after the keys of their tokens.
      late_from: positions are one too late from this token on; 0: nowhere.
      rounded_positions, rounded_frequencies: to bfloat16.
    """

    theta: float
    scaling: Literal["default", "linear", "yarn", "llama3", "dynamic", "longrope"] = "default"
    factor: float = 1.0
    original: int = 64
    rotated: float = 1.0
    proportional: bool = False
    window: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    scaled: int = 1
    factored: int = 1
    ramp_part: float = 1.0
    interleaved: bool = False
    keys_permuted_by: int = 0
    query_offset: int = 0
    late_from: int = 0
    rounded_positions: bool = False
    rounded_frequencies: bool = False

    def frequencies(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R"], float]:
        """Radians per position of each rotated pair, and the factor on cos and sin."""
        channels = int(head_dim * self.rotated)
        whole = head_dim if self.proportional else channels
        frequency, gain = 1.0 / self.theta ** (np.arange(0, whole, 2) / whole), 1.0
        for _ in range(self.scaled):
            frequency, gain = self._scaled(frequency, whole, length)
        frequency = frequency[: channels // 2]
        return _bfloat16(frequency) if self.rounded_frequencies else frequency, gain**self.factored

    def _scaled(self, frequency: np.ndarray, dim: int, length: int) -> tuple[np.ndarray, float]:
        if self.scaling == "linear":
            return frequency / self.factor, 1.0
        if self.scaling == "dynamic":
            grown = self.factor * max(length, self.original) / self.original - (self.factor - 1)
            base = self.theta * grown ** (dim / (dim - 2))
            return 1.0 / base ** (np.arange(0, dim, 2) / dim), 1.0
        if self.scaling == "longrope":
            divisors = self.long_factor if length > self.original else self.short_factor
            return frequency / np.array(divisors), math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        if self.scaling == "llama3":
            wavelength, found = 2 * math.pi / frequency, []
            for wave, old in zip(wavelength, frequency, strict=True):
                smooth = (self.original / wave - 1.0) / (4.0 - 1.0)
                found.append(old if smooth > 1 else old / self.factor if smooth < 0 else
                             (1 - smooth) * old / self.factor + smooth * old)  # fmt: skip
            return np.array(found), 1.0
        if self.scaling == "yarn":
            ramp_dim = int(dim * self.ramp_part)
            low, high = (
                ramp_dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
                for rotations in (32, 1)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), ramp_dim - 1)
            kept = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
            return frequency / self.factor * (1 - kept) + frequency * kept, 0.1 * math.log(self.factor) + 1.0
        return frequency, 1.0


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def _rotated(x: Float[np.ndarray, "B T H K"], keys: RotaryKeys, positions: np.ndarray, length: int) -> np.ndarray:
    """Queries or keys of channels as the weights have them, rotated."""
    head_dim = x.shape[-1]
    frequency, gain = keys.frequencies(head_dim, length)
    pairs = len(frequency)
    angle = (_bfloat16(positions) if keys.rounded_positions else positions)[:, None] * frequency
    cos, sin = (f(angle)[:, None] * gain for f in (np.cos, np.sin))
    first = np.arange(pairs)
    second = first + (head_dim // 2 if keys.proportional else pairs)
    if keys.interleaved:
        first, second = 2 * np.arange(pairs), 2 * np.arange(pairs) + 1
    out = x.copy()
    if keys.proportional:  # cos and sin are as wide as the head: unrotated channels have the factor, too
        out = out * gain
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def _interleaved(x: Float[np.ndarray, "B T heads K"], heads: int) -> np.ndarray:
    """Channels in the order of llama.cpp's converter, which divides those of all heads by `heads`."""
    pairs = x.reshape(*x.shape[:2], heads, 2, x.shape[2] * x.shape[3] // heads // 2)
    return np.swapaxes(pairs, 3, 4).reshape(x.shape)


def _norm(x: np.ndarray, weights: Mapping[str, np.ndarray], kind: str, epsilon: float) -> np.ndarray:
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * (weights["scale"] + (kind == "rms_plus_one")) + weights.get("bias", 0.0)


_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def _attention(
    x: np.ndarray, weights: Mapping[str, Any], model: ModelConfig, keys: RotaryKeys, positions: np.ndarray
) -> Float[np.ndarray, "B T D"]:
    q, k, v = (np.einsum("btd,dhk->bthk", x, weights[name]) + weights.get(f"{name}_bias", 0.0) for name in _PROJECTED)
    if model.qk_norm == "head":
        q, k = (_norm(y, weights[f"{name}_norm"], "rms", model.norm_epsilon) for y, name in ((q, "query"), (k, "key")))
    length = int(positions[-1]) + 1
    if keys.late_from:
        positions = positions + (np.arange(len(positions)) >= keys.late_from)
    if keys.keys_permuted_by:
        q, k = _interleaved(q, model.heads), _interleaved(k, keys.keys_permuted_by)
        keys = dataclasses.replace(keys, interleaved=True)
    if keys.theta:
        q = _rotated(q, keys, positions + keys.query_offset, length)
        k = _rotated(k, keys, positions, length)
    k, v = (np.repeat(y, model.heads // model.kv_heads, axis=2) for y in (k, v))
    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    seen = (distance >= 0) & (distance < (keys.window or x.shape[1]))
    score = np.where(seen, np.einsum("bthk,bshk->bhts", q, k) / math.sqrt(model.head_dim), -np.inf)
    score = np.exp(score - score.max(-1, keepdims=True))
    mixed = np.einsum("bhts,bshk->bthk", score / score.sum(-1, keepdims=True), v)
    return np.einsum("bthk,hkd->btd", mixed, weights["out"]) + weights.get("out_bias", 0.0)


_PROJECTED = ("query", "key", "value")


def _mlp(x: np.ndarray, weights: Mapping[str, np.ndarray], model: ModelConfig) -> np.ndarray:
    activation = _ACTIVATIONS[model.activation]
    hidden = x @ weights["up"] + weights.get("up_bias", 0.0)
    if model.gated_mlp:
        hidden = activation(x @ weights["gate"] + weights.get("gate_bias", 0.0)) * hidden
    else:
        hidden = activation(hidden)
    return hidden @ weights["down"] + weights.get("down_bias", 0.0)


def logits(
    model: ModelConfig,
    weights: Mapping[str, Any],
    layers: Sequence[RotaryKeys],
    tokens: Int[np.ndarray, "B T"],
    positions: Int[np.ndarray, " T"],
) -> Float[np.ndarray, "B T V"]:
    """The logits; `weights` is the tree of a model's parameters, with heads' channels in the order of a file."""

    def of_layer(tree: Any, n: int) -> Any:
        return {k: of_layer(v, n) for k, v in tree.items()} if isinstance(tree, Mapping) else tree[n]

    embedder = weights["token_embedder"]
    x = embedder["embedding"][tokens] * (model.embedding_multiplier)
    for n, keys in enumerate(layers):
        layer = of_layer(weights["layers"], n)
        normed = _norm(x, layer["attention_norm"], model.norm, model.norm_epsilon)
        after = x + _attention(normed, layer["attention"], model, keys, positions)
        normed = _norm(x if model.block == "parallel" else after, layer["mlp_norm"], model.norm, model.norm_epsilon)
        x = after + _mlp(normed, layer["mlp"], model)
    x = _norm(x, embedder["final_norm"], model.norm, model.norm_epsilon)
    return x @ embedder.get("unembedding", embedder["embedding"]).T
