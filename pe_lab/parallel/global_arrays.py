"""Arrays on devices of several processes: how they are put there, and how the host gets them back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding


def put(tree: Any, sharding: Sharding) -> Any:
    """Arrays on the devices of a sharding. Of arrays on the host, every process has the same one.

    `jax.device_put` alone takes no array of one process's device for devices of several, and compares arrays of the
    host between the processes, whose every byte then travels.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def fetch(array: Any) -> np.ndarray:
    """An array on the host of every process; if it is sharded over devices of several, all must call it."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
