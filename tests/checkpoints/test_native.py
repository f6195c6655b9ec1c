"""Checkpoints of ours written and read a piece at a time, and pieces put where a mesh wants them."""

import collections
import weakref

import jax
import numpy as np
import pytest
from checkpoints.external import DATA, Memory
from jax.sharding import Mesh
from tiny_runs import arrays

from pe_lab.checkpoints import source
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.families import leaf_paths, leaf_shapes
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.checkpoints.native import NativeSource, write_checkpoint
from pe_lab.checkpoints.source import place
from pe_lab.checkpoints.store import Store, metadata_of
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.parallel import AxisRules
from pe_lab.positional import CANONICAL, Layer, Layout, NoPE, Rope

MODEL = ModelConfig(
    vocab_size=48, layers=4, d_model=32, d_ff=64, heads=4, kv_heads=2, qk_norm="head", tie_embeddings=False
)
LAYERS = (Layer(Rope(500.0)), Layer(NoPE())) * 2


def mesh_of(fsdp, tensor):
    devices = np.array(jax.devices()[:8]).reshape(8 // fsdp // tensor, fsdp, tensor, 1)
    return Mesh(devices, ("data", "fsdp", "tensor", "context"))


def assert_holds(params, memory):
    found = {path: np.asarray(leaf) for path, leaf in leaf_paths(params).items()}
    assert found.keys() == memory.arrays.keys()
    for path, array in memory.arrays.items():
        assert (found[path] == array.astype(np.float32)).all(), path


def assert_reads(opened, memory):
    """Every piece by itself: layers one by one, the others by rows."""
    for path, array in memory.arrays.items():
        if path.startswith("layers."):
            for n in (3, 0, 2, 1):
                assert (opened.read(path, n) == array[n]).all(), path
        else:
            assert (opened.read(path) == array).all() and (opened.read(path, rows=slice(5, 9)) == array[5:9]).all()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float32", "float16"))]
)
def test_what_is_written_in_pieces_is_a_checkpoint_like_any(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ROW_BYTES", 700)
    memory = Memory(MODEL, LAYERS, dtype=dtype)
    told = []
    where = write_checkpoint(memory, tmp_path / "new", tmp_path / "run", {"tokenizer": "none"}, told.append)
    assert where == tmp_path / "new/checkpoints/0"
    assert sum(told) == sum(array.nbytes for array in memory.arrays.values())
    opened = open_checkpoint(tmp_path / "new")
    assert_holds(opened.params, memory)
    assert opened.layers == LAYERS and opened.model == memory.model
    assert opened.metadata["training_length"] == 32 and opened.metadata["weights_dtype"] == dtype
    last = opened.metadata["lineage"][-1]
    assert last["what"] == "converted from memory" and last["path"] == str(tmp_path / "run/checkpoints/0")
    # As Orbax reads it without us: in the source's own type.
    on_disk = arrays(where, "params")
    assert {str(array.dtype) for array in on_disk.values()} == {dtype}
    again = NativeSource(tmp_path / "new")
    assert (again.dtype, again.model, again.layers, again.training_length) == (memory.dtype, memory.model, LAYERS, 32)
    assert_reads(again, memory)


def saved(memory, directory, params, layout=CANONICAL):
    """As training saves."""
    model = memory.model
    metadata = {"id": "0", "phase": "p", "step": 7, "training_length": memory.training_length, "lineage": []}
    kept = Store(directory / "checkpoints")
    kept.save(7, params, None, metadata_of(model, memory.layers, layout, **metadata))
    kept.wait()
    kept.close()
    return directory


@pytest.mark.parametrize("fsdp, tensor", [(1, 1), (8, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_pieces_of_what_training_saved_on_one_device_or_a_mesh(fsdp, tensor, tmp_path):
    memory = Memory(MODEL, LAYERS)
    mesh = None if fsdp == tensor == 1 else mesh_of(fsdp, tensor)
    opened = NativeSource(saved(memory, tmp_path, place(memory, mesh)))
    assert opened.training_length == 32 and opened.layers == LAYERS
    assert_reads(opened, memory)


def test_another_layout_is_undone_as_it_is_for_the_whole(tmp_path):
    memory = Memory(MODEL, LAYERS)
    saved(memory, tmp_path, place(memory), Layout("interleaved"))
    whole = leaf_paths(open_checkpoint(tmp_path).params)
    opened, moved = NativeSource(tmp_path), 0
    for path in memory.arrays:
        piece = opened.read(path, 1) if path.startswith("layers.") else opened.read(path)
        assert (piece == np.asarray(whole[path][1] if path.startswith("layers.") else whole[path])).all(), path
        moved += not np.array_equal(np.asarray(whole[path]), memory.arrays[path])
    assert moved == 4  # queries, keys, and their norms


class Failing(Memory):
    """Cannot be read to its end."""

    def read(self, leaf, layer=None, rows=slice(None)):
        if leaf == "layers.mlp.up" and layer == 2:
            raise UserError("memory: tensor 'up' has 1 of 9 values that are NaN or infinite.")
        return super().read(leaf, layer, rows)


def test_a_failure_in_the_middle_is_raised_as_it_is_and_leaves_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="^memory: tensor 'up' has 1 of 9"):
        write_checkpoint(Failing(MODEL, LAYERS), tmp_path / "new", tmp_path / "run", {})
    with pytest.raises(UserError, match="no checkpoint"):
        open_checkpoint(tmp_path / "new")


class Watched(Memory):
    """Knows how many of the pieces it gave are still somewhere."""

    def __init__(self, *args):
        super().__init__(*args)
        self.alive, self.most = [], 0

    def read(self, leaf, layer=None, rows=slice(None)):
        self.alive = [ref for ref in self.alive if ref() is not None]
        self.most = max(self.most, len(self.alive))
        piece = super().read(leaf, layer, rows).copy()
        self.alive.append(weakref.ref(piece))
        return piece


def test_one_piece_is_held_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ROW_BYTES", 700)
    watched = Watched(MODEL, LAYERS)
    write_checkpoint(watched, tmp_path / "new", tmp_path / "run", {})
    # When the next one is read, a thread of TensorStore may still hold the last.
    assert len(watched.reads) > 4 * 10 and watched.most <= 1, watched.most


def test_a_damaged_checkpoint_is_one_message(tmp_path):
    memory = Memory(MODEL, LAYERS)
    where = write_checkpoint(memory, tmp_path / "new", tmp_path / "run", {})
    opened = NativeSource(tmp_path / "new")
    for file in (where / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:100])
    own_error = "is damaged"
    with pytest.raises(UserError, match=own_error) as caught:
        for path in memory.arrays:
            opened.read(path, 0) if path.startswith("layers.") else opened.read(path)
    assert "\n" not in str(caught.value)


# Placing.


@pytest.mark.parametrize("fsdp, tensor", [(8, 1), (2, 2), (1, 1)])
def test_a_mesh_holds_what_one_device_does_by_the_rules(fsdp, tensor):
    memory = Memory(MODEL, LAYERS)
    mesh, rules, model = mesh_of(fsdp, tensor), AxisRules(), Model(MODEL)
    placed = place(memory, mesh, rules)
    assert_holds(placed, memory)
    expected = jax.tree.map(lambda s, axes: rules.sharding(mesh, axes, s.shape), model.shapes, model.axes)
    assert jax.tree.map(lambda leaf, s: leaf.sharding == s, placed, expected) == jax.tree.map(lambda _: True, expected)
    if fsdp == 8:
        assert not placed["layers"]["mlp"]["up"].sharding.is_fully_replicated
    assert {leaf.dtype for leaf in jax.tree.leaves(placed)} == {np.dtype("float32")}


@pytest.mark.parametrize("fsdp, tensor", [(None, None), (8, 1), (2, 2)])
def test_placing_reads_every_piece_once(fsdp, tensor, monkeypatch):
    monkeypatch.setattr(source, "ROW_BYTES", 700)
    memory = Memory(MODEL, LAYERS)
    assert_holds(place(memory, mesh_of(fsdp, tensor) if fsdp else None), memory)
    rows = collections.Counter()
    for leaf, layer, block in memory.reads:
        for row in [layer] if layer is not None else range(*block.indices(memory.arrays[leaf].shape[0])):
            rows[leaf, row] += 1
    assert set(rows.values()) == {1}
    assert len(rows) == sum(array.shape[0] for array in memory.arrays.values())


def test_a_foreign_model_on_a_mesh_is_the_one_on_a_device():
    opened = HuggingFaceSource(DATA / "gpt_neox")
    one, many = leaf_paths(place(opened)), leaf_paths(place(opened, mesh_of(4, 2)))
    assert one.keys() == leaf_shapes(opened.model).keys()
    assert all((np.asarray(one[path]) == np.asarray(many[path])).all() for path in one)
