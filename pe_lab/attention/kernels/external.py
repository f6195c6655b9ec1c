"""Attention by other people's kernels, where they can honour a request: splash (TPU), cuDNN and tokamax (GPU).

Each takes what `reference_attention` takes, and gives what it gives. What a library cannot honour never gets here: the
dispatcher asks the tables below first.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.attention.capabilities import Capabilities
from pe_lab.errors import UserError

BLOCK = 512  # queries, and keys, whose logits splash computes at once
# Splash keeps 3 bytes for each pair of a query block and a key block that it may see, all pairs at once, in a TPU
# core's scalar memory of 1 MiB.
SCALAR_MEMORY, BYTES_OF_PAIR = 2**20, 3

SPLASH = Capabilities(
    honours=frozenset({"segments", "windows", "soft cap"}),
    dtypes=("bfloat16", "float32"),
    head_dims=lambda K: K <= 256,
    head_dims_text="at most 256",
    backward=True,
    platforms=("tpu",),
    longest=2**19,
)
# Segments could only be a bias, [T, T]: packing by offsets and score functions are not part of `jax.nn`, and cuDNN's
# lengths are of padding. Heads of 136 to 256 channels have a backward pass on Hopper alone.
CUDNN = Capabilities(
    honours=frozenset({"windows"}),
    dtypes=("bfloat16", "float16"),
    head_dims=lambda K: K <= 128 and K % 8 == 0,
    head_dims_text="multiples of 8 up to 128",
    backward=True,
    platforms=("gpu",),
    needs="compute capability 8.0 and cuDNN 9",
)
# By its Mosaic kernels. On TPUs tokamax runs a fork of splash that takes neither segments nor windows. What 0.0.12
# calls in Pallas is gone from JAX 0.12.
TOKAMAX = Capabilities(
    honours=frozenset({"windows", "soft cap"}),
    dtypes=("bfloat16", "float16"),
    head_dims=lambda K: K <= 128,
    head_dims_text="at most 128",
    backward=True,
    platforms=("gpu",),
    needs="compute capability 9.0 or 10.x (8.x will do without windows and soft caps), and for JAX 0.12 a tokamax "
    "later than 0.0.12",
)


def splash_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    scale: Float[Array, ""],
    *,
    slope: Float[Array, " H"] | None,
    positions: Int[Array, "#B T"] | None,
    segments: Int[Array, "B T"] | None,
    window: int | None,
    diagonal_bias: Float[Array, "#B T"] | None = None,
    soft_cap: float | None = None,
    chunk: int = 512,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """JAX's splash attention for TPUs. It cuts blocks of its own; `interpret` runs it anywhere, slowly."""
    _check("splash", SPLASH, slope, segments, window, diagonal_bias, soft_cap)
    H, T = query.shape[2], query.shape[1]
    window = None if window is None or window >= T else window
    blocks = splash_blocks(T)
    pairs = blocks.count * min(blocks.count, 2 + (window or T) // blocks.size)
    if pairs * BYTES_OF_PAIR > SCALAR_MEMORY:
        raise NotImplementedError(f"splash attention: {T} tokens make {pairs} pairs of blocks, more than a TPU holds.")
    kernel = jax.vmap(_splash_kernel(blocks, H, window, soft_cap, interpret))
    length = blocks.count * blocks.size
    q, k, v = (_padded(x, 1, length).transpose(0, 2, 1, 3) for x in (_scaled(query, scale), key, value))
    if segments is None:
        out = kernel(q, k, v)  # padded keys are later than all queries
    else:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        ids = _padded(segments.astype(jnp.int32), 1, length)
        out = kernel(q, k, v, SegmentIds(ids, ids))
    return out.transpose(0, 2, 1, 3)[:, :T]


def cudnn_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    scale: Float[Array, ""],
    *,
    slope: Float[Array, " H"] | None,
    positions: Int[Array, "#B T"] | None,
    segments: Int[Array, "B T"] | None,
    window: int | None,
    diagonal_bias: Float[Array, "#B T"] | None = None,
    soft_cap: float | None = None,
    chunk: int = 512,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T H K"]:
    """cuDNN's flash attention, by `jax.nn`; "xla" computes the same from the same arguments anywhere."""
    _check("cuDNN", CUDNN, slope, segments, window, diagonal_bias, soft_cap)
    T = query.shape[1]
    # Gradients of texts of an odd length are refused: JAX takes every call for one with a bias.
    q, k, v = (_padded(x, 1, T + T % 2) for x in (_scaled(query, scale), key, value))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        is_causal=True,
        local_window_size=_neighbours(window, T),
        implementation=implementation,
    )
    return out[:, :T]


