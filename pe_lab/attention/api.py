"""The one public function for attention of whole sequences."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pe_lab.attention.dispatch import IMPLEMENTATIONS, choose, layer_request
from pe_lab.attention.key_block import AttentionInputs, Noise, scaled
from pe_lab.attention.layer_encoding import LayerEncoding, check_heads, encode_keys, encode_queries
from pe_lab.attention.noise import noise_size
from pe_lab.attention.sharded import on_mesh
from pe_lab.positional import LayerStructure

CPU_BLOCK = 256


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    encoding: LayerEncoding,
    *,
    positions: Int[Array, "#B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    window: int | None = None,
    implementation: str = "auto",
    chunk: int = 512,
    backward: bool = True,
) -> Float[Array, "B T H K"]:
    """Causal self-attention with grouped queries, under the positional encoding of one layer.

    On a mesh with a context axis, tokens are in the order of `parallel.balanced_order`, and keys travel around a ring.

    Args:
      query, key, value: not rotated, not scaled; G divides H.
      encoding: of this layer.
      positions: token positions, for ALiBi's distances; None counts from 0.
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
    structure = LayerStructure(
        rotates=encoding.cos is not None,
        slopes=encoding.slope is not None,
        window=window,
        heads="split" if encoding.cos is not None and encoding.cos.shape[2] == H else "shared",
        diagonal_bias=None if encoding.diagonal_bias is None else (0.0, T),  # its values are in the encoding
    )
    request = layer_request(structure, (H, G, K), query.dtype.name, T, segments=segments is not None, backward=backward)
    chosen = IMPLEMENTATIONS[choose(implementation, request, chunk)]
    rotates_inside = request.split_heads and encoding.rotation is not None and positions is None
    rotates_inside = rotates_inside and chosen.capabilities.rotates_keys and not request.partial
    query = scaled(encode_queries(query, encoding, G, positions), encoding.scale(K))
    slope_positions = None if encoding.slope is None else positions
    inputs = AttentionInputs(
        slope=encoding.slope,
        query_positions=slope_positions,
        key_positions=slope_positions,
        query_segments=segments,
        key_segments=segments,
        diagonal_bias=encoding.diagonal_bias,
        window=window,
        # Smaller blocks of logits stay in a CPU's caches: training takes three fifths of the time of blocks of 512.
        chunk=min(chunk, CPU_BLOCK) if request.platform == "cpu" else chunk,
    )
    if rotates_inside:
        noise = None
        if encoding.noise is not None:
            # The size of the keys' noise depends on rotated keys; XLA sums over them without keeping them.
            rotated = encode_keys(key, encoding._replace(noise=None), H, positions)
            noise = Noise(encoding.noise, noise_size(rotated, encoding.noise, encoding.noise_sigma))
        inputs = replace(inputs, rotation=encoding.rotation, noise=noise)
    else:
        key = encode_keys(key, encoding, H, positions)
        value = jnp.repeat(value, key.shape[2] // G, axis=2) if key.shape[2] != G else value
    if request.partial or chosen.kernel:
        return on_mesh(chosen, query, key, value, inputs)
    return chosen.run(query, key, value, inputs)
