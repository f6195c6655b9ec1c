"""The table that `auto` follows: which implementation of attention is the fastest, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pe_lab.attention.capabilities import AttentionRequest

SHORT = 256  # up to this many tokens, accelerators multiply whole matrices faster than a kernel runs
REPEATED = 2**17  # up to this many tokens, keys are repeated for heads that rotate differently


@dataclass(frozen=True)
class Preference:
    """A row of the table that `auto` follows; the first one that covers a request counts.

    Attributes:
      requests: in words.
      covers: whether it is for a request, given the block of chunked attention.
      order: names, the fastest first.
      source: the results under benchmarks/results that it rests on; empty: nothing was measured.
      measured: of these results, the speed of each alternative in TFLOP/s, by what was measured.
    """

    requests: str
    covers: Callable[[AttentionRequest, int], bool]
    order: tuple[str, ...]
    source: str = ""
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


_OTHERS = ("chunked", "reference", "dense")
# pallas_hopper has not run on a GPU yet: it serves what nothing else does, and whoever names it. tokamax is before
# pallas_gpu by the measurements that it ships: its Mosaic kernel is 1.7 to 2 times as fast as its Triton one.
_KERNELS = ("pallas_gpu", "pallas_hopper")
_H100 = "h100/attention.json"
PREFERENCES = (
    Preference(
        "a CPU, sequences of at most a block",
        lambda request, chunk: request.platform == "cpu" and request.length <= chunk,
        ("dense", "chunked", "reference"),
    ),
    Preference("a CPU", lambda request, chunk: request.platform == "cpu", _OTHERS),
    Preference(
        f"a TPU, at most {SHORT} tokens",
        lambda request, chunk: request.platform == "tpu" and request.length <= min(chunk, SHORT),
        ("dense", "splash", "pallas_tpu", "chunked", "reference"),
    ),
    Preference(
        "a TPU, heads that rotate differently",
        lambda request, chunk: request.platform == "tpu" and request.split_heads,
        ("pallas_tpu", "splash", *_OTHERS),
    ),
    Preference("a TPU", lambda request, chunk: request.platform == "tpu", ("splash", "pallas_tpu", *_OTHERS)),
    Preference(
        f"a GPU, at most {SHORT} tokens",
        lambda request, chunk: request.length <= min(chunk, SHORT),
        ("dense", "cudnn", "tokamax", *_KERNELS, "chunked", "reference"),
    ),
    Preference(
        "a GPU, one sequence of at most 1,024 tokens",
        lambda request, chunk: request.sequences == 1 and request.length <= 1024,
        ("pallas_gpu", "cudnn", "tokamax", "pallas_hopper", *_OTHERS),
        _H100,
        {
            "forward, 1,000 tokens": {"pallas_gpu": 35.2, "cudnn": 17.8},
            "forward, 1,000 tokens, heads rotate differently": {"pallas_gpu": 31.9, "cudnn": 16.6},
            "forward and backward, 1,000 tokens": {"pallas_gpu": 37.0, "cudnn": 26.6},
        },
    ),
    Preference(
        f"a GPU, heads that rotate differently, more than {REPEATED:,} tokens: repeated keys are too large",
        lambda request, chunk: request.split_heads and request.length > REPEATED,
        (*_KERNELS, "cudnn", "tokamax", *_OTHERS),
    ),
    Preference(
        "a GPU, heads that rotate differently: keys are repeated",
        lambda request, chunk: request.split_heads,
        ("cudnn", "tokamax", *_KERNELS, *_OTHERS),
        _H100,
        {
            "forward, 8,192 tokens, heads rotate differently": {"cudnn": 393.5, "pallas_gpu": 224.6},
            "forward, 32,768 tokens, heads rotate differently": {"cudnn": 453.8, "pallas_gpu": 254.0},
        },
    ),
    Preference(
        "a GPU",
        lambda request, chunk: True,
        ("cudnn", "tokamax", *_KERNELS, *_OTHERS),
        _H100,
        {
            "forward, 8,192 tokens": {"cudnn": 420.5, "pallas_gpu": 286.9},
            "forward, 32,768 tokens": {"cudnn": 455.3, "pallas_gpu": 327.7},
            "forward and backward, 2,048 tokens": {"cudnn": 270.7, "pallas_gpu": 210.1},
            "forward and backward, 8,192 tokens": {"cudnn": 401.6, "pallas_gpu": 278.8},
            "forward and backward, 32,768 tokens": {"cudnn": 429.9, "pallas_gpu": 300.9},
        },
    ),
)


def preference(request: AttentionRequest, chunk: int = 512) -> Preference:
    """The row of the table for a request; `chunk` is the block of chunked attention."""
    return next(one for one in PREFERENCES if one.covers(request, chunk))
