"""The cases of `attention.py`, equal for pe_lab and the peer: arrays, expected results, and FLOPs.

Imports NumPy alone, for the peer's Python may have nothing else of ours.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # for `error`
WINDOW, DOCUMENTS, SOFT_CAP = 1024, 8, 50.0


class Case(NamedTuple):
    """B texts of S tokens, whose last T are queries; H heads of K channels that share G key heads."""

    B: int
    T: int
    S: int
    H: int
    G: int
    K: int
    dtype: str

    def __str__(self) -> str:
        queries = "" if self.T == self.S else f"{self.T} of "
        return f"{self.B} x {queries}{self.S:,} tokens, {self.H}/{self.G} heads of {self.K}, {self.dtype}"

    @property
    def flops(self) -> float:
        """Two products of 2 T S K a head; half of them, as causality leaves of a whole text."""
        return 4.0 * self.B * self.H * self.T * self.S * self.K / (2 if self.T == self.S else 1)

    @property
    def cache_bytes(self) -> int:
        """Keys and values, each read once."""
        return 2 * self.B * self.S * self.G * self.K * {"float32": 4, "bfloat16": 2}[self.dtype]


def arrays(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal queries [B, T, H, K], keys and values [B, S, G, K], float32; a case's are always the same ones."""
    rng = np.random.default_rng(zlib.crc32(repr(tuple(case)).encode()))
    B, T, S, H, G, K, _ = case
    return tuple(rng.standard_normal(shape, np.float32) for shape in ((B, T, H, K), (B, S, G, K), (B, S, G, K)))


def chosen_rows(case: Case, most: int = 16) -> list[int]:
    """Queries to look at: all of a few short texts; else the first, the last and some between."""
    if case.B * case.T <= 2048:
        return list(range(case.T))
    between = np.random.default_rng(0).integers(0, case.T, most - 4)
    return sorted({0, 1, case.T // 2, case.T - 1, *map(int, between)})


def bias_table(case: Case, size: int) -> np.ndarray:
    """[H, size] biases that fall slowly with the distance, another curve for each head; float32."""
    rng = np.random.default_rng(size)
    fall = np.log1p(np.arange(size)) * np.linspace(0.1, 0.5, case.H)[:, None]
    return (0.3 * rng.standard_normal((case.H, size)) - fall).astype(np.float32)


def beside(feature: str, case: Case) -> dict[str, np.ndarray]:
    """What a feature of `attention_features.FEATURES` has beside queries, keys and values.

    `segments` [B, T]: the document of each token; `slope` [H]; `distance_bias` [H, n], whose last entry is also that of
    larger distances; `key_bias` [1, H, T]; `sink` [H].
    """
    rng = np.random.default_rng(case.T)
    if feature == f"{DOCUMENTS} documents":
        cuts = np.sort(rng.integers(1, case.T, (case.B, DOCUMENTS - 1)), axis=1)
        return {"segments": (np.arange(case.T)[None, :, None] >= cuts[:, None]).sum(-1).astype(np.int32)}
    if feature == "ALiBi":
        return {"slope": (2.0 ** (-8 * np.arange(1, case.H + 1) / case.H)).astype(np.float32)}
    if feature == "a bias for every distance":
        return {"distance_bias": bias_table(case, case.T)}
    if feature == "a bias for 128 distances":
        return {"distance_bias": bias_table(case, 128)}
    if feature == "a bias of keys":
        return {"key_bias": rng.standard_normal((1, case.H, case.T), np.float32)}
    return {"sink": rng.standard_normal(case.H, np.float32)} if feature == "a sink" else {}


def head_frequencies(H: int, K: int) -> np.ndarray:
    """[H, K / 2] radians a position, other ones for every head: RoPE's, slowed down from head to head."""
    return 10000.0 ** (-np.arange(K // 2) / (K // 2)) / np.linspace(1, 2, H)[:, None]


def _turned(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """x [n, K] at n positions, pairs being K / 2 apart, as complex numbers."""
    R = x.shape[-1] // 2
    z = (x[:, :R] + 1j * x[:, R:]) * np.exp(1j * positions[:, None] * frequencies)
    return np.concatenate([z.real, z.imag], -1)


def reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    rows: Sequence[int],
    slope: np.ndarray | None = None,
    frequencies: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of some queries, a head at a time, in float64: [B, rows, H, K]."""
    B, T, H, K = query.shape
    S, G = key.shape[1:3]
    out = np.empty((B, len(rows), H, K))
    at, positions = np.asarray(rows) + S - T, np.arange(S)
    distance = at[:, None] - positions
    for b, h in np.ndindex(B, H):
        q, k, v = (x.astype(np.float64) for x in (query[b, rows, h], key[b, :, h * G // H], value[b, :, h * G // H]))
        if frequencies is not None:
            q, k = _turned(q, at, frequencies[h]), _turned(k, positions, frequencies[h])
        logits = q @ k.T * K**-0.5
        if slope is not None:
            logits -= float(slope[h]) * distance
        logits = np.where(distance >= 0, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[b, :, h] = weights @ v / weights.sum(-1, keepdims=True)
    return out


def error(found: np.ndarray, right: np.ndarray) -> float:
    """The worst query: the root mean square, over heads and channels, of what is off, over that of what is right."""
    found, right = np.asarray(found, np.float64), np.asarray(right, np.float64)
    if found.shape != right.shape or not np.isfinite(found).all():
        return float("inf")
    off = np.sqrt(((found - right) ** 2).mean((-2, -1)))
    return float((off / np.sqrt((right**2).mean((-2, -1)))).max())
