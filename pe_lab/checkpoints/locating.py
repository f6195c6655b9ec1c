"""Finds checkpoints: the directories of a run, which of their steps are complete and whole, and their metadata.

Nothing here imports JAX: `pe_lab.verify` needs no more than this.
"""

from __future__ import annotations

import uuid
from typing import Any

from pe_lab import storage
from pe_lab.errors import CheckpointError, DataError, excerpt
from pe_lab.storage import AnyPath, absolute, children, exists, is_file, json_object, kvstore, read_bytes
from pe_lab.storage.manifest import MANIFEST, SMALL_BYTES, Damage, Manifest
from pe_lab.terminal import console

DIRECTORY = "checkpoints"  # of a phase; has one directory per step
UNREADABLE = "unreadable"  # of a phase; has checkpoints that could not be read
FORMER = "former"  # of a phase; has checkpoints that a longer run did not go on from
FORMAT = 1  # of the metadata
SET_ASIDE = "Move it out of its directory, and training goes on from the one before it."  # what to do about damage


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return excerpt((str(error).strip().splitlines() or [type(error).__name__])[0])


def lineage_entry(what: str, path: str, step: int, origin: str = "") -> dict[str, Any]:
    """The entry of a new checkpoint in its lineage, with a unique id; `origin` is the family of an external one."""
    entry = {"id": uuid.uuid4().hex[:12], "what": what, "path": path, "step": step}
    return entry | {"origin": origin} if origin else entry


def stored_metadata(path: AnyPath) -> dict[str, Any]:
    """The metadata of the checkpoint at `path`, of a known format; `CheckpointError` if it cannot be read."""
    try:
        metadata = json_object(read_bytes(path / "metadata" / "metadata"))  # the file that Orbax writes
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint '{path}' cannot be read ({error.strerror or first_line(error)})."
        ) from None
    if metadata is None:
        raise CheckpointError(f"The checkpoint '{path}' cannot be read (its metadata is no JSON object).")
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint '{path}' has format {metadata.get('format')}; this version reads {FORMAT}."
        )
    return metadata


def read_metadata(path: AnyPath) -> dict[str, Any]:
    """The metadata of the checkpoint at `path`; `CheckpointError` if it cannot be read, or a key has another type."""
    metadata = {"id": "unknown", "phase": "", "step": 0, "lineage": [], **stored_metadata(path)}
    for key, kind in _KINDS.items():
        value = metadata.get(key)
        if value is None and key not in _NEEDED:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            found = f"is {excerpt(repr(value), 60)}" if key in metadata else "is missing"
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


def read_manifest(path: AnyPath) -> Manifest:
    """The manifest of the checkpoint at `path`; `CheckpointError` if it is missing, damaged, or another step's."""
    try:
        manifest = Manifest.read(path)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if manifest.about.get("step") != int(path.name):
        raise CheckpointError(f"'{path}' holds step {manifest.about.get('step')}: it was copied or renamed.")
    arrays, metrics = manifest.about.get("arrays"), manifest.about.get("metrics", {})
    described = isinstance(arrays, dict) and "params" in arrays and all(map(_is_description, arrays.values()))
    if not described or not isinstance(metrics, dict) or not all(type(x) in (int, float) for x in metrics.values()):
        raise CheckpointError(f"'{path / MANIFEST}' is damaged: it does not describe arrays and metrics.")
    return manifest


def _is_description(arrays: Any) -> bool:
    """Whether a value is what `describe_arrays` returns, in JSON."""
    return isinstance(arrays, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("shape"), list)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("checksum"), str | None)
        for entry in arrays.values()
    )


def is_step(path: AnyPath) -> bool:
    """Whether a directory has the name of a step."""
    return path.name.isascii() and path.name.isdecimal()


def is_checkpoint(path: AnyPath) -> bool:
    """Whether a directory is a committed checkpoint: its manifest was written last."""
    return is_step(path) and is_file(path / MANIFEST)


