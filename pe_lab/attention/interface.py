"""The one way to attend: queries, keys, values, a row of the schedule, segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pe_lab.attention.chunked import chunked_attention
from pe_lab.attention.dense import dense_attention
from pe_lab.attention.noise import replace_heads_by_noise
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
      noise: [H] seeds of heads whose queries and keys are noise, 0 = none; needs cos and sin of H rows.
      self_bias: [B or 1, T] added to the logit of a token with itself.
    """

    cos: Float[Array, "B T rows R"] | None = None
    sin: Float[Array, "B T rows R"] | None = None
    slope: Float[Array, " H"] | None = None
    logit_scale: Float[Array, ""] | None = None
    noise: UInt32[Array, " H"] | None = None
    self_bias: Float[Array, "#B T"] | None = None


@dataclass(frozen=True)
class Implementation:
    """A way to compute attention, and what it can honour beside causality and grouped queries."""

    run: Callable[..., jax.Array]
    honours: frozenset[str] = frozenset({"slopes", "segments", "windows", "self bias"})


IMPLEMENTATIONS = {
    "reference": Implementation(reference_attention),
    "dense": Implementation(dense_attention),
    "chunked": Implementation(chunked_attention),
}


def choose(implementation: str, length: int, chunk: int, needs: set[str]) -> Implementation:
    """The implementation by its name, or for `auto` the fastest that honours all that is needed.

    Raises:
      UserError: no such name, or one that cannot honour the request: nothing is ever left out silently.
    """
    if implementation == "auto":
        order = ("dense", "chunked", "reference") if chunk >= length else ("chunked", "reference", "dense")
        known = [name for name in order if needs <= IMPLEMENTATIONS[name].honours]
        if not known:
            raise UserError(f"attention: no implementation honours {' and '.join(sorted(needs))} together.")
        return IMPLEMENTATIONS[known[0]]
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attention: no implementation is called '{implementation}'. "
            + did_you_mean(implementation, ["auto", *IMPLEMENTATIONS])
        )
    missing = sorted(needs - IMPLEMENTATIONS[implementation].honours)
    if missing:
        able = [name for name, one in IMPLEMENTATIONS.items() if needs <= one.honours]
        raise UserError(
            f"model.attention '{implementation}' has no {' and no '.join(missing)}, which this layer needs. Choose one "
            f"of {', '.join(['auto', *able])}."
        )
    return IMPLEMENTATIONS[implementation]


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
    if positions is None and (row.slope is not None or row.noise is not None):
        positions = jnp.arange(T, dtype=jnp.int32)[None]
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
    if row.noise is not None:
        if G != H:
            raise UserError("attention: heads can only become noise where keys are rotated per query head.")
        query, key = replace_heads_by_noise(query, key, row.noise, positions)
    scale = jnp.float32(K**-0.5) * (1.0 if row.logit_scale is None else row.logit_scale)
    asked = {
        "slopes": row.slope is not None,
        "segments": segments is not None,
        "windows": window is not None,
        "self bias": row.self_bias is not None,
    }
    chosen = choose(implementation, T, chunk, {name for name, wanted in asked.items() if wanted})
    return chosen.run(
        query,
        key,
        value,
        scale,
        slope=row.slope,
        positions=positions if row.slope is not None else None,
        segments=segments,
        window=window,
        self_bias=row.self_bias,
        chunk=chunk,
    )
