"""What a runtime computes from a checkpoint: transformers, llama.cpp, or logits that somebody saved."""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.checkpoints.audit.hypotheses import AuditedModel
from pe_lab.checkpoints.audit.search import Batch
from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pe_lab.checkpoints.families import leaf_paths
from pe_lab.checkpoints.families.tensors import ROTATED, block_leaf
from pe_lab.checkpoints.parity import LENGTH, compared_positions, llama_cpp_logits, transformers_logits
from pe_lab.checkpoints.source import nested
from pe_lab.errors import CheckpointError, DataError, UnsupportedError
from pe_lab.positional import Layer

SEQUENCES = 2
SHORTEST, LONGEST = 320, 1152  # default lengths: bfloat16 counts to 256; Gemma 3's windows have 1,024 tokens
SCREENED = 64  # tokens of a long batch at which hypotheses are tried first
FIRST = 32  # short sequences, for their first tokens
ALIKE = 0.9  # cosine of a tensor and its quantized self


class Observed(NamedTuple):
    """The logits of a runtime.

    Attributes:
      name: of the runtime.
      batches: the tokens and their positions, the one that hypotheses are tried on first.
      logits: [B, P, V] of each batch's compared tokens.
      exact: it computes in float32 throughout.
      notes: what a person should know of them.
    """

    name: str
    batches: tuple[Batch, ...]
    logits: tuple[Float[Any, "B P V"], ...]
    exact: bool = False
    notes: tuple[str, ...] = ()


def audited_tokens(vocab_size: int, sequences: int, length: int) -> Int[np.ndarray, "B T"]:
    """Random token ids; every second sequence repeats its first quarter, for attention to what is far."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (sequences, length)).astype(np.int32)
    tokens[1::2] = np.resize(tokens[1::2, : max(1, length // 4)].T, (length, len(tokens[1::2]))).T
    return tokens


def default_length(layers: Sequence[Layer]) -> int:
    """The tokens of a sequence that shows what it can of these layers at a bounded cost."""
    windows = [layer.window for layer in layers if layer.window is not None]
    return min(max(SHORTEST, max(windows, default=0) + LENGTH), LONGEST)


def near_batch(checkpoint: Checkpoint, length: int, sequences: int = SEQUENCES) -> Batch:
    """Sequences of `length` tokens from position 0 on, or as long as the model has positions for."""
    at = AuditedModel(checkpoint.layers, checkpoint.model)
    longest = min((one.max_length or length for one in at.acting), default=length)
    return _batch(checkpoint, np.arange(min(length, longest), dtype=np.int32), sequences)


def audited_batches(checkpoint: Checkpoint, length: int, sequences: int = SEQUENCES) -> tuple[Batch, ...]:
    """`near_batch`, and a few tokens at positions that reach twice the training length; the shorter one first."""
    far = compared_positions(int(checkpoint.metadata["training_length"]), checkpoint.layers)[1]
    batches = near_batch(checkpoint, length, sequences), _batch(checkpoint, far, sequences)
    return tuple(sorted(batches, key=lambda batch: len(batch.positions)))


def _batch(checkpoint: Checkpoint, positions: Int[np.ndarray, " T"], sequences: int) -> Batch:
    tokens = audited_tokens(checkpoint.model.vocab_size, sequences, len(positions))
    return Batch(tokens, positions, int(positions[-1]) + 1)


def by_transformers(directory: Path, python: str, batches: Sequence[Batch], gguf_file: str | None = None) -> Observed:
    """What transformers computes in float32 from a directory, or from a GGUF file in it."""
    passes = [(batch.tokens, batch.positions[None]) for batch in batches]
    found = [logits[0] for logits in transformers_logits(directory, python, passes, gguf_file)]
    return _finite(Observed("transformers", tuple(batches), tuple(found), exact=True))


def by_llama_cpp(file: Path, python: str, batch: Batch, vocab_size: int) -> Observed:
    """What llama.cpp computes from a GGUF file, with a float32 cache; it refuses positions with gaps.

    It rounds the inputs of products to 16 or 8 bits where the weights have so many, and GELU to 16 bits; how much that
    changes logits, more first tokens show than those of `batch`.
    """
    tokens, at = audited_tokens(vocab_size, FIRST, 2), np.arange(2, dtype=np.int32)
    first, found = llama_cpp_logits(file, python, [(tokens, at[None]), (batch.tokens, batch.positions[None])])
    observed = _screened("llama.cpp", batch, found[0])
    # Not the first, which all hypotheses are tried on: two tokens show little else.
    batches = (observed.batches[0], Batch(tokens, at, 2), *observed.batches[1:])
    return _finite(observed._replace(batches=batches, logits=(observed.logits[0], first[0], *observed.logits[1:])))


def _finite(found: Observed) -> Observed:
    if not all(np.isfinite(logits).all() for logits in found.logits):
        raise CheckpointError(f"{found.name} computes logits that are NaN or infinite.")
    return found


def _screened(name: str, batch: Batch, logits: Float[Any, "B T V"]) -> Observed:
    """A batch, and its first tokens as one before it, which later tokens do not change."""
    batches, parts = [batch], [logits]
    if batch.at is None and len(batch.positions) >= 2 * SCREENED:
        batches.insert(0, Batch(batch.tokens[:, :SCREENED], batch.positions[:SCREENED], batch.length))
        parts.insert(0, logits[:, :SCREENED])
    return Observed(name, tuple(batches), tuple(parts))


def with_weights_of(checkpoint: Checkpoint, file: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with the weights of a GGUF file, which may be quantized, and notes.

    Queries and keys in another order of channels than the checkpoint's stay those of the checkpoint: the runtime's are
    then wrong, which the audit has to find.

    Raises:
      CheckpointError: the file has another model's weights.
    """
    try:
        other = open_checkpoint(f"gguf:{file}")
    except UnsupportedError:  # the file is of an architecture that pe_lab imports from Hugging Face alone
        return checkpoint, ("pe_lab does not read such a GGUF file: the weights compared are the checkpoint's.",)
    own, found = leaf_paths(checkpoint.params), leaf_paths(other.params)
    if {path: leaf.shape for path, leaf in own.items()} != {path: leaf.shape for path, leaf in found.items()}:
        raise CheckpointError(f"'{file}' has other tensors than the checkpoint: it was not made of it.")
    permuted = []
    for path, leaf in own.items():
        cosine = jnp.vdot(leaf, found[path]) / (jnp.linalg.norm(leaf) * jnp.linalg.norm(found[path]) + 1e-30)
        if float(cosine) < ALIKE:
            if block_leaf(path) not in ROTATED:
                raise CheckpointError(
                    f"'{file}' has other weights than the checkpoint ({path}: cosine {float(cosine):.2f}): it was not "
                    "made of it."
                )
            permuted.append(path)
    notes = (f"The file's {' and '.join(permuted)} are not the checkpoint's.",) if permuted else ()
    kept = {path: own[path] if path in permuted else leaf for path, leaf in found.items()}
    return dataclasses.replace(checkpoint, params=nested(kept)), notes


