"""RoPE and softmax in float64 NumPy, in the layout of `pe_lab.positional`: pair r is channels r and r + R."""

from __future__ import annotations

import numpy as np
from jaxtyping import Complex, Float, Int

HEAD_DIM, BASE = 64, 1e4  # of the heads in this analysis

Distances = Float[np.ndarray, " T"] | Int[np.ndarray, " T"]


def pairs(x: Float[np.ndarray, "*batch K"]) -> Complex[np.ndarray, "*batch R"]:
    """Every pair of channels as one complex number."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def channels(z: Complex[np.ndarray, "*batch R"]) -> Float[np.ndarray, "*batch K"]:
    """The inverse of `pairs`."""
    return np.concatenate([z.real, z.imag], axis=-1)


def rotated(
    x: Float[np.ndarray, "... K"], inv_freq: Float[np.ndarray, " R"], positions: Distances
) -> Float[np.ndarray, "T K"]:
    """Vectors rotated to their positions: one vector for each position [T, K], or the same for all [K]."""
    return channels(pairs(x) * np.exp(1j * np.multiply.outer(positions, inv_freq)))


def key_for_distance(
    query: Float[np.ndarray, "*batch K"], inv_freq: Float[np.ndarray, " R"], distance: int
) -> Float[np.ndarray, "*batch K"]:
    """The key whose logit with `query` is largest at `distance`: R^r q (proof of Proposition 3.1)."""
    return channels(pairs(query) * np.exp(1j * distance * inv_freq))


def logits_by_distance(
    query: Float[np.ndarray, "*#batch K"],
    key: Float[np.ndarray, "*#batch K"],
    inv_freq: Float[np.ndarray, " R"],
    distances: Distances,
) -> Float[np.ndarray, "*batch T"]:
    """The logit of a query with a key that many positions before it: q^T R^(-r) k, without 1 / sqrt(K)."""
    product = pairs(query) * np.conj(pairs(key))
    return (product @ np.exp(1j * np.multiply.outer(inv_freq, distances))).real


def octave_means(curve: Float[np.ndarray, " T"]) -> Float[np.ndarray, " O"]:
    """Means of a curve over distances 1, 2-3, 4-7, ..; entry 0 of the curve is distance 0, and the last octave full."""
    octaves = int(np.log2(len(curve)))
    return np.array([curve[2**o : 2 ** (o + 1)].mean() for o in range(octaves)])


def softmax(x: Float[np.ndarray, "*batch n"]) -> Float[np.ndarray, "*batch n"]:
    """The softmax over the last axis; entries of -inf have weight 0."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
