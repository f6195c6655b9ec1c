"""An open checkpoint of any format: its weights, its encodings, the digest of its weights, its fitted logit scale.

`PHASE/logit_scale.json` has DroPE's beta(n) = 1 + c ln(n / L) as fitted for a checkpoint, one entry per checkpoint id:
fitting changes no weights, and a checkpoint that is trained further has another id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.checkpoints.gguf.source import GgufSource
from pe_lab.checkpoints.hub import download
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.checkpoints.locating import DIRECTORY, lineage_entry
from pe_lab.checkpoints.native import NativeSource
from pe_lab.checkpoints.source import CheckpointSource, place
from pe_lab.config import ModelConfig
from pe_lab.errors import CheckpointError
from pe_lab.model import Params, complete, least_parameters
from pe_lab.parallel import AxisRules, check_memory
from pe_lab.positional import Beta, Layer
from pe_lab.storage import AnyPath, read_json, write_json

SCALE_FILE = "logit_scale.json"
SAMPLED = 4096  # numbers of each array, in a digest of weights


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: the weights, the encodings and the metadata.

    `metadata` has id, run, phase, step, training_length, config, config_hash, lineage, mixture, tokenizer, vocab_size
    and versions; that of a converted checkpoint has fewer keys.
    """

    path: AnyPath
    step: int
    params: Params
    model: ModelConfig
    layers: tuple[Layer, ...]
    metadata: dict[str, Any]
    tokenizer: str = ""  # an argument of `data.tokenizers.load_tokenizer`; "": none

    @property
    def converted(self) -> bool:
        """Whether the weights were trained elsewhere, and no training config is known."""
        return "config" not in self.metadata


def is_external(path: str | AnyPath) -> bool:
    """Whether a path names an external checkpoint: `hf:`, `gguf:`, a .gguf file, or a Hugging Face directory."""
    text = str(path)
    if text.startswith(("hf:", "gguf:")) or text.endswith(".gguf"):
        return True
    return (storage.path("the checkpoint", path) / "config.json").is_file()


def open_source(path: str | AnyPath) -> CheckpointSource:
    """A checkpoint, native or external, opened without reading its weights; `CheckpointError` if that is impossible.

    `hf:ORG/NAME` that is no directory is downloaded from the hub, if `huggingface_hub` is installed and online.
    """
    text = str(path)
    if not is_external(path):
        return NativeSource(path)
    if text.startswith("gguf:") or text.endswith(".gguf"):
        return GgufSource(storage.local_copy(storage.path("the checkpoint", text.removeprefix("gguf:"))))
    name = text.removeprefix("hf:")
    directory = storage.path("the checkpoint", name)
    return HuggingFaceSource(storage.local_copy(directory) if directory.is_dir() else download(name), f"hf:{name}")


def open_checkpoint(path: str | AnyPath, *, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Checkpoint:
    """A checkpoint with its weights on the first device or sharded over a mesh, without the optimizer.

    `path` is that of a native checkpoint (see `locating.resolve`), `hf:DIR`, `hf:ORG/NAME`, `gguf:FILE`, or their plain
    paths.

    Raises:
      CheckpointError: there is none, or it is damaged or not supported.
      UnsupportedError: its weights do not fit the memory of this machine and its devices.
    """
    source = open_source(path)
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    share = 1.0 if mesh is None else len(devices) / mesh.size
    needed = int(4 * least_parameters(complete(source.model)) * share)  # float32
    check_memory(needed, f"The model of '{source.display_name}'", devices)
    if isinstance(source, NativeSource):
        step, params, metadata = source.step, source.restore(mesh, rules), source.metadata
    else:
        entry = lineage_entry(f"read from {source.display_name}", source.display_name, 0, source.origin)
        metadata = {
            "id": entry["id"],
            "phase": source.path.name,
            "step": 0,
            "tokens": 0,
            "training_length": source.training_length,
            "vocab_size": source.model.vocab_size,
            "lineage": [entry],
        }
        step, params = 0, place(source, mesh, rules)
    return Checkpoint(source.path, step, params, source.model, source.layers, metadata, source.tokenizer)


def weights_digest(params: Params) -> str:
    """A digest of the weights: of up to 4,096 numbers of each array, at even distances, as float32.

    A checkpoint, its copies, also external ones, and children that surgery gave other encodings have one digest.
    """
    found = hashlib.sha256()
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name, leaf in sorted(leaves.items()):
        at = np.linspace(0, leaf.size - 1, min(leaf.size, SAMPLED)).astype(np.int64)
        sampled = np.asarray(leaf[np.unravel_index(at, leaf.shape)], np.float32)
        found.update(repr((name, leaf.shape)).encode())
        found.update(sampled.astype("<f4").tobytes())
    return found.hexdigest()[:16]


def _scale_file(checkpoint: Checkpoint) -> AnyPath | None:
    """The file for a native checkpoint; None for an external one."""
    directory = checkpoint.path.parent
    return directory.parent / SCALE_FILE if directory.name == DIRECTORY else None


def write_logit_scale(
    checkpoint: Checkpoint, coefficient: float, fitted: Mapping[int, float], on: str
) -> AnyPath | None:
    """Writes a fit and returns the file's path; None for an external checkpoint.

    `coefficient` is c, common to all lengths, `fitted` the scales by length in tokens, `on` describes the data.
    """
    path = _scale_file(checkpoint)
    if path is None:
        return None
    kept = _read_scales(path)
    kept[str(checkpoint.metadata["id"])] = {
        "coefficient": coefficient,
        "original_length": int(checkpoint.metadata["training_length"]),
        "scales": {str(length): scale for length, scale in sorted(fitted.items())},
        "fitted_on": on,
        "step": checkpoint.step,
    }
    write_json(path, kept, "The fitted logit scale is lost.")
    return path


def read_logit_scale(checkpoint: Checkpoint) -> Beta | None:
    """The scale that was fitted for a checkpoint, or None. Raises `CheckpointError`: the file is damaged."""
    path = _scale_file(checkpoint)
    entry = _read_scales(path).get(str(checkpoint.metadata.get("id"))) if path is not None else None
    if entry is None:
        return None
    try:
        return Beta(float(entry["coefficient"]), int(entry["original_length"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}). Remove it, and fit again: --suite=beta.") from None


def how_to_fit(checkpoint: Checkpoint) -> str:
    """The advice of a message about a checkpoint without a fitted scale."""
    if _scale_file(checkpoint) is None:
        return (
            f"{checkpoint.path} has no fitted logit scale, and external checkpoints cannot store one. Import "
            f"it first (python -m pe_lab.convert --from={checkpoint.path} --to=runs/NAME), then fit one."
        )
    return (
        f"no logit scale was fitted for {checkpoint.path} yet. Fit one on held-out text: python -m pe_lab.evaluate "
        f"--from={checkpoint.path} --suite=beta --lengths=2x,4x."
    )


def _read_scales(path: AnyPath) -> dict[str, Any]:
    return read_json(path, "Remove it, and fit again: --suite=beta.", CheckpointError) if path.exists() else {}
