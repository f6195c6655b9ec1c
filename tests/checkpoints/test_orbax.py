"""Checkpoints on object stores: Orbax's checkpointers, and a store of ours."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from object_stores import bucket, gcs_bucket, store_servers  # noqa: F401

from pe_lab import storage, verify
from pe_lab.checkpoints.locating import latest, steps_in
from pe_lab.checkpoints.orbax import checkpointer, quiet
from pe_lab.checkpoints.store import Store, metadata_of, templates
from pe_lab.config import ModelConfig
from pe_lab.errors import StoreError
from pe_lab.positional import layers

COMMIT_FILE = "commit_success.txt"  # Orbax's last object of a directory


def test_orbax_is_quiet_during_calls_alone(tmp_path):
    log = logging.getLogger("absl")
    before = log.level
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert log.level == logging.CRITICAL  # for the second, of another thread
    second.__exit__(None, None, None)
    assert log.level == before
    store = Store(tmp_path / "checkpoints")
    store.save(1, {"w": jnp.ones(3)}, None, {"format": 1, "step": 1})
    store.wait()
    store.restore(1, templates({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, {"w": jnp.ones(3).sharding}))
    store.close()
    assert log.level == before < logging.CRITICAL


def saved(step, weights):
    items = ocp.args.Composite(params=ocp.args.StandardSave(weights), metadata=ocp.args.JsonSave({"step": 7}))
    with checkpointer(step, ocp.AsyncCheckpointer) as writer:
        writer.save(step, args=items, force=True)
        writer.wait_until_finished()


@pytest.mark.slow
def test_a_checkpoint_is_saved_committed_and_restored_sharded(bucket):  # noqa: F811
    root = storage.path("--workdir", f"{bucket.url}/run/checkpoints")
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    weights = {"a": {"w": jax.device_put(jnp.arange(64.0).reshape(16, 4), sharding)}, "b": jnp.ones(3)}
    step = root / "7"
    saved(step, weights)
    names = storage.listing(step)
    assert {COMMIT_FILE, f"params/{COMMIT_FILE}", "params/manifest.ocdbt"} <= names.keys()
    # What a killed process leaves: no commit file. The step is then saved again.
    storage.remove(step / COMMIT_FILE)
    saved(step, weights)
    assert COMMIT_FILE in storage.listing(step)
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights)
    items = ocp.args.Composite(params=ocp.args.StandardRestore(wanted), metadata=ocp.args.JsonRestore())
    with checkpointer(step) as reader:
        found = reader.restore(step, args=items)
    assert found["metadata"] == {"step": 7}
    assert found["params"]["a"]["w"].sharding == sharding
    np.testing.assert_array_equal(found["params"]["a"]["w"], weights["a"]["w"])

    import tensorstore as ts

    base = {"driver": "ocdbt", "base": storage.kvstore(step / "params"), "path": "a.w/"}
    array = ts.open({"driver": "zarr", "kvstore": base}, open=True, read=True).result()
    np.testing.assert_array_equal(array[3].read().result(), np.arange(64.0).reshape(16, 4)[3])


@pytest.mark.slow
def test_an_account_that_may_not_read_the_bucket_itself_saves_and_restores(gcs_bucket):  # noqa: F811
    """roles/storage.objectUser has no storage.buckets.get, with which Orbax learns a bucket's layout. 3 s."""
    root = storage.path("--workdir", f"{gcs_bucket.url}/run/checkpoints")
    gcs_bucket.inject("403", rf"^GET /storage/v1/b/{gcs_bucket.name}(\?|$| )", times=1000)
    store = Store(root)
    for step in (3, 4):
        store.save(step, {"w": jnp.ones(3)}, None, {"format": 1, "step": step})
        store.wait()
    wanted = templates({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, {"w": jnp.ones(3).sharding})
    assert store.restore(4, wanted)[0]["w"].sum() == 3 and store.steps() == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_of", [r"manifest\.json", r"^GET .*[?&](prefix|list-type)="], ids=["manifest", "listing"]
)
def test_a_checkpoint_that_a_store_does_not_show_is_not_taken_for_absent(bucket, request_of):  # noqa: F811
    """fsspec's `isfile` and `isdir` are False then: a step would be removed, or training begin anew. 3 s."""
    root = storage.path("--workdir", f"{bucket.url}/run/checkpoints")
    store = Store(root)
    config = ModelConfig(vocab_size=128, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, head_dim=8)
    store.save(3, {"w": jnp.ones(3)}, None, metadata_of(config, layers("nope", 2), training_length=16))
    store.wait()
    bucket.inject("403", request_of, times=1000)
    for ask in (
        lambda: Store(root),
        store.steps,
        lambda: steps_in(root),
        lambda: latest(root),
        lambda: store.damage(3),
    ):
        with pytest.raises(StoreError):
            ask()
    bucket.proxy.faults.clear()
    assert store.steps() == [3] and store.damage(3) == "" and verify.main([f"{bucket.url}/run"]) == 0
    assert steps_in(root.parent / "nowhere") == [] and Store(root.parent / "new").steps() == []
