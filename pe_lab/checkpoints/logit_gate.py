"""The logit gate: a conversion is right if both sides compute the same, which nothing but computing can tell.

A wrong permutation of queries and keys loads, runs, and is a bad model. So pe_lab.convert ends by reading a fixed batch
with transformers and with pe_lab, and refuses where they differ.
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
from jaxtyping import Int

from pe_lab.checkpoints.store import Checkpoint
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.positional import build_schedule

BATCH, LENGTH = 2, 64
# Float32 arithmetic of two libraries differs by a few 1e-6 of the largest logit, a wrong conversion by 1e-1 of it.
ABSOLUTE, RELATIVE = 2e-4, 2e-5
SCRIPT = Path(__file__).with_name("transformers_logits.py")


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Attributes:
      difference: largest absolute difference of a logit.
      largest: largest absolute logit.
      agreement: share of positions whose most probable next token is the same.
    """

    difference: float
    largest: float
    agreement: float

    @property
    def passed(self) -> bool:
        return self.difference <= max(ABSOLUTE, RELATIVE * self.largest)

    def __str__(self) -> str:
        return (
            f"largest difference of a logit {self.difference:.2g} (largest logit {self.largest:.3g}), "
            f"most probable next tokens equal at {self.agreement:.1%} of {BATCH * LENGTH} positions"
        )


def gate_python(given: str | None, needs: Sequence[str] = ("transformers", "torch")) -> str | None:
    """The interpreter that has the packages of the other side: the given one, or this one; None where there is none.

    Raises:
      UserError: the given one cannot import them.
    """
    if given is None:
        return sys.executable if all(importlib.util.find_spec(name) is not None for name in needs) else None
    try:
        check = subprocess.run([given, "-c", f"import {', '.join(needs)}"], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--gate-python '{given}' cannot be run ({error}).") from None
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"--gate-python '{given}' cannot import {' and '.join(needs)}: {reason}")
    return given


def fixed_batch(vocab_size: int) -> Int[np.ndarray, "B T"]:
    """The tokens that both sides read: the same for every model of a vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, (BATCH, LENGTH)).astype(np.int32)


def compare(checkpoint: Checkpoint, theirs: Path, python: str, gguf_file: str | None = None) -> Verdict:
    """Reads the fixed batch on both sides, in float32.

    Args:
      checkpoint: ours, as it was written or read.
      theirs: the directory that transformers reads.
      python: an interpreter with transformers and torch.
      gguf_file: the file in it, where it is a GGUF.

    Raises:
      UserError: transformers cannot read it; with its last line.
    """
    model = Model(dataclasses.replace(checkpoint.model, dtype="float32"))
    tokens = fixed_batch(model.config.vocab_size)
    config = model.config
    schedule = build_schedule(checkpoint.layers, config.heads, config.kv_heads, config.head_dim, LENGTH)
    with tempfile.TemporaryDirectory() as scratch:
        files = {name: f"{scratch}/{name}.npy" for name in ("tokens", "out")}
        np.save(files["tokens"], tokens)
        command = [python, str(SCRIPT), f"--model={theirs}", *(f"--{name}={file}" for name, file in files.items())]
        command += [f"--gguf-file={gguf_file}"] if gguf_file else []
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UserError(f"transformers cannot read '{theirs}': {reason}")
        expected = np.load(files["out"])
    found = np.asarray(jax.jit(model.apply)(checkpoint.params, jnp.asarray(tokens), None, None, schedule))
    # Some converters pad the vocabulary on their side only.
    width = min(found.shape[-1], expected.shape[-1])
    found, expected = found[..., :width], expected[..., :width]
    return Verdict(
        difference=float(np.abs(found - expected).max()),
        largest=float(np.abs(expected).max()),
        agreement=float((found.argmax(-1) == expected.argmax(-1)).mean()),
    )


def held(checkpoint_bytes: int) -> bool:
    """Whether this machine's memory holds a float32 model twice: ours and theirs."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration, ValueError):
        return True
    return 2.5 * checkpoint_bytes < available
