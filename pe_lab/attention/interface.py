"""The one way to attend: queries, keys, values, a row of the schedule, segments."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pe_lab.attention.abilities import Request
from pe_lab.attention.implementations import IMPLEMENTATIONS, choose
from pe_lab.attention.noise import noise_size, replace_heads_by_noise, replace_queries_by_noise
from pe_lab.attention.sharded import on_mesh
from pe_lab.attention.span import Noise, Rotation
from pe_lab.config import UserError
from pe_lab.parallel import context_size, platform
from pe_lab.positional import rotate

CPU_BLOCK = 256


class Row(NamedTuple):
    """One layer's row of the schedule, as attention wants it. None = absent from the compiled program.

    Attributes:
      cos, sin: [B or 1, T, 1 or G or H, R] float32, gain included (see `positional.rotation_tables`). With H rows, keys
        are rotated once per query head; with G, queries of a group share their key head's row.
      slope: [H] ALiBi's penalty per token.
      logit_scale: scalar factor on the logits.
      noise: [H] seeds of heads whose queries and keys are noise, 0 = none; needs cos and sin of H rows.
      self_bias: [B or 1, T] added to the logit of a token with itself.
      rotation: what cos and sin are made of, for kernels that turn keys themselves; None where positions are not
        indices, or more than a rotation makes them (the notebook's).
    """

    cos: Float[Array, "B T rows R"] | None = None
    sin: Float[Array, "B T rows R"] | None = None
    slope: Float[Array, " H"] | None = None
    logit_scale: Float[Array, ""] | None = None
    noise: UInt32[Array, " H"] | None = None
    self_bias: Float[Array, "#B T"] | None = None
    rotation: Rotation | None = None


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
    asked = request(query.shape, query.dtype, G, row, segments is not None, window, soft_cap, backward)
    name = choose(implementation, asked, chunk)
    chosen = IMPLEMENTATIONS[name]
    inside = asked.split_heads and row.rotation is not None and positions is None
    inside = inside and chosen.abilities.turns_keys and not asked.spans
    noise = None
    if inside and row.noise is not None:
        # How large the keys' noise is, is known from turned keys; XLA sums over them without keeping them.
        turned = rotate(jnp.repeat(key, H // G, axis=2), row.cos, row.sin)
        noise = Noise(row.noise, noise_size(turned, row.noise))
    query, key, value = _encoded(query, key, value, row, positions, turn_keys=not inside)
    scale = jnp.float32(K**-0.5) * (1.0 if row.logit_scale is None else row.logit_scale)
    arrays = dict(
        slope=row.slope,
        positions=positions if row.slope is not None else None,
        segments=segments,
        self_bias=row.self_bias,
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
    dtype: jnp.dtype,
    kv_heads: int,
    row: Row,
    segments: bool,
    window: int | None,
    soft_cap: float | None,
    backward: bool,
) -> Request:
    """What a call of attention asks of its implementation, on the mesh of the moment; `shape` [B, T, H, K]."""
    asked = {
        "slopes": row.slope is not None,
        "segments": segments,
        "windows": window is not None,
        "self bias": row.self_bias is not None,
        "soft cap": soft_cap is not None,
    }
    split = row.cos is not None and row.cos.shape[2] == shape[2] != kv_heads
    return Request(
        needs=frozenset(name for name, wanted in asked.items() if wanted),
        platform=platform(),
        head_dim=shape[3],
        dtype=jnp.dtype(dtype).name,
        length=shape[1],
        backward=backward,
        split_heads=split,
        spans=context_size() > 1,
    )


def _encoded(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    row: Row,
    positions: Int[Array, "#B T"] | None,
    turn_keys: bool,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T heads K"], Float[Array, "B T heads K"]]:
    """Queries, keys and values as logits are taken of them: turned, repeated where a group's heads differ, or noise."""
    T, H, G = query.shape[1], query.shape[2], key.shape[2]
    if row.cos is not None and row.sin is not None:
        rows = row.cos.shape[2]
        if rows not in (1, G, H):
            raise UserError(f"attention: {rows} rows of rotations fit neither {G} key heads nor {H} query heads.")
        cos, sin = row.cos, row.sin
        if turn_keys:
            if rows == H and H != G:
                # Heads of one group differ: each needs its keys rotated its own way.
                key, value, G = jnp.repeat(key, H // G, axis=2), jnp.repeat(value, H // G, axis=2), H
            key = rotate(key, cos, sin)
        if rows == G and rows != 1 and H != G:
            cos, sin = jnp.repeat(cos, H // G, axis=2), jnp.repeat(sin, H // G, axis=2)
        query = rotate(query, cos, sin)
    if row.noise is not None:
        if positions is None:
            positions = jnp.arange(T, dtype=jnp.int32)[None]
        if not turn_keys:
            return replace_queries_by_noise(query, row.noise, positions), key, value
        if G != H:
            raise UserError("attention: heads can only become noise where keys are rotated per query head.")
        query, key = replace_heads_by_noise(query, key, row.noise, positions)
    return query, key, value
