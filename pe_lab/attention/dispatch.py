"""The table of implementations, the request of a layer, and the choice of the implementation that serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pe_lab.attention.capabilities import FEATURES, AttentionRequest, Capabilities, refusals
from pe_lab.attention.chunked import chunked_attention, chunked_gradient, chunked_key_block
from pe_lab.attention.context import context_attention
from pe_lab.attention.dense import dense_attention
from pe_lab.attention.hooks import hook_features
from pe_lab.attention.kernels import external
from pe_lab.attention.kernels.gpu import gpu_key_block
from pe_lab.attention.kernels.gpu_gradient import gpu_key_block_gradient
from pe_lab.attention.kernels.hopper import hopper_key_block
from pe_lab.attention.kernels.hopper_gradient import hopper_key_block_gradient
from pe_lab.attention.kernels.tpu import tpu_key_block
from pe_lab.attention.kernels.tpu_gradient import tpu_key_block_gradient
from pe_lab.attention.key_block import KeyBlockGradient, KeyBlockKernel, Pair, whole_sequence
from pe_lab.attention.preferences import preference
from pe_lab.attention.reference import reference_attention
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
from pe_lab.parallel import compute_capability, platform, slots_are_sharded
from pe_lab.positional import LayerStructure

EVERYTHING = frozenset(FEATURES)
KERNEL_FEATURES = EVERYTHING - {"position bias", "logit functions", "soft cap"}


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
      description: a few words.
      run: as `reference_attention`, for a whole sequence; with `rotates_keys`, also with rotation.
      capabilities: what it supports.
      partial: as `chunked_key_block`, for a block of keys, if it has that; a context axis and KV caches need it.
      gradient: of `partial`, where `capabilities.backward`.
      kernel: a program of the device, which XLA cannot shard: on a mesh it runs on each device's part.
    """

    description: str
    run: Callable[..., jax.Array]
    capabilities: Capabilities
    partial: KeyBlockKernel | None = None
    gradient: KeyBlockGradient | None = None
    kernel: bool = False


def _pallas(
    partial: KeyBlockKernel, gradient: KeyBlockGradient, platform: str, compiler: str, **different: Any
) -> Implementation:
    capabilities = Capabilities(
        honours=KERNEL_FEATURES,
        dtypes=("float32", "bfloat16"),
        head_dims=lambda K, capability: 32 <= K <= 256 and K % 16 == 0,
        head_dims_text="32 to 256, in steps of 16",
        rotates_keys=True,
        platforms=(platform,),
    )._replace(**different)
    run = whole_sequence(Pair(partial, gradient))
    return Implementation(f"pe_lab's kernel, by {compiler}", run, capabilities, partial, gradient, True)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation("all logits at once, by the formula", reference_attention, Capabilities(EVERYTHING)),
    "dense": Implementation(
        "all logits at once, with a hand-written gradient",
        dense_attention,
        Capabilities(EVERYTHING - {"logit functions"}),
    ),
    "chunked": Implementation(
        "blocks of logits, memory linear in the length",
        chunked_attention,
        Capabilities(EVERYTHING),
        chunked_key_block,
        chunked_gradient,
    ),
    "splash": Implementation("JAX's kernel", external.splash_attention, external.SPLASH, kernel=True),
    "cudnn": Implementation("NVIDIA's kernel, through jax.nn", external.cudnn_attention, external.CUDNN, kernel=True),
    "tokamax": Implementation("OpenXLA's kernels", external.tokamax_attention, external.TOKAMAX, kernel=True),
    "pallas_tpu": _pallas(tpu_key_block, tpu_key_block_gradient, "tpu", "Mosaic"),
    "pallas_gpu": _pallas(gpu_key_block, gpu_key_block_gradient, "gpu", "Triton"),
    "pallas_hopper": _pallas(
        hopper_key_block,
        hopper_key_block_gradient,
        "gpu",
        "Mosaic GPU",
        honours=KERNEL_FEATURES | {"soft cap"},
        dtypes=("bfloat16", "float16"),
        gpus=lambda capability: capability == 9.0,
        needs="compute capability 9.0 (H100, H200)",
    ),
}


