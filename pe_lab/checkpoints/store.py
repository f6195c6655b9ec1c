"""Orbax behind one door: where checkpoints lie, what is in them, and which one is the last good one."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from pe_lab.config import ModelConfig, from_dict, to_json
from pe_lab.errors import CheckpointError, UserError
from pe_lab.model import Model, Params
from pe_lab.parallel import AxisRules
from pe_lab.positional import CANONICAL, Layer, Layout, Schedule, build_schedule, channel_order, from_json
from pe_lab.positional import to_json as layer_to_json

DIRECTORY = "checkpoints"  # of a phase; one directory a step inside
UNREADABLE = "unreadable"  # of a phase; what could not be read, and training went back behind
FORMAT = 2
FORMER_NAMES = {1: {"token_embedder": "trunk"}}  # of parameters, in the files of earlier formats

# Orbax announces every save and every read-only manager; a run has a log of its own.
logging.getLogger("absl").setLevel(logging.ERROR)


def new_id() -> str:
    """A name for a checkpoint that no other one has."""
    return uuid.uuid4().hex[:12]


def metadata_of(
    model: ModelConfig, layers: tuple[Layer, ...], layout: Layout = CANONICAL, **facts: Any
) -> dict[str, Any]:
    """The JSON part of a checkpoint: the model, its encodings, and whatever facts the writer adds.

    `layout` says which channels of a head its weights pair; training writes the canonical one, and whoever opens a
    checkpoint of another gets its weights in that.
    """
    return {
        "format": FORMAT,
        "model": to_json(model),
        "layout": dataclasses.asdict(layout),
        "layers": [layer_to_json(layer) for layer in layers],
        **facts,
    }


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as readers want it: the weights, what they are read with, and where they come from.

    `metadata` holds id, run, phase, step, training_length, config, config_hash, lineage, mixture, tokenizer,
    vocab_size and versions; of a converted checkpoint, what there is of these. `tokenizer` is what
    `data.tokenizers.load_tokenizer` reads its tokenizer from, "" where it came without one.
    """

    path: Path
    step: int
    params: Params
    model: ModelConfig
    layers: tuple[Layer, ...]
    schedule: Schedule
    metadata: dict[str, Any]
    tokenizer: str = ""

    @property
    def converted(self) -> bool:
        """Whether the weights are somebody else's, of whose training nothing is known here."""
        return "config" not in self.metadata


class Store:
    """The checkpoints of one phase. Saving is asynchronous and atomic; only committed ones are ever seen."""

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
        """Starts saving; returns once the arrays are copied. The previous save is waited for.

        Whoever dies before the files are complete leaves an uncommitted directory, which no reader sees.
        """
        items: dict[str, Any] = {
            "params": ocp.args.StandardSave(params),
            "metadata": ocp.args.JsonSave(dict(metadata)),
        }
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardSave(optimizer)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Until all saves are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def metadata(self, step: int) -> dict[str, Any]:
        """The JSON part of one checkpoint."""
        args = ocp.args.Composite(metadata=ocp.args.JsonRestore())
        return dict(self._manager.restore(step, args=args)["metadata"])

    def restore(self, step: int, params: Any, optimizer: Any = None) -> tuple[Params, Any]:
        """Parameters, and the optimizer's state where a template of it is given.

        Args:
          step: one of `steps()`.
          params, optimizer: trees of `jax.ShapeDtypeStruct` with shardings; arrays arrive there.
        """
        former = FORMER_NAMES.get(self.metadata(step)["format"], {})
        items = {"params": ocp.args.StandardRestore(renamed(params, former))}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardRestore(renamed(optimizer, former))
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        names = {old: new for new, old in former.items()}
        return renamed(restored["params"], names), renamed(restored.get("optimizer"), names)

    def set_aside_after(self, step: int) -> None:
        """Moves checkpoints later than `step`, which could not be read, to `unreadable` beside this directory.

        They are not deleted: what could not be read may be whole, and the reason a full memory or a lost mount.
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


def _one_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def _with_sharding(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def templates(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings, for `Store.restore`."""
    return jax.tree.map(_with_sharding, shapes, shardings)


def tokenizer_directory(checkpoint: Path) -> Path | None:
    """Where the tokenizer of a checkpoint lies: with its phase (what surgery wrote) or with its run."""
    phase = checkpoint.absolute().parents[1]
    return next((p / "tokenizer" for p in (phase, phase.parent) if (p / "tokenizer").is_dir()), None)


