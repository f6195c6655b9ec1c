"""The store of native checkpoints: Orbax, the directories, and the metadata."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from pe_lab.config import ModelConfig, to_json
from pe_lab.errors import CheckpointError
from pe_lab.model import Params
from pe_lab.positional import CANONICAL, Layer, Layout

DIRECTORY = "checkpoints"  # of a phase; has one directory per step
UNREADABLE = "unreadable"  # of a phase; has checkpoints that could not be read
FORMAT = 2
FORMER_NAMES = {1: {"token_embedder": "trunk"}}  # of parameters, in the files of earlier formats

# Orbax logs every save, every read-only manager, and each error in over a hundred lines before it raises it.
logging.getLogger("absl").setLevel(logging.CRITICAL)


def new_id() -> str:
    """A unique name for a checkpoint."""
    return uuid.uuid4().hex[:12]


def metadata_of(
    model: ModelConfig, layers: tuple[Layer, ...], layout: Layout = CANONICAL, **more: Any
) -> dict[str, Any]:
    """The metadata of a checkpoint: its model, its encodings, the layout of its heads, and `more`.

    pe_lab writes the canonical layout; weights of another layout are permuted when a checkpoint is opened.
    """
    return {
        "format": FORMAT,
        "model": to_json(model),
        "layout": dataclasses.asdict(layout),
        "layers": to_json(layers),
        **more,
    }


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: the weights, the encodings and the metadata.

    `metadata` has id, run, phase, step, training_length, config, config_hash, lineage, mixture, tokenizer, vocab_size
    and versions; that of a converted checkpoint has fewer keys. `tokenizer` is an argument of
    `data.tokenizers.load_tokenizer`, "" for a checkpoint without tokenizer.
    """

    path: Path
    step: int
    params: Params
    model: ModelConfig
    layers: tuple[Layer, ...]
    metadata: dict[str, Any]
    tokenizer: str = ""

    @property
    def converted(self) -> bool:
        """Whether the weights were trained elsewhere, and no training config is known."""
        return "config" not in self.metadata


class Store:
    """The checkpoints of one phase. Saving is asynchronous and atomic; only committed checkpoints are listed."""

    def __init__(self, directory: str | Path, keep: int = 2, milestones: Sequence[int] = (), read_only: bool = False):
        """Opens the checkpoints of a directory; `save` deletes all but the latest `keep` and the steps `milestones`."""
        self.directory = Path(directory).absolute()
        kept = [policies.LatestN(keep), policies.CustomSteps(milestones)]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if read_only else policies.AnyPreservationPolicy(kept),
            enable_async_checkpointing=True,
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, params: Params, optimizer: Any, metadata: Mapping[str, Any]) -> None:
        """Starts to save, after the previous save has finished, and returns once the arrays are copied.

        A process that is killed before the files are complete leaves an uncommitted directory, which is not listed.
        """
        items: dict[str, Any] = {
            "params": ocp.args.StandardSave(params),
            "metadata": ocp.args.JsonSave(dict(metadata)),
        }
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardSave(optimizer)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Returns when all saves are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata of one checkpoint."""
        args = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        return dict(self._manager.restore(step, args=args)["metadata"])

    def restore(self, step: int, params: Any, optimizer: Any = None) -> tuple[Params, Any]:
        """The parameters, and the optimizer's state if a template of it is given.

        Args:
          step: one of `steps()`.
          params, optimizer: trees of `jax.ShapeDtypeStruct` with shardings.
        """
        former = FORMER_NAMES.get(self.metadata(step)["format"], {})
        items = {"params": ocp.args.StandardRestore(renamed(params, former))}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardRestore(renamed(optimizer, former))
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        names = {old: new for new, old in former.items()}
        return renamed(restored["params"], names), renamed(restored.get("optimizer"), names)

    def set_aside_after(self, step: int) -> None:
        """Moves checkpoints later than `step`, which could not be read, to the directory `unreadable` of the phase.

        They are not deleted: the cause may be exhausted memory or a lost mount, and the checkpoint intact.
        """
        aside = self.directory.parent / UNREADABLE
        for later in [s for s in self.steps() if s > step]:
            if jax.process_index() == 0:
                aside.mkdir(exist_ok=True)
                (self.directory / str(later)).rename(aside / f"{later}-{new_id()}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside after {step}")
        self._manager.reload()


def renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """A tree of parameters, or an optimizer state of such trees, with other names for the dictionary keys `names`."""

    def is_renamed(node: Any) -> bool:
        return isinstance(node, dict) and not names.keys().isdisjoint(node)

    def rename(node: Any) -> Any:
        return {names.get(key, key): value for key, value in node.items()} if is_renamed(node) else node

    return jax.tree.map(rename, tree, is_leaf=is_renamed)


def templates(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings, for `Store.restore`."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings
    )


def tokenizer_directory(checkpoint: Path) -> Path | None:
    """The tokenizer of a checkpoint: in its phase's directory (surgery writes it there) or in its run's."""
    phase = checkpoint.absolute().parents[1]
    return next((p / "tokenizer" for p in (phase, phase.parent) if (p / "tokenizer").is_dir()), None)


def resolve(path: str | Path) -> tuple[Path, int]:
    """(the `checkpoints` directory, the step) of the checkpoint that a path names.

    A run's directory names the checkpoint of its last phase with one; a phase, or its `checkpoints`, the last step.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at '{path}': no such directory.")
    if path.name.isdigit() and _is_checkpoint(path):
        return path.parent, int(path.name)
    for directory in (path, path / DIRECTORY):
        steps = steps_in(directory)
        if steps:
            return directory, steps[-1]
    phases = find_checkpoints(path)
    if phases:
        return phases[-1].parent, int(phases[-1].name)
    raise CheckpointError(
        f"There is no checkpoint at '{path}'. Give a run directory, a phase of it, or one step's directory."
    )


