"""A digest of weights, which tells whether two checkpoints have the same ones."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from pe_lab.model import Params

SAMPLED = 4096  # numbers of each array


def weights_digest(params: Params) -> str:
    """A digest of the weights: of up to 4,096 numbers of each array, at even distances, as float32.

    A checkpoint, its copies, and children that surgery gave other encodings have one digest, also if one of them is
    external and gets another id whenever it is opened. A step of training changes all numbers, a QK-norm adds some.
    """
    found = hashlib.sha256()
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name, leaf in sorted(leaves.items()):
        at = np.linspace(0, leaf.size - 1, min(leaf.size, SAMPLED)).astype(np.int64)
        sampled = np.asarray(leaf[np.unravel_index(at, leaf.shape)], np.float32)
        found.update(repr((name, leaf.shape)).encode())
        found.update(sampled.astype("<f4").tobytes())
    return found.hexdigest()[:16]
