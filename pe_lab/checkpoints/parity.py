"""The parity check: the logits of a fixed batch by transformers and by pe_lab, compared after every conversion.

A wrong permutation of queries and keys loads and runs without an error, and makes a bad model. So does a wrong scaling
of the rotation, which shows at distances near the training length and beyond: the same tokens are compared twice, at
positions 0, 1, 2, ... and at positions that reach twice the training length, up to 131,072, with as few tokens.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pe_lab.errors import CheckpointError, UnsupportedError
from pe_lab.model import Model, model_schedule
from pe_lab.positional import Alibi, Layer
from pe_lab.storage.gguf_format import open_gguf

BATCH, LENGTH = 2, 64
# Float32 results of two libraries differ by a few 1e-6 of the largest logit, a wrong conversion by 1e-1 of it.
ABSOLUTE, RELATIVE = 2e-4, 2e-5
# transformers rounds a frequency to float32, and multiplies: at position n an angle is off by about n 2**-24.
PER_POSITION = 2.0**-23
LAST_POSITION = 2**17  # beyond it that is more than 1.6% of the largest logit, which may hide a wrong scaling
# llama.cpp rounds the inputs of products as it does the weights, and GELU to 16 bits: of the largest logit.
ROUNDING = {"F32": 2e-3, "F16": 1e-2, "BF16": 3e-2, "Q8_0": 8e-2}
SCRIPT = Path(__file__).with_name("transformers_logits.py")
LLAMA_CPP = Path(__file__).with_name("llama_cpp_logits.py")


@dataclass(frozen=True)
class Parity:
    """The result of a comparison of `BATCH` sequences of `LENGTH` tokens."""

    difference: float  # largest absolute difference of a logit
    largest: float  # largest absolute logit
    agreement: float  # share of positions whose most probable next token is the same
    last: int  # position of the last token
    rounding: float = RELATIVE  # allowed, of the largest logit

    @property
    def passed(self) -> bool:
        relative = self.rounding + (PER_POSITION * self.last if self.last >= LENGTH else 0.0)
        return self.difference <= max(ABSOLUTE, relative * self.largest)

    def __str__(self) -> str:
        return (
            f"largest difference of a logit {self.difference:.2g} (largest logit {self.largest:.3g}), "
            f"most probable next tokens equal at {self.agreement:.1%} of {BATCH * LENGTH} positions up to "
            f"{self.last:,}"
        )


def find_python(given: str | None, needs: Sequence[str], flag: str = "--parity-python") -> str | None:
    """The interpreter for transformers: the one that `flag` gives, which must have the packages, or this one."""
    if given is None:
        return sys.executable if all(importlib.util.find_spec(name) is not None for name in needs) else None
    try:
        check = subprocess.run([given, "-c", f"import {', '.join(needs)}"], capture_output=True, text=True)
    except OSError as error:
        raise UnsupportedError(f"{flag} '{given}' cannot be run ({error}).") from None
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnsupportedError(f"{flag} '{given}' cannot import {' and '.join(needs)}: {reason}")
    return given


def fixed_batch(vocab_size: int) -> Int[np.ndarray, "B T"]:
    """The tokens of the comparison, the same for all models of a vocabulary size."""
    return np.random.default_rng(0).integers(0, vocab_size, (BATCH, LENGTH)).astype(np.int32)


def compared_positions(training_length: int, layers: Sequence[Layer] = ()) -> Int[np.ndarray, "2 T"]:
    """The positions of the tokens in the two comparisons: consecutive ones, and some up to twice the training length.

    The second are farther and farther apart, up to `LAST_POSITION`: every order of distance is there. Learned positions
    (`layers`) have an end; and transformers takes no positions for ALiBi, so that those are consecutive too.
    """
    acting = [encoding for layer in set(layers) for _, encoding in layer.acting()]
    longest = min((one.max_length for one in acting if one.max_length), default=LAST_POSITION + 2)
    count = np.arange(min(LENGTH, longest))
    if any(isinstance(one, Alibi) for one in acting):
        return np.stack([count, count]).astype(np.int32)
    stop = min(max(2 * training_length, 2 * LENGTH), LAST_POSITION + 2, longest)
    far = np.round(np.geomspace(1, max(1, stop - len(count)), len(count))).astype(np.int64) - 1 + count
    return np.stack([count, far]).astype(np.int32)


# Tokens [B, T], where they stand in each of P passes [P, T], and logits [P, B, T, V]; T differs between batches.
Passes = tuple[Int[np.ndarray, "_ _"], Int[np.ndarray, "_ _"]]
PassLogits = Float[np.ndarray, "_ _ _ _"]


def script_logits(
    script: Path, python: str, options: Sequence[str], passes: Sequence[Passes], failure: str
) -> list[PassLogits]:
    """The float32 logits that a script computes in its own process, of each of `passes`.

    Raises:
      CheckpointError: it fails; with `failure` and the last line of its error.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, str(script), *options]
        for n, (tokens, positions) in enumerate(passes):
            np.save(f"{scratch}/tokens_{n}.npy", tokens)
            np.save(f"{scratch}/positions_{n}.npy", positions)
            command += [f"--{what}={scratch}/{what}_{n}.npy" for what in ("tokens", "positions", "out")]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise CheckpointError(f"{failure}: {reason}")
        return [np.load(f"{scratch}/out_{n}.npy") for n in range(len(passes))]


