"""The one way to attend: queries, keys, values, a row of the schedule, segments."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.chunked import chunked_attention
from pe_lab.attention.dense import dense_attention
from pe_lab.attention.reference import reference_attention
from pe_lab.config import UserError, did_you_mean
from pe_lab.positional import rotate


class Row(NamedTuple):
    """One layer's row of the schedule, as attention wants it. None = absent from the compiled program.

    Attributes:
      cos, sin: [B or 1, T, 1 or G or H, R] float32, gain included (see `positional.rotation_tables`). With H rows, keys
        are rotated once per query head; with G, queries of a group share their key head's row.
      slope: [H] ALiBi's penalty per token.
      logit_scale: scalar factor on the logits.
    """

    cos: Float[Array, "B T rows R"] | None = None
    sin: Float[Array, "B T rows R"] | None = None
    slope: Float[Array, " H"] | None = None
    logit_scale: Float[Array, ""] | None = None


IMPLEMENTATIONS = {"reference": reference_attention, "dense": dense_attention, "chunked": chunked_attention}


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    row: Row,
    *,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    implementation: str = "auto",
    chunk: int = 512,
) -> Float[Array, "B T H K"]:
    """Causal self-attention with grouped queries, in the positional encoding of `row`.

    Args:
      query, key, value: not rotated, not scaled; G divides H.
      row: this layer's part of the schedule.
      positions: token positions, for ALiBi's distances; None counts from 0.
      segments: document of each token; a query sees keys of its own segment only.
      window: a query sees the last `window` tokens, itself included; None sees all.
      implementation: auto, reference, dense or chunked. `auto` takes the dense one while the logits of a head fit
        one chunk, and the chunked one beyond.
      chunk: query and key block of the chunked implementation, in tokens.

    Returns:
      [B, T, H, K] in the dtype of `query`.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    if H % G:
        raise UserError(f"attention: {H} query heads do not divide into {G} key-value heads.")
    if row.cos is not None and row.sin is not None:
        rows = row.cos.shape[2]
        if rows not in (1, G, H):
            raise UserError(f"attention: {rows} rows of rotations fit neither {G} key heads nor {H} query heads.")
        if rows == H and H != G:
            # Heads of one group differ: each needs its keys rotated its own way.
            key, value, G = jnp.repeat(key, H // G, axis=2), jnp.repeat(value, H // G, axis=2), H
        cos, sin = row.cos, row.sin
        key = rotate(key, cos, sin)
        if rows == G and rows != 1:
            cos, sin = jnp.repeat(cos, H // G, axis=2), jnp.repeat(sin, H // G, axis=2)
        query = rotate(query, cos, sin)
    if row.slope is not None and positions is None:
        positions = jnp.arange(T, dtype=jnp.int32)[None]
    scale = jnp.float32(K**-0.5) * (1.0 if row.logit_scale is None else row.logit_scale)
    if implementation == "auto":
        implementation = "dense" if chunk >= T else "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attention: no implementation is called '{implementation}'. "
            + did_you_mean(implementation, ["auto", *IMPLEMENTATIONS])
        )
    return IMPLEMENTATIONS[implementation](
        query,
        key,
        value,
        scale,
        slope=row.slope,
        positions=positions if row.slope is not None else None,
        segments=segments,
        window=window,
        chunk=chunk,
    )
