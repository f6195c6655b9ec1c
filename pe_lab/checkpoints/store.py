"""The store of native checkpoints: saving, with a manifest of what was written, retention, and verified restoring.

Orbax writes and reads the arrays. A checkpoint counts from the moment that it has its manifest, which comes last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from pe_lab import storage
from pe_lab.checkpoints.array_checksums import comparable, describe_arrays, differing, received
from pe_lab.checkpoints.locating import (
    FORMAT,
    UNREADABLE,
    absent_arrays,
    first_line,
    is_checkpoint,
    is_step,
    quick_damage,
    read_manifest,
    steps_in,
    stored_metadata,
)
from pe_lab.checkpoints.orbax import checkpointer, quiet
from pe_lab.config import CheckpointConfig, ModelConfig, to_json
from pe_lab.errors import CheckpointError, SaveFailed, UserError
from pe_lab.model import Params
from pe_lab.parallel import all_values, give_value, return_freed_memory
from pe_lab.positional import CANONICAL, Layer, Layout, sources
from pe_lab.storage import AnyPath, absolute, children, exists, is_remote, move_tree, remove_tree
from pe_lab.storage.manifest import MANIFEST, SMALL_BYTES, Digest, Manifest, digest_files

# Of files whose arrays have no checksums, what is read to compare digests before they are restored, by each process:
# about ten seconds. Of larger checkpoints a sample is read.
VERIFIED_BYTES = 20 * 2**30
TRIMMED_BYTES = 2**28  # saves above this leave enough freed memory behind that it is returned to the kernel
REMOVALS, REMOVAL_SECONDS = 4, 0.25  # of the files of a failed save
BARRIERS = 4  # Orbax has two in the background of a save
_SAVING, _DELETING = ".saving", ".deleting"  # suffixes of directories under way


def metadata_of(
    model: ModelConfig, layers: tuple[Layer, ...], layout: Layout = CANONICAL, **more: Any
) -> dict[str, Any]:
    """The metadata of a checkpoint: its model, its encodings, the layout of its heads, and `more`."""
    return {
        "format": FORMAT,
        "model": to_json(model),
        "layout": dataclasses.asdict(layout),
        "layers": to_json(layers),
        "encodings": sources(encoding for layer in layers for _, encoding in layer.acting()),
        **more,
    }


class Store:
    """The checkpoints of one phase. Saving is asynchronous; only committed checkpoints are listed.

    A step is written under another name, then every process digests the files that it wrote, process 0 writes the
    manifest, and renames the directory. Files of killed processes are removed when the store is opened for writing;
    checkpoints that are not `kept`, see `CheckpointConfig.kept`, after a save and by `delete_old`.
    """

    def __init__(self, directory: str | AnyPath, kept: Callable[..., set[int]] | None = None, read_only: bool = False):
        self.directory = absolute(storage.path("the checkpoints", directory))
        self._kept = kept or CheckpointConfig().kept
        self._checkpointer: Any = None
        self._commit: threading.Thread | None = None
        self._failure: str | None = None
        self._exchange = ""  # the name of the save under way, alike on all processes
        self._barriers = 0  # of Orbax, that this process has met in it
        self.verified = "not verified"  # how the checkpoint that was restored last was
        if not read_only and jax.process_index() == 0:
            if not is_remote(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Removes what a killed or failed save or deletion has left."""
        for path in children(self.directory):
            unfinished = any(suffix in path.name for suffix in (_SAVING, _DELETING))
            if unfinished or (is_remote(path) and not is_checkpoint(path)):
                remove_tree(path)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return steps_in(self.directory)

    def uncommitted(self) -> list[int]:
        """Steps whose directory has no manifest, as after damage: a killed save leaves none under this name."""
        found = {int(path.name) for path in children(self.directory) if is_step(path)}
        return sorted(found - set(self.steps()))

    def damage(self, step: int) -> str:
        """What is wrong with the files of a checkpoint, all of which process 0 reads; "" if it is whole."""
        found = b""
        if jax.process_index() == 0:
            try:
                manifest = read_manifest(self._path(step))
                damage = manifest.damage(self._path(step))
                found = str(damage[0]).encode() if damage else b""
            except CheckpointError as error:
                found = str(error).encode()
        return all_values(f"{self.directory}/whole/{next(_exchanges)}", found)[0].decode()

    # -----------------------------------------------------------------------------------------------------------------
    # Saving

    def save(
        self,
        step: int,
        params: Params,
        optimizer: Any,
        metadata: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to save a step that does not exist, and returns once the arrays are copied.

        A process that is killed before the checkpoint is committed leaves nothing that is listed.

        Args:
          params, optimizer: trees of arrays; `optimizer` may be None.
          metrics: of this step, for `CheckpointConfig.best`.
          before: writes what must be on disk before; if it raises a `UserError` in one process, none saves.

        Raises:
          SaveFailed: the previous save failed, and this one was not started; or this one failed at once.
        """
        self.wait()
        self._exchange, self._barriers = f"{self.directory}/{step}/{next(_exchanges)}", 0
        name, refused = self._exchange, b""
        try:
            before()
        except UserError as error:
            refused = first_line(error).rstrip(".").encode()
        for reason in filter(None, all_values(f"{name}/before", refused)):
            raise SaveFailed(f"Checkpoint {step} of '{self.directory}' was not written ({reason.decode()}).")
        items: dict[str, Any] = {"params": params} | ({} if optimizer is None else {"optimizer": optimizer})
        arrays = {name: describe_arrays(tree) for name, tree in items.items()}
        about = {"kind": "checkpoint", "step": step, "id": metadata.get("id"), "metrics": dict(metrics or {})}
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        path = self._saving(step)
        silence = contextlib.ExitStack()  # until the save has ended
        silence.enter_context(quiet())
        try:
            if self._checkpointer is None:
                options = ocp.options.AsyncOptions(barrier_sync_fn=self._barrier)
                self._checkpointer = checkpointer(path, ocp.AsyncCheckpointer, async_options=options)
            self._checkpointer.save(
                path, args=ocp.args.Composite(metadata=ocp.args.JsonSave(dict(metadata)), **saved), force=True
            )
        except Exception as error:
            with silence:
                self._failed(step, error)
            self.wait()

        def finish() -> None:
            with silence:
                self._finish(step, arrays, about, name)

        self._commit = threading.Thread(target=finish, daemon=True)
        self._commit.start()

    def _path(self, step: int, suffix: str = "") -> AnyPath:
        return self.directory / f"{step}{suffix}"

    def _saving(self, step: int) -> AnyPath:
        """Where a step is written. On an object store nothing is renamed: the manifest alone commits a step."""
        return self._path(step, "" if is_remote(self.directory) else _SAVING)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """A barrier of Orbax in a save, which raises where one process has failed; Orbax's own waits for 20 minutes."""
        name, self._barriers = f"{self._exchange}/barrier/{self._barriers}", self._barriers + 1
        for failure in filter(None, all_values(name, b"")):
            raise OSError(failure.decode())

    def _finish(self, step: int, arrays: Mapping[str, Any], about: Mapping[str, Any], name: str) -> None:
        """Waits for the files, and commits them: in a thread of its own, in every process."""
        saving = self._saving(step)
        try:
            mine: dict[str, Any] = {}
            try:
                self._checkpointer.wait_until_finished()
                mine["files"] = digest_files(saving, _is_own)
            except Exception as error:
                mine["error"] = first_line(error)
                for number in range(self._barriers, BARRIERS):  # at which the others wait for this process
                    give_value(f"{name}/barrier/{number}", mine["error"].encode() or b"unknown")
            done = [f"{name}/before", *(f"{name}/barrier/{number}" for number in range(BARRIERS))]
            shared = all_values(f"{name}/files", json.dumps(mine).encode(), done)
            every = [json.loads(value) for value in shared]
            errors = [value["error"] for value in every if "error" in value]
            result = b""
            if jax.process_index() == 0:
                try:
                    if errors:
                        raise OSError(errors[0])
                    files = {name: Digest(*digest) for value in every for name, digest in value["files"].items()}
                    checked = {item: received(described) for item, described in arrays.items()}
                    manifest = Manifest(files, {**about, "arrays": checked})
                    if lost := absent_arrays(saving, manifest):
                        raise OSError(f"Orbax has written no {lost[0]} that can be read")
                    manifest.write(saving)
                    if not is_remote(saving):
                        self._set_aside(self._path(step))  # one without a manifest, which is not listed
                        saving.rename(self._path(step))
                except Exception as error:
                    result = first_line(error).encode() or b"unknown"
            failure = all_values(f"{name}/committed", result, [f"{name}/files"])[0]
            if failure:
                raise OSError(failure.decode())
        except Exception as error:
            self._failed(step, error)
            return
        self.delete_old()
        if sum(digest.size for digest in mine["files"].values()) > TRIMMED_BYTES:
            return_freed_memory()

    def _failed(self, step: int, error: Exception) -> None:
        """Remembers a failure, which `wait` raises, and removes its files, which may fill the disk."""
        self._failure = f"Checkpoint {step} of '{self.directory}' could not be written ({first_line(error)})."
        self._checkpointer = None  # its state is unknown
        if jax.process_index() == 0:
            # Orbax reports the first write that fails, while others are under way and may make their directory again.
            for _ in range(REMOVALS):
                with contextlib.suppress(OSError, UserError):
                    self._remove_unfinished()
                time.sleep(REMOVAL_SECONDS)

    def delete_old(self) -> None:
        """Deletes what the retention does not keep, as long as a checkpoint stays whose files have their sizes.

        Their content is not read: call it after a save, or once the newest was restored and compared. What fails is
        tried again after the next save.
        """
        if jax.process_index() != 0:
            return
        with contextlib.suppress(OSError, UserError):
            steps = self.steps()
            kept = self._kept(steps, self._metrics)
            if all(quick_damage(self._path(step)) for step in kept):
                return
            for step in steps:
                if step not in kept:
                    doomed = self._path(step)
                    if not is_remote(doomed):
                        doomed = doomed.rename(self._path(step, _DELETING))
                    remove_tree(doomed, first=MANIFEST)

    def _metrics(self, step: int) -> Mapping[str, float]:
        with contextlib.suppress(CheckpointError):
            return read_manifest(self._path(step)).about.get("metrics", {})
        return {}

    def wait(self) -> None:
        """Returns when the save under way is committed; `SaveFailed` if it failed, once."""
        if self._commit is not None:
            self._commit.join()
            self._commit = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise SaveFailed(failure)

    def close(self) -> None:
        """Waits for the save under way, whether it fails or not."""
        with contextlib.suppress(SaveFailed):
            self.wait()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    # -----------------------------------------------------------------------------------------------------------------
    # Restoring

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata of one checkpoint."""
        return stored_metadata(self._path(step))

    def restore(self, step: int, params: Any, optimizer: Any = None, verify: bool = True) -> tuple[Params, Any]:
        """The parameters, and the optimizer's state if a template of it is given.

        Args:
          params, optimizer: trees of `jax.ShapeDtypeStruct` with shardings.
          verify: whether the manifest is compared: the sizes of all files, the digests of the small ones, the checksums
            of the restored arrays; of those without, the digests of their files, `VERIFIED_BYTES` at most.

        Raises:
          CheckpointError: the checkpoint is not what was saved.
        """
        path = self._path(step)
        manifest = read_manifest(path) if verify else None
        self.verified = "not verified" if manifest is None else "verified"
        templates = {"params": params} | ({} if optimizer is None else {"optimizer": optimizer})
        # Processes that restore one array together must agree on what is damaged, or some would wait for the others.
        together = not all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(templates))
        if manifest is not None:
            self._refuse_damaged_files(path, manifest, templates, together)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in templates.items()}
        with quiet(), contextlib.closing(checkpointer(path)) as reader:
            restored = reader.restore(path, args=ocp.args.Composite(**items))
        for item in templates if manifest else ():
            saved = manifest.about["arrays"][item]
            if comparable(restored[item], saved) and (wrong := differing(restored[item], saved)):
                raise CheckpointError(
                    f"The checkpoint '{path}' is damaged ({len(wrong)} of its arrays differ from what was saved: "
                    f"{item}.{wrong[0]})."
                )
        return restored["params"], restored.get("optimizer")

    def _refuse_damaged_files(
        self, path: AnyPath, manifest: Manifest, items: Mapping[str, Any], together: bool
    ) -> None:
        """`CheckpointError` for files that differ from the manifest; see `restore`."""
        arrays, chosen = manifest.about["arrays"], set()
        if together or not all(comparable(tree, arrays[item]) for item, tree in items.items()):
            large = [name for name, digest in manifest.files.items() if digest.size > SMALL_BYTES]
            mine = large[jax.process_index() :: jax.process_count()] if together else large
            left = VERIFIED_BYTES
            for name in mine:
                left -= manifest.files[name].size
                if left >= 0:
                    chosen.add(name)
            if len(chosen) < len(mine):
                self.verified = f"verified by a sample of its files, {len(chosen)} of {len(mine)}"
        damage = manifest.damage(path, lambda name, digest: name in chosen or digest.size <= SMALL_BYTES)
        found = [str(damage[0]).encode() if damage else b""]
        if together:
            found = all_values(f"{path}/damage/{next(_exchanges)}", found[0])
        if any(found):
            raise CheckpointError(f"The checkpoint '{path}' is damaged ({next(filter(None, found)).decode()}).")

    def set_aside_after(
        self, step: int, directory: str = UNREADABLE, which: Callable[[int], bool] = lambda step: True
    ) -> None:
        """Moves checkpoints later than `step` that `which` chooses to a directory of the phase.

        They are not deleted: exhausted memory or a lost mount may be why an intact one could not be read.
        """
        if jax.process_index() == 0:
            for path in children(self.directory):
                if is_step(path) and int(path.name) > step and which(int(path.name)):
                    self._set_aside(path, directory)
        all_values(f"{self.directory}/aside/{next(_exchanges)}", b"")

    def _set_aside(self, path: AnyPath, directory: str = UNREADABLE) -> None:
        """Moves a checkpoint to a directory of the phase, if there is one."""
        if exists(path):
            move_tree(path, self.directory.parent / directory / f"{path.name}-{secrets.token_hex(6)}", first=MANIFEST)


_exchanges = itertools.count()  # alike on all processes, which save and restore in the same order


def _is_own(name: str) -> bool:
    """Whether this process wrote a file of a checkpoint: that of its OCDBT directory; process 0 all others."""
    _, marked, rest = name.partition("ocdbt.process_")
    return (int(rest.partition("/")[0]) if marked else 0) == jax.process_index()


def templates(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings, for `Store.restore`."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings
    )
