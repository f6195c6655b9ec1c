"""The memory of one chip: what the compiler assigns to a program, and what evaluating a long sequence needs."""

from __future__ import annotations

import bisect
import dataclasses
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.errors import excerpt
from pe_lab.evaluation.scoring.forward import CHUNK_ELSEWHERE
from pe_lab.model import Model
from pe_lab.model.cache import cache_bytes, cache_bytes_per_token
from pe_lab.model.loss import LOGITS
from pe_lab.parallel import AxisRules, padded_length, use_mesh
from pe_lab.positional import LayerStructure, Schedule


@dataclass(frozen=True)
class Compiled:
    """Bytes per chip of a compiled program. `aliased` outputs share the memory of arguments."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int
    seconds: float

    @property
    def needed(self) -> int:
        """The larger of the compiler's peak and the sum of the parts: each omits something."""
        return max(self.peak, self.arguments + self.outputs - self.aliased + self.temporaries + self.code)


# libtpu 0.0.51 writes "... (32.57G) exceeds available HBM (15.75G)", earlier ones "Used 32.57G of 15.75G hbm".
_REFUSALS = (
    r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)",
    r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm",
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfMemory(Exception):
    """The compiler found no layout that fits the chip. `used` and `capacity` in bytes; None if it gave no numbers."""

    def __init__(self, message: str):
        super().__init__(excerpt(message.splitlines()[0]))
        self.used = self.capacity = None
        for pattern in _REFUSALS:
            if found := re.search(pattern, message):
                used, used_unit, capacity, unit = found.groups()
                self.used, self.capacity = int(float(used) * _UNITS[used_unit]), int(float(capacity) * _UNITS[unit])
                break


@dataclass(frozen=True)
class Program:
    """The text of a compiled program, and the compiler's notes on its buffers; "" where it writes none."""

    text: str
    assignment: str = ""
    live_ranges: str = ""


def analyze(lowered: Any, start: float) -> Compiled:
    """Compiles a lowered program; `seconds` counts from `start`, of `time.perf_counter`.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    return _memory(_compile(lowered), start)


def analyze_program(lowered: Any, start: float, dump: bool) -> tuple[Compiled, Program]:
    """As `analyze`, with the program; with `dump`, from the files that the compiler of TPUs can write.

    Some programs of libtpu 0.0.51 have no `as_text` in jaxlib 0.10.2, and only the files have the buffers.
    """
    if not dump:
        compiled = _compile(lowered)
        return _memory(compiled, start), Program(compiled.as_text())
    with tempfile.TemporaryDirectory(prefix="pe_lab_plan_") as directory:
        memory = _memory(_compile(lowered, {"xla_dump_to": directory}), start)

        def text(ending: str) -> str:
            """The largest file: other programs, of parts of this one, are dumped too."""
            files = sorted(Path(directory).glob(f"*{ending}"), key=lambda path: path.stat().st_size)
            return files[-1].read_text() if files else ""

        program = text("after_codegen.txt") or text("after_optimizations.txt")
        return memory, Program(program, text("after_optimizations-buffer-assignment.txt"), text("live-range.txt"))


def _compile(lowered: Any, options: dict[str, str] | None = None) -> Any:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(str(error)) from None


def _memory(compiled: Any, start: float) -> Compiled:
    analysis = compiled.memory_analysis()
    return Compiled(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        peak=getattr(analysis, "peak_memory_in_bytes", 0),
        seconds=time.perf_counter() - start,
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sequence, estimated from shapes or compiled


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes per chip of one sequence, without the weights.

    Attributes:
      cache: the KV cache of the whole sequence, on all chips together.
      at_once: activations of one pass, with the sequence sharded over the chips.
      in_chunks: the KV cache and the activations of one chunk, on one chip.
      decoding: the KV cache, sharded over the chips.
    """

    cache: int
    at_once: int
    in_chunks: int
    decoding: int


def weight_bytes(model: Model, shards: int) -> int:
    """Bytes of the weights of a chip in an evaluation, sharded over `shards`: float32, and a copy in bfloat16.

    The compiler casts the weights of all layers before it scans over them.
    """
    width = np.dtype(model.config.dtype).itemsize
    return model.num_parameters * (4 + (width if width < 4 else 0)) // shards


def sequence_memory(
    model: Model, structure: Sequence[LayerStructure], length: int, chips: int, shards: int = 1
) -> SequenceMemory:
    """The estimated memory of one sequence of `length` tokens on `chips` chips, with weights over `shards` of them."""
    config = model.config
    width = np.dtype(config.dtype).itemsize
    cache = cache_bytes(config, structure, length)
    parts = chips // shards
    here = padded_length(length, parts) // parts

    def activations(tokens: int, shards: int = 1) -> int:
        # The residual stream, its norm and a branch's output; queries, keys and values before and after rotation,
        # and the attention output; gate, up and their product. XLA frees one branch before it begins the other.
        shapes = [stack.config for stack in model.stacks]
        attended = max((3 * one.heads + 4 * one.kv_heads) * one.head_dim for one in shapes)
        hidden = (3 if config.gated_mlp else 2) * max(one.d_ff for one in shapes)
        logits = min(LOGITS, tokens * config.vocab_size // shards) * 4 * 2
        return tokens * width * (3 * config.d_model + max(attended, hidden) // shards) + logits

    # Ring attention holds two slices of a layer's keys and values: the current one, and the one being received.
    largest = max(cache_bytes_per_token(stack.config) for stack in model.stacks)
    ring = 2 * here * largest // shards if parts > 1 else 0
    in_chunks = cache + activations(min(CHUNK_ELSEWHERE, length))
    return SequenceMemory(cache, activations(here, shards) + ring, in_chunks, -(-cache // chips))


def longest(
    model: Model, structure: Sequence[LayerStructure], chips: int, available: int, mode: str, shards: int = 1
) -> int:
    """The largest length, a multiple of 1024, whose `mode` (a field of `SequenceMemory`) fits `available` bytes."""

    def needed(multiple: int) -> int:
        return getattr(sequence_memory(model, structure, multiple * 1024, chips, shards), mode)

    return 1024 * bisect.bisect_right(range(1, 2**30 // 1024 + 1), available, key=needed)


def compile_evaluation(model: Model, schedule: Schedule, length: int, mesh: Mesh) -> Compiled:
    """Compiles the pass that computes the losses of one sequence, sharded over the context axis of `mesh`.

    Weights are sharded over its tensor axis.

    Raises:
      OutOfMemory: the compiler found no layout that fits the chip.
    """
    evaluated = Model(dataclasses.replace(model.config, remat="none"), backward=False, hooks=schedule.hooks)

    def losses(params, tokens, targets, schedule):  # noqa: ANN001, ANN202
        with use_mesh(mesh, AxisRules()):
            return evaluated.token_loss(params, {"tokens": tokens, "targets": targets}, schedule)

    replicated = NamedSharding(mesh, PartitionSpec())

    def shape(x: Any, sharding: NamedSharding = replicated) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=replicated)
    start = time.perf_counter()
    shardings = parameter_shardings(evaluated, mesh, AxisRules())
    params, arrays = jax.tree.map(shape, evaluated.shapes, shardings), jax.tree.map(shape, schedule)
    lowered = jax.jit(losses).lower(params, tokens, tokens, arrays)
    return analyze(lowered, start)
