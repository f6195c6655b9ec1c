"""Gradients that are computed twice: equal on sound hardware, and one flipped bit names its device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import assert_same_training, compilations_kept, tiny, train, trained  # noqa: F401

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig
from pe_lab.errors import SilentCorruption
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import Rope, build_schedule, layers
from pe_lab.terminal import command
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.replay import Replay, _checksums
from pe_lab.training.step import init_state, make_shardings, place_batch

pytestmark = pytest.mark.usefixtures("compilations_kept")
SHAPE = ModelConfig(64, 2, 16, 32, 2, 2, dtype="float32", qk_norm="head")
SCHEDULE = build_schedule(layers(Rope(), 2), 2, 2, 8)


def test_any_flipped_bit_changes_the_checksum():
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    whole = np.asarray(_checksums({"a": jnp.asarray(x), "b": jnp.ones(2)}))
    assert whole.shape == (1, 2)
    for word in (0, 7, 14):
        for bit in (0, 13, 31):
            flipped = x.copy()
            flipped.view(np.uint32).ravel()[word] ^= np.uint32(1 << bit)
            other = np.asarray(_checksums({"a": jnp.asarray(flipped), "b": jnp.ones(2)}))
            assert (other != whole).tolist() == [[True, False]]


def flip_a_bit(params, device: int):
    """The parameters with one bit of one array flipped on one device, as a faulty memory has them."""
    name = "final_norm"
    array = params["token_embedder"][name]["scale"]
    parts = []
    for shard in sorted(array.addressable_shards, key=lambda s: s.device.id):
        part = np.array(shard.data)
        if shard.device.id == device:
            part.view(np.uint32).ravel()[0] ^= np.uint32(1 << 20)
        parts.append(jax.device_put(part, shard.device))
    flipped = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return {**params, "token_embedder": {**params["token_embedder"], name: {"scale": flipped}}}


@pytest.mark.parametrize(
    ("mesh_config", "devices", "says"),
    [
        (MeshConfig(), 4, r" on \S*2 of process 0 \(first in '\S+'\)\. Take the machine of process 0"),
        pytest.param(MeshConfig(data=2, fsdp=2), 4, "a sum over devices had spread", marks=pytest.mark.slow),
    ],
    ids=["data", "fsdp"],
)
def test_a_flipped_bit_on_one_device_stops_training_and_names_it(mesh_config, devices, says):
    """The slow one compiles for a mesh of four devices: 5 s."""
    mesh, rules, shown = make_mesh(mesh_config, jax.devices()[:devices]), AxisRules(), []
    model = Model(SHAPE)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0), 20, model.axes)
    shardings = make_shardings(model, optimizer, mesh, rules)
    state = jax.device_put(init_state(model, optimizer, model.init(jax.random.key(0))), shardings.state)
    windows = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
    batch = {"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": np.ones((8, 16), np.float32)}
    batch = place_batch({name: np.ascontiguousarray(rows) for name, rows in batch.items()}, shardings.batch)
    schedule = jax.device_put(SCHEDULE, shardings.replicated)
    replay = Replay(2, model, optimizer, mesh, rules, 1, None, {}, shown.append)

    compute, calls = replay._checksums, []

    def faulty(params, *rest):
        calls.append(len(calls))
        return compute(flip_a_bit(params, 2) if len(calls) == 6 else params, *rest)

    replay._checksums = faulty
    for step in range(1, 6):
        replay.check(step, state, batch, schedule)
    assert len(calls) == 4  # two at steps 2 and 4
    assert len(shown) == 1 and "one step in 2" in shown[0]
    with pytest.raises(SilentCorruption, match=rf"gradients of step 6, computed twice, differ.*{says}"):
        replay.check(6, state, batch, schedule)


def test_silent_corruption_is_one_message_and_status_1(capsys):
    @command
    def main(argv):
        raise SilentCorruption("Silent corruption: ...")

    assert main([]) == 1
    assert capsys.readouterr().err == "error: Silent corruption: ...\n"


@pytest.mark.slow
def test_a_run_that_is_checked_is_the_same_run(tmp_path, trained, capsys):  # noqa: F811
    """Trains the tiny run once: 4 s."""
    train(tiny(tmp_path / "recipe", stability__replay_every=2), tmp_path / "run")
    assert_same_training(trained, tmp_path / "run")
    assert "one step in 2" in capsys.readouterr().out