def tokamax_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    scale: Float[Array, ""],
    *,
    slope: Float[Array, " H"] | None,
    positions: Int[Array, "#B T"] | None,
    segments: Int[Array, "B T"] | None,
    window: int | None,
    diagonal_bias: Float[Array, "#B T"] | None = None,
    soft_cap: float | None = None,
    chunk: int = 512,
    implementation: tuple[str, ...] | None = None,
) -> Float[Array, "B T H K"]:
    """Flash attention by the package tokamax; `implementation` are names of its own, the first that can is taken.

    Raises:
      UserError: tokamax is not installed.
    """
    _check("tokamax", TOKAMAX, slope, segments, window, diagonal_bias, soft_cap)
    try:
        import tokamax
    except ImportError:
        raise UserError("model.attention 'tokamax' needs the package tokamax: pip install tokamax") from None
    from absl import flags

    if not flags.FLAGS.is_parsed():  # else tokamax takes the program's own arguments for absl's, and ends it
        flags.FLAGS.mark_as_parsed()
    T = query.shape[1]
    neighbours = _neighbours(window, T)
    if implementation is None:
        # Left to itself it ends with plain XLA, whose logits are [T, T]. So is Triton's mask of a window in the
        # backward pass, which has no soft cap at all.
        plain = neighbours is None and soft_cap is None
        implementation = ("mosaic_gpu", "triton") if plain else ("mosaic_gpu",)
    # Its kernels pad by themselves where they must, each to another multiple; here once, for both directions.
    q, k, v = (_padded(x, 1, T + -T % 128) for x in (_scaled(query, scale), key, value))
    out = tokamax.dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        is_causal=True,
        local_window_size=neighbours,
        logits_soft_cap=soft_cap,
        implementation=implementation,
    )
    return out[:, :T]


def why_no_tokamax() -> str:
    """Why tokamax cannot be used on this machine; "" if it can."""
    if importlib.util.find_spec("tokamax") is None:
        return "is not installed (pip install tokamax)"
    version = importlib.metadata.version("tokamax")
    if version == "0.0.12" and jax.__version_info__ >= (0, 12):
        return "0.0.12 does not work with JAX 0.12"
    return ""


def _check(
    name: str,
    capabilities: Capabilities,
    slope: jax.Array | None,
    segments: jax.Array | None,
    window: int | None,
    diagonal_bias: jax.Array | None,
    soft_cap: float | None,
) -> None:
    asked = {
        "slopes": slope,
        "segments": segments,
        "windows": window,
        "diagonal bias": diagonal_bias,
        "soft cap": soft_cap,
    }
    refused = [what for what, given in asked.items() if given is not None and what not in capabilities.honours]
    if refused:
        raise NotImplementedError(f"{name} attention has no {' and no '.join(refused)}.")


def _scaled(query: Float[Array, "B T H K"], scale: Float[Array, ""]) -> Float[Array, "B T H K"]:
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    """With zeros for tokens; they are segment -1, which no token has, among integers."""
    if x.shape[axis] == length:
        return x
    widths = [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=-1 if jnp.issubdtype(x.dtype, jnp.integer) else 0)


def _neighbours(window: int | None, length: int) -> tuple[int, int] | None:
    """How many tokens before itself, and after, a token sees in a window that counts the token too."""
    return None if window is None or window >= length else (window - 1, 0)


class SplashBlocks(NamedTuple):
    """How splash cuts a text: `count` blocks of `size` tokens, padding included, computed `compute` keys at a time."""

    count: int
    size: int
    compute: int


def splash_blocks(length: int) -> SplashBlocks:
    """Even cuts, so that padding is short: multiples of 128 up to BLOCK, read in pairs where a text has many."""
    # The diagonal's blocks are half in vain: of eight, each half as long as wide, that is an eighth.
    pair = 2 if length > 15 * BLOCK else 1
    count = -(-length // (BLOCK * pair))
    compute = -(-length // (count * pair * 128)) * 128
    return SplashBlocks(count, compute * pair, compute)


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    blocks: SplashBlocks, heads: int, window: int | None, soft_cap: float | None, interpret: bool
) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    # One kernel for the whole backward pass writes the query's gradient once per key block, [count, H, T, K]; two
    # compute the logits twice, and memory stays linear in the length.
    fused = blocks.count <= 4
    sizes = splash.BlockSizes(
        block_q=blocks.size,
        block_kv=blocks.size,
        block_kv_compute=blocks.compute,
        block_q_dkv=blocks.size,
        block_kv_dkv=blocks.size,
        block_kv_dkv_compute=blocks.compute,
        block_q_dq=None if fused else blocks.size,
        block_kv_dq=None if fused else blocks.size,
        use_fused_bwd_kernel=fused,
    )
    mask = splash.MultiHeadMask([_band()(blocks.count * blocks.size, window)] * heads)
    # Tables of blocks are constants of whatever program asks first, and of all that ask later.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)


@functools.cache
def _band() -> Callable[[int, int | None], Any]:
    """The class of masks below, made where splash is first asked for."""
    from jax.experimental.pallas.ops.tpu.splash_attention import Mask

    @dataclass(frozen=True)
    class Band(Mask):
        """Causal, and within a window: what splash's LocalMask says, computed in the kernel alike.

        Splash looks at every block of a mask, several times, to tell whole ones from empty ones. Its own masks compute
        them, which takes minutes at 128k tokens; here arithmetic tells.
        """

        length: int
        window: int | None

        @property
        def shape(self) -> tuple[int, ...]:
            return (self.length, self.length)

        @property
        def q_sequence(self) -> np.ndarray:
            return np.arange(self.length, dtype=np.int32)

        def mask_function(self, query: Any, key: Any) -> Any:
            seen = query >= key
            return seen if self.window is None else seen & (query - key < self.window)

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            query, key = index
            nearest, farthest = query.start - (key.stop - 1), query.stop - 1 - key.start  # distances in the block
            window = self.length if self.window is None else self.window
            if nearest >= 0 and farthest < window:
                return np.ones((1, 1), bool)  # of a whole or empty block splash asks any() and all() alone
            if farthest < 0 or nearest >= window:
                return np.zeros((1, 1), bool)
            rows, columns = np.arange(query.start, query.stop), np.arange(key.start, key.stop)
            return self.mask_function(rows[:, None], columns[None])

    return Band