def layer_request(
    structure: LayerStructure,
    heads: tuple[int, int, int],
    dtype: str,
    length: int,
    *,
    segments: bool = False,
    sequences: int | None = None,
    positions: bool = False,
    soft_cap: bool = False,
    backward: bool = False,
    partial: bool | None = None,
) -> AttentionRequest:
    """The request of one layer, for the devices that are being traced for.

    Args:
      heads: query heads H, key-value heads G, and head_dim K.
      length: tokens of a sequence.
      segments: sequences hold several documents.
      sequences: of a call; None: many.
      positions: those of tokens are not their indices.
      soft_cap: on the products of queries and keys.
      backward: a gradient will be taken.
      partial: partial results will be merged. None: as `context_attention` says for the mesh.
    """
    H, G, K = heads
    needs = {
        "slopes": structure.slopes,
        "segments": segments,
        "windows": structure.window is not None,
        "soft cap": soft_cap,
        **dict.fromkeys(hook_features(structure.hooks, positions), True),
    }
    needed = frozenset(name for name, asked in needs.items() if asked)
    split_heads = structure.rotates and structure.heads == "split" and H != G
    context = None if partial is not None else context_attention(heads, dtype, needed, split_heads, backward)
    return AttentionRequest(
        needs=needed,
        platform=platform(),
        capability=compute_capability(),
        head_dim=K,
        dtype=dtype,
        length=length,
        sequences=sequences,
        backward=backward,
        split_heads=split_heads,
        partial=partial or (context is not None and context.name == "ring"),
        context=context,
    )


def reasons_against(name: str, request: AttentionRequest) -> list[str]:
    """Why an implementation cannot serve a request on this machine; empty if it can."""
    one = IMPLEMENTATIONS[name]
    reasons = refusals(one.capabilities, request)
    if request.partial and one.partial is None:
        ring = "; mesh.context_attention=ulysses needs none, where heads divide" if request.context is not None else ""
        reasons.append(
            f"gives no partial results, from which KV caches and sequences on several devices are merged{ring}"
        )
    if request.partial and "logit functions" in request.needs:
        reasons.append("has no logit functions for a sequence on several devices")
    # What another machine has installed is not known here.
    if name == "tokamax" and (reason := external.why_no_tokamax(request, here=request.platform == platform())):
        reasons.append(reason)
    if name == "pallas_hopper" and request.platform == platform() and jax.__version_info__ < (0, 11):
        reasons.append("needs JAX 0.11 or later, which needs Python 3.12")
    return reasons


def choose(name: str, request: AttentionRequest, chunk: int = 512) -> str:
    """The name of the implementation that serves a request: the given one, or for `auto` the fastest.

    Raises:
      ConfigError: no implementation has this name.
      UnsupportedError: the implementation cannot serve the request; the message lists the reasons and alternatives.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(
            f"attention: no implementation is called '{name}'. " + did_you_mean(name, ["auto", *IMPLEMENTATIONS])
        )
    against = {one: reasons_against(one, request) for one in IMPLEMENTATIONS}
    if name == "auto":
        order = preference(request, chunk).order
        for one in order:
            if not against[one]:
                return one
        reasons = "; ".join(f"'{one}' {' and '.join(against[one])}" for one in order)
        raise UnsupportedError(f"attention: no implementation serves this layer on {request.platform}: {reasons}.")
    if against[name]:
        able = [one for one in IMPLEMENTATIONS if not against[one]]
        advice = f"Choose one of {', '.join(['auto', *able])}." if able else "No other one serves it."
        raise UnsupportedError(f"attention: '{name}' {'; and '.join(against[name])}. {advice}")
    return name


def cache_kernel(name: str, request: AttentionRequest) -> KeyBlockKernel | None:
    """The kernel that attends to KV caches, for a request with `partial`; None: `cached_attention` in XLA does.

    A name that serves training only is ignored.
    """
    named = name != "auto" and IMPLEMENTATIONS[name].partial is not None
    found = IMPLEMENTATIONS[choose(name if named else "auto", request)]
    return found.partial if found.kernel or slots_are_sharded() else None