def find_checkpoints(run: str | Path) -> list[Path]:
    """The last committed checkpoint of every phase of a run, in the order of its phases.

    `run` may also be one phase, or a directory of surgery.
    """
    run = Path(run)
    found = []
    for phase in [run, *sorted(p for p in run.iterdir() if p.is_dir())] if run.is_dir() else []:
        steps = steps_in(phase / DIRECTORY)
        if steps:
            found.append(phase / DIRECTORY / str(steps[-1]))
    return sorted(found, key=lambda p: (int(read_metadata(p).get("phase_index", 0)), str(p)))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path / "metadata").is_dir() and (path / "params").is_dir()


def steps_in(directory: Path) -> list[int]:
    """Steps of the committed checkpoints under a directory, ascending.

    Orbax renames a checkpoint to its step once it is complete.
    """
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and _is_checkpoint(p))


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of the checkpoint at `path`; `CheckpointError` if it cannot be read."""
    try:
        store = Store(path.parent, read_only=True)  # reads the metadata of Orbax
        try:
            metadata = store.metadata(int(path.name))
        finally:
            store.close()
    except Exception as error:
        raise CheckpointError(f"The checkpoint '{path}' cannot be read ({first_line(error)}).") from error
    if metadata.get("format") not in (FORMAT, *FORMER_NAMES):
        raise CheckpointError(
            f"The checkpoint '{path}' has format {metadata.get('format')}; this version reads up to {FORMAT}."
        )
    metadata = {"id": "unknown", "phase": "", "step": 0, "lineage": [], **metadata}
    for key, kind in _KINDS.items():
        value = metadata.get(key)
        if (key in metadata or key in _NEEDED) and (not isinstance(value, kind) or isinstance(value, bool)):
            found = f"is {value!r:.60}" if key in metadata else "is missing"
            raise CheckpointError(f"The metadata of the checkpoint '{path}' are damaged: {key} {found}.")
    if not all(isinstance(entry, dict) for entry in (*metadata["layers"], *metadata["lineage"])):
        raise CheckpointError(f"The metadata of the checkpoint '{path}' are damaged: layers or lineage.")
    if not 1 <= metadata["training_length"] < 2**31:
        raise CheckpointError(f"The metadata of the checkpoint '{path}' are damaged: training_length.")
    return metadata


# The types that every reader of metadata relies on, and the keys without which there is no model.
_NEEDED = ("model", "layers", "training_length")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("id", "phase", "tokenizer", "weights_dtype"), str),
    **dict.fromkeys(("phase_index", "step", "tokens", "training_length"), int),
    **dict.fromkeys(("layers", "lineage"), list),
    **dict.fromkeys(("model", "layout", "config"), dict),
}


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