def saved(path: Path, vocab_size: int) -> Observed:
    """Logits that somebody saved: an npz file with `tokens` [B, T] and `logits` [B, T, V].

    `positions` [T] are those of the tokens, if they are not 0, 1, 2, ...; `at` [P] the tokens that [B, P, V] logits are
    of, if they are not of all.

    Raises:
      DataError: it is damaged, or its arrays do not fit the model or each other.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive, or it is truncated")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"'{path}' is no npz file that can be read ({error}). Write it with numpy.savez.") from None
    for name in ("tokens", "logits"):
        if name not in arrays:
            raise DataError(f"'{path}' has no array '{name}'; it has {', '.join(sorted(arrays)) or 'none'}.")
    tokens, logits = np.atleast_2d(arrays["tokens"]), arrays["logits"]
    logits = logits[None] if logits.ndim == 2 else logits
    count = tokens.shape[-1]
    positions, at = arrays.get("positions", np.arange(count)), arrays.get("at", np.arange(count))
    wrong = _misfit(tokens, logits, positions, at, vocab_size)
    if wrong:
        raise DataError(f"'{path}': {wrong}.")
    whole = Batch(tokens.astype(np.int32), positions.astype(np.int32), int(positions.max()) + 1)
    return _screened(f"'{path.name}'", whole if len(at) == count else whole._replace(at=at), logits)


def _misfit(tokens: Any, logits: Any, positions: Any, at: Any, vocab_size: int) -> str:
    """Why arrays do not fit the model or each other; empty: they do."""
    if not np.issubdtype(tokens.dtype, np.integer) or tokens.ndim != 2 or not tokens.size:
        return f"tokens are {tokens.dtype} of shape {list(tokens.shape)}; give whole numbers [B, T]"
    if not np.issubdtype(logits.dtype, np.floating) or logits.ndim != 3:
        return f"logits are {logits.dtype} of shape {list(logits.shape)}; give floating-point numbers [B, T, V]"
    if not np.issubdtype(at.dtype, np.integer) or at.ndim != 1 or not at.size:
        return f"at is {at.dtype} of shape {list(at.shape)}; give whole numbers [P], the tokens that logits are of"
    if at.min() < 0 or at.max() >= tokens.shape[1] or (np.diff(at) <= 0).any():
        return f"at must have ascending numbers from 0 to {tokens.shape[1] - 1:,}, the tokens that logits are of"
    if logits.shape[:2] != (len(tokens), len(at)):
        return (
            f"logits {list(logits.shape)} and tokens {list(tokens.shape)} disagree; give [B, T, V] and [B, T], or "
            "logits [B, P, V] and the array at [P] of the tokens that they are of"
        )
    if tokens.shape[1] < 2:
        return "one token a sequence shows no position; give sequences of two tokens or more"
    if logits.shape[2] != vocab_size:
        return f"logits are of a vocabulary of {logits.shape[2]:,}; the model's has {vocab_size:,}"
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"tokens range from {tokens.min()} to {tokens.max()}; the model's vocabulary has {vocab_size:,}"
    if not np.issubdtype(positions.dtype, np.integer) or positions.shape != tokens.shape[1:]:
        return f"positions are {positions.dtype} of shape {list(positions.shape)}; give whole numbers [T]"
    if positions.min() < 0 or positions.max() >= 2**31 - 1:
        return f"positions range from {positions.min()} to {positions.max()}; give numbers from 0 to 2^31 - 2"
    if bad := int((~np.isfinite(logits)).sum()):
        return f"{bad:,} of {logits.size:,} logits are NaN or infinite"
    return ""
