"""The table of implementations, and which of them serves a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pe_lab.attention.capabilities import Capabilities, Request, refusals
from pe_lab.attention.chunked import chunked_attention, chunked_span
from pe_lab.attention.dense import dense_attention
from pe_lab.attention.kernels import external as libraries
from pe_lab.attention.kernels.gpu import gpu_span
from pe_lab.attention.kernels.tpu import tpu_span
from pe_lab.attention.key_block import Noise, Partial, Rotation, Side
from pe_lab.attention.reference import reference_attention
from pe_lab.errors import UserError, did_you_mean

EVERYTHING = frozenset({"slopes", "segments", "windows", "diagonal bias", "soft cap"})
SHORT = 256  # tokens up to which accelerators multiply whole matrices instead of calling a kernel


@dataclass(frozen=True)
class Implementation:
    """A way to compute attention.

    Attributes:
      what: it is, in a few words.
      run: as `reference_attention`, on whole texts; with `turns_keys` it takes `rotation` and `noise` of `span.Side`.
      capabilities: what it can do.
      span: as `chunked_span`, on parts of the keys, where it can; what a context axis and caches are served by.
      kernel: one program of the device: on a mesh it is run on each device's part, for XLA cannot cut it.
    """

    what: str
    run: Callable[..., jax.Array]
    capabilities: Capabilities
    span: Callable[..., Partial] | None = None
    kernel: bool = False


def whole_text(span: Callable[..., Partial]) -> Callable[..., jax.Array]:
    """A span's kernel as attention of a text to itself, [B, T, H, K]."""

    def run(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        scale: jax.Array,
        *,
        slope: jax.Array | None,
        positions: jax.Array | None,
        segments: jax.Array | None,
        window: int | None,
        diagonal_bias: jax.Array | None = None,
        soft_cap: float | None = None,
        rotation: Rotation | None = None,
        noise: Noise | None = None,
        chunk: int = 0,
    ) -> jax.Array:
        if diagonal_bias is not None:
            raise NotImplementedError("attention of spans has no diagonal bias.")
        q = (query.astype(jnp.float32) * scale).astype(query.dtype)
        if positions is not None:
            positions = jnp.broadcast_to(positions, query.shape[:2])
        side = Side(
            slope=slope,
            query_positions=positions,
            key_positions=positions,
            query_segments=segments,
            key_segments=segments,
            rotation=rotation,
            noise=noise,
        )
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, key, value))
        return span(q, k, v, side, window=window, soft_cap=soft_cap).out.transpose(0, 2, 1, 3)

    return run


_OURS = Capabilities(
    honours=EVERYTHING - {"diagonal bias"},
    dtypes=("float32", "bfloat16"),
    head_dims=lambda K: 32 <= K <= 256 and K % 16 == 0,
    head_dims_text="32 to 256, in steps of 16",
    backward=False,
    rotates_keys=True,
)

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation("all logits at once, by the formula", reference_attention, Capabilities(EVERYTHING)),
    "dense": Implementation(
        "all logits at once, with a gradient of its own", dense_attention, Capabilities(EVERYTHING - {"soft cap"})
    ),
    "chunked": Implementation(
        "blocks of logits, memory linear in the length", chunked_attention, Capabilities(EVERYTHING), chunked_span
    ),
    "splash": Implementation("JAX's kernel", libraries.splash_attention, libraries.SPLASH, kernel=True),
    "cudnn": Implementation("NVIDIA's kernel, through jax.nn", libraries.cudnn_attention, libraries.CUDNN, kernel=True),
    "tokamax": Implementation("OpenXLA's kernels", libraries.tokamax_attention, libraries.TOKAMAX, kernel=True),
    "pallas_tpu": Implementation(
        "our kernel, by Mosaic", whole_text(tpu_span), _OURS._replace(platforms=("tpu",)), tpu_span, kernel=True
    ),
    "pallas_gpu": Implementation(
        "our kernel, by Triton", whole_text(gpu_span), _OURS._replace(platforms=("gpu",)), gpu_span, kernel=True
    ),
}  # fmt: skip

# The fastest first, of those that can serve a request.
_ORDER = {
    "cpu": ("chunked", "reference", "dense"),
    "tpu": ("splash", "pallas_tpu", "chunked", "reference", "dense"),
    "gpu": ("cudnn", "tokamax", "pallas_gpu", "chunked", "reference", "dense"),
}


def order(request: Request, chunk: int) -> tuple[str, ...]:
    """The names that `auto` tries, in their order: the fastest first."""
    names = _ORDER[request.platform]
    if request.split_heads:
        # A library would read a copy of the keys for every query head.
        names = tuple(sorted(names, key=lambda name: not name.startswith("pallas")))
    short = chunk if request.platform == "cpu" else min(chunk, SHORT)
    if request.length <= short:
        names = ("dense", *(name for name in names if name != "dense"))
    return names


def reasons_against(name: str, request: Request) -> list[str]:
    """Why an implementation cannot serve a request on this machine."""
    one = IMPLEMENTATIONS[name]
    reasons = refusals(one.capabilities, request)
    if request.spans and one.span is None:
        reasons.append("gives no partial results, which caches and texts on several devices are merged from")
    if request.spans and "diagonal bias" in request.needs:
        reasons.append("has no diagonal bias for a text that lies on several devices")
    if name == "tokamax" and (reason := libraries.why_no_tokamax()):
        reasons.append(reason)
    return reasons


def choose(name: str, request: Request, chunk: int = 512) -> str:
    """The name of the implementation that serves a request: the one asked for, or for `auto` the fastest that can.

    Raises:
      UserError: no such name, or one that cannot honour the request: nothing is ever left out silently. The message
        says what refuses what, and what would take it.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise UserError(
            f"attention: no implementation is called '{name}'. " + did_you_mean(name, ["auto", *IMPLEMENTATIONS])
        )
    against = {one: reasons_against(one, request) for one in IMPLEMENTATIONS}
    if name == "auto":
        for one in order(request, chunk):
            if not against[one]:
                return one
        told = "; ".join(f"'{one}' {' and '.join(against[one])}" for one in order(request, chunk))
        raise UserError(f"attention: no implementation serves this layer on {request.platform}: {told}.")
    if against[name]:
        able = [one for one in IMPLEMENTATIONS if not against[one]]
        take = f"Choose one of {', '.join(['auto', *able])}." if able else "No other would take it."
        raise UserError(f"attention: '{name}' {'; and '.join(against[name])}. {take}")
    return name
