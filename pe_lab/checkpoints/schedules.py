"""A schedule as arrays and JSON, for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pe_lab.positional import LayerStructure, Schedule

_ARRAYS = ("inv_freq", "gain", "turns", "alibi_slope", "logit_scale")


def to_arrays(schedule: Schedule) -> dict[str, np.ndarray]:
    """The data of a schedule, by name."""
    return {name: np.asarray(getattr(schedule, name)) for name in _ARRAYS}


def structure_to_json(schedule: Schedule) -> dict[str, Any]:
    """The static part of a schedule."""
    return {
        "layers": [dataclasses.asdict(layer) for layer in schedule.structure],
        "same_rotation": schedule.same_rotation,
    }


def from_arrays(arrays: Mapping[str, np.ndarray], structure: Mapping[str, Any]) -> Schedule:
    """The schedule that `to_arrays` and `structure_to_json` took apart."""
    layers: Sequence[Mapping[str, Any]] = structure["layers"]
    return Schedule(
        **{name: arrays[name] for name in _ARRAYS},
        structure=tuple(LayerStructure(**layer) for layer in layers),
        same_rotation=structure["same_rotation"],
    )


def array_shapes(metadata: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays of `to_arrays`, from a checkpoint's metadata."""
    model = metadata["model"]
    N, H, R = model["layers"], model["heads"], model["head_dim"] // 2
    shapes = {
        "inv_freq": (N, H, R),
        "gain": (N, H, R),
        "turns": (N, H, R, 2),
        "alibi_slope": (N, H),
        "logit_scale": (N,),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, np.uint32 if name == "turns" else np.float32)
        for name, shape in shapes.items()
    }
