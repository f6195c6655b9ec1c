"""The same run on other devices: one, four (sequences sharded over two), eight, and from eight back to one."""

import shutil

import jax
import numpy as np
import pytest
from tiny_runs import compilations_kept, losses, tiny, train  # noqa: F401

from pe_lab.checkpoints.checkpoint import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compilations_kept")]
STEPS = 20
MESHES = {
    1: {},
    4: {"mesh__data": 1, "mesh__fsdp": 2, "mesh__context": 2},
    8: {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2},
}


def config(directory, devices):
    one_phase = (
        f"[{{'name': 'pretrain', 'steps': {STEPS}, 'sequence_length': 16, 'batch_size': 8, "
        "'optimizer': {'learning_rate': 0.003, 'warmup_steps': 4}}]"
    )
    return tiny(
        directory, phases=one_phase, log__validate_every_steps=STEPS, checkpoint__every_steps=10, **MESHES[devices]
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, compilations_kept):  # noqa: F811
    directory = tmp_path_factory.mktemp("runs")
    for devices in MESHES:
        train(config(directory / "recipe", devices), directory / str(devices), jax.devices()[:devices])
    return directory


def test_losses_do_not_depend_on_the_devices(runs):
    one = losses(runs / "1" / "pretrain")
    assert len(one) == STEPS and one[-1] < one[0] - 0.2
    for devices in (4, 8):
        np.testing.assert_allclose(losses(runs / str(devices) / "pretrain"), one, rtol=1e-5)


def test_the_runs_were_spread(runs):
    from pe_lab.config import MeshConfig
    from pe_lab.parallel import make_mesh

    # 8 devices hold an eighth or a quarter of a matrix each; the checkpoint is one and the same kind of file.
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = open_checkpoint(runs / "8", mesh=mesh).params
    assert params["layers"]["mlp"]["up"].addressable_shards[0].data.size == params["layers"]["mlp"]["up"].size // 4
    one = open_checkpoint(runs / "1").params
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)


@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 8)])
def test_a_checkpoint_of_other_devices_goes_on_with_the_same_losses(runs, tmp_path, before, after):
    moved = shutil.copytree(runs / str(before), tmp_path / "run")
    shutil.rmtree(moved / "pretrain" / "checkpoints" / str(STEPS))
    train(config(tmp_path / "recipe", after), moved, jax.devices()[:after])
    resumed = losses(moved / "pretrain")
    np.testing.assert_array_equal(resumed[:10], losses(runs / str(before) / "pretrain")[:10])
    np.testing.assert_allclose(resumed, losses(runs / "1" / "pretrain"), rtol=1e-5)
