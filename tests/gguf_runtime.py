"""llama.cpp's library for the slow tests: logits and token ids of GGUF files, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from runtime_environments import package

SCRIPT = Path(__file__).parent / "data" / "read_gguf_with_llama_cpp.py"


def logits(jobs: Sequence[tuple[Path, np.ndarray]]) -> list[np.ndarray]:
    """[B, T, V] of each (file, tokens [B, T]), in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        listed = []
        for n, (file, tokens) in enumerate(jobs):
            np.save(f"{scratch}/{n}.tokens.npy", tokens)
            listed.append({"model": str(file), "tokens": f"{scratch}/{n}.tokens.npy", "out": f"{scratch}/{n}.npy"})
        _run(listed, scratch)
        return [np.load(job["out"]) for job in listed]


def ids(file: Path, texts: Sequence[str]) -> list[list[list[int]]]:
    """For each text its ids as a document and as a prompt."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "texts.json").write_text(json.dumps(texts))
        _run([{"model": str(file), "texts": f"{scratch}/texts.json", "out": f"{scratch}/ids.json"}], scratch)
        return json.loads(Path(scratch, "ids.json").read_text())


def _run(jobs: list[dict[str, str]], scratch: str) -> None:
    Path(scratch, "jobs.json").write_text(json.dumps(jobs))
    bindings = package("llama-cpp-python") / "llama_cpp"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"--bindings={bindings}", f"{scratch}/jobs.json"],
        env=os.environ | {"PYTHONPATH": str(package("xllamacpp"))},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for job in jobs:
        reason = Path(job["out"]).with_suffix(".txt")
        assert not reason.exists(), f"{job['model']}: {reason.read_text()}"
