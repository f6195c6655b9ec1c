"""Writes positional_golden.json: what other people's code says about frequencies, rotations and slopes.

    python -m pip install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
    python tests/data/make_positional_golden.py

Made with Python 3.11, transformers 5.23.0 and torch 2.13.0 (CPU); the file records its versions.

Frequencies come from transformers' own functions, for every type that it has, and again with `partial_rotary_factor`.
They run in float64: they name torch.float, torch.float32 and Tensor.float, which `in_float64` replaces. As they are,
in float32, they are right to 6e-7, but to 5e-6 only where a large factor amplifies the rounding of a blend (YaRN
without truncation, llama3). The file records the largest difference between the two ("float32_differs"), and every
value is written with ten digits. Two schemes have no type of their own there:

- dynamic YaRN is their YaRN with factor = max(1, length / original length);
- NTK-by-parts is their YaRN with attention_factor = 1.

Rotated tensors (float32) and slopes come from transformers as well. What is written here, from papers, is p-RoPE for
tensors (`apply_p_rope` of Barbero et al. 2024, appendix C) and the notebook's `apply_ntk` and `apply_yarn` with
their operations as published, all in numpy and float64. The notebook's frequencies are read off from what its
function does to unit vectors at position 1.
"""

import json
import platform
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import Cohere2Config, GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

OUT = Path(__file__).with_name("positional_golden.json")
# Small, since transformers multiplies position and frequency in float32; two rows that differ.
POSITIONS = np.array([[0, 1, 3, 17, 63], [2, 2, 40, 5, 62]])
HEADS = 2

