"""The checkpoints that `--from` means, the directory of their results, and their weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from pe_lab import storage
from pe_lab.checkpoints.checkpoint import is_external, open_source
from pe_lab.checkpoints.locating import find_checkpoints, resolve, steps_in
from pe_lab.config import MeshConfig
from pe_lab.errors import CheckpointError, ConfigError
from pe_lab.evaluation.variants import Subject
from pe_lab.language_model import LanguageModel, load
from pe_lab.model import Model
from pe_lab.parallel import compute_devices, computes_together, hide_absent_tpu, is_first, make_mesh, on_first
from pe_lab.storage import AnyPath, json_object, write_file

MARKER = "source.json"  # in the results' directory of an external checkpoint: its path


@dataclass(frozen=True)
class EvaluationTarget:
    """One path of `--from`.

    Attributes:
      root: the directory whose `evaluation` holds the results.
      paths: the checkpoints, as `pe_lab.load` takes them.
      run: the name of the run in records: that of its run.json, else of its directory.
      display_name: `run`, with parts of the directory where several roots have that name.
      external: the path of an external checkpoint.
    """

    root: AnyPath
    paths: tuple[str, ...]
    run: str
    display_name: str
    external: str | None = None

    def write_marker(self) -> None:
        """Writes the path of an external checkpoint into its directory; another one of its name gets another."""
        if self.external is not None and is_first() and not (self.root / MARKER).exists():
            write_file(self.root / MARKER, json.dumps({"source": self.external}) + "\n", "Give a directory with --out.")


def parse_steps(text: str) -> tuple[int, ...]:
    """Steps from `8000,14000`; none for `all`."""
    items = [part.strip() for part in text.split(",") if part.strip()]
    if items == ["all"]:
        return ()
    if not items or not all(re.fullmatch("[0-9]{1,10}", item) for item in items):
        raise ConfigError(f"--steps={text}: write all, or steps such as 8000,14000.")
    return tuple(sorted({int(item) for item in items}))


def locate(given: str | AnyPath, steps: tuple[int, ...] | None = None) -> EvaluationTarget:
    """The checkpoints that a path means.

    A run directory means the last checkpoint of each phase; a phase, a directory that surgery wrote, or a checkpoint
    mean that one. An external checkpoint is itself, and its results go to `runs/NAME`.

    Args:
      steps: checkpoints of these steps in each phase, instead of its last; empty: all that are kept.

    Raises:
      CheckpointError: there is none, or none of these steps.
    """
    if is_external(given):
        if steps is not None:
            raise ConfigError(f"--steps chooses checkpoints of a run, and '{given}' is a single one.")
        return _external(str(given))
    directory = storage.path("--from", given)
    if not directory.is_dir():
        raise CheckpointError(
            f"--from '{given}' is not a directory. Give a run, a phase of it, a checkpoint, hf:DIR or gguf:FILE."
        )
    directory = root = storage.absolute(directory)
    if (directory / "run.json").is_file():
        found = find_checkpoints(directory)
        if not found:
            raise CheckpointError(f"--from '{given}' has no checkpoint yet. Train it first (python -m pe_lab.train).")
    else:
        checkpoints, step = resolve(directory)
        checkpoints = storage.absolute(checkpoints)
        found = [checkpoints / str(step)]
        above = [checkpoints, *list(checkpoints.parents)[:2]]  # checkpoints, phase, run
        root = next((path for path in above if (path / "run.json").is_file()), checkpoints.parent)
    if steps is not None:
        kept = {path.parent: steps_in(path.parent) for path in found}
        missing = sorted(set(steps) - {step for of_phase in kept.values() for step in of_phase})
        if missing:
            listed = "; ".join(f"{path.parent.name}: {', '.join(map(str, of))}" for path, of in kept.items())
            raise CheckpointError(f"--steps: '{given}' keeps no checkpoint of step {missing[0]}. It keeps {listed}.")
        found = [path / str(step) for path, of in kept.items() for step in of if not steps or step in steps]
    name = _read_key(root / "run.json", "name") or root.name
    return EvaluationTarget(root, tuple(map(str, found)), name, name)


def locate_all(given: str, steps: tuple[int, ...] | None = None) -> list[EvaluationTarget]:
    """The targets of a comma-separated `--from`; see `locate`. Display names of different roots differ.

    A path of this machine that exists is one source, also with a comma in its name.
    """
    whole = "," in given and os.path.exists(storage.at_home(_path_of(given)))  # False for what is too long
    sources = [given] if whole else [part.strip() for part in given.split(",") if part.strip()]
    if not sources:
        raise ConfigError(f"--from='{given}' names nothing. Give runs, checkpoints, hf:DIR or gguf:FILE.")
    targets = [locate(source, steps) for source in sources]
    roots: dict[str, set[AnyPath]] = {}
    for target in targets:
        roots.setdefault(target.run, set()).add(storage.absolute(target.root))
    found = []
    for target in targets:
        alike, parts = roots[target.run], 1
        while len(alike) > 1 and len({root.parts[-parts:] for root in alike}) < len(alike):
            parts += 1
        name = target.run if len(alike) == 1 else "-".join(storage.absolute(target.root).parts[-parts:])
        found.append(dataclasses.replace(target, display_name=name))
    return found


def _path_of(given: str) -> str:
    """The path of a source, without `hf:` or `gguf:`."""
    return given.partition(":")[2] if given.startswith(("hf:", "gguf:")) else given


def _external(given: str) -> EvaluationTarget:
    """The target `runs/NAME`, with more parts of the path in NAME where another checkpoint has that directory."""
    text = _path_of(given)
    here = storage.path("--from", text)
    source = str(storage.absolute(here)) if here.exists() else text
    parts = [part for part in Path(source.removesuffix(".gguf")).parts if part != "/"]
    for count in range(1, len(parts) + 1):
        name = "-".join(parts[-count:])
        root = Path("runs") / name
        if _read_key(root / MARKER, "source") in (None, source) and not (root / "run.json").exists():
            return EvaluationTarget(root, (given,), name, name, source)
    raise ConfigError(f"--from '{given}': every directory of its name in runs is another model's. Give --out=DIR.")


def _read_key(path: AnyPath, name: str) -> str | None:
    """A key of a JSON file; None where the file is missing, damaged or lacks it."""
    value = (json_object(storage.read_bytes(path)) or {}).get(name) if path.is_file() else None
    return None if value is None else str(value)


def load_subjects(target: EvaluationTarget, paths: Sequence[str]) -> list[Subject]:
    """The checkpoints of a target with their weights, on the local devices.

    Every device has all weights, and the sequences of a batch are sharded over the devices. Weights that take more
    than a third of a device's memory are sharded (axis `tensor`) over as many devices as needed.

    Raises:
      UserError: a checkpoint is missing or cannot be read.
    """
    hide_absent_tpu()
    found = []
    for path in paths:
        local = Path(path).is_absolute()
        inside = os.path.relpath(path, target.root) if local else path.removeprefix(f"{target.root}/")
        lm = load(path, mesh=mesh_for(path))
        found.append(Subject(_with_lasting_id(lm, path), target.run, inside))
    return found


def _with_lasting_id(lm: LanguageModel, path: str) -> LanguageModel:
    """The model; an external checkpoint gets an id from the first process's files: their names, sizes and times."""
    if not is_external(path):
        return lm
    checkpoint = lm.checkpoint
    where = Path(checkpoint.path)

    def identity() -> str:
        files = sorted(p for p in where.iterdir() if p.is_file()) if where.is_dir() else [where]
        listed = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.exists()]
        return "read-" + hashlib.sha256(repr((str(where.resolve()), listed)).encode()).hexdigest()[:16]

    checkpoint = dataclasses.replace(checkpoint, metadata={**checkpoint.metadata, "id": on_first(identity)})
    return dataclasses.replace(lm, checkpoint=checkpoint)


def weight_shards(model: Model, devices: int, memory: float) -> int:
    """The devices over which weights are sharded in an evaluation, so that they take at most a third of each.

    A power of two that divides the devices and the key-value heads; 1 where the bytes of a device are unknown (0).
    """
    tensor = 1
    while memory and 4 * model.num_parameters / tensor > memory / 3:
        if devices % (2 * tensor) or any(one.config.kv_heads % (2 * tensor) for one in model.stacks):
            break
        tensor *= 2
    return tensor


def mesh_for(path: str) -> Mesh | None:
    """The mesh for a checkpoint's weights; None on one device.

    Of devices that are not needed for the weights, each has other sequences or, where processes compute together, a
    part of every sequence.
    """
    devices = compute_devices()
    if len(devices) == 1:
        return None
    stats = jax.local_devices()[0].memory_stats() or {}
    tensor = weight_shards(Model(open_source(path).model), len(devices), stats.get("bytes_limit", 0))
    rest = {"data": 1, "context": -1} if computes_together() else {"data": -1}
    return make_mesh(MeshConfig(tensor=tensor, **rest), devices)
