"""The device mesh: its shape, the order of its devices, and the errors where a shape or a batch does not fit."""

import jax
import pytest

from pe_lab.config import MeshConfig
from pe_lab.errors import ConfigError
from pe_lab.parallel import check_batch, make_mesh
from pe_lab.parallel.compiler import topology_devices, wrap_around
from pe_lab.parallel.sharding import mesh_shape
from pe_lab.parallel.topology import parse_topology


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
def test_the_free_axis_takes_the_remaining_devices(sizes, devices, shape):
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
def test_a_mesh_of_another_size_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        mesh_shape(MeshConfig(*sizes), 8)


def test_the_mesh_is_made_of_the_devices_given():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=1), jax.devices()[:4])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "context": 1}
    assert set(mesh.devices.flat) == set(jax.devices()[:4])
    assert make_mesh(MeshConfig()).size == len(jax.devices()) == 8


@pytest.mark.parametrize(
    ("slice_name", "config", "first"),
    [
        # 8 of the 16 chips of an axis, and 8 of 4 x 4: more than jax.make_mesh does on v6e and v5p.
        ("v6e:16x16", MeshConfig(data=-1, fsdp=8), [(x, 0, 0) for x in range(8)]),
        ("v5e:16x16", MeshConfig(data=-1, fsdp=8), [(x, 0, 0) for x in range(8)]),
        ("v5p:4x4x4", MeshConfig(data=-1, fsdp=8), [(x, y, 0) for x in range(4) for y in range(2)]),
        ("v5p:4x4x4", MeshConfig(data=1, fsdp=-1), [(0, 0, z) for z in range(4)]),
    ],
)
def test_a_mesh_axis_takes_neighbours_of_a_slice(slice_name, config, first):
    mesh = make_mesh(config, topology_devices(parse_topology(slice_name)))
    found = [tuple(device.coords) for device in mesh.devices[0, :, 0, 0]]
    assert found[: len(first)] == first
    if slice_name == "v5e:16x16":  # the order that jax.make_mesh gives, with which runs were made
        reference = jax.make_mesh(mesh.devices.shape, mesh.axis_names, devices=list(mesh.devices.flat)).devices
        assert (mesh.devices == reference).all()


def test_wrap_around_links():
    assert wrap_around(parse_topology("v5p:4x4x4")) == wrap_around(parse_topology("v5p:4x4x8")) == (True, True, True)
    assert wrap_around(parse_topology("v5p:2x4x4")) == (False, False, False)  # less than a cube
    assert wrap_around(parse_topology("v5e:16x16")) == wrap_around(parse_topology("v6e:16x16")) == (True, True, False)
    assert wrap_around(parse_topology("v6e:8x16")) == (False, True, False)
    assert not any(wrap_around(parse_topology("v5e:8x8")))


def test_slices_are_joined_along_data():
    mesh = make_mesh(MeshConfig(data=-1, fsdp=4), topology_devices(parse_topology("v5e:2x4", slices=2)))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 4, "tensor": 1, "context": 1}
    slices = [[device.slice_index for device in row.flat] for row in mesh.devices]
    assert slices == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    with pytest.raises(ConfigError, match="2 slices do not divide data = 1"):
        mesh_shape(MeshConfig(data=1, fsdp=-1), 16, 2)
    with pytest.raises(ConfigError, match="config.mesh.slices is 4; the devices are in 2"):
        mesh_shape(MeshConfig(slices=4), 16, 2)


def test_a_batch_is_sharded_over_data_and_fsdp_but_not_tensor():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    check_batch(8, 2, mesh, "phase 'pretrain'")
    with pytest.raises(ConfigError, match="phase 'pretrain': batch_size 6 .* data x fsdp = 4 .* multiple of 4"):
        check_batch(6, 1, mesh, "phase 'pretrain'")
    with pytest.raises(ConfigError, match="batch_size 4 in 2 micro-batches .* multiple of 8"):
        check_batch(4, 2, mesh, "phase 'pretrain'")
    with pytest.raises(ConfigError, match="accumulate is 0"):
        check_batch(8, 0, mesh, "phase 'pretrain'")
    with pytest.raises(ConfigError, match="batch_size is 0"):
        check_batch(0, 1, mesh, "phase 'pretrain'")
