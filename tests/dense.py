"""A tiny model whose layers have six encodings, and the logits and weights of its layers in float64, all [T, T]."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np

from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.store import metadata_of
from pe_lab.config import ModelConfig
from pe_lab.language_model import LanguageModel
from pe_lab.model import Model
from pe_lab.positional import Alibi, HeadEdit, Layer, NoPE, PartialRope, Rope, Yarn, alibi_slopes, frequencies

H, G, K = 4, 2, 8
CONFIG = ModelConfig(
    vocab_size=64, layers=6, d_model=32, d_ff=48, heads=H, kv_heads=G, head_dim=K, dtype="float32", attention_chunk=32
)
LAYERS = (
    Layer(Rope(100.0)),
    Layer(PartialRope(100.0, 0.5)),
    Layer(NoPE(), window=40),
    Layer(Alibi(), logit_scale=1.5),
    Layer(Rope(100.0, scaling=Yarn(4.0, 64))),
    Layer(Rope(100.0), heads=(HeadEdit((1,), NoPE()),)),
)


@functools.cache
def language_model(layers: tuple[Layer, ...] = LAYERS, seed: int = 0, training_length: int = 64) -> LanguageModel:
    """Weights larger than an initialization's, so that attention is peaked and heads differ."""
    config = dataclasses.replace(CONFIG, layers=len(layers))
    params = jax.tree.map(lambda a: 8 * a if a.ndim > 2 else a, Model(config).init(jax.random.key(seed)))
    metadata = metadata_of(
        Model(config).config, layers, id=f"dense-{seed}", run="dense", phase="pretrain", step=1, tokens=64,
        training_length=training_length, lineage=[{"id": f"dense-{seed}", "step": 1, "what": "initialized"}],
    )  # fmt: skip
    return LanguageModel(Checkpoint(Path(f"dense-{seed}"), 1, params, Model(config).config, layers, metadata), layers)


def tokens(length: int, batch: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, length)).astype(np.int32)


def packed(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions of two sequences of three documents each."""
    cuts = np.array([[length // 4, length // 2], [length // 3, 2 * length // 3]])
    index = np.arange(length)
    segments = 1 + (index >= cuts[:, :1]) + (index >= cuts[:, 1:])
    begins = np.where(segments == 1, 0, np.where(segments == 2, cuts[:, :1], cuts[:, 1:]))
    return segments.astype(np.int32), (index - begins).astype(np.int32)


def rotated(x: np.ndarray, layer: Layer, positions: np.ndarray) -> np.ndarray:
    """[B, T, H, K] in float64, each head by its own encoding."""
    x = np.asarray(x, np.float64).copy()
    for h in range(x.shape[2]):
        encoding = next((edit.to for edit in layer.heads if h in edit.heads), layer.encoding)
        inv_freq, gain = frequencies(encoding, K)
        z = x[:, :, h, : K // 2] + 1j * x[:, :, h, K // 2 :]
        z = z * gain * np.exp(1j * positions[..., None] * inv_freq)
        x[:, :, h] = np.concatenate([z.real, z.imag], -1)
    return x


def logits(q: np.ndarray, k: np.ndarray, layer: Layer, positions: np.ndarray) -> np.ndarray:
    """[B, H, T, T] in float64, without a mask and without ALiBi's penalty, scaled."""
    k = np.repeat(k, H // G, axis=2)
    return np.einsum("bthk,bshk->bhts", rotated(q, layer, positions), rotated(k, layer, positions)) * scale(layer)


def scale(layer: Layer) -> float:
    return layer.logit_scale / K**0.5


def weights(q: np.ndarray, k: np.ndarray, layer: Layer, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """[B, H, T, T] in float64."""
    found = logits(q, k, layer, positions)
    if isinstance(layer.encoding, Alibi):
        found = found - alibi_slopes(H)[:, None, None] * (positions[:, None, :, None] - positions[:, None, None, :])
    T = found.shape[-1]
    distance = np.subtract.outer(np.arange(T), np.arange(T))
    seen = (distance >= 0) & (distance < (layer.window or T)) & (segments[:, :, None] == segments[:, None, :])
    found = np.where(seen[:, None], np.exp(found - np.where(seen[:, None], found, -np.inf).max(-1, keepdims=True)), 0)
    return found / found.sum(-1, keepdims=True)
