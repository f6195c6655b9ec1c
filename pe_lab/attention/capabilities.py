"""What an implementation of attention supports, what a layer requests, and whether the first covers the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pe_lab.attention.context import ContextAttention
from pe_lab.attention.key_block import AttentionInputs
from pe_lab.errors import UnsupportedError

# What a layer may request beside causality and grouped queries, which all implementations support.
FEATURES = (
    "slopes",
    "segments",
    "windows",
    "distance bias",  # a table by distance
    "key bias",
    "position bias",  # a function of positions
    "logit functions",  # of all logits of a query
    "sinks",
    "soft cap",  # on the products of queries and keys
)


class Capabilities(NamedTuple):
    """What an implementation supports, beside causality and grouped queries.

    Attributes:
      honours: of FEATURES.
      dtypes: of queries, keys and values, which share one dtype.
      head_dims: whether it supports heads of K channels on a GPU of this compute capability; head_dims_text says the
        same in words.
      backward: it has gradients for all that it honours, but for `forward_only`.
      platforms: as `jax.default_backend` names them.
      rotates_keys: it takes unrotated keys and rotates them inside, once per query head where needed, without a copy
        of a key head for every query head of its group.
      gpus: whether it runs on a GPU of this compute capability; `needs` says the same in words.
      needs: of the machine, in words; "" for nothing more.
      longest: tokens of a sequence without a window; None for no limit.
    """

    honours: frozenset[str]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: Callable[[int, float], bool] = lambda K, capability: True
    head_dims_text: str = "any"
    backward: bool = True
    forward_only: frozenset[str] = frozenset()
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    rotates_keys: bool = False
    gpus: Callable[[float], bool] = lambda capability: True
    needs: str = ""
    longest: int | None = None


class AttentionRequest(NamedTuple):
    """What a layer requires of its attention.

    Attributes:
      needs: of FEATURES.
      platform: cpu, gpu or tpu.
      capability: the compute capability of a GPU, as 9.0 for an H100.
      head_dim, dtype, length: K, the dtype of queries, and the tokens of a sequence.
      sequences: of a call; None: many.
      backward: a gradient will be taken.
      split_heads: heads of a group rotate differently, so that a key is rotated once per query head.
      partial: partial results over blocks of keys will be merged, as KV caches and a ring of devices need it.
      context: how attention crosses the context axis of a mesh that has one.
    """

    needs: frozenset[str] = frozenset()
    platform: str = "cpu"
    capability: float = 0.0
    head_dim: int = 64
    dtype: str = "bfloat16"
    length: int = 1024
    sequences: int | None = None
    backward: bool = False
    split_heads: bool = False
    partial: bool = False
    context: ContextAttention | None = None


def refusals(capabilities: Capabilities, request: AttentionRequest) -> list[str]:
    """Why an implementation cannot serve a request: clauses that follow its name; empty if it can."""
    reasons = []
    if missing := [name for name in FEATURES if name in request.needs - capabilities.honours]:
        reasons.append(f"has no {' and no '.join(missing)}, which this layer needs")
    if request.platform not in capabilities.platforms:
        reasons.append(f"runs on {' and '.join(capabilities.platforms)}, and this is for {request.platform}")
    elif request.platform == "gpu" and not capabilities.gpus(request.capability):
        reasons.append(f"needs {capabilities.needs}, and this GPU has {request.capability}")
    if not capabilities.head_dims(request.head_dim, request.capability):
        reasons.append(f"takes heads of {capabilities.head_dims_text} channels, and these have {request.head_dim}")
    if request.dtype not in capabilities.dtypes:
        reasons.append(f"computes in {' or '.join(capabilities.dtypes)}, and this is {request.dtype}")
    if request.backward and not capabilities.backward:
        reasons.append("has no gradient, which training needs")
    elif request.backward and (
        asked := [name for name in FEATURES if name in request.needs & capabilities.forward_only]
    ):
        reasons.append(f"has no gradient with {' and '.join(asked)}, which training needs")
    if capabilities.longest is not None and request.length > capabilities.longest and "windows" not in request.needs:
        reasons.append(f"reads at most {capabilities.longest:,} tokens, and these are {request.length:,}")
    return reasons


def check_inputs(name: str, honours: frozenset[str], inputs: AttentionInputs) -> None:
    """Raises an `UnsupportedError` if an implementation is called with a feature that it does not honour."""
    given = (
        inputs.slope,
        inputs.query_segments,
        inputs.window,
        inputs.distance_bias,
        inputs.key_bias,
        inputs.bias,
        inputs.logit_functions,
        inputs.sink,
        inputs.soft_cap,
    )
    refused = [what for what, x in zip(FEATURES, given, strict=True) if x is not None and what not in honours]
    if refused:
        raise UnsupportedError(f"{name} attention has no {' and no '.join(refused)}.")
