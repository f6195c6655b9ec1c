"""Encodings and changes of attention since the papers, all built on hooks; each names its paper and its equation.

Golden values made by their authors' code are in tests/data/encoding_golden.npz.
"""

from pe_lab.positional.schemes.biases import Fire, KerpleLog, KerplePower, LearnedAlibi, T5Bias
from pe_lab.positional.schemes.content import ContextualPosition, ForgettingGate
from pe_lab.positional.schemes.gates import GatedRope
from pe_lab.positional.schemes.outputs import XSA, GatedOutput, GatedXSA, LearnedSink
from pe_lab.positional.schemes.selective import ContentRotation, SelectiveRope
from pe_lab.positional.schemes.spectra import ClippedRope, FoPE, PoPE, XPos
from pe_lab.positional.schemes.temperature import Llama4Temperature, SSMax
