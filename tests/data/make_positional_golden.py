"""Writes positional_golden.json: what other people's code says about frequencies, rotations and slopes.

    python -m pip install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
    python tests/data/make_positional_golden.py

Made with Python 3.11, transformers 5.23.0 and torch 2.13.0 (CPU); the file records its versions.
Frequencies, rotated tensors and slopes come from transformers' own functions. The one thing written here is
p-RoPE for tensors: the algorithm `apply_p_rope` of Barbero et al. 2024 (appendix C), step by step, in numpy
and float64.
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

OUT = Path(__file__).with_name("positional_golden.json")
# Small, since transformers multiplies position and frequency in float32; two rows that differ.
POSITIONS = np.array([[0, 1, 3, 17, 63], [2, 2, 40, 5, 62]])
HEADS = 2

# fmt: off
# head_dim, base
ROPE = [(32, 1e4), (64, 1e4), (64, 1e6), (80, 1e4), (96, 5e5), (128, 1e5), (128, 5e6), (256, 1e4)]
# head_dim, base, factor
PI = [(32, 1e4, 1.0), (64, 1e4, 2.0), (64, 1e6, 4.0), (80, 1e4, 3.0), (128, 5e5, 8.0), (128, 5e6, 64.0)]
# head_dim, base, factor, training length
NTK = [
    (32, 1e4, 2, 2048), (64, 1e4, 1, 2048), (64, 1e4, 2, 2048), (64, 1e6, 2, 1024), (64, 1e6, 4, 1024),
    (80, 1e4, 8, 2048), (96, 5e5, 4, 4096), (128, 1e4, 8, 4096), (128, 5e6, 64, 8192), (256, 1e4, 16, 8192),
]
# head_dim, base, factor, training length, other settings
YARN = [
    (32, 1e4, 2.0, 2048, {}), (64, 1e4, 1.0, 2048, {}), (64, 1e4, 2.0, 2048, {}), (64, 1e4, 4.0, 2048, {}),
    (64, 1e4, 8.0, 512, {}), (64, 1e5, 2.0, 8192, {}), (64, 1e6, 2.0, 1024, {}), (64, 1e6, 4.0, 1024, {}),
    (64, 1e6, 1.5, 1000, {}), (80, 1e4, 2.0, 2048, {}), (96, 5e5, 4.0, 4096, {}), (128, 1e4, 2.0, 4096, {}),
    (128, 1e4, 16.0, 4096, {}), (128, 5e5, 32.0, 8192, {}), (128, 5e6, 64.0, 32768, {}),
    (256, 1e4, 4.0, 8192, {}),
    (64, 1e4, 4.0, 2048, {"beta_fast": 64.0, "beta_slow": 2.0}),
    (128, 1e6, 8.0, 4096, {"beta_fast": 16.0, "beta_slow": 0.5}),
    # Corners of the ramp: both bounds 0 (then 0.001 apart); lower bound clamped; upper bound beyond d - 1.
    (64, 1e4, 2.0, 6, {}), (64, 1e4, 2.0, 128, {}), (64, 10.0, 4.0, 1000, {}),
]
# head_dim, base, fraction
P_ROPE = [
    (32, 1e4, 0.5), (64, 1e4, 0.0), (64, 1e4, 0.1), (64, 1e4, 0.25), (64, 1e6, 0.5), (64, 1e4, 0.75),
    (64, 1e4, 1.0), (80, 1e4, 0.3), (96, 5e5, 0.25), (128, 1e5, 0.333), (128, 5e6, 0.75), (256, 1e4, 0.25),
]
# head_dim, base, fraction. transformers keeps an odd channel count, which no rotation can use: even only.
PARTIAL = [
    (32, 1e4, 0.25), (64, 1e4, 0.1), (64, 1e4, 0.25), (64, 1e6, 0.75), (80, 1e4, 0.4), (96, 1e4, 0.25),
    (128, 1e4, 0.1), (128, 5e5, 0.5), (256, 1e4, 0.01), (256, 1e4, 0.25),
]
# head_dim, base, fraction, factor, training length
PARTIAL_YARN = [(64, 1e4, 0.5, 2.0, 2048), (128, 1e6, 0.25, 4.0, 4096)]
# head_dim, maximal wavelength, percentage
P_ROPE_TENSORS = [(32, 10000, 0.25), (32, 10000, 0.75), (16, 5000, 0.4), (16, 10000, 1.0)]
ALIBI_HEADS = [1, 2, 3, 4, 6, 8, 12, 14, 16, 20, 32, 40]
# fmt: on


def llama_config(head_dim, base, rope_type, length=2048, **rope):
    """A Llama configuration of which only the positional part matters."""
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters={"rope_type": rope_type, "rope_theta": base, **rope},
    )


def yarn_config(head_dim, base, factor, length, **rope):
    """YaRN from `length` to `factor * length` tokens."""
    rope |= {"factor": factor, "original_max_position_embeddings": length}
    return llama_config(head_dim, base, "yarn", int(factor * length), **rope)


def neox_config(head_dim, base, fraction):
    return GPTNeoXConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction},
    )


def numbers(array):
    """A float32 array as nested lists of the shortest decimals that read back as the same float32."""
    if array.ndim:
        return [numbers(row) for row in array]
    return float(str(np.float32(array)))


def frequency_cases():
    """Frequencies [R] and the factor on cos and sin ("gain"), one case at a time."""

    def case(scheme, head_dim, base, settings, result):
        inv_freq, gain = result
        known = {"scheme": scheme, "head_dim": head_dim, "base": base, **settings}
        return {**known, "inv_freq": numbers(inv_freq.numpy()), "gain": float(gain)}

    default = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
    for head_dim, base in ROPE:
        yield case("rope", head_dim, base, {}, default(llama_config(head_dim, base, "default")))
    for head_dim, base, factor in PI:
        made = llama_config(head_dim, base, "linear", factor=factor)
        yield case("pi", head_dim, base, {"factor": factor}, ROPE_INIT_FUNCTIONS["linear"](made))
    for head_dim, base, factor, length in NTK:
        # Dynamic NTK with factor 1 has base * (length / L)^(d / (d - 2)): NTK at exactly that ratio.
        made = llama_config(head_dim, base, "dynamic", length, factor=1.0)
        result = ROPE_INIT_FUNCTIONS["dynamic"](made, seq_len=factor * length)
        yield case("ntk", head_dim, base, {"factor": float(factor)}, result)
    for head_dim, base, factor, length, other in YARN:
        made = yarn_config(head_dim, base, factor, length, **other)
        settings = {"factor": factor, "original_length": length, **other}
        yield case("yarn", head_dim, base, settings, ROPE_INIT_FUNCTIONS["yarn"](made))
    for head_dim, base, fraction in P_ROPE:
        made = llama_config(head_dim, base, "proportional", partial_rotary_factor=fraction)
        result = ROPE_INIT_FUNCTIONS["proportional"](made)
        yield case("p_rope", head_dim, base, {"fraction": fraction}, result)
    partial = modeling_gpt_neox.GPTNeoXRotaryEmbedding.compute_default_rope_parameters
    for head_dim, base, fraction in PARTIAL:
        result = partial(neox_config(head_dim, base, fraction))
        yield case("partial_rope", head_dim, base, {"fraction": fraction}, result)
    for head_dim, base, fraction, factor, length in PARTIAL_YARN:
        made = yarn_config(head_dim, base, factor, length, partial_rotary_factor=fraction)
        settings = {"fraction": fraction, "yarn": {"factor": factor, "original_length": length}}
        yield case("partial_rope", head_dim, base, settings, ROPE_INIT_FUNCTIONS["yarn"](made))


def rotated_cases(generator):
    """Tensors [B, T, H, K] before and after, in the channel layout of the code that rotated them."""

    def case(scheme, head_dim, settings, rotated_by):
        x = generator.standard_normal((*POSITIONS.shape, HEADS, head_dim)).astype(np.float32)
        known = {"scheme": scheme, "head_dim": head_dim, **settings}
        return {**known, "inputs": numbers(x), "outputs": numbers(rotated_by(x))}

    def transformers_rotation(embedding, apply):
        def rotated_by(x):
            cos, sin = embedding(torch.zeros(1), torch.tensor(POSITIONS))
            return apply(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)[0].numpy()

        return rotated_by

    def llama(made):
        return transformers_rotation(modeling_llama.LlamaRotaryEmbedding(made), modeling_llama.apply_rotary_pos_emb)

    def neox(made):
        return transformers_rotation(
            modeling_gpt_neox.GPTNeoXRotaryEmbedding(made), modeling_gpt_neox.apply_rotary_pos_emb
        )

    yield case("rope", 32, {"base": 1e4}, llama(llama_config(32, 1e4, "default")))
    settings = {"base": 1e4, "factor": 4.0}
    yield case("pi", 16, settings, llama(llama_config(16, 1e4, "linear", factor=4.0)))
    settings["original_length"] = 1024
    yield case("yarn", 32, settings, llama(yarn_config(32, 1e4, 4.0, 1024)))
    for head_dim, fraction in [(32, 0.25), (64, 0.1)]:
        settings = {"base": 1e4, "fraction": fraction}
        yield case("partial_rope", head_dim, settings, neox(neox_config(head_dim, 1e4, fraction)))
    for head_dim, wavelength, percentage in P_ROPE_TENSORS:

        def paper(x, args=(head_dim, wavelength, percentage)):
            return published_p_rope(x, POSITIONS, *args)

        settings = {"max_wavelength": wavelength, "rope_percentage": percentage}
        yield case("p_rope", head_dim, settings, paper)


def published_p_rope(inputs, positions, head_dim, max_wavelength, rope_percentage):
    """The published steps: timescales of the pairs kept, infinity for the rest; sin, cos; two halves."""
    kept = int(rope_percentage * head_dim // 2)
    timescale = np.full(head_dim // 2, np.inf)
    timescale[:kept] = float(max_wavelength) ** (2.0 * np.arange(kept) / head_dim)
    angle = (positions[..., None] / timescale)[..., None, :]
    sin, cos = np.sin(angle), np.cos(angle)
    first, second = np.split(inputs.astype(np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def bloom_slopes(heads):
    """Bloom's bias at key position 1 is the slope itself."""
    bias = build_alibi_tensor(torch.ones(1, 3, dtype=torch.int64), heads, torch.float32)
    return numbers(bias[:, 0, 1].numpy())


def main():
    versions = {name: version(name) for name in ("transformers", "torch", "numpy")}
    golden = {
        "versions": {"python": platform.python_version(), **versions},
        "positions": POSITIONS.tolist(),
        "frequencies": list(frequency_cases()),
        "rotated": list(rotated_cases(np.random.default_rng(0))),
        "alibi_slopes": {str(heads): bloom_slopes(heads) for heads in ALIBI_HEADS},
    }
    # One case a line, so that a change shows up as the lines that changed.
    parts = []
    for key, value in golden.items():
        rows = value if key in ("frequencies", "rotated") else None
        texts = [json.dumps(row, separators=(",", ":")) for row in rows or [value]]
        parts.append(f'"{key}": ' + ("[\n" + ",\n".join(texts) + "\n]" if rows else texts[0]))
    OUT.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{OUT}: {len(golden['frequencies'])} frequency cases, {len(golden['rotated'])} tensors")


if __name__ == "__main__":
    main()
