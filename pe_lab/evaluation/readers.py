"""Models and the ways of reading them that prompted suites ask: methods by name, encodings by description."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from pe_lab.checkpoints import is_external, open_source
from pe_lab.checkpoints.logit_scale import how_to_fit, read_logit_scale
from pe_lab.checkpoints.store import Checkpoint
from pe_lab.config import MeshConfig
from pe_lab.errors import UserError
from pe_lab.evaluation import methods
from pe_lab.evaluation.plan import Subject
from pe_lab.language_model import LanguageModel, load
from pe_lab.model import Model
from pe_lab.parallel import hide_absent_tpu, make_mesh
from pe_lab.positional import Beta, Layer, build_schedule, to_json
from pe_lab.positional import read_with as read_positional

DEFAULT = ("as trained",)  # answering prompts is dear: other methods are measured when they are named


@dataclass(frozen=True)
class Reader:
    """A checkpoint and a way of reading it.

    Attributes:
      lm: the weights, with their tokenizer.
      subject: what rows say of them.
      method, label: as in the rows of other suites; a method here may be the description of an encoding.
      layers_at: length in tokens -> the layers that texts of this length are read with.
      crop: the baseline that sees the last so many tokens alone (DroPE, Fig. 5): a prompt keeps its end.
    """

    lm: LanguageModel
    subject: Subject
    method: str
    label: str
    layers_at: Callable[[int], tuple[Layer, ...]]
    crop: int | None = None

    @property
    def training_length(self) -> int:
        return self.subject.training_length

    def at(self, length: int) -> LanguageModel:
        """The model as texts of `length` tokens are read."""
        layers = self.layers_at(length)
        return dataclasses.replace(self.lm, layers=layers).at_length(length)

    def fingerprint(self, length: int) -> str:
        """Of how texts of `length` tokens are read: equal ones read alike."""
        layers = self.layers_at(length)
        follows = length if any(layer.follows_length for layer in layers) else None
        described = [[to_json(layer) for layer in layers], follows, self.crop]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def lineage(self) -> list[str]:
        """What made the weights, oldest first."""
        return [str(ancestor.get("what", "")) for ancestor in self.subject.checkpoint.metadata.get("lineage", [])]


def readers_of(
    lm: LanguageModel,
    subject: Subject,
    chosen: Sequence[str] | None,
    described: Sequence[str],
    scale: Beta | None,
) -> list[Reader]:
    """One reader a method and a description.

    Args:
      chosen: methods by name. None: as trained, or none where there are descriptions.
      described: encodings as `--positional` writes them, each instead of the model's own.
      scale: the fitted logit scale, for the method `beta`.

    Raises:
      UserError: a method that makes no sense for the model, `beta` where none was fitted, an impossible description.
    """
    possible = subject.methods()
    found = []
    for method in chosen if chosen is not None else () if described else DEFAULT:
        if method not in possible:
            continue
        if method == "beta" and scale is None:
            raise UserError(f"--methods=beta: {how_to_fit(lm.checkpoint)} Or name paper-beta.")
        crop = subject.training_length if method == "cropped" else None
        found.append(Reader(lm, subject, method, methods.label(subject.model, method), _by_method(
            method, subject, scale
        ), crop))  # fmt: skip
    for text in described:
        read = _described(subject, text)
        found.append(Reader(lm, subject, text, f"{subject.model}, read as {text}", lambda _, read=read: read))
    return found


def _described(subject: Subject, text: str) -> tuple[Layer, ...]:
    """The layers that `--positional` describes; edits that follow each other are joined by `+`."""
    items = text.split("+")
    given = items if len(items) > 1 else items[0]
    return tuple(read_positional(given, subject.checkpoint.layers, subject.training_length))


def _by_method(method: str, subject: Subject, scale: Beta | None) -> Callable[[int], tuple[Layer, ...]]:
    def layers_at(length: int) -> tuple[Layer, ...]:
        beta = 1.0
        if method == "beta" and scale is not None:
            beta = scale.at(length)
        elif method == "paper beta":
            beta = methods.paper_beta(length / subject.training_length)
        return methods.read_with(method, subject.checkpoint.layers, length, subject.training_length, beta)

    return layers_at


def with_lasting_id(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """Somebody else's checkpoint with an id that is the same when it is opened again: of its files' names, sizes and
    times. Ours have one."""
    if not is_external(source):
        return checkpoint
    path = Path(checkpoint.path)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    listed = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.exists()]
    identity = "read-" + hashlib.sha256(repr((str(path.resolve()), listed)).encode()).hexdigest()[:16]
    return dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, "id": identity})


def load_all(paths: Sequence[str]) -> list[LanguageModel]:
    """Models of one shape or several, spread over the devices that there are.

    Weights lie on every device, and rows of a batch are spread; where they take more than a third of a device's
    memory, they are cut (`tensor`) over as many as needed.

    Raises:
      UserError: no checkpoint there, or none that can be read.
    """
    hide_absent_tpu()
    loaded = []
    for path in paths:
        lm = load(path, mesh=mesh_for(path))
        loaded.append(dataclasses.replace(lm, checkpoint=with_lasting_id(lm.checkpoint, path)))
    return loaded


def mesh_for(path: str) -> Mesh | None:
    """The mesh for a checkpoint's weights; None on one device."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    stats = devices[0].memory_stats() or {}
    config, tensor = open_source(path).model, 1
    while "bytes_limit" in stats and 4 * Model(config).num_parameters / tensor > stats["bytes_limit"] / 3:
        if len(devices) % (2 * tensor) or config.kv_heads % (2 * tensor):
            break
        tensor *= 2
    return make_mesh(MeshConfig(data=-1, tensor=tensor), devices)


def read_as(subject: Subject, text: str) -> Subject:
    """A subject whose weights are read under another encoding, as `--positional` writes it."""
    checkpoint, layers = subject.checkpoint, _described(subject, text)
    config = checkpoint.model
    changed = dataclasses.replace(
        checkpoint,
        layers=layers,
        schedule=build_schedule(layers, config.heads, config.kv_heads, config.head_dim),
    )
    return Subject(changed, subject.run, subject.path, text, checkpoint.layers)


def all_readers(
    models: Sequence[LanguageModel],
    subjects: Sequence[Subject],
    chosen: Sequence[str] | None,
    described: Sequence[str],
    attention: str | None = None,
) -> list[Reader]:
    """The readers of several checkpoints; see `readers_of`.

    Raises:
      UserError: a method makes no sense for any of them, or attention is named that cannot read caches here.
    """
    found = []
    for lm, subject in zip(models, subjects, strict=True):
        lm = lm if attention is None else lm.with_attention(attention)
        found += readers_of(lm, subject, chosen, described, read_logit_scale(lm.checkpoint))
    missing = [method for method in chosen or () if all(reader.method != method for reader in found)]
    if missing:
        names = ", ".join(dict.fromkeys(subject.model for subject in subjects))
        possible = dict.fromkeys(method for subject in subjects for method in subject.methods())
        raise UserError(
            f"--methods={missing[0].replace(' ', '-')} makes no sense for what is here ({names}). Possible: "
            f"{', '.join(method.replace(' ', '-') for method in possible)}."
        )
    return found
