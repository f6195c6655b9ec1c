"""Our own checkpoints as a source, and any source written as one of ours: both a tensor at a time."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

from pe_lab.checkpoints.families import LAYERS, leaf_paths
from pe_lab.checkpoints.source import Source, check_finite, nested, row_blocks
from pe_lab.checkpoints.store import (
    DIRECTORY,
    FORMER_NAMES,
    first_line,
    metadata_of,
    model_of,
    new_id,
    read_metadata,
    resolve,
    tokenizer_directory,
)
from pe_lab.checkpoints.surgery import lineage_entry
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.positional import Layout, from_json, to_canonical

_CACHE_BYTES = 2**30  # of decoded chunks: a checkpoint of one device has one chunk a leaf, of which a layer is a part
_FILE_BYTES = 2**28  # of an Orbax data file: what is written is held in memory until a file is full


class NativeSource:
    """See `Source`: one of our checkpoints, any path that `store.resolve` takes.

    Raises:
      UserError: no checkpoint there, or a damaged one.
    """

    def __init__(self, path: str | Path):
        directory, step = resolve(path)
        self.path = directory / str(step)
        self.said = str(self.path)
        self.metadata = read_metadata(self.path)
        self.model = Model(model_of(self.metadata, self.path)).config
        self.layers = tuple(from_json(layer) for layer in self.metadata["layers"])
        self.training_length = int(self.metadata["training_length"])
        self._layout = Layout(**self.metadata.get("layout", {}))
        self._opened: dict[str, Any] = {}
        directory_of_tokenizer = tokenizer_directory(self.path)
        self.tokenizer = f"saved:{directory_of_tokenizer}" if directory_of_tokenizer else ""
        self.dtype = np.dtype(self._array("token_embedder.embedding").dtype.numpy_dtype)

    def _array(self, leaf: str) -> Any:
        """The leaf as tensorstore opens it: nothing is read yet."""
        import tensorstore as ts

        if leaf not in self._opened:
            where = (self.path / "params").absolute()
            head, _, rest = leaf.partition(".")
            former = FORMER_NAMES.get(self.metadata["format"], {})
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": f"file://{where}/", "path": f"{former.get(head, head)}.{rest}/"},
                "context": {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}},
            }
            try:
                self._opened = {leaf: ts.open(spec, open=True, read=True).result()}  # one at a time, and its cache
            except Exception as error:  # tensorstore raises ValueError for anything
                raise UserError(f"The checkpoint '{self.path}' is damaged ({first_line(error)}).") from error
        return self._opened[leaf]

    def read(self, leaf: str, layer: int | None = None, rows: slice = slice(None)) -> Shaped[np.ndarray, "..."]:
        """See `Source`."""
        array = self._array(leaf)
        try:
            piece = array[rows if layer is None else layer].read().result()
        except ValueError as error:
            raise UserError(f"The checkpoint '{self.path}' is damaged ({first_line(error)}).") from error
        piece = check_finite(np.asarray(piece), leaf, self.said)
        moved = leaf.removeprefix(LAYERS).startswith(("attention.query", "attention.key"))
        return to_canonical(piece, self._layout) if moved else piece


class _Piecewise:
    """A leaf that Orbax asks for piece by piece instead of holding it: as wide as an array, as deep as one layer."""

    def __init__(
        self,
        source: Source,
        leaf: str,
        shape: tuple[int, ...],
        turn: asyncio.Lock,
        done: Callable[[int], None],
        failures: list[Exception],
    ):
        self.source, self.leaf, self.shape, self.dtype = source, leaf, shape, source.dtype
        self.turn, self.done, self.failures = turn, done, failures
        self.ndim, self.size = len(shape), int(np.prod(shape))
        self.nbytes = self.size * self.dtype.itemsize

    def pieces(self) -> list[tuple[Any, Callable[[], np.ndarray]]]:
        """(where in the leaf, how to read it), in order."""
        if self.leaf.startswith(LAYERS):
            return [(slice(n, n + 1), lambda n=n: self.source.read(self.leaf, n)[None]) for n in range(self.shape[0])]
        blocks = row_blocks(self.shape, self.dtype.itemsize)
        return [(rows, lambda rows=rows: self.source.read(self.leaf, rows=rows)) for rows in blocks]


class _PiecewiseHandler(ocp.type_handlers.NumpyHandler):
    """Writes a `_Piecewise` as Orbax writes a NumPy array, one piece in memory at a time, one leaf after another."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
        import tensorstore as ts

        pieces = value.pieces()
        rows = pieces[0][0].stop - pieces[0][0].start
        # A chunk a piece: one that a piece only touched would be read and written again for the next.
        tspec["metadata"]["chunks"] = [rows, *value.shape[1:]]
        async with value.turn:
            if value.failures:
                return
            try:
                array = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
                for where, read in pieces:
                    piece = np.ascontiguousarray(read(), value.dtype)
                    await array[where].write(piece)
                    value.done(piece.nbytes)
                    del piece  # before the next one is read
            except Exception as error:
                # Raised here, it would leave the other leaves waiting for their turn in a loop that Orbax closes, and
                # they say so on stderr, one by one. `write_checkpoint` raises it.
                value.failures.append(error)


ocp.type_handlers.register_type_handler(_Piecewise, _PiecewiseHandler(), override=True)


def write_checkpoint(
    source: Source,
    directory: Path,
    final: Path,
    facts: Mapping[str, Any],
    done: Callable[[int], None] = lambda size: None,
) -> Path:
    """Writes any source as a checkpoint of ours, a phase's first, in the source's own number format; returns its path.

    Memory holds a piece at a time: one layer of one leaf, or some rows of an embedding.

    Args:
      source: what to read.
      directory: where to write; see `new_directory`.
      final: what the directory will be called, for the lineage.
      facts: more of the metadata.
      done: told how many bytes were written, as they are.

    Raises:
      UserError: the source cannot be read to its end.
    """
    model = source.model
    shapes = leaf_paths(Model(model).shapes)
    turn = asyncio.Lock()
    failures: list[Exception] = []
    params = {leaf: _Piecewise(source, leaf, tuple(s.shape), turn, done, failures) for leaf, s in shapes.items()}
    child = new_id()
    parents = list(source.metadata.get("lineage", ()))
    metadata = metadata_of(
        model,
        source.layers,
        id=child,
        run=final.name,
        phase=final.name,
        phase_index=0,
        step=0,
        tokens=0,
        training_length=source.training_length,
        vocab_size=model.vocab_size,
        weights_dtype=str(source.dtype),
        lineage=[*parents, lineage_entry(f"converted from {source.said}", child, str(final / DIRECTORY / "0"), 0)],
        **facts,
    )
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, create=True)
    manager = ocp.CheckpointManager((directory / DIRECTORY).absolute(), options=options)
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)  # Orbax logs what it raises, over a hundred lines of it
    try:
        manager.save(
            0,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(nested(params), ocdbt_target_data_file_size=_FILE_BYTES),
                metadata=ocp.args.JsonSave(metadata),
            ),
        )
        manager.wait_until_finished()
    except Exception:
        if not failures:
            raise
    finally:
        log.setLevel(level)
        manager.close()
    if failures:
        shutil.rmtree(directory / DIRECTORY, ignore_errors=True)  # Orbax takes what there is for whole
        raise failures[0]
    return directory / DIRECTORY / "0"
