"""How attention crosses the context axis of a mesh: keys travel around a ring, or tokens are exchanged for heads."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from pe_lab.errors import UnsupportedError
from pe_lab.parallel import context_size, current_mesh, sharding_axes

# A function of positions serves all heads at once, and one of all logits has the heads of its layer.
OF_ALL_HEADS = ("position bias", "logit functions")


class ContextAttention(NamedTuple):
    """The way that attention crosses a context axis, ring or ulysses, and why that one."""

    name: str
    reason: str


def context_attention(
    heads: tuple[int, int, int], dtype: str, needs: Collection[str], split_heads: bool, backward: bool
) -> ContextAttention | None:
    """The way of a layer on the mesh that is being traced for; None: that mesh has no context axis.

    By default what sends less.

    Args:
      heads: query heads H, key-value heads G, and head_dim K.
      needs: of FEATURES.
      split_heads: as in `AttentionRequest`.
      backward: a gradient will be taken.

    Raises:
      UnsupportedError: the mesh asks for ulysses, and this layer cannot have it.
    """
    size, current = context_size(), current_mesh()
    if size == 1 or current is None:
        return None
    mesh, rules = current
    tensor = math.prod(mesh.shape[axis] for axis in sharding_axes(mesh, rules.heads))
    asked, against = rules.context_attention, reason_against_ulysses(heads[0], size, tensor, needs)
    if asked == "ulysses" and against:
        raise UnsupportedError(f"mesh.context_attention is 'ulysses', and {against}. Use ring, or auto.")
    if asked != "auto":
        return ContextAttention(asked, "as mesh.context_attention says")
    if against:
        return ContextAttention("ring", against)
    width = np.dtype(dtype).itemsize
    ring, ulysses = sent(heads, width, size, tensor, split_heads, backward)
    name = "ulysses" if ulysses < ring else "ring"
    numbers = f"{ulysses / 1024:,.1f} KiB with ulysses and {ring / 1024:,.1f} in a ring"
    return ContextAttention(name, f"a device sends for each token and layer {numbers}")


def reason_against_ulysses(num_heads: int, size: int, tensor: int, needs: Collection[str]) -> str:
    """Why the heads of a layer cannot be shared out over `size` devices of context and `tensor`; "" if they can."""
    if num_heads % (size * tensor):
        over = f"{size} devices of mesh axis 'context'" + (f" and {tensor} of 'tensor'" if tensor > 1 else "")
        return f"{num_heads} query heads do not divide over {over}"
    if found := [one for one in OF_ALL_HEADS if one in needs]:
        return f"a layer with {' and '.join(found)} has all heads on each device"
    return ""


def sent(
    heads: tuple[int, int, int], width: int, size: int, tensor: int, split_heads: bool, backward: bool
) -> tuple[float, float]:
    """Bytes that a device sends for each of its tokens and a layer: in a ring, and with ulysses.

    Args:
      heads: as in `context_attention`.
      width: bytes of a number.
      size, tensor: devices of context and of tensor.
    """
    H, G, K = heads
    G = H if split_heads else G  # keys rotated per query head
    # Keys and values visit the other devices; in the backward pass they go all round, and their float32 gradients too.
    keys = G // tensor if G % tensor == 0 else H // tensor
    ring = 2 * keys * K * (width * (size - 1) + (size * (width + 4) if backward else 0))
    # Queries, keys, values and outputs, of which each device keeps its part; forward, recomputed, and their gradients.
    keys = math.lcm(G, size * tensor) // tensor
    ulysses = 2 * (H // tensor + keys) * K * width * (size - 1) / size * (3 if backward else 1)
    return ring, ulysses
