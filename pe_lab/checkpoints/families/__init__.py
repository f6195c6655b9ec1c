"""Families of external checkpoints: a file each, found by being here.

A module of this package that defines FAMILIES, a tuple of `Family`, adds them to the table of that name below.
"""

from __future__ import annotations

import importlib
import pkgutil

from pe_lab.checkpoints.families.family import Config, Family, PositionFormat, Positions
from pe_lab.checkpoints.families.tensors import (
    LAYERS,
    LEAVES,
    POSITIONAL,
    Fused,
    Leaf,
    Tensor,
    TensorTable,
    block_leaf,
    canonical_leaf,
    leaf_paths,
    leaf_shapes,
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in sorted(one.name for one in pkgutil.iter_modules(__path__))
    for family in getattr(importlib.import_module(f"{__name__}.{module}"), "FAMILIES", ())
}

__all__ = [
    "FAMILIES",
    "LAYERS",
    "LEAVES",
    "POSITIONAL",
    "Config",
    "Family",
    "Fused",
    "Leaf",
    "PositionFormat",
    "Positions",
    "Tensor",
    "TensorTable",
    "block_leaf",
    "canonical_leaf",
    "leaf_paths",
    "leaf_shapes",
]
