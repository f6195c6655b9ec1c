"""Cases of attention to a block of keys, with the expected results and gradients in float64 from whole matrices."""

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.attention.key_block import AttentionInputs, KeyBlockGradients, KeyRotation
from pe_lab.positional import alibi_slopes
from pe_lab.positional.rotation import fixed_point_frequencies

# These compile much and compute little, and so they compile in a third of the time.
QUICK = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}  # gone by JAX 0.12
# `JAX_PLATFORMS=cuda pytest tests/attention/test_gpu*.py` compiles the GPU kernels with Triton and runs them.
INTERPRET = jax.default_backend() == "cpu"
interpreter_only = pytest.mark.skipif(not INTERPRET, reason="it looks into the interpreter")

# Any two features occur together: most are rows, columns and wrapped diagonals of a square of features. Where one
# feature replaces another (shared or split rotations), the other two also occur together in a line of their own.
# The biases join one line each of every other feature. Lines without rotations are also those of gradients.
LINES = [
    ("used", "window", "distance bias"), ("slopes", "positions", "segments", "distance bias"),
    ("shared", "split", "few", "distance bias"), ("used", "slopes", "shared", "key bias"),
    ("window", "positions", "split", "key bias"), ("segments", "few", "key bias"),
    ("used", "positions", "few"), ("window", "segments", "shared"), ("slopes", "split"),
    ("used", "segments", "split"), ("window", "slopes", "few"), ("positions", "shared"),
    ("slopes", "segments"), ("shared", "few"), ("distance bias", "key bias"),
]  # fmt: skip
assert len({frozenset(pair) for line in LINES for pair in itertools.combinations(line, 2)}) == 10 * 9 / 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A block of queries, a block of keys, and their features. The defaults are a whole sequence."""

    B: int = 1
    T: int = 16
    S: int = 0  # 0: as many as queries
    H: int = 2
    G: int = 1
    K: int = 32
    dtype: str = "float32"
    start: tuple[int, ...] = ()  # per row of the batch
    used: tuple[int, ...] = ()
    window: int | None = None
    slopes: bool = False
    segments: bool = False
    positions: bool = False  # other than indices, for the slopes
    rotation: str = ""  # shared, grouped, split
    distance_bias: int = 0  # entries of the table; larger distances have the last one
    key_bias: int = 0  # 1: one for all rows of the batch, B: one for each
    soft_cap: float | None = None
    scale: float = 1.3
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        fields = [f.name for f in dataclasses.fields(self)]
        return " ".join(f"{n}={getattr(self, n)}" for n in fields if getattr(self, n) != getattr(default, n))


@dataclasses.dataclass
class Request:
    """A case's arrays for a kernel, and the expected results."""

    query: Any
    key: Any
    value: Any
    inputs: AttentionInputs
    out: np.ndarray
    logsumexp: np.ndarray
    backward: "Backward | None"  # None with rotations: gradients are of rotated keys


@dataclasses.dataclass
class Backward:
    """Arguments of a `KeyBlockGradient` beside those of its forward pass, and the expected gradients in float64."""

    logsumexp: Any
    inner: Any
    d_out: Any
    wanted: KeyBlockGradients


