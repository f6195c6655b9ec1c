"""The one public function for attention of whole sequences."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.dispatch import IMPLEMENTATIONS, choose, layer_request
from pe_lab.attention.hooks import (
    distance_bias,
    encoded,
    key_bias,
    logit_functions,
    output,
    position_bias,
    sink,
)
from pe_lab.attention.key_block import AttentionInputs, padded, scaled
from pe_lab.attention.layer_encoding import LayerEncoding, check_heads, encode_keys, encode_queries
from pe_lab.attention.ring import on_mesh
from pe_lab.positional import LayerStructure

CPU_BLOCK = 256


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    encoding: LayerEncoding,
    *,
    x: Float[Array, "B T D"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    implementation: str = "auto",
    chunk: int = 512,
    backward: bool = True,
) -> Float[Array, "B T H K"]:
    """Causal self-attention with grouped queries, under the positional encoding of one layer.

    On a mesh with a context axis, tokens are in the order of `parallel.balanced_order`, and attention crosses the axis
    as `context_attention` says.

    Args:
      query, key, value: not rotated, not scaled; G divides H.
      encoding: of this layer.
      x: the input of the layer's attention; None where no hook takes it.
      positions: token positions, for ALiBi's distances and for hooks; None: the indices, from 0 on.
      segments: document of each token; a query sees only keys of its own document.
      window: a query sees the last `window` tokens, itself included; None sees all.
      implementation: a name of `IMPLEMENTATIONS`, or auto: the fastest that serves the layer.
      chunk: query and key block of the chunked implementation, in tokens; at most CPU_BLOCK on a CPU.
      backward: a gradient will be taken; False admits kernels without one.

    Returns:
      [B, T, H, K] in the dtype of `query`.

    Raises:
      ConfigError: heads that do not divide, or an unknown implementation.
      UnsupportedError: no implementation, or not the given one, serves this layer.
    """
    B, T, H, K = query.shape
    G = key.shape[2]
    check_heads(H, G)
    hooks, own_value = encoding.hooks, value
    functions = logit_functions(hooks, query)
    query, key, inputs_of_hooks = encoded(hooks, query, key, x, positions, segments)
    structure = LayerStructure(
        rotates=encoding.cos is not None,
        slopes=encoding.slope is not None,
        window=window,
        heads="split" if encoding.cos is not None and encoding.cos.shape[2] == H else "shared",
        hooks=hooks.hooks,
    )
    request = layer_request(
        structure,
        (H, G, max(K, query.shape[3])),
        query.dtype.name,
        T,
        segments=segments is not None,
        sequences=B,
        positions=positions is not None,
        soft_cap=encoding.soft_cap is not None,
        backward=backward,
    )
    chosen = IMPLEMENTATIONS[choose(implementation, request, chunk)]
    rotates_inside = request.split_heads and encoding.rotation is not None and positions is None
    rotates_inside = rotates_inside and chosen.capabilities.rotates_keys and not request.partial
    rotates_inside = rotates_inside and key.shape[2] == G
    query = scaled(encode_queries(query, encoding, G), encoding.scale(K))
    by_position = encoding.slope is not None or bool(hooks.having("bias"))
    given = positions if by_position else None
    inputs = AttentionInputs(
        slope=encoding.slope,
        query_positions=given,
        key_positions=given,
        query_segments=segments,
        key_segments=segments,
        distance_bias=distance_bias(hooks, min(T, window or T), H) if positions is None else None,
        key_bias=key_bias(hooks, inputs_of_hooks, H),
        bias=position_bias(hooks, relative=False if positions is None else None),
        logit_functions=functions,
        sink=sink(hooks, H),
        window=window,
        soft_cap=encoding.soft_cap,
        # Smaller blocks of logits stay in a CPU's caches: training takes three fifths of the time of blocks of 512.
        chunk=min(chunk, CPU_BLOCK) if request.platform == "cpu" else chunk,
    )
    if rotates_inside:
        inputs = replace(inputs, rotation=encoding.rotation)
    else:
        key = encode_keys(key, encoding, H)
        value = jnp.repeat(value, key.shape[2] // G, axis=2) if key.shape[2] != G else value
    if chosen.kernel and query.shape[3] != K:
        # Kernels take one number of channels; more of them that are zero change neither logits nor outputs.
        query, key, value = (padded(one, 3, max(K, query.shape[3])) for one in (query, key, value))
    if request.context or chosen.kernel:
        exchanged = request.context is not None and request.context.name == "ulysses"
        out = on_mesh(chosen, query, key, value, inputs, exchanged)
    else:
        out = chosen.run(query, key, value, inputs)
    out = out if out.shape[3] == K else out[..., :K]
    return output(hooks, inputs_of_hooks, out, own_value)
