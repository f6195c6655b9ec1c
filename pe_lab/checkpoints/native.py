"""Native checkpoints as sources, and any source written as a native checkpoint one tensor at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jaxtyping import Shaped

from pe_lab.checkpoints.families import canonical_leaf, leaf_paths
from pe_lab.checkpoints.locating import (
    DIRECTORY,
    SET_ASIDE,
    absent_arrays,
    database,
    first_line,
    lineage_entry,
    read_manifest,
    read_metadata,
    resolve,
    tokenizer_directory,
)
from pe_lab.checkpoints.orbax import checkpointer, quiet
from pe_lab.checkpoints.source import CheckpointSource, blocks, check_finite, nested, parameter_shardings
from pe_lab.checkpoints.store import Store, metadata_of, templates
from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import CheckpointError, ConfigError, EncodingError, excerpt
from pe_lab.model import Model, Params
from pe_lab.parallel import AxisRules
from pe_lab.positional import Layout, check_sources, from_json, layer_hooks
from pe_lab.storage import AnyPath
from pe_lab.storage.manifest import manifest_of

# Of decoded chunks: a checkpoint of one device has one chunk per leaf, and layers are read from it one by one.
_CACHE_BYTES = 2**30
_FILE_BYTES = 2**28  # of an Orbax data file: its content stays in memory until the file is full


class NativeSource(CheckpointSource):
    """A native checkpoint at any path that `locating.resolve` takes; `CheckpointError` if it is damaged."""

    def __init__(self, path: str | AnyPath):
        directory, self.step = resolve(path)
        self.path = directory / str(self.step)
        self.display_name = str(self.path)
        self.metadata = read_metadata(self.path)
        try:
            config = from_dict(ModelConfig, self.metadata["model"], "model")
            # The attention of the training machine may not exist on this one.
            config = dataclasses.replace(config, attention="auto")
            check_sources(self.metadata.get("encodings", {}), f"The checkpoint '{self.path}'")
            self.layers = tuple(from_json(layer) for layer in self.metadata["layers"])
            self._model = Model(config, hooks=layer_hooks(self.layers, config.heads))
            self._layout = Layout(**self.metadata.get("layout", {}))
            self.dtype = np.dtype(self.metadata.get("weights_dtype", "float32"))
            if not isinstance(self._layout.rotated, int | None):
                raise TypeError(f"layout.rotated is {excerpt(repr(self._layout.rotated), 60)}")
        except EncodingError:  # its module is not imported, or has changed
            raise
        except (ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The metadata of the checkpoint '{self.path}' are damaged ({first_line(error)})."
            ) from None
        self.model = self._model.config
        self.training_length = self.metadata["training_length"]
        if len(self.layers) != self.model.layers:
            raise CheckpointError(
                f"The metadata of the checkpoint '{self.path}' are damaged: {len(self.layers)} encodings for "
                f"{self.model.layers} layers."
            )
        self._opened: dict[str, Any] = {}
        self._verified = False  # whether its files have been compared with its manifest
        origins = (entry["origin"] for entry in self.metadata["lineage"] if isinstance(entry.get("origin"), str))
        self.origin = next(origins, "")
        saved = tokenizer_directory(self.path)
        self.tokenizer = f"saved:{saved}" if saved else ""

    def _damaged(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"The checkpoint '{self.path}' is damaged ({first_line(error)}). {SET_ASIDE}")

    def restore(self, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Params:
        """All parameters, in float32, on the first device or sharded over a mesh."""
        wanted = templates(self._model.shapes, parameter_shardings(self._model, mesh, rules))
        store = Store(self.path.parent, read_only=True)
        try:
            params, _ = store.restore(self.step, wanted)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {SET_ASIDE}") from error
        except Exception as error:
            raise self._damaged(error) from error
        finally:
            store.close()
        return nested({path: canonical_leaf(path, leaf, self._layout) for path, leaf in leaf_paths(params).items()})

    def _array(self, leaf: str) -> Any:
        """The leaf as an open tensorstore, of which nothing is read yet."""
        import tensorstore as ts

        if not self._verified:
            if damage := read_manifest(self.path).damage(self.path, lambda name, _: name.startswith("params/")):
                raise CheckpointError(f"The checkpoint '{self.path}' is damaged ({damage[0]}). {SET_ASIDE}")
            self._verified = True
        if leaf not in self._opened:
            spec = {
                "driver": "zarr",
                "kvstore": {**database(self.path / "params"), "path": f"{leaf}/"},
                "context": {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}},
            }
            try:
                # The last leaf only, with its cache.
                self._opened = {leaf: ts.open(spec, open=True, read=True).result()}
            except Exception as error:  # tensorstore raises ValueError for all failures
                raise self._damaged(error) from error
        return self._opened[leaf]

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """See `CheckpointSource`."""
        array = self._array(leaf)
        try:
            piece = array[rows if layer is None else layer].read().result()
        except ValueError as error:
            raise self._damaged(error) from error
        return canonical_leaf(leaf, check_finite(np.asarray(piece), leaf, self.display_name), self._layout)


class _Piecewise:
    """A leaf that Orbax saves piece by piece, without the whole leaf in memory."""

    def __init__(self, source: CheckpointSource, leaf: str, shape: tuple[int, ...]):
        self.source, self.leaf, self.shape, self.dtype = source, leaf, shape, source.dtype
        self.ndim, self.size = len(shape), math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize


class _PiecewiseHandler(ocp.type_handlers.NumpyHandler):
    """Writes a `_Piecewise` as Orbax writes a NumPy array, with one piece in memory at a time, leaf after leaf."""

    def __init__(self, done: Callable[[int], None]):
        super().__init__()
        self.done = done

    async def serialize(self, values: Sequence[_Piecewise], infos: Sequence[Any], args: Any = None) -> list[Any]:
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(values, infos, args), name="pieces")]

    async def _write(self, values: Sequence[_Piecewise], infos: Sequence[Any], args: Sequence[Any]) -> None:
        import tensorstore as ts

        for value, info, arg in zip(values, infos, args, strict=True):
            await info.await_path_creation()
            shapes = {"global_shape": value.shape, "local_shape": value.shape, "dtype": value.dtype}
            common = {"use_ocdbt": info.is_ocdbt_checkpoint, "process_index": jax.process_index(), "arg": arg}
            tspec = ocp.type_handlers.get_json_tspec_write(info, **shapes, **common)
            pieces = blocks(value.leaf, value.shape, value.dtype.itemsize)
            # One chunk per piece: a chunk of several pieces would be read and written again for each.
            tspec["metadata"]["chunks"] = [pieces[0].stop, *value.shape[1:]]
            array = await ts.open(ts.Spec(tspec), create=True, open=True, context=info.ts_context)
            for block in pieces:
                piece = np.ascontiguousarray(value.source.read_block(value.leaf, block), value.dtype)
                await array[block].write(piece)
                self.done(piece.nbytes)
                del piece  # before the next one is read


def write_checkpoint(
    source: CheckpointSource,
    directory: Path,
    final: AnyPath,
    metadata: Mapping[str, Any],
    done: Callable[[int], None] = lambda size: None,
) -> Path:
    """Writes any source as a native checkpoint, the first of a phase, in the source's dtype; returns its path.

    Memory holds one piece at a time: one layer of one leaf, or some rows of an embedding; `done` is called with the
    bytes of each. The directory will be named `final`, which the lineage has; `metadata` is added to the source's.

    Raises:
      CheckpointError: the source cannot be read completely.
    """
    model = source.model
    shapes = leaf_paths(Model(model, hooks=layer_hooks(source.layers, model.heads)).shapes)
    params = {leaf: _Piecewise(source, leaf, tuple(s.shape)) for leaf, s in shapes.items()}
    entry = lineage_entry(f"converted from {source.display_name}", str(final / DIRECTORY / "0"), 0, source.origin)
    written = metadata_of(
        model,
        source.layers,
        id=entry["id"],
        run=final.name,
        phase=final.name,
        phase_index=0,
        step=0,
        tokens=0,
        training_length=source.training_length,
        vocab_size=model.vocab_size,
        weights_dtype=str(source.dtype),
        lineage=[*source.metadata.get("lineage", ()), entry],
        **metadata,
    )
    path = (directory / DIRECTORY / "0").absolute()
    try:
        with quiet(), contextlib.closing(checkpointer(path)) as writer:
            ocp.type_handlers.register_type_handler(_Piecewise, _PiecewiseHandler(done), override=True)
            writer.save(
                path,
                args=ocp.args.Composite(
                    params=ocp.args.PyTreeSave(nested(params), ocdbt_target_data_file_size=_FILE_BYTES),
                    metadata=ocp.args.JsonSave(written),
                ),
            )
    except Exception:
        shutil.rmtree(directory / DIRECTORY, ignore_errors=True)  # Orbax takes the incomplete one for complete
        raise
    arrays = {
        leaf: {"shape": list(piecewise.shape), "dtype": str(piecewise.dtype), "checksum": None}
        for leaf, piecewise in params.items()
    }
    manifest = manifest_of(path, {"kind": "checkpoint", "step": 0, "id": entry["id"], "arrays": {"params": arrays}})
    if lost := absent_arrays(path, manifest):
        raise CheckpointError(f"'{final}' cannot be written: Orbax has written no {lost[0]} that can be read.")
    manifest.write(path)
    return directory / DIRECTORY / "0"
