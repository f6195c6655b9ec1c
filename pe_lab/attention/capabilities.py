"""What an implementation of attention can do, what a layer asks of it, and whether the one covers the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# What a layer may ask for beside causality and grouped queries, which all implementations have.
FEATURES = ("slopes", "segments", "windows", "soft cap", "diagonal bias")


class Capabilities(NamedTuple):
    """What an implementation takes, beside causality and grouped queries.

    Attributes:
      honours: of FEATURES.
      dtypes: of queries, keys and values, all of the same.
      head_dims: whether it takes heads of K channels; head_dims_text says so in words.
      backward: has gradients for all that it honours.
      platforms: as `jax.default_backend` names them.
      turns_keys: takes keys as they were projected and turns them inside, once per query head where need be, without
        making a copy of a key head for every query head of its group.
      needs: of the machine, in words; "" for nothing more.
      longest: tokens in a text without a window; None for no limit.
    """

    honours: frozenset[str]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: Callable[[int], bool] = lambda _: True
    head_dims_text: str = "any"
    backward: bool = True
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    rotates_keys: bool = False
    needs: str = ""
    longest: int | None = None


class Request(NamedTuple):
    """What is known of a call of attention before anything is computed.

    Attributes:
      needs: of FEATURES.
      platform: cpu, gpu or tpu.
      head_dim, dtype, length: K, of queries, and tokens of the text.
      backward: a gradient will be taken.
      split_heads: heads of a group rotate differently, so that a key is turned once per query head.
      spans: partial results over parts of the keys are merged, as a context axis of the mesh needs it.
    """

    needs: frozenset[str] = frozenset()
    platform: str = "cpu"
    head_dim: int = 64
    dtype: str = "bfloat16"
    length: int = 1024
    backward: bool = False
    split_heads: bool = False
    spans: bool = False


def refusals(capabilities: Capabilities, request: Request) -> list[str]:
    """Why an implementation cannot serve a request: clauses that follow its name; empty if it can."""
    reasons = []
    if missing := [name for name in FEATURES if name in request.needs - capabilities.honours]:
        reasons.append(f"has no {' and no '.join(missing)}, which this layer needs")
    if request.platform not in capabilities.platforms:
        reasons.append(f"runs on {' and '.join(capabilities.platforms)}, and this is for {request.platform}")
    if not capabilities.head_dims(request.head_dim):
        reasons.append(f"takes heads of {capabilities.head_dims_text} channels, and these have {request.head_dim}")
    if request.dtype not in capabilities.dtypes:
        reasons.append(f"computes in {' or '.join(capabilities.dtypes)}, and this is {request.dtype}")
    if request.backward and not capabilities.backward:
        reasons.append("has no gradient, which training needs")
    if capabilities.longest is not None and request.length > capabilities.longest and "windows" not in request.needs:
        reasons.append(f"reads at most {capabilities.longest:,} tokens, and these are {request.length:,}")
    return reasons