# fmt: off
# head_dim, base
SHAPES = [(32, 1e4), (64, 1e4), (64, 1e6), (80, 1e5), (96, 5e5), (128, 5e5), (128, 5e6), (256, 1e4)]
# the same and the fraction that rotates: 16, 48, 40, 24, 64, 32 and 192 channels
PARTIAL_SHAPES = [
    ((32, 1e4), 0.5), ((64, 1e6), 0.75), ((80, 1e4), 0.5), ((96, 5e5), 0.25), ((128, 1e5), 0.5), ((128, 5e6), 0.25),
    ((256, 1e4), 0.75),
]
DEEPSEEK = {"mscale": 0.707, "mscale_all_dim": 0.707}
# scheme: shape, settings
GRID = {
    "rope": [(shape, ()) for shape in [*SHAPES, (80, 1e4), (128, 1e5), (256, 5e6)]],
    # factor
    "pi": [
        *product(SHAPES, [(1.0,), (2.5,), (8.0,), (64.0,)]),
        *product([(64, 1e4), (64, 1e6), (80, 1e4)], [(2.0,), (4.0,)]), ((80, 1e4), (3.0,)),
    ],
    # training length, target length
    "ntk": [
        *product(SHAPES, [(2048, 2048), (2048, 4096), (4096, 32768), (2048, 131072)]), ((96, 5e5), (2048, 5000)),
        ((64, 1e6), (1024, 4096)), ((80, 1e4), (2048, 16384)), ((96, 5e5), (4096, 16384)), ((128, 1e4), (4096, 32768)),
    ],
    # factor, training length, length
    "dynamic_ntk": [*product(SHAPES, [
        (1.0, 2048, 512), (1.0, 4096, 4096), (1.0, 2048, 2049), (1.0, 1024, 16384), (2.0, 2048, 2000),
        (4.0, 1024, 3000), (8.0, 4096, 8192), (64.0, 2048, 4096),
    ])],
    # factor, training length, other settings
    "yarn": [
        *product(SHAPES, [(2.0, 2048, {}), (16.0, 4096, {}), (64.0, 8192, {})]),
        *product([(64, 1e4), (128, 5e6)], [
            (40.0, 4096, DEEPSEEK),
            (40.0, 4096, {"mscale": 1.0, "mscale_all_dim": 1.0}),
            (16.0, 4096, {"mscale": 1.0, "mscale_all_dim": 0.5}),
            (8.0, 4096, {"mscale": 0.5, "mscale_all_dim": 1.5}),
            (4.0, 4096, {"mscale": 0.707}),  # alone, neither of the two changes anything
            (4.0, 4096, {"mscale_all_dim": 0.707}),
            (8.0, 2048, {"attention_factor": 1.3}),
            (8.0, 2048, {"attention_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}),  # goes before them
            (2.0, 2048, {"truncate": False}),
            (64.0, 8192, {"truncate": False}),
            (4.0, 2048, {"beta_fast": 64.0, "beta_slow": 2.0}),
            (8.0, 4096, {"beta_fast": 16.0, "beta_slow": 0.5}),
            (8.0, 4096, {"beta_fast": 10.0, "beta_slow": 0.25, "truncate": False, **DEEPSEEK}),
        ]),
        ((64, 1e4), (1.0, 2048, {})), ((64, 1e4), (4.0, 2048, {})), ((64, 1e4), (8.0, 512, {})),
        ((64, 1e5), (2.0, 8192, {})), ((64, 1e6), (2.0, 1024, {})), ((64, 1e6), (4.0, 1024, {})),
        ((64, 1e6), (1.5, 1000, {})), ((80, 1e4), (2.0, 2048, {})), ((96, 5e5), (4.0, 4096, {})),
        ((128, 1e4), (2.0, 4096, {})), ((128, 1e4), (16.0, 4096, {})), ((128, 5e5), (32.0, 8192, {})),
        ((128, 5e6), (64.0, 32768, {})), ((256, 1e4), (4.0, 8192, {})), ((128, 1e6), (8.0, 4096, {"beta_fast": 16.0})),
        ((128, 1e6), (8.0, 4096, {"beta_fast": 16.0, "beta_slow": 0.5})),
        ((256, 1e5), (64.0, 32768, {"truncate": False})),  # where transformers' float32 is worst
        # Corners of the ramp: both bounds 0 (then 0.001 apart); lower bound clamped; upper bound beyond d - 1.
        *product([(64, 1e4)], [(2.0, 6, {}), (2.0, 128, {}), (2.0, 6, {"truncate": False})]),
        *product([(64, 10.0)], [(4.0, 1000, {}), (4.0, 1000, {"truncate": False})]),
    ],
    # factor, training length, other settings
    "ntk_by_parts": [
        *product(SHAPES, [(2.0, 2048, {}), (32.0, 4096, {})]),
        *product([(64, 1e4), (128, 5e5)], [(4.0, 2048, {"truncate": False}), (8.0, 1024, {"beta_fast": 8.0})]),
        ((64, 1e4), (2.0, 6, {})),
    ],
    # training length, length, other settings
    "dynamic_yarn": [
        *product(SHAPES, [(2048, 1000, {}), (4096, 4096, {}), (2048, 2049, {}), (1024, 3000, {}), (4096, 262144, {})]),
        *product([(64, 1e6), (128, 1e4)], [
            (2048, 20000, DEEPSEEK), (2048, 20000, {"mscale": 1.0, "mscale_all_dim": 0.5}), (2048, 512, DEEPSEEK),
            (2048, 20000, {"truncate": False}), (2048, 8192, {"beta_fast": 16.0, "beta_slow": 0.5}),
        ]),
    ],
    # factor, low_freq_factor, high_freq_factor, training length; first Llama 3.1 and 3.2
    "llama3": [
        ((128, 5e5), (8.0, 1.0, 4.0, 8192)), ((64, 5e5), (32.0, 1.0, 4.0, 8192)), ((128, 5e5), (32.0, 1.0, 4.0, 8192)),
        ((80, 5e5), (32.0, 1.0, 4.0, 32768)),  # where transformers' float32 is worst
        *product(SHAPES, [(1.0, 1.0, 4.0, 8192), (4.0, 1.0, 8.0, 2048), (64.0, 2.0, 32.0, 4096)]),
    ],
    # factor, training length, length, other settings; the tables are made in `longrope`
    "longrope": [
        *product(SHAPES, [
            (32.0, 4096, 1000, {}), (32.0, 4096, 4096, {}), (16.0, 2048, 2049, {}), (64.0, 8192, 99999, {}),
        ]),
        *product([(64, 1e6), (96, 1e4)], [
            (32.0, 4096, 131072, {"attention_factor": 1.25}), (32.0, 4096, 100, {"attention_factor": 1.0}),
            (1.0, 4096, 100, {}), (1.0, 4096, 5000, {}), (0.5, 4096, 5000, {}),
        ]),
    ],
    # fraction
    "p_rope": [
        *product(SHAPES, [(0.25,), (0.75,)]), *product([(64, 1e4)], [(0.0,), (0.1,), (1.0,)]), ((32, 1e4), (0.5,)),
        ((64, 1e6), (0.5,)), ((80, 1e4), (0.3,)), ((128, 1e5), (0.333,)),
    ],
    # fraction, factor
    "p_rope_pi": [*product(SHAPES, [(0.25, 8.0), (0.75, 2.5)])],
}
# shape and fraction, (scheme, settings)
PARTIAL_GRID = [
    *product(PARTIAL_SHAPES, [
        ("pi", (4.0,)), ("ntk", (1024, 4096)), ("dynamic_ntk", (1.0, 2048, 10000)), ("dynamic_ntk", (4.0, 2048, 100)),
        ("yarn", (4.0, 2048, {})), ("yarn", (40.0, 4096, DEEPSEEK)), ("yarn", (8.0, 4096, {"truncate": False})),
        ("ntk_by_parts", (8.0, 4096, {})), ("dynamic_yarn", (2048, 9000, {})), ("dynamic_yarn", (2048, 2000, {})),
        ("llama3", (8.0, 1.0, 4.0, 8192)), ("longrope", (32.0, 4096, 4000, {})), ("longrope", (32.0, 4096, 8000, {})),
    ]),
    (((64, 1e4), 0.5), ("yarn", (2.0, 2048, {}))), (((128, 1e6), 0.25), ("yarn", (4.0, 4096, {}))),
    # Unscaled, from GPT-NeoX. transformers keeps an odd channel count, which no rotation can use: even only.
    *[((shape, fraction), ("rope", ())) for shape, fraction in [
        ((32, 1e4), 0.25), ((64, 1e4), 0.1), ((64, 1e4), 0.25), ((64, 1e6), 0.75), ((80, 1e4), 0.4), ((96, 1e4), 0.25),
        ((128, 1e4), 0.1), ((128, 5e5), 0.5), ((256, 1e4), 0.01), ((256, 1e4), 0.25), ((80, 1e5), 0.1),
        ((96, 5e6), 0.5),
    ]],
]
# shape, factor
NOTEBOOK_NTK = [((32, 1e4), 8.0), ((64, 1e4), 1.0), ((64, 1e6), 4.0), ((80, 1e5), 16.0), ((128, 5e6), 8.0)]
# head_dim, maximal wavelength, percentage
P_ROPE_TENSORS = [(32, 10000, 0.25), (32, 10000, 0.75), (16, 5000, 0.4), (16, 10000, 1.0)]
# head_dim, rotated channels
GPTJ_TENSORS = [(32, 8), (40, 24)]
# head_dim, settings in the notebook's words
NOTEBOOK_NTK_TENSORS = [(16, {}), (12, {"base": 500.0, "scaling": 4.0})]
NOTEBOOK_YARN_TENSORS = [
    (16, {"N_train": 8, "blend": 3}), (12, {"N_train": 6, "blend": 2, "alpha": 0.5, "beta": 2.0, "base": 500.0}),
]
ALIBI_HEADS = [1, 2, 3, 4, 6, 8, 12, 14, 16, 20, 32, 40]
# fmt: on


@contextmanager
def in_float64():
    """transformers' functions as they are, except that whatever they call float has 64 bits."""
    with (
        mock.patch.multiple(torch, float=torch.float64, float32=torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


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


# One function a scheme: shape, settings, what partial RoPE adds -> our settings, their configuration, the length read.


def rope(shape, settings, rotary):
    if rotary:
        return {}, neox_config(*shape, rotary["partial_rotary_factor"]), None
    return {}, llama_config(*shape, "default"), None


def pi(shape, settings, rotary):
    (factor,) = settings
    return {"factor": factor}, llama_config(*shape, "linear", factor=factor, **rotary), None


def ntk(shape, settings, rotary):
    # Dynamic NTK with factor 1 has base * (length / L)^(d / (d - 2)): NTK at exactly that ratio.
    trained, target = settings
    return {"factor": target / trained}, llama_config(*shape, "dynamic", trained, factor=1.0, **rotary), target


def dynamic_ntk(shape, settings, rotary):
    factor, trained, length = settings
    config = llama_config(*shape, "dynamic", trained, factor=factor, **rotary)
    return {"original_length": trained, "factor": factor}, config, length


def yarn(shape, settings, rotary):
    factor, trained, other = settings
    config = yarn_config(*shape, factor, trained, **other, **rotary)
    # Given one of mscale and mscale_all_dim, transformers reads neither; we refuse it, so leave it out.
    lone = {"mscale", "mscale_all_dim"} if ("mscale" in other) != ("mscale_all_dim" in other) else set()
    read = {name: value for name, value in other.items() if name not in lone}
    return {"factor": factor, "original_length": trained, **read}, config, None


def ntk_by_parts(shape, settings, rotary):
    factor, trained, other = settings
    config = yarn_config(*shape, factor, trained, attention_factor=1.0, **other, **rotary)
    return {"factor": factor, "original_length": trained, **other}, config, None


def dynamic_yarn(shape, settings, rotary):
    trained, length, other = settings
    config = yarn_config(*shape, max(1.0, length / trained), trained, **other, **rotary)
    return {"original_length": trained, **other}, config, length


def llama3(shape, settings, rotary):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_length")
    ours = dict(zip(names, settings, strict=True))
    theirs = {name.replace("original_length", "original_max_position_embeddings"): v for name, v in ours.items()}
    return ours, llama_config(*shape, "llama3", 131072, **theirs, **rotary), None


def longrope(shape, settings, rotary):
    """Two increasing tables in the manner of Phi-3's: divisors from 1 on, gentle for short texts, to 64 for long."""
    factor, trained, length, other = settings
    pairs = int(shape[0] * rotary.get("partial_rotary_factor", 1.0)) // 2
    generator = np.random.default_rng(pairs)

    def table(last):
        steps = generator.uniform(0.2, 1.8, pairs - 1).cumsum()
        return [1.0, *(last ** (steps / steps[-1])).round(3).tolist()]

    tables = {"short_factor": table(2.5), "long_factor": table(64.0)}
    # Phi-3 gives the lengths and no factor; both ways are in use, so take turns.
    theirs = {"original_max_position_embeddings": trained, **({} if trained == 4096 else {"factor": factor})}
    config = llama_config(*shape, "longrope", int(factor * trained), **theirs, **tables, **other, **rotary)
    # A factor below 1 means there what 1 means; we refuse it.
    return {**tables, "original_length": trained, "factor": max(1.0, factor), **other}, config, length


def p_rope(shape, settings, rotary):
    fraction, *factor = settings
    ours = {"factor": factor[0]} if factor else {}
    return ours, llama_config(*shape, "proportional", partial_rotary_factor=fraction, **ours), None


SCHEMES = {function.__name__: function for function in (rope, pi, ntk, dynamic_ntk, yarn, ntk_by_parts)}
SCHEMES |= {function.__name__: function for function in (dynamic_yarn, llama3, longrope, p_rope)}
SCHEMES["p_rope_pi"] = p_rope


def written(array):
    """Nested lists of the shortest decimals that read back as the same float32, or ten digits of a float64."""
    if array.ndim:
        return [written(row) for row in array]
    return float(str(array) if array.dtype == np.float32 else f"{array:.9e}")


def computed(config, length):
    """transformers' frequencies and factor in float64, and how far its own float32 is from them, relatively."""
    function = {
        "llama": modeling_llama.LlamaRotaryEmbedding,
        "gpt_neox": modeling_gpt_neox.GPTNeoXRotaryEmbedding,
    }[config.model_type].compute_default_rope_parameters
    function = ROPE_INIT_FUNCTIONS.get(config.rope_parameters["rope_type"], function)
    single, _ = function(config, seq_len=length)
    with in_float64():
        inv_freq, gain = function(config, seq_len=length)
    assert single.dtype == torch.float32 and inv_freq.dtype == torch.float64
    rotating = inv_freq > 0
    differs = (single.double() / inv_freq - 1).abs()[rotating]
    return inv_freq.numpy(), gain, differs.max().item() if rotating.any() else 0.0


def frequency_cases():
    """Frequencies [R] and the factor on cos and sin ("gain"); and float32's largest difference by scheme."""
    cases, float32_differs = [], {}

    def case(scheme, shape, settings, inv_freq, gain, more):
        known = {"scheme": scheme, "head_dim": shape[0], "base": shape[1], **more, "settings": settings}
        cases.append({**known, "inv_freq": written(inv_freq), "gain": float(gain)})

    full = [(shape, None, scheme, settings) for scheme, grid in GRID.items() for shape, settings in grid]
    partial = [(shape, fraction, scheme, settings) for (shape, fraction), (scheme, settings) in PARTIAL_GRID]
    for shape, fraction, scheme, settings in full + partial:
        more = {} if fraction is None else {"partial": fraction}
        if scheme.startswith("p_rope"):
            more["fraction"] = settings[0]
        rotary = {} if fraction is None else {"partial_rotary_factor": fraction}
        ours, config, length = SCHEMES[scheme](shape, settings, rotary)
        inv_freq, gain, differs = computed(config, length)
        float32_differs[scheme] = max(differs, float32_differs.get(scheme, 0.0))
        if length is not None and scheme != "ntk":
            more["length"] = length
        case(scheme, shape, ours, inv_freq, gain, more)
    for (head_dim, base), factor in NOTEBOOK_NTK:
        # A pair at (1, 0) lands on (cos w, sin w) at position 1.
        x, y = notebook_ntk(np.tile([1.0, 0.0], (2, head_dim // 2)), base, factor)[1].reshape(-1, 2).T
        case("notebook_ntk", (head_dim, base), {"factor": factor}, np.arctan2(y, x), 1.0, {})
    return cases, float32_differs


def rotated_cases(generator):
    """Tensors before and after, in the channel layout of the code that rotated them.

    [B, T, H, K] at POSITIONS in float32; the notebook's are [T, K] at 0, 1, ... in float64.
    """

    def case(scheme, head_dim, settings, rotated_by, shape=(*POSITIONS.shape, HEADS), dtype=np.float32):
        x = generator.standard_normal((*shape, head_dim)).astype(dtype)
        known = {"scheme": scheme, "head_dim": head_dim, **settings}
        return {**known, "inputs": written(x), "outputs": written(rotated_by(x).astype(dtype))}

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

    def cohere2(made):
        return transformers_rotation(
            modeling_cohere2.Cohere2RotaryEmbedding(made), modeling_cohere2.apply_rotary_pos_emb
        )

    yield case("rope", 32, {"base": 1e4, "settings": {}}, llama(llama_config(32, 1e4, "default")))
    settings = {"factor": 4.0}
    made = llama_config(16, 1e4, "linear", factor=4.0)
    yield case("pi", 16, {"base": 1e4, "settings": settings}, llama(made))
    settings = {"factor": 4.0, "original_length": 1024}
    yield case("yarn", 32, {"base": 1e4, "settings": settings}, llama(yarn_config(32, 1e4, 4.0, 1024)))
    for head_dim, fraction in [(32, 0.25), (64, 0.1)]:
        settings = {"base": 1e4, "partial": fraction, "settings": {}}
        yield case("partial_rope", head_dim, settings, neox(neox_config(head_dim, 1e4, fraction)))
    for head_dim, wavelength, percentage in P_ROPE_TENSORS:

        def paper(x, args=(head_dim, wavelength, percentage)):
            return published_p_rope(x, POSITIONS, *args)

        settings = {"max_wavelength": wavelength, "rope_percentage": percentage}
        yield case("p_rope", head_dim, settings, paper)
    made = Cohere2Config(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    yield case("cohere2", 32, {"base": 1e5}, cohere2(made))
    for head_dim, rotated in GPTJ_TENSORS:
        yield case("gptj", head_dim, {"base": 1e4, "rotated": rotated}, lambda x, r=rotated: gptj_rotation(x, r))
    for name, function, cases in (
        ("notebook_ntk", notebook_ntk, NOTEBOOK_NTK_TENSORS),
        ("notebook_yarn", notebook_yarn, NOTEBOOK_YARN_TENSORS),
    ):
        for head_dim, settings in cases:

            def notebook(x, function=function, settings=settings):
                return function(x, **settings)

            yield case(name, head_dim, {"settings": settings}, notebook, shape=(16,), dtype=np.float64)


def gptj_rotation(x, rotated):
    """What GPTJAttention.forward does to queries and keys: its first `rotated` channels turn, the rest pass."""
    positions = torch.tensor(POSITIONS)[:, :, None].repeat(1, 1, rotated)
    table = modeling_gptj.create_sinusoidal_positions(int(POSITIONS.max()) + 1, rotated)
    embed_positions = modeling_gptj.get_embed_positions(table, positions)
    sin, cos = torch.split(torch.gather(embed_positions, 1, positions), rotated // 2, dim=-1)
    x = torch.tensor(x)
    turned = modeling_gptj.apply_rotary_pos_emb(x[:, :, :, :rotated], sin, cos)
    return torch.cat([turned, x[:, :, :, rotated:]], dim=-1).numpy()


def published_p_rope(inputs, positions, head_dim, max_wavelength, rope_percentage):
    """The published steps: timescales of the pairs kept, infinity for the rest; sin, cos; two halves."""
    kept = int(rope_percentage * head_dim // 2)
    timescale = np.full(head_dim // 2, np.inf)
    timescale[:kept] = float(max_wavelength) ** (2.0 * np.arange(kept) / head_dim)
    angle = (positions[..., None] / timescale)[..., None, :]
    sin, cos = np.sin(angle), np.cos(angle)
    first, second = np.split(inputs.astype(np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def notebook_rotation(vecs, theta):
    """The end that the notebook's functions share: neighbouring channels are a pair, turned by theta [L, d / 2]."""
    L, d = vecs.shape
    pairs = vecs.reshape(*vecs.shape[:-1], vecs.shape[-1] // 2, 2)
    cos, sin = np.cos(theta)[..., None], np.sin(theta)[..., None]
    x, y = pairs[..., 0:1], pairs[..., 1:2]
    rot_x, rot_y = x * cos - y * sin, x * sin + y * cos
    return np.concatenate([rot_x, rot_y], axis=-1).reshape(L, d)


def notebook_ntk(vecs, base=10000.0, scaling=8.0):
    """The notebook's `apply_ntk`: its factor multiplies, so that low frequencies turn faster."""
    L, d = vecs.shape
    i = np.arange(d // 2)
    freqs = 1.0 / (base ** (2 * i / d))
    freqs = freqs * (scaling ** (i / (d / 2)))
    n = np.arange(L)[:, None]
    return notebook_rotation(vecs, n * freqs[None, :])


def notebook_yarn(vecs, N_train=128, alpha=0.85, beta=1.25, base=10000.0, blend=16):
    """The notebook's `apply_yarn`: every frequency times a number that depends on the position."""
    L, d = vecs.shape
    i = np.arange(d // 2)
    freqs = 1.0 / (base ** (2 * i / d))
    n = np.arange(L)[:, None]
    lam = np.clip((n - (N_train - blend)) / (2 * blend), 0, 1)
    scale = (1 - lam) * alpha + lam * beta
    return notebook_rotation(vecs, n * (freqs[None, :] * scale))


def bloom_slopes(heads):
    """Bloom's bias at key position 1 is the slope itself."""
    bias = build_alibi_tensor(torch.ones(1, 3, dtype=torch.int64), heads, torch.float32)
    return written(bias[:, 0, 1].numpy())


def main():
    versions = {name: version(name) for name in ("transformers", "torch", "numpy")}
    frequencies, float32_differs = frequency_cases()
    golden = {
        "versions": {"python": platform.python_version(), **versions},
        "positions": POSITIONS.tolist(),
        "float32_differs": {scheme: float(f"{value:.1e}") for scheme, value in float32_differs.items()},
        "frequencies": frequencies,
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
    print(f"{OUT}: {len(frequencies)} frequency cases, {len(golden['rotated'])} tensors")
    for scheme, value in float32_differs.items():
        print(f"{scheme}: transformers' float32 differs from its float64 by {value:.1e}")


if __name__ == "__main__":
    main()
