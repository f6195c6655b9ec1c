"""From a config file to frozen dataclasses: every default, every validation, every "did you mean".

A recipe in `configs/` builds an `ml_collections.ConfigDict`. It stops here: `load_config` turns it into a `Config`,
and the rest of the code base sees nothing but frozen dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import json
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


class UserError(ValueError):
    """Bad input: says what was wrong, where, and what to do. A command prints it and exits with status 2."""


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Wraps a verb's `main`: a `UserError` becomes one message on stderr and exit status 2."""

    @functools.wraps(main)
    def wrapper(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapper


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """`Did you mean 'x'?` for the nearest allowed name, else the list of what is allowed."""
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Allowed: {', '.join(sorted(allowed))}."


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the decoder. What it does with positions is not here: that is a phase's `positional`."""

    vocab_size: int = 0  # 0: taken from the tokenizer, rounded up to a multiple of 128
    layers: int = 12
    d_model: int = 768
    d_ff: int = 2048
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 0  # 0: d_model / heads
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys, before rotation
    attention_bias: bool = False  # bias on the query, key and value projections (Qwen2)
    tie_embeddings: bool = True
    norm_epsilon: float = 1e-6
    init_std: float = 0.02
    dtype: str = "bfloat16"  # compute; parameters are float32
    remat: str = "none"  # none | dots | full
    scan: bool = True  # False unrolls the layers: faster on a CPU, slower to compile
    attention: str = "auto"  # auto | reference | chunked
    attention_chunk: int = 512  # query and key block of the chunked attention, in tokens
    loss_chunks: int = 1  # the cross-entropy walks over the vocabulary in this many chunks


@dataclass(frozen=True)
class SourceConfig:
    """One corpus of the mixture. `options` are the source's own settings (needles have some)."""

    source: str = "stdlib"
    weight: float = 1.0
    column: str = "text"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """What the model reads, and how it is cut into windows of `sequence_length` + 1 tokens."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    tokenizer: str = "bytes"  # bytes | hf:PATH | sentencepiece:PATH | sentencepiece:train:SIZE
    prepared: str = ""  # a directory written by pe_lab.prepare; replaces `sources` and `tokenizer`
    cache_dir: str = "data"  # where shards written on first use live
    segments: bool = False  # mask attention between the documents packed into one window
    validation_fraction: float = 0.01
    seed: int = 0
    workers: int = 0  # Grain worker processes; 0 reads in this process, on threads


@dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis. -1 (on one axis): whatever is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW under a warm-up and a decay. `schedule`: cosine | wsd | constant."""

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 100
    decay_fraction: float = 0.2  # wsd: the share of the steps spent decaying
    final_fraction: float = 0.0  # learning rate at the end, as a fraction of the peak
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    clip_norm: float = 1.0


@dataclass(frozen=True)
class PhaseConfig:
    """One stretch of training. A phase starts where the one before it ended, unless `init_from` says otherwise."""

    name: str = "pretrain"
    steps: int = 1000
    positional: Any = "rope"  # an encoding, a text ("rope:base=10000"), or one per layer (see pe_lab.positional.layers)
    init_from: str = ""  # a checkpoint; "" is the previous phase's last, or random for the first phase
    sequence_length: int = 1024
    batch_size: int = 256  # windows a step, over all devices and micro-batches
    accumulate: int = 1  # micro-batches a step
    optimizer: OptimizerConfig = OptimizerConfig()


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a run saves, and how many checkpoints a phase keeps (its last one always)."""

    every_steps: int = 1000
    keep: int = 2


@dataclass(frozen=True)
class LogConfig:
    """How often a run writes a row of metrics and measures the validation loss."""

    every_steps: int = 1
    validate_every_steps: int = 500
    validation_batches: int = 8


@dataclass(frozen=True)
class EvaluationConfig:
    """What `pe_lab.evaluate` does with this run by default."""

    factors: tuple[int, ...] = (1, 2, 4, 8)  # lengths, in multiples of the training length
    tokens: int = 65536  # held-out tokens per perplexity
    needle_windows: int = 256  # windows per needle accuracy
    seed: int = 0


@dataclass(frozen=True)
class Notes:
    """What a reader should know of a recipe; copied into the run and its report."""

    paper: str = ""
    command: str = ""
    cost: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Config:
    """One experiment, whole."""

    name: str = "run"
    seed: int = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    notes: Notes = Notes()