def transformers_logits(
    external: Path, python: str, passes: Sequence[Passes], gguf_file: str | None = None
) -> list[PassLogits]:
    """The logits of a directory, or of a GGUF file in it, by transformers; see `script_logits`."""
    options = [f"--model={external}", *([f"--gguf-file={gguf_file}"] if gguf_file else [])]
    return script_logits(SCRIPT, python, options, passes, f"transformers cannot read '{external}'")


def llama_cpp_logits(file: Path, python: str, passes: Sequence[Passes]) -> list[Float[np.ndarray, "P B T V"]]:
    """The logits of a GGUF file by llama.cpp; see `script_logits`."""
    return script_logits(LLAMA_CPP, python, [f"--model={file}"], passes, f"llama.cpp cannot read '{file}'")


def compare(checkpoint: Checkpoint, external: Path, python: str, gguf_file: str | None = None) -> tuple[Parity, Parity]:
    """Compares the float32 logits of a checkpoint by pe_lab and of a directory by transformers.

    The tokens are those of `fixed_batch`, at each of `compared_positions`. `python` is an interpreter with transformers
    and torch, `gguf_file` the file in the directory, for a GGUF.

    Raises:
      CheckpointError: transformers cannot read it; with the last line of its error.
    """
    model = Model(dataclasses.replace(checkpoint.model, dtype="float32"))
    config = model.config
    positions = compared_positions(int(checkpoint.metadata["training_length"]), checkpoint.layers)
    tokens = fixed_batch(config.vocab_size)[:, : positions.shape[1]]
    (expected,) = transformers_logits(external, python, [(tokens, positions)], gguf_file)
    apply = jax.jit(model.apply)

    def verdict(at: Int[np.ndarray, " T"], theirs: Float[np.ndarray, "B T V"]) -> Parity:
        last = int(at[-1])
        schedule = model_schedule(config, checkpoint.layers, last + 1)
        found = np.asarray(apply(checkpoint.params, jnp.asarray(tokens), jnp.asarray(at)[None], None, schedule))
        width = min(found.shape[-1], theirs.shape[-1])  # some converters pad the vocabulary
        found, theirs = found[..., :width], theirs[..., :width]
        return Parity(
            difference=float(np.abs(found - theirs).max()),
            largest=float(np.abs(theirs).max()),
            agreement=float((found.argmax(-1) == theirs.argmax(-1)).mean()),
            last=last,
        )

    near, far = map(verdict, positions, expected)
    return near, far


def compare_with_llama_cpp(file: Path, python: str) -> Parity:
    """Compares the logits of a GGUF file by pe_lab and by llama.cpp, at consecutive positions: it takes no others.

    The weights are those of the file on both sides. `python` is an interpreter with llama_cpp.

    Raises:
      CheckpointError: llama.cpp cannot read it; with the last line of its error.
    """
    checkpoint = open_checkpoint(f"gguf:{file}")
    model = Model(dataclasses.replace(checkpoint.model, dtype="float32"))
    config = model.config
    positions = compared_positions(int(checkpoint.metadata["training_length"]), checkpoint.layers)[0]
    tokens = fixed_batch(config.vocab_size)[:, : len(positions)]
    ((theirs,),) = llama_cpp_logits(file, python, [(tokens, positions[None])])
    schedule = model_schedule(config, checkpoint.layers, len(positions))
    inputs = jnp.asarray(tokens), jnp.asarray(positions)[None]
    found = np.asarray(jax.jit(model.apply)(checkpoint.params, *inputs, None, schedule))
    kinds = {one.kind for one in open_gguf(file, CheckpointError, lambda key: False).tensors.values()}
    return Parity(
        difference=float(np.abs(found - theirs).max()),
        largest=float(np.abs(theirs).max()),
        agreement=float((found.argmax(-1) == theirs.argmax(-1)).mean()),
        last=len(positions) - 1,
        rounding=max(ROUNDING[kind] for kind in kinds),
    )


def fits_twice(model_bytes: int) -> bool:
    """Whether the memory of this machine holds a model twice; True if that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration, ValueError):
        return True
    return 2.5 * model_bytes < available