def steps_in(directory: AnyPath) -> list[int]:
    """Steps of the committed checkpoints under a directory, ascending."""
    return sorted(int(path.name) for path in children(directory) if is_checkpoint(path))


def quick_damage(path: AnyPath) -> list[Damage]:
    """What is wrong with a checkpoint, as far as the sizes of its files and the content of the small ones tell."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [Damage(MANIFEST, f"cannot be used: {error}")]
    return manifest.damage(path, lambda name, digest: digest.size <= SMALL_BYTES)


def database(directory: AnyPath) -> dict[str, Any]:
    """The tensorstore key-value store of the arrays of one item of a checkpoint, such as its `params`."""
    return {"driver": "ocdbt", "base": kvstore(directory)}


def absent_arrays(path: AnyPath, manifest: Manifest) -> list[str]:
    """The arrays that a manifest describes and that are not reached from the files, such as `params.head`."""
    import tensorstore as ts

    absent = []
    for item, arrays in manifest.about["arrays"].items():
        try:
            found = set(ts.KvStore.open(database(path / item)).result().list().result())
        except ValueError as error:  # of tensorstore, for all failures
            raise CheckpointError(f"The {item} of '{path}' cannot be read ({first_line(error)}).") from None
        absent += [f"{item}.{name}" for name in arrays if f"{name}/.zarray".encode() not in found]
    return absent


def latest(directory: AnyPath) -> int | None:
    """The newest step of `steps_in` that `quick_damage` finds whole; damaged ones are named on stderr, once."""
    for step in reversed(steps_in(directory)):
        path = directory / str(step)
        damage = quick_damage(path)
        if not damage:
            return step
        if path not in _named:
            _named.add(path)
            console(stderr=True).print(f"DAMAGED checkpoint '{path}', passed over: {damage[0]}")
    return None


_named: set[AnyPath] = set()


def resolve(path: str | AnyPath) -> tuple[AnyPath, int]:
    """(the `checkpoints` directory, the step) of the checkpoint that a path names.

    A run's directory names the checkpoint of its last phase with one; a phase, or its `checkpoints`, the last step that
    is whole.

    Raises:
      CheckpointError: there is none, or the files of the step that is named differ from its manifest, as far as
        `quick_damage` tells: its metadata are small.
    """
    path = storage.path("the checkpoint", path)
    if not exists(path):
        raise CheckpointError(f"There is no checkpoint at '{path}': no such directory.")
    if is_checkpoint(path):
        if damage := quick_damage(path):
            raise CheckpointError(f"The checkpoint '{path}' is damaged ({damage[0]}). {SET_ASIDE}")
        return path.parent, int(path.name)
    for directory in (path, path / DIRECTORY):
        if (step := latest(directory)) is not None:
            return directory, step
    phases = find_checkpoints(path)
    if phases:
        return phases[-1].parent, int(phases[-1].name)
    raise CheckpointError(
        f"There is no checkpoint at '{path}'. Give a run directory, a phase of it, or one step's directory."
    )


def find_checkpoints(run: str | AnyPath) -> list[AnyPath]:
    """The last whole checkpoint of every phase of a run (or of one phase, or of surgery), in the order of phases."""
    run = storage.path("the run", run)
    found = []
    for phase in (run, *sorted(children(run))):
        if (step := latest(phase / DIRECTORY)) is not None:
            found.append(phase / DIRECTORY / str(step))
    return sorted(found, key=lambda p: (int(read_metadata(p).get("phase_index", 0)), str(p)))


def tokenizer_directory(checkpoint: AnyPath) -> AnyPath | None:
    """The tokenizer of a checkpoint: in its phase's directory (surgery writes it there) or in its run's."""
    phase = absolute(checkpoint).parents[1]
    return next((p / "tokenizer" for p in (phase, phase.parent) if exists(p / "tokenizer")), None)
