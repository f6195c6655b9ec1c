"""Positional encodings as data: descriptions -> schedule -> one rotation."""

from pe_lab.positional.encodings import (
    NTK,
    PI,
    Alibi,
    Encoding,
    NoPE,
    PartialRope,
    Rope,
    Scaling,
    Yarn,
    alibi_slopes,
    frequencies,
)
from pe_lab.positional.layers import Layer, family, from_json, label, layers, parse, to_json
from pe_lab.positional.rotation import angles, apply_p_rope, apply_rope, rotate, rotation_tables
from pe_lab.positional.schedule import LayerStructure, Schedule, build_schedule, describe

__all__ = [
    "NTK",
    "PI",
    "Alibi",
    "Encoding",
    "Layer",
    "LayerStructure",
    "NoPE",
    "PartialRope",
    "Rope",
    "Scaling",
    "Schedule",
    "Yarn",
    "alibi_slopes",
    "angles",
    "apply_p_rope",
    "apply_rope",
    "build_schedule",
    "describe",
    "family",
    "frequencies",
    "from_json",
    "label",
    "layers",
    "parse",
    "rotate",
    "rotation_tables",
    "to_json",
]