def resolve(path: str | Path) -> tuple[Path, int]:
    """Finds one checkpoint from any path people give: (its `checkpoints` directory, its step).

    A run directory means its last phase that has one; a phase, or its `checkpoints`, the last step.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"There is no checkpoint at '{path}': no such directory.")
    if path.name.isdigit() and _is_checkpoint(path):
        return path.parent, int(path.name)
    for directory in (path, path / DIRECTORY):
        steps = steps_in(directory)
        if steps:
            return directory, steps[-1]
    phases = find_checkpoints(path)
    if phases:
        return phases[-1].parent, int(phases[-1].name)
    raise UserError(
        f"There is no checkpoint at '{path}'. Give a run directory, a phase of it, or one step's directory."
    )


def find_checkpoints(run: str | Path) -> list[Path]:
    """The last committed checkpoint of every phase of a run, in the order of its phases.

    `run` may also be one phase, or a directory that surgery wrote.
    """
    run = Path(run)
    found = []
    for phase in [run, *sorted(p for p in run.iterdir() if p.is_dir())] if run.is_dir() else []:
        steps = steps_in(phase / DIRECTORY)
        if steps:
            found.append(phase / DIRECTORY / str(steps[-1]))
    return sorted(found, key=lambda p: (_read_index(p), str(p)))


def _read_index(path: Path) -> int:
    return int(read_metadata(path).get("phase_index", 0))


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path / "metadata").is_dir() and (path / "params").is_dir()


def steps_in(directory: Path) -> list[int]:
    """Steps of the committed checkpoints under a directory, ascending.

    Orbax renames a checkpoint to its number once it is complete.
    """
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit() and _is_checkpoint(p))


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON part of the checkpoint at `path`; `UserError` if it cannot be read."""
    store = Store(path.parent, read_only=True)
    try:
        metadata = store.metadata(int(path.name))
    except Exception as error:
        raise UserError(f"The checkpoint '{path}' cannot be read ({first_line(error)}).") from error
    finally:
        store.close()
    if metadata.get("format") not in (FORMAT, *FORMER_NAMES):
        raise CheckpointError(
            f"The checkpoint '{path}' has format {metadata.get('format')}; this version reads up to {FORMAT}."
        )
    return metadata


def in_canonical_layout(params: Params, layout: Layout, head_dim: int) -> Params:
    """Parameters whose heads pair channels by `layout`, with the channels where pe_lab looks for them.

    Queries and keys are permuted alike, with their biases and the scales of their norms, so no score changes.
    """
    if layout == CANONICAL:
        return params
    order = channel_order(layout, head_dim)
    moved = ("query", "key", "query_bias", "key_bias", "query_norm", "key_norm")
    attention = {
        name: jax.tree.map(lambda x: jnp.take(x, order, axis=-1), leaf) if name in moved else leaf
        for name, leaf in params["layers"]["attention"].items()
    }
    return {**params, "layers": {**params["layers"], "attention": attention}}


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def model_of(metadata: Mapping[str, Any], where: Path) -> ModelConfig:
    """The shape that a checkpoint's metadata describe, `where` it lies.

    What its training attended by says nothing of the machine that it is read on: a laptop has no splash.
    """
    return dataclasses.replace(from_dict(ModelConfig, metadata["model"], f"{where}: model"), attention="auto")


def open_checkpoint(path: str | Path, *, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Checkpoint:
    """Reads the weights and everything they are read with; not the optimizer.

    Args:
      path: see `resolve`.
      mesh, rules: where the weights go; without them, onto the first device.

    Raises:
      UserError: no checkpoint there, or one that is damaged or not ours.
    """
    directory, step = resolve(path)
    where = directory / str(step)
    metadata = read_metadata(where)
    model = Model(model_of(metadata, where))
    if mesh is None:
        shapes = jax.tree.map(lambda s: _with_sharding(s, _one_device()), model.shapes)
    else:
        chosen = rules or AxisRules()
        shapes = jax.tree.map(
            lambda s, axes: _with_sharding(s, chosen.sharding(mesh, axes, s.shape)), model.shapes, model.axes
        )
    store = Store(directory, read_only=True)
    try:
        params, _ = store.restore(step, shapes)
    except Exception as error:
        raise UserError(
            f"The checkpoint '{where}' is damaged ({first_line(error)}). Delete it, and training goes on from the one "
            "before it."
        ) from error
    finally:
        store.close()
    layers, config = tuple(from_json(layer) for layer in metadata["layers"]), model.config
    schedule = build_schedule(layers, config.heads, config.kv_heads, config.head_dim)
    params = in_canonical_layout(params, Layout(**metadata.get("layout", {})), model.config.head_dim)
    saved = tokenizer_directory(where)
    tokenizer = f"saved:{saved}" if saved else ""
    return Checkpoint(where, step, params, model.config, layers, schedule, metadata, tokenizer)
