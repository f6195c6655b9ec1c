"""Attention by kernels of external packages: splash (TPU), cuDNN and tokamax (GPU).

Each has the arguments and the result of `reference_attention`. The dispatcher reads the capabilities below and never
requests a feature that a kernel does not honour.
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

from pe_lab.attention.capabilities import AttentionRequest, Capabilities, check_inputs
from pe_lab.attention.key_block import RESIDUALS, AttentionInputs, Keys, Queries
from pe_lab.errors import UnsupportedError

BLOCK = 512  # queries, and keys, whose logits splash computes at once
# Splash keeps 3 bytes for each pair of a query block and a key block that it may see, all pairs at once, in a TPU
# core's scalar memory of 1 MiB.
SCALAR_MEMORY, BYTES_OF_PAIR = 2**20, 3

SPLASH = Capabilities(
    honours=frozenset({"segments", "windows", "soft cap"}),
    dtypes=("bfloat16", "float32"),
    head_dims=lambda K, capability: K <= 256,
    head_dims_text="at most 256",
    platforms=("tpu",),
    longest=2**19,
)
# Segments would need a bias of [T, T]: `jax.nn` has no packing by offsets and no score functions, and cuDNN's lengths
# only describe padding.
CUDNN = Capabilities(
    honours=frozenset({"windows"}),
    dtypes=("bfloat16", "float16"),
    head_dims=lambda K, capability: (256 if capability >= 9 else 128) >= K and K % 8 == 0,
    head_dims_text="multiples of 8 up to 128 (256 from compute capability 9.0 on)",
    platforms=("gpu",),
    gpus=lambda capability: capability >= 8,
    needs="compute capability 8.0 and cuDNN 9",
)
# By its Mosaic GPU kernels. On TPUs, tokamax runs a fork of splash that takes neither segments nor windows. The
# gradient of a bias would be [H, T, T], so that slopes and key biases are for evaluation alone.
TOKAMAX = Capabilities(
    honours=frozenset({"windows", "segments", "slopes", "key bias", "soft cap"}),
    forward_only=frozenset({"slopes", "key bias"}),
    dtypes=("bfloat16", "float16"),
    head_dims=lambda K, capability: K <= 256,
    head_dims_text="at most 256",
    platforms=("gpu",),
    gpus=lambda capability: 9 <= capability < 11,
    needs="compute capability 9.0 or 10.x",
)
SLOPES_UP_TO = 2**17  # tokens: slope times position is a float32


def splash_attention(
    query: Queries, key: Keys, value: Keys, inputs: AttentionInputs, interpret: bool = False
) -> Queries:
    """JAX's splash attention for TPUs. `interpret` runs it on any platform, slowly."""
    check_inputs("splash", SPLASH.honours, inputs)
    H, T = query.shape[2], query.shape[1]
    window = _window(inputs, T)
    blocks = splash_blocks(T)
    pairs = blocks.count * min(blocks.count, 2 + (window or T) // blocks.size)
    if pairs * BYTES_OF_PAIR > SCALAR_MEMORY:
        raise UnsupportedError(f"splash attention: {T} tokens make {pairs} pairs of blocks, more than a TPU holds.")
    kernel = jax.vmap(_splash_kernel(blocks, H, window, inputs.soft_cap, interpret))
    length = blocks.count * blocks.size
    q, k, v = (_padded(x, 1, length).transpose(0, 2, 1, 3) for x in (query, key, value))
    if inputs.query_segments is None:
        out = kernel(q, k, v)  # padded keys are later than all queries
    else:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        ids = _padded(inputs.query_segments.astype(jnp.int32), 1, length)
        out = kernel(q, k, v, SegmentIds(ids, ids))
    return out.transpose(0, 2, 1, 3)[:, :T]


def cudnn_attention(
    query: Queries, key: Keys, value: Keys, inputs: AttentionInputs, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Queries:
    """cuDNN's flash attention, by `jax.nn`; implementation "xla" computes the same result on any platform.

    Raises:
      UnsupportedError: JAX refuses it, for it asks the GPUs of this machine also where it compiles for others.
    """
    check_inputs("cuDNN", CUDNN.honours, inputs)
    # JAX refuses gradients of sequences of an odd length, because it treats every call as one with a bias.
    T = query.shape[1]
    q, k, v = (_padded(x, 1, T + T % 2) for x in (query, key, value))
    window = _window(inputs, T)
    neighbours = None if window is None else (window - 1, 0)  # before and after a token, which the window counts
    try:
        out = jax.nn.dot_product_attention(
            q, k, v, scale=1.0, is_causal=True, local_window_size=neighbours, implementation=implementation
        )
    except NotImplementedError as error:
        raise UnsupportedError(
            f"cuDNN's attention: {error} JAX asked the GPUs of this machine. To compile for others, name another "
            "kernel, such as model.attention=pallas_gpu."
        ) from None
    return out[:, :T]


def tokamax_attention(
    query: Queries, key: Keys, value: Keys, inputs: AttentionInputs, implementation: str = "mosaic_gpu"
) -> Queries:
    """Flash attention by the package tokamax; implementation "xla" computes the same result on any platform.

    Windows and documents, whose tokens are neighbours, are the first key that each query sees. ALiBi is a bias of keys:
    of its penalty, slope (query - key), the part of the query cancels in the softmax.

    Raises:
      UnsupportedError: tokamax is not installed.
    """
    check_inputs("tokamax", TOKAMAX.honours, inputs)
    try:
        from tokamax._src.ops.attention.api import IMPLEMENTATIONS
        from tokamax._src.ops.attention.base import Mask
    except ImportError:
        raise UnsupportedError("model.attention 'tokamax' needs the package tokamax: pip install tokamax") from None
    from absl import flags

    if not flags.FLAGS.is_parsed():  # else tokamax parses the program's own arguments as absl's, and exits
        flags.FLAGS.mark_as_parsed()
    T = query.shape[1]
    length = T + -T % 128  # its kernels pad to different multiples; padding here serves both passes
    q, k, v = (_padded(x, 1, length) for x in (query, key, value))
    at, first, bias = jnp.arange(length), None, None
    if (window := _window(inputs, T)) is not None:
        first = jnp.maximum(at - window + 1, 0)[None]
    if inputs.query_segments is not None:
        documents = _padded(inputs.query_segments.astype(jnp.int32), 1, length)
        begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
        start = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
        first = start if first is None else jnp.maximum(first, start)
    if inputs.slope is not None:
        positions = at[None] if inputs.key_positions is None else _padded(inputs.key_positions, 1, length)
        bias = inputs.slope.astype(jnp.float32)[:, None] * positions[:, None].astype(jnp.float32)
    if inputs.key_bias is not None:
        key_bias = _padded(inputs.key_bias.astype(jnp.float32), 2, length)
        bias = key_bias if bias is None else bias + key_bias
    out = IMPLEMENTATIONS[implementation](
        q,
        k,
        v,
        bias=None if bias is None else bias[:, :, None],
        mask=Mask(k_start=None if first is None else first[:, None], is_causal=True),
        logits_scale=1.0,
        logits_soft_cap=inputs.soft_cap,
    )
    return out[:, :T]


def why_no_tokamax(request: AttentionRequest, here: bool) -> str:
    """Why tokamax cannot serve a request, beside its capabilities; "" if it can. `here`: on this machine."""
    if here and importlib.util.find_spec("tokamax") is None:
        return "is not installed (pip install tokamax; Python 3.12 or later)"
    version = importlib.metadata.version("tokamax") if here else ""
    if here and tuple(int(part) for part in version.split(".")[:3]) < (0, 0, 17):
        return f"{version} is too old: 0.0.17 or later is needed (Python 3.12 or later)"
    if "soft cap" in request.needs and request.needs & {"slopes", "key bias"}:
        return "adds biases before a soft cap, and this layer after it"
    if "slopes" in request.needs and request.length > SLOPES_UP_TO:
        return f"has slopes for at most {SLOPES_UP_TO:,} tokens, and these are {request.length:,}"
    return ""


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Pads arrays of tokens with zeros, and segments with -1, which no token has."""
    if x.shape[axis] == length:
        return x
    widths = [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=-1 if jnp.issubdtype(x.dtype, jnp.integer) else 0)


def _window(inputs: AttentionInputs, length: int) -> int | None:
    """The window; None if it contains the whole sequence."""
    return None if inputs.window is None or inputs.window >= length else inputs.window


class SplashBlocks(NamedTuple):
    """`count` blocks of `size` tokens, padding included, of which splash computes `compute` keys at a time."""

    count: int
    size: int
    compute: int


def splash_blocks(length: int) -> SplashBlocks:
    """Equal blocks with little padding: multiples of 128 up to BLOCK, in pairs for a long sequence."""
    # Half of the work in a block on the diagonal is wasted. In pairs, that is at most an eighth of all work.
    pair = 2 if length > 15 * BLOCK else 1
    count = -(-length // (BLOCK * pair))
    compute = -(-length // (count * pair * 128)) * 128
    return SplashBlocks(count, compute * pair, compute)


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    blocks: SplashBlocks, heads: int, window: int | None, soft_cap: float | None, interpret: bool
) -> Callable[..., jax.Array]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    # A single kernel for the backward pass writes the query's gradient once per key block, [count, H, T, K]. Two
    # kernels compute the logits twice, and their memory is linear in the length.
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
    # The tables of blocks are cached and become constants of several programs, so that they must not be tracers.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
            attn_logits_soft_cap=soft_cap,
            residual_checkpoint_name=RESIDUALS,
        )
    return jax.tree.map(np.asarray, kernel)


@functools.cache
def _band() -> Callable[[int, int | None], Any]:
    """The class of splash's masks, defined on first use, because it needs the import."""
    from jax.experimental.pallas.ops.tpu.splash_attention import Mask

    @dataclass(frozen=True)
    class Band(Mask):
        """A causal mask with a window, equal to splash's LocalMask.

        Splash reads every block of a mask several times to find full and empty ones. Its own masks compute each block,
        which takes minutes at 128k tokens; this one decides by its corners.
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
                return np.ones((1, 1), bool)  # splash only calls any() and all() of a full or empty block
            if farthest < 0 or nearest >= window:
                return np.zeros((1, 1), bool)
            rows, columns = np.arange(query.start, query.stop), np.arange(key.start, key.stop)
            return self.mask_function(rows[:, None], columns[None])

    return Band
