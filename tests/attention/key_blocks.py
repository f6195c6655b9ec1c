"""Cases of attention to a block of keys, with the expected results in float64 from whole matrices of logits."""

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.attention.key_block import AttentionInputs, Rotation
from pe_lab.positional import alibi_slopes
from pe_lab.positional.rotation import fixed_point_frequencies

# These compile much and compute little, and so they compile in a third of the time.
QUICK = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}  # gone by JAX 0.12

# Any two features occur together: most are rows, columns and wrapped diagonals of a square of features. Where one
# feature replaces another (shared or split rotations), the other two also occur together in a line of their own.
LINES = [
    ("used", "window"), ("slopes", "positions", "segments"), ("shared", "split", "few"),
    ("used", "slopes", "shared"), ("window", "positions", "split"), ("segments", "few"),
    ("used", "positions", "few"), ("window", "segments", "shared"), ("slopes", "split"),
    ("used", "segments", "split"), ("window", "slopes", "few"), ("positions", "shared"),
    ("slopes", "segments"), ("shared", "few"),
]  # fmt: skip
assert len({frozenset(pair) for line in LINES for pair in itertools.combinations(line, 2)}) == 8 * 7 / 2


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


def request(case: Case, garbage: bool = True) -> Request:
    """Arrays of a case; with `garbage`, keys and values beyond `used` are NaN."""
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

    # Queries are rotated, scaled and rounded to the dtype before the kernel.
    q = q if frequencies is None else _rotate(q, at, _per_head(frequencies, H), _per_head(gain, H))
    query = jnp.asarray(q * case.scale * K**-0.5, dtype)
    out, logsumexp = expected(
        np.asarray(query, np.float64), k, v, case, start, used, slope,
        (query_segments, key_segments) if case.segments else None,
        (query_positions, key_positions) if case.positions else None,
        frequencies, gain,
    )  # fmt: skip
    inputs = AttentionInputs(
        start=jnp.asarray(start, jnp.int32) if case.start else None,
        used=jnp.asarray(used, jnp.int32) if case.used else None,
        slope=None if slope is None else jnp.asarray(slope, jnp.float32),
        query_positions=jnp.asarray(query_positions, jnp.int32) if case.positions else None,
        key_positions=jnp.asarray(key_positions, jnp.int32) if case.positions else None,
        query_segments=jnp.asarray(query_segments, jnp.int32) if case.segments else None,
        key_segments=jnp.asarray(key_segments, jnp.int32) if case.segments else None,
        window=case.window,
        chunk=32,
    )
    if frequencies is not None:
        rotation = Rotation(jnp.asarray(fixed_point_frequencies(frequencies)), jnp.float32(gain))
        inputs = dataclasses.replace(inputs, rotation=rotation)
    if garbage:
        gone = (np.arange(S) >= used[:, None])[:, None, :, None]
        k, v = np.where(gone, np.nan, k), np.where(gone, np.nan, v)
    return Request(
        query,
        jnp.asarray(k, dtype),
        jnp.asarray(v, dtype),
        inputs,
        out,
        logsumexp,
    )


def _per_head(rows: np.ndarray, H: int) -> np.ndarray:
    return np.repeat(rows, H // len(rows), axis=0)


def _rotate(x: np.ndarray, at: np.ndarray, frequencies: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """x [B, H, T, K] at positions [B, T], with frequencies and gains [H, R], as complex numbers."""
    R = x.shape[-1] // 2
    z = x[..., :R] + 1j * x[..., R:]
    z = z * gain[:, None] * np.exp(1j * at[:, None, :, None] * frequencies[:, None])
    return np.concatenate([z.real, z.imag], axis=-1)


def expected(q, k, v, case, start, used, slope, segments, positions, frequencies, gain):  # noqa: ANN001, ANN201
    """Output and logsumexp, float64, from whole matrices of logits; queries are rotated and scaled."""
    B, H, T, K = q.shape
    G, S = k.shape[1:3]
    k, v = np.repeat(k, H // G, axis=1), np.repeat(v, H // G, axis=1)
    query_index = start[:, None] + np.arange(T)
    key_index = np.broadcast_to(np.arange(S), (B, S))
    if frequencies is not None:
        k = _rotate(k, key_index, _per_head(frequencies, H), _per_head(gain, H))
    logits = np.einsum("bhtk,bhsk->bhts", q, k)
    distance = query_index[:, :, None] - key_index[:, None, :]
    if slope is not None:
        far = distance if positions is None else positions[0][:, :, None] - positions[1][:, None, :]
        logits = logits - slope[:, None, None] * far[:, None]
    seen = (distance >= 0) & (key_index < used[:, None])[:, None, :]
    if case.window is not None:
        seen &= distance < case.window
    if segments is not None:
        seen &= segments[0][:, :, None] == segments[1][:, None, :]
    seen = np.broadcast_to(seen[:, None], logits.shape)
    some = seen.any(-1)
    highest = np.where(seen, logits, -np.inf).max(-1, initial=-np.inf)
    weights = np.exp(np.where(seen, logits - np.where(some, highest, 0)[..., None], -np.inf))
    total = weights.sum(-1)
    out = np.einsum("bhts,bhsk->bhtk", weights, v) / np.where(some, total, 1)[..., None]
    return out, np.where(some, highest + np.log(np.where(some, total, 1)), -1e30)


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
