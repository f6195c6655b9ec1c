"""The one way to attend: queries, keys, values, a row of the schedule, segments."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.capabilities import Request
from pe_lab.attention.dispatch import IMPLEMENTATIONS, choose
from pe_lab.attention.key_block import Noise
from pe_lab.attention.layer_encoding import Row, encode_keys, encode_queries
from pe_lab.attention.noise import noise_size
from pe_lab.attention.sharded import on_mesh
from pe_lab.errors import UserError
from pe_lab.parallel import context_size, platform

CPU_BLOCK = 256


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    row: Row,
    *,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
    chunk: int = 512,
    backward: bool = True,
) -> Float[Array, "B T H K"]:
    """Causal self-attention with grouped queries, in the positional encoding of `row`.

    On a mesh with a context axis, tokens lie in the order of `parallel.balanced_order`, and the keys go round.

    Args:
      query, key, value: not rotated, not scaled; G divides H.
      row: this layer's part of the schedule.
      positions: token positions, for ALiBi's distances; None counts from 0.
      segments: document of each token; a query sees keys of its own segment only.
      window: a query sees the last `window` tokens, itself included; None sees all.
      soft_cap: logits become cap * tanh(logits / cap), before slopes and masks (Gemma 2).
      implementation: a name of `IMPLEMENTATIONS`, or auto: the fastest that can.
      chunk: query and key block of the chunked implementation, in tokens; at most CPU_BLOCK on a CPU.
      backward: a gradient will be taken; False admits kernels that have none.

    Returns:
      [B, T, H, K] in the dtype of `query`.

    Raises:
      UserError: heads that do not divide, or an implementation that cannot do what is asked.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    if H % G:
        raise UserError(f"attention: {H} query heads do not divide into {G} key-value heads.")
    asked = request(
        query.shape,
        query.dtype.name,
        slopes=row.slope is not None,
        segments=segments is not None,
        window=window,
        diagonal_bias=row.diagonal_bias is not None,
        soft_cap=soft_cap,
        split_heads=row.cos is not None and row.cos.shape[2] == H != G,
        backward=backward,
    )
    name = choose(implementation, asked, chunk)
    chosen = IMPLEMENTATIONS[name]
    inside = asked.split_heads and row.rotation is not None and positions is None
    inside = inside and chosen.capabilities.rotates_keys and not asked.spans
    query = encode_queries(query, row, G, positions)
    noise = None
    if not inside:
        key = encode_keys(key, row, H, positions)
        value = jnp.repeat(value, key.shape[2] // G, axis=2) if key.shape[2] != G else value
    elif row.noise is not None:
        # How large the keys' noise is, is known from turned keys; XLA sums over them without keeping them.
        turned = encode_keys(key, row._replace(noise=None), H, positions)
        noise = Noise(row.noise, noise_size(turned, row.noise, row.noise_sigma))
    scale = jnp.float32(K**-0.5) * (1.0 if row.logit_scale is None else row.logit_scale)
    arrays = dict(
        slope=row.slope,
        positions=positions if row.slope is not None else None,
        segments=segments,
        diagonal_bias=row.diagonal_bias,
    )
    # Blocks of logits that stay in a CPU's caches: training takes three fifths of what blocks of 512 take.
    block = min(chunk, CPU_BLOCK) if asked.platform == "cpu" else chunk
    static = dict(window=window, soft_cap=soft_cap, chunk=block)
    if inside:
        arrays |= {"rotation": row.rotation, "noise": noise}
    if asked.spans or chosen.kernel:
        return on_mesh(chosen, query, key, value, scale, arrays, static)
    return chosen.run(query, key, value, scale, **arrays, **static)


def request(
    shape: tuple[int, ...],
    dtype: str,
    *,
    slopes: bool,
    segments: bool,
    window: int | None,
    diagonal_bias: bool,
    soft_cap: float | None,
    split_heads: bool,
    backward: bool,
) -> Request:
    """What a layer asks of its attention, on the mesh of the moment; `shape` [B, T, H, K] of the queries."""
    asked = {
        "slopes": slopes,
        "segments": segments,
        "windows": window is not None,
        "diagonal bias": diagonal_bias,
        "soft cap": soft_cap is not None,
    }
    return Request(
        needs=frozenset(name for name, wanted in asked.items() if wanted),
        platform=platform(),
        head_dim=shape[3],
        dtype=dtype,
        length=shape[1],
        backward=backward,
        split_heads=split_heads,
        spans=context_size() > 1,
    )
