"""Whether encodings are what they say: `pe_lab.model.encoding_check` on one encoding, or on every registered one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.analysis.analysis import Analysis
from pe_lab.attention.capabilities import AttentionRequest, refusals
from pe_lab.attention.dispatch import IMPLEMENTATIONS, layer_request
from pe_lab.config import from_dict
from pe_lab.errors import ConfigError
from pe_lab.model import Model, model_schedule
from pe_lab.model.encoding_check import CONFIG, LENGTH, Check, check
from pe_lab.positional import HOOKS, Layer, Rope, Schedule, build_schedule, has, label, layers
from pe_lab.positional.registry import ENCODINGS
from pe_lab.results.findings import Findings
from pe_lab.results.table import TextTable
from pe_lab.storage import write_file
from pe_lab.terminal import Progress, console

# Columns: of the table in docs/encodings.md too.
HEADER = (
    "encoding", "hooks", "causal", "relative", "static", "exact under a cache", "packed = separate",
    "sharded = whole", "all parameters learn", "bfloat16 gradients", "kernels that train it", "parameters", "cost",
)  # fmt: skip
KERNELS = ("splash", "cudnn", "tokamax", "pallas_tpu", "pallas_gpu", "pallas_hopper", "chunked", "dense", "reference")
EXAMPLES = {
    "function": {"name": "pe_lab.positional:apply_p_rope", "settings": (("rope_percentage", 0.75),)},
    "longrope_start": {"divisors": (2.0,)},
}
FURTHER = ("selective_rope:convolution=4",)  # which computes with earlier tokens
MARKERS = "<!-- checked -->\n", "<!-- end of checked -->"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--positional",
        action="append",
        metavar="TEXT",
        help="an encoding, such as rope/with=t5; may be repeated (default: every registered one)",
    )
    parser.add_argument("--cost", action="store_true", help="the time of a training step too")
    parser.add_argument("--write", metavar="FILE", help="write the table into a Markdown file, between its markers")


def default_layers() -> tuple[list[Layer], list[str]]:
    """A layer with each registered encoding, and the names of those that need settings which only their user knows."""
    found, left = [], []
    for name, kind in ENCODINGS.items():
        required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
        given: dict[str, Any] = dict(EXAMPLES.get(name, {}))
        if "original_length" in required:
            given["original_length"] = LENGTH
        if set(required) <= set(given):
            found.append(Layer(from_dict(kind, given, name)))
        else:
            left.append(name)
    return found + [layer for text in FURTHER for layer in layers(text, 1)], left


def kernels_of(layer: Layer) -> list[str]:
    """The implementations of attention that train a layer, each on its own platform: bfloat16, heads of 64 channels."""
    found = []
    structure = build_schedule((layer,), 8, 4, 64).structure[0]
    for name in KERNELS:
        able = IMPLEMENTATIONS[name].capabilities
        one: AttentionRequest = layer_request(structure, (8, 4, 64), "bfloat16", 4096, backward=True, partial=False)
        if not refusals(able, one._replace(platform=able.platforms[0], capability=9.0)):
            found.append(name)
    return found


def row(layer: Layer, found: Sequence[Check], with_cost: bool) -> tuple[str, ...]:
    """One line of the table. A declared property that its check did not show has an exclamation mark."""
    by_name = {one.name: one for one in found}

    def cell(name: str) -> str:
        one = by_name[name]
        if one.found is None:
            return "–"
        return ("yes" if one.found else "no") + ("!" if one.fails else "")

    acting = [encoding for _, encoding in layer.acting()]
    kernels = kernels_of(layer)
    hooks = [h for h in ("frequencies", "slopes", *HOOKS) if any(has(one, h) for one in acting)]
    return (
        label(layer),
        ", ".join(hooks) or "–",
        *(
            cell(name)
            for name in ("causal", "relative", "static", "cached", "packed", "sharded", "learned", "bfloat16")
        ),
        "all" if len(kernels) == len(KERNELS) else ", ".join(kernels),
        f"{_wide(layer)[0].num_parameters - Model(_WIDE).num_parameters:,}",
        f"{cost(layer):.2f}" if with_cost else "–",
    )


_WIDE = dataclasses.replace(
    CONFIG, vocab_size=64, layers=1, d_model=512, d_ff=64, heads=8, kv_heads=8, head_dim=64, attention="auto",
    attention_chunk=256,
)  # fmt: skip


def _wide(layer: Layer) -> tuple[Model, Schedule]:
    """A model of one layer of 8 heads and d_model 512."""
    schedule = model_schedule(_WIDE, (layer,))
    return Model(_WIDE, hooks=schedule.hooks), schedule


def cost(layer: Layer, length: int = 512, repeats: int = 25) -> float:
    """The time of a training step of one layer over that with RoPE, on this machine.

    The median of ratios of steps that follow each other: 8 heads of 64 channels, float32, `length` tokens.
    """
    step, with_rope = (_training_step(one, length) for one in (layer, Layer(Rope())))
    ratios = []
    for _ in range(repeats):
        seconds = []
        for one in (step, with_rope):
            start = time.perf_counter()
            jax.block_until_ready(one())
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return float(np.median(ratios))


@functools.lru_cache(maxsize=2)  # RoPE's stays
def _training_step(layer: Layer, length: int) -> Callable[[], Any]:
    """The gradient of `_wide` as a call without arguments, compiled."""
    model, schedule = _wide(layer)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.02, x.dtype), model.shapes)  # values take no time
    tokens = jnp.zeros((1, length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "weights": jnp.ones(tokens.shape)}
    gradient = jax.grad(lambda params, batch: model.loss_sum(params, batch, schedule))
    step = functools.partial(jax.jit(gradient), params, batch)
    jax.block_until_ready(step())
    return step


def failures(layer: Layer, found: Sequence[Check]) -> list[str]:
    """A sentence for each declared property that does not hold."""
    return [
        f"{label(layer)}: {one.name} FAILS: it {'says so' if one.claimed else 'must be'}, and the check finds "
        f"{one.detail or 'otherwise'}."
        for one in found
        if one.fails
    ]


def _run(arguments: argparse.Namespace) -> Findings:
    with contextlib.suppress(RuntimeError):  # devices are known already
        jax.config.update("jax_num_cpu_devices", 2)  # to shard a sequence
    left: list[str] = []
    if arguments.positional:
        chosen = [layer for text in arguments.positional for layer in layers(text, text.count("+") + 1)]
    else:
        chosen, left = default_layers()
    rows, sentences, metadata = [], [], []
    with Progress(console(), "check", len(chosen)) as progress:
        for n, layer in enumerate(chosen, 1):
            found = check(layer)
            rows.append(row(layer, found, arguments.cost))
            sentences += failures(layer, found)
            metadata.append({"encoding": label(layer), "checks": [dataclasses.asdict(one) for one in found]})
            progress.update(n, label(layer))
    failed = bool(sentences)
    if not failed:
        sentences = [f"{len(chosen)} encodings are what they say."]
    if left:
        sentences.append(f"Not checked, because they need settings (--positional): {', '.join(left)}.")
    sentences.append(
        "parameters: of a layer of 8 heads and d_model 512; cost (with --cost): the time of its training step over "
        "that with RoPE, on this machine. kernels: bfloat16, heads of 64 channels, each on its own platform."
    )
    if arguments.write:
        write_table(Path(arguments.write), rows)
    settings = {"layers": CONFIG.layers, "heads": CONFIG.heads, "kv_heads": CONFIG.kv_heads, "checked": metadata}
    numbers = {
        f"{n}/holds": np.array([one["found"] is not False for one in each["checks"]]) for n, each in enumerate(metadata)
    }
    shapes = {str(n): each["encoding"] for n, each in enumerate(metadata)}
    table = TextTable("Encodings, checked on a model of two layers", HEADER, tuple(rows), words=len(HEADER))
    return Findings(tuple(sentences), (table,), (), numbers, shapes, settings, failed=failed)


def write_table(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Replaces the table of a Markdown file; `ConfigError` if it has no place for one."""
    text = path.read_text() if path.is_file() else ""
    start, end = (text.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        raise ConfigError(f"--write: '{path}' has no lines '{MARKERS[0].strip()}' and '{MARKERS[1]}'.")
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, *rows)]
    table = "\n".join([lines[0], "|" + "---|" * len(HEADER), *lines[1:]])
    write_file(path, f"{text[: start + len(MARKERS[0])]}{table}\n{text[end:]}".encode())


ANALYSIS = Analysis("pe_lab.positional.hooks", _options, _run, models=False)