def request(case: Case, garbage: bool = True) -> Request:
    """Arrays of a case; with `garbage`, keys, values and biases of keys beyond `used` are NaN."""
    rng = np.random.default_rng(case.seed + 7 * case.T + case.S)
    B, T, H, G, K = case.B, case.T, case.H, case.G, case.K
    S = case.S or T
    dtype = jnp.dtype(case.dtype)
    rounded = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)  # noqa: E731
    q, k, v = rounded(B, H, T, K), rounded(B, G, S, K), rounded(B, G, S, K)
    start = np.asarray(case.start or (0,) * B)
    used = np.asarray(case.used or (S,) * B)
    slope = alibi_slopes(H) if case.slopes else None
    key_segments = np.sort(rng.integers(0, 4, (B, S)), axis=1)
    at = start[:, None] + np.arange(T)
    query_segments = np.take_along_axis(key_segments, np.clip(at, 0, S - 1), axis=1)
    key_positions = np.sort(rng.integers(0, 5 * S, (B, S)), axis=1)
    query_positions = np.take_along_axis(key_positions, np.clip(at, 0, S - 1), axis=1) + 2
    frequencies = gain = None
    if case.rotation:
        rows = {"shared": 1, "grouped": G, "split": H}[case.rotation]
        frequencies = 10000.0 ** -np.sort(rng.uniform(0, 1, (rows, K // 2)), axis=1)
        frequencies[0, K // 3 :] = 0  # a pair that does not rotate
        gain = rng.uniform(0.5, 1.5, (rows, K // 2))

    distance_bias = rng.standard_normal((H, case.distance_bias)).astype(np.float32) if case.distance_bias else None
    key_bias = rng.standard_normal((case.key_bias, H, S)).astype(np.float32) if case.key_bias else None

    # Queries are rotated, scaled and rounded to the dtype before the kernel.
    q = q if frequencies is None else _rotate(q, at, _per_head(frequencies, H), _per_head(gain, H))
    query = jnp.asarray(q * case.scale * K**-0.5, dtype)
    q = np.asarray(query, np.float64)
    p, logsumexp, distance, far = weights(
        q, k, case, start, used, slope,
        (query_segments, key_segments) if case.segments else None,
        (query_positions, key_positions) if case.positions else None,
        frequencies, gain, distance_bias, key_bias,
    )  # fmt: skip
    out = np.einsum("bhts,bhsk->bhtk", p, np.repeat(v, H // G, axis=1))
    backward = None
    if frequencies is None:
        d_out, d_logsumexp = rounded(B, H, T, K), rng.standard_normal((B, H, T))
        inner = (d_out * out).sum(-1) - d_logsumexp
        backward = Backward(
            jnp.float32(logsumexp),
            jnp.float32(inner),
            jnp.asarray(d_out, dtype),
            gradients(case, q, k, v, p, inner, d_out, distance, far),
        )
    inputs = AttentionInputs(
        start=jnp.asarray(start, jnp.int32) if case.start else None,
        used=jnp.asarray(used, jnp.int32) if case.used else None,
        slope=None if slope is None else jnp.asarray(slope, jnp.float32),
        query_positions=jnp.asarray(query_positions, jnp.int32) if case.positions else None,
        key_positions=jnp.asarray(key_positions, jnp.int32) if case.positions else None,
        query_segments=jnp.asarray(query_segments, jnp.int32) if case.segments else None,
        key_segments=jnp.asarray(key_segments, jnp.int32) if case.segments else None,
        distance_bias=None if distance_bias is None else jnp.asarray(distance_bias),
        key_bias=None if key_bias is None else jnp.asarray(key_bias),
        window=case.window,
        soft_cap=case.soft_cap,
        chunk=32,
    )
    if frequencies is not None:
        rotation = KeyRotation(jnp.asarray(fixed_point_frequencies(frequencies)), jnp.float32(gain))
        inputs = dataclasses.replace(inputs, rotation=rotation)
    if garbage:
        gone = (np.arange(S) >= used[:, None])[:, None, :, None]
        k, v = np.where(gone, np.nan, k), np.where(gone, np.nan, v)
        if key_bias is not None:
            of_all = gone if case.key_bias == B else gone.all(0, keepdims=True)
            bias = jnp.asarray(np.where(of_all[..., 0], np.nan, key_bias), jnp.float32)
            inputs = dataclasses.replace(inputs, key_bias=bias)
    return Request(
        query,
        jnp.asarray(k, dtype),
        jnp.asarray(v, dtype),
        inputs,
        out,
        logsumexp,
        backward,
    )


def _per_head(rows: np.ndarray, H: int) -> np.ndarray:
    return np.repeat(rows, H // len(rows), axis=0)


def _rotate(x: np.ndarray, at: np.ndarray, frequencies: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """x [B, H, T, K] at positions [B, T], with frequencies and gains [H, R], as complex numbers."""
    R = x.shape[-1] // 2
    z = x[..., :R] + 1j * x[..., R:]
    z = z * gain[:, None] * np.exp(1j * at[:, None, :, None] * frequencies[:, None])
    return np.concatenate([z.real, z.imag], axis=-1)


def weights(q, k, case, start, used, slope, segments, positions, frequencies, gain, distance_bias, key_bias):  # noqa: ANN001, ANN201
    """Weights and logsumexp, float64, from whole matrices of logits; queries are rotated and scaled.

    Also the distance of indices and that of slopes, [B, T, S].
    """
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    k = np.repeat(k, H // G, axis=1)
    query_index = start[:, None] + np.arange(T)
    key_index = np.broadcast_to(np.arange(S), (B, S))
    if frequencies is not None:
        k = _rotate(k, key_index, _per_head(frequencies, H), _per_head(gain, H))
    logits = np.einsum("bhtk,bhsk->bhts", q, k)
    if case.soft_cap is not None:
        logits = case.soft_cap * np.tanh(logits / case.soft_cap)
    distance = query_index[:, :, None] - key_index[:, None, :]
    far = distance if positions is None else positions[0][:, :, None] - positions[1][:, None, :]
    if slope is not None:
        logits = logits - slope[:, None, None] * far[:, None]
    if distance_bias is not None:
        logits = logits + distance_bias[:, _entry(distance, distance_bias.shape[1])].swapaxes(0, 1)
    if key_bias is not None:
        logits = logits + key_bias[:, :, None, :]
    seen = (distance >= 0) & (key_index < used[:, None])[:, None, :]
    if case.window is not None:
        seen &= distance < case.window
    if segments is not None:
        seen &= segments[0][:, :, None] == segments[1][:, None, :]
    seen = np.broadcast_to(seen[:, None], logits.shape)
    some = seen.any(-1)
    highest = np.where(seen, logits, -np.inf).max(-1, initial=-np.inf)
    unscaled = np.exp(np.where(seen, logits - np.where(some, highest, 0)[..., None], -np.inf))
    total = np.where(some, unscaled.sum(-1), 1)
    return unscaled / total[..., None], np.where(some, highest + np.log(total), -1e30), distance, far


def _entry(distance: np.ndarray, entries: int) -> np.ndarray:
    """Which entry of a table of biases a distance has. Keys at distances below 0 are not visible."""
    return np.clip(distance, 0, entries - 1)


def gradients(case, q, k, v, p, inner, d_out, distance, far) -> KeyBlockGradients:  # noqa: ANN001
    """Float64 gradients from the weights p [B, H, T, S]."""
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    k, v = np.repeat(k, H // G, axis=1), np.repeat(v, H // G, axis=1)
    of_groups = lambda x: x.reshape(B, G, H // G, S, K).sum(2)  # noqa: E731
    d_logits = p * (np.einsum("bhtk,bhsk->bhts", d_out, v) - inner[..., None])
    d_product = d_logits
    if case.soft_cap is not None:
        d_product = d_logits * (1 - np.tanh(np.einsum("bhtk,bhsk->bhts", q, k) / case.soft_cap) ** 2)
    d_distance_bias = d_key_bias = None
    if case.distance_bias:
        entry = _entry(distance, case.distance_bias)
        d_distance_bias = np.zeros((H, case.distance_bias))
        for h in range(H):
            np.add.at(d_distance_bias[h], entry, d_logits[:, h])
    if case.key_bias:
        d_key_bias = d_logits.sum(2)
        d_key_bias = d_key_bias if case.key_bias == B else d_key_bias.sum(0, keepdims=True)
    return KeyBlockGradients(
        query=np.einsum("bhts,bhsk->bhtk", d_product, k),
        key=of_groups(np.einsum("bhts,bhtk->bhsk", d_product, q)),
        value=of_groups(np.einsum("bhts,bhtk->bhsk", p, d_out)),
        slope=-(d_logits * far[:, None]).sum((0, 2, 3)) if case.slopes else None,
        distance_bias=d_distance_bias,
        key_bias=d_key_bias,
    )


def error(found: Any, wanted: np.ndarray) -> float:
    """Relative error in the Frobenius norm."""
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all(), "not finite"
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


def an_h100():
    """A context for lowering to an H100. JAX before 0.12 needs none."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    try:
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    except TypeError:
        return contextlib.nullcontext()
