"""A schedule as arrays and JSON, for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pe_lab.positional import LayerStructure, Schedule, Warp

_ARRAYS = ("inv_freq", "gain", "turns", "alibi_slope", "logit_scale", "noise")
_SINCE = {"noise"}  # what the first checkpoints did not have; absent, it is zero


def to_arrays(schedule: Schedule) -> dict[str, np.ndarray]:
    """The data of a schedule, by name."""
    return {name: np.asarray(getattr(schedule, name)) for name in _ARRAYS}


def structure_to_json(schedule: Schedule) -> dict[str, Any]:
    """The static part of a schedule, and the names of its arrays."""
    return {
        "layers": [dataclasses.asdict(layer) for layer in schedule.structure],
        "same_rotation": schedule.same_rotation,
        "arrays": list(_ARRAYS),
    }


def from_arrays(arrays: Mapping[str, np.ndarray], structure: Mapping[str, Any]) -> Schedule:
    """The schedule that `to_arrays` and `structure_to_json` took apart."""
    layers: Sequence[Mapping[str, Any]] = structure["layers"]
    absent = {"noise": np.zeros(arrays["alibi_slope"].shape, np.uint32)}
    return Schedule(
        **{name: arrays.get(name, absent.get(name)) for name in _ARRAYS},
        structure=tuple(_layer_structure(layer) for layer in layers),
        same_rotation=structure["same_rotation"],
    )


def _layer_structure(layer: Mapping[str, Any]) -> LayerStructure:
    """One layer's, with its tuples again: JSON has lists, and a structure must hash."""
    warp, self_bias = layer.get("warp"), layer.get("self_bias")
    tuples = {"warp": Warp(*warp) if warp else None, "self_bias": tuple(self_bias) if self_bias else None}
    return LayerStructure(**{**layer, **tuples})


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
        "noise": (N, H),
    }
    saved = metadata["structure"].get("arrays", [name for name in _ARRAYS if name not in _SINCE])
    return {
        name: jax.ShapeDtypeStruct(shapes[name], np.uint32 if name in ("turns", "noise") else np.float32)
        for name in saved
    }
