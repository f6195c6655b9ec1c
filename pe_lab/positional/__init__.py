"""Positional encodings as data: descriptions -> schedule -> one rotation."""

import sys

from pe_lab.config import to_json
from pe_lab.positional.codec import (
    drop,
    family,
    from_json,
    label,
    label_layers,
    layers,
    parse,
    pattern,
    read_with,
    rescale,
    rnope_swa,
    smollm3,
    swan,
    text_of,
)
from pe_lab.positional.denoising import (
    DOPE,
    Gaussian,
    denoise,
    denoise_by,
    dope_by_all,
    dope_by_gaussian,
    dope_by_parts,
    read_scores,
    select_heads,
)
from pe_lab.positional.encodings import (
    Alibi,
    NoPE,
    PartialRope,
    Rope,
    alibi_slopes,
    frequencies,
)
from pe_lab.positional.hooks import HOOKS, Encoding, HeadShape, LayerHooks, Parameter, has
from pe_lab.positional.layers import Bands, Beta, Drop, HeadEdit, Layer, Pattern, Rescale, Uniform
from pe_lab.positional.registry import Function, check_sources, function, import_encodings, register, sources
from pe_lab.positional.rotation import (
    CANONICAL,
    Layout,
    angles,
    apply_p_rope,
    apply_rope,
    channel_order,
    from_canonical,
    rotate,
    rotation_tables,
    to_canonical,
)
from pe_lab.positional.scalings import (
    NTK,
    PI,
    DynamicNTK,
    DynamicYarn,
    Llama3,
    LongRope,
    NTKByParts,
    Scaling,
    Yarn,
)
from pe_lab.positional.schedule import LayerHeads, LayerStructure, Schedule, build_schedule, describe, layer_hooks
from pe_lab.positional.schemes import (
    XSA,
    ClippedRope,
    ContentRotation,
    ContextualPosition,
    Fire,
    FoPE,
    ForgettingGate,
    GatedOutput,
    GatedRope,
    GatedXSA,
    KerpleLog,
    KerplePower,
    LearnedAlibi,
    LearnedPositions,
    LearnedSink,
    Llama4Temperature,
    LongRopeStart,
    PoPE,
    SelectiveRope,
    Sinusoidal,
    SSMax,
    T5Bias,
    XPos,
)
from pe_lab.terminal import import_encodings_by

# A file of encodings may import `pe_lab.model` too, and that this package: then the end of that import reads the file.
if not {"pe_lab.attention", "pe_lab.model"} & set(sys.modules):
    import_encodings_by(import_encodings)
