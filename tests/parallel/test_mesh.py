"""Devices into a mesh, and what is said when they do not fit."""

import jax
import pytest

from pe_lab.config import MeshConfig
from pe_lab.errors import UserError
from pe_lab.parallel import check_batch, make_mesh, mesh_shape


@pytest.mark.parametrize(
    "sizes, devices, shape",
    [
        ((-1, 1, 1), 8, (8, 1, 1, 1)),
        ((1, -1, 1), 4, (1, 4, 1, 1)),
        ((2, 2, -1), 8, (2, 2, 2, 1)),
        ((2, 2, 2), 8, (2, 2, 2, 1)),
        ((-1, 16, 1), 256, (16, 16, 1, 1)),
        ((1, 1, 1, -1), 8, (1, 1, 1, 8)),
        ((-1, 2, 1, 2), 8, (2, 2, 1, 2)),
        ((-1, 1, 1), 1, (1, 1, 1, 1)),
    ],
)
def test_the_free_axis_takes_what_is_left(sizes, devices, shape):
    assert mesh_shape(MeshConfig(*sizes), devices) == shape


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((-1, -1, 1), "at most one is -1"),
        ((0, -1, 1), "axes are positive"),
        ((-2, 1, 1), "axes are positive"),
        ((-1, 3, 1), "a multiple of 3 devices, and there are 8"),
        ((-1, 16, 1), "a multiple of 16 devices, and there are 8"),
        ((2, 2, 1), "4 devices, and there are 8"),
        ((4, 2, 2), "16 devices, and there are 8"),
    ],
)
def test_a_mesh_that_does_not_fit_says_why(sizes, message):
    with pytest.raises(UserError, match=message):
        mesh_shape(MeshConfig(*sizes), 8)


def test_the_mesh_is_made_of_the_devices_given():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=1), jax.devices()[:4])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "context": 1}
    assert set(mesh.devices.flat) == set(jax.devices()[:4])
    assert make_mesh(MeshConfig()).size == len(jax.devices()) == 8


def test_a_batch_cuts_over_data_and_fsdp_but_not_tensor():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    check_batch(8, 2, mesh, "phase 'pretrain'")
    with pytest.raises(UserError, match="phase 'pretrain': batch_size 6 .* data x fsdp = 4 .* multiple of 4"):
        check_batch(6, 1, mesh, "phase 'pretrain'")
    with pytest.raises(UserError, match="batch_size 4 in 2 micro-batches .* multiple of 8"):
        check_batch(4, 2, mesh, "phase 'pretrain'")
    with pytest.raises(UserError, match="accumulate is 0"):
        check_batch(8, 0, mesh, "phase 'pretrain'")
    with pytest.raises(UserError, match="batch_size is 0"):
        check_batch(0, 1, mesh, "phase 'pretrain'")
