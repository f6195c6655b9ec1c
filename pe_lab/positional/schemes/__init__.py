"""Encodings and changes of attention since the papers, all built on hooks; each names its paper and its equation.

Golden values made by their authors' code are in tests/data/encoding_golden.npz.
"""

from pe_lab.positional.schemes.absolute import LearnedPositions, Sinusoidal
from pe_lab.positional.schemes.biases import (
    ContextualPosition,
    Fire,
    ForgettingGate,
    KerpleLog,
    KerplePower,
    LearnedAlibi,
    T5Bias,
)
from pe_lab.positional.schemes.rotations import (
    ClippedRope,
    ContentRotation,
    FoPE,
    GatedRope,
    LongRopeStart,
    PoPE,
    SelectiveRope,
    XPos,
)
from pe_lab.positional.schemes.softmax import XSA, GatedOutput, GatedXSA, LearnedSink, Llama4Temperature, SSMax
