"""External checkpoints for tests: the committed ones, edited copies of them, and a model in memory."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.config import ModelConfig
from pe_lab.model import Model, model_schedule
from pe_lab.positional import Layer

DATA = Path(__file__).parents[1] / "data" / "hf"
NAMES = sorted(path.name for path in DATA.iterdir() if (path / "config.json").is_file())
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

Tensors = dict[str, tuple[str, list[int], bytes]]  # name: dtype, shape, bytes


def copy_of(name: str, to: Path, **edits: Any) -> Path:
    """A committed model that a test may change; `edits` are set in its config.json, `...` removes a key."""
    shutil.copytree(DATA / name, to)
    edit_config(to, **edits)
    return to


def edit_config(directory: Path, **edits: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | edits
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def read_file(path: Path) -> Tensors:
    """A safetensors file, parsed here: nothing of pe_lab or of the package is trusted."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (x["dtype"], x["shape"], raw[start + x["data_offsets"][0] : start + x["data_offsets"][1]])
        for name, x in header.items()
    }


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of a directory, from one file or several."""
    found: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= read_file(file)
    return found


def write_tensors(path: Path, tensors: Tensors) -> None:
    header, body = {}, b""
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def as_array(tensor: tuple[str, list[int], bytes]) -> np.ndarray:
    kind, shape, data = tensor
    return np.frombuffer(data, NUMPY[kind]).reshape(shape)


@functools.lru_cache(maxsize=64)
def _compiled(model: ModelConfig) -> Any:
    return jax.jit(lambda params, tokens, schedule: Model(model).apply(params, tokens, None, None, schedule))


def logits(checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """What a checkpoint computes; models of one shape share a compilation."""
    model = checkpoint.model
    schedule = model_schedule(model, checkpoint.layers, tokens.shape[1])
    return np.asarray(_compiled(model)(checkpoint.params, jnp.asarray(tokens), schedule))


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and what transformers computes from them."""
    with np.load(DATA / name / "logits.npz") as file:
        return file["tokens"], file["logits"]


class Memory(CheckpointSource):
    """A source of random numbers, which counts what is read of it."""

    def __init__(
        self, model: ModelConfig, layers: tuple[Layer, ...], training_length: int = 32, dtype: Any = "float32"
    ):
        self.model, self.layers, self.training_length = Model(model).config, layers, training_length
        self.path, self.display_name, self.dtype = Path("memory"), "memory", np.dtype(dtype)
        self.reads: list[tuple[str, int | None, slice]] = []
        rng = np.random.default_rng(0)
        self.arrays = {
            path: (rng.standard_normal(leaf.shape) / 4 + ("scale" in path)).astype(self.dtype)
            for path, leaf in _flat(Model(self.model).shapes).items()
        }

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> np.ndarray:
        self.reads.append((leaf, layer, rows))
        return self.arrays[leaf][rows if layer is None else layer]

    def checkpoint(self) -> Checkpoint:
        """The same model as an opened checkpoint."""
        tree: dict[str, Any] = {}
        for path, array in self.arrays.items():
            *above, last = path.split(".")
            at = tree
            for name in above:
                at = at.setdefault(name, {})
            at[last] = jnp.asarray(array, jnp.float32)
        return Checkpoint(self.path, 0, tree, self.model, self.layers, {})


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        at = f"{path}.{name}" if path else name
        found |= _flat(value, at) if isinstance(value, dict) else {at: value}
    return found
