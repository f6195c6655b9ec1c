r"""Writes encoding_golden.npz: what other people's code says of encodings and attention changes since the papers.

    python3.11 -m venv /tmp/v && /tmp/v/bin/pip install torch==2.13.0 transformers==5.23.0 numpy==2.4.6 einops==0.8.2 \
        triton==3.9.0 PoPE-pytorch==0.2.1 x-transformers==2.31.10 fla-core==0.6.0 flash-linear-attention==0.6.0
    /tmp/v/bin/python tests/data/make_encoding_golden.py --sources=DIR

DIR has a checkout of each repository of `SOURCES` under the repository's name, at the commit named there; only the file
named there is read, and its SHA-256 is compared. Where a file cannot be imported (it wants CUDA, a GPU kernel or the
rest of its package), the classes named below are taken out of it as they are and run with what they ask for given.
Everything runs on a CPU in float64: where code names torch.float or Tensor.float, `in_float64` replaces it.

Inputs are rounded to float32 and stored so; outputs are float64. All schemes read the same `q` [B, T, H, K], `k` and
`v` [B, T, G, K], `x` [B, T, D] and `positions` [B, T] (used by PoPE alone; elsewhere positions are 0 .. T-1), unless
they have inputs of their own. Query head h reads key head h // (H / G). `NAME/...` holds a scheme's parameters under
plain names, what it computes first (`bias` [H, T, T] or [B, H, T, T], `encoded_q`, `encoded_k`), and `output` [B, T, H,
K], the causal attention's. A bias is right at j <= i only. Matrices are [in, out]. "Plain attention" below is
`attention`, here, in numpy.

ssmax: softmax(s ln(n) z), n = i + 1 (Nakanishi 2025, arXiv 2501.19399, eq. 2). The query's factor is by
    soda-inria/tabicl, src/tabicl/_model/ssmax.py, `SSMax`, called query by query, since its n is one number; then plain
    attention. No code of the author was found.
llama4: transformers, `Llama4TextAttention` of a layer without rotation; projections give q, k and v, floor_scale 4.
    `scales` at `scale_positions` is what it does to a query of ones under the default configuration (8192, 0.1).
xpos: microsoft/torchscale, torchscale/component/xpos_relative_position.py, `XPOS` (Sun et al. 2022, arXiv 2212.10554):
    neighbouring channels are a pair, and exponents are centred; then plain attention.
fope: TsinghuaC3I/Fourier-Position-Embedding, olmo/model.py, `FourierEmbedding` with the settings of its configs (arXiv
    2412.17739, eq. 11 to 13), halves as pairs; coefficients are the same within a group of heads. It has sin = cos = 1
    on the pairs without a series, `encoded_*`; `paper_encoded_*` has eq. 13's cos = 1, sin = 0 there, by numpy.
    "fope_wide/" has more frequencies than pairs (fourier_dim 32). Plain attention.
clipped_rope: hrlics/CoPE, modeling_cope.py, `LlamaRotaryEmbedding` (arXiv 2602.05258) clips 20 pairs: `inv_freq_K` at
    head_dim K with base and length for which exactly these have a wavelength beyond the length. That count by
    wavelength is of ml-explore/mlx-lm's pull request 1387, which was not merged: `auto_*` are by numpy.
pope: PoPE-pytorch, `PoPE` and `apply_pope_to_qk` (Gopalakrishnan et al. 2025, arXiv 2509.10534, eq. 3 to 10): cos and
    sin parts are neighbours. `bias` [G, K] has values outside [-2 pi, 0], which are clamped. Logits times K^-0.5, as in
    its `flash_attn_with_pope`; plain attention, since its grouped heads are in another order.
selective_rope: timurcarstensen/selective-rope, src/selective_rope/modules/rotary.py, `SelectiveRoPE` (Movahedi et al.
    2026, arXiv 2511.17388) without Triton. fla's `l2_norm` and `ShortConvolution`, which run on GPUs only, are replaced
    by their formulas in torch. One angle a head for q and k: as many key heads as heads (own `k`, `v`). Variants:
    "selective_rope/" as its language models; "_gated/" phase gate and bias; "_difference/" without convolution.
t5: transformers, `T5Attention.compute_bias` of a decoder (Raffel et al. 2020); `buckets` of distances 0 .. 200. Plain
    attention.
kerple_log, kerple_power, learned_alibi: chijames/KERPLE, megatron/mpu/layers.py, `ParallelKerpleLog`,
    `ParallelKerplePower` with "kerple_power_ap_" and "kerple_power_a_" (Chi et al. 2022, arXiv 2205.09921). Parameters
    [H] are as stored; some are out of range, and the code clamps them. Plain attention.
fire: the listing in the appendix of Li et al. 2023 (arXiv 2310.04418) as in mcleish7/arithmetic,
    cramming/architectures/embeddings.py, `FIRE`, in eval mode. Plain attention.
forgetting: gates by the formula of zhixuan-lin/forgetting-transformer (Lin et al. 2025, arXiv 2503.02130),
    model/forgetting_transformer/modeling_forgetting_transformer.py, `ForgettingAttentionLayer` "full"; `output` by fla,
    fla/ops/forgetting_attn/naive.py, `naive_forgetting_attn`; `bias` by numpy.
cope: contextual position encoding (Golovneva et al. 2024, arXiv 2405.18719). `listing_*`: x-transformers, `CoPE`, which
    is the paper's appendix B: position logits are added to scaled logits. `repository_*`: facebookresearch/RAM,
    projects/cope/src/cope/context_position.py, `ContextPosSelfAttn`, where they are added before scaling; its
    --cope-nodiv must give the listing's.
gated: transformers, `Qwen3NextAttention` without rotation and norms (Qiu et al. 2025, arXiv 2505.06708). `gate` [D, H,
    K].
xsa: numpy, from Zhai 2026 (arXiv 2603.09078): y minus its projection on the token's own value.
sink: transformers, gpt_oss `eager_attention_forward`.
"""

import argparse
import ast
import hashlib
import json
import math
import platform
from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from fla.ops.forgetting_attn.naive import naive_forgetting_attn
from make_positional_golden import in_float64
from PoPE_pytorch import PoPE, apply_pope_to_qk
from torch import nn
from transformers import Llama4TextConfig, Qwen3NextConfig, T5Config
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention
from transformers.models.t5.modeling_t5 import T5Attention
from x_transformers.x_transformers import CoPE

OUT = Path(__file__).with_name("encoding_golden.npz")
# repository: commit, the one file that is read, its SHA-256, license
SOURCES = {
    "soda-inria/tabicl": (
        "8f1aa2098c894ab91dba15209cf2002ba4be6c6c",
        "src/tabicl/_model/ssmax.py",
        "29b3955e2597446cdcfe70f2084a70faa959f0ef510a27ac0668e58943d3d639",
        "BSD-3-Clause",
    ),
    "microsoft/torchscale": (
        "4d1e0e82e5adf86dd424f1463192635b73fc8efc",
        "torchscale/component/xpos_relative_position.py",
        "d337ba30c5b837018839d6c442832fe12cf237f9d9b7422d53db7b20fd18b991",
        "MIT",
    ),
    "TsinghuaC3I/Fourier-Position-Embedding": (
        "bd94b20d82bf11240ad3584c515c790d255da919",
        "olmo/model.py",
        "27f9561d046aa158ad1c227912f34806b5055e7d1aefef852525974b88574e86",
        "none stated (OLMo, from which it is derived: Apache-2.0)",
    ),
    "hrlics/CoPE": (
        "ed52ba5e2d80aaea7577144109c572e93e84e537",
        "modeling_cope.py",
        "85e19100b1e14de2f829b36d2979345a4f50e24f62384ba15aa9b82f82229fb4",
        "Apache-2.0 (header of the file)",
    ),
    "timurcarstensen/selective-rope": (
        "d12e82503de1b5062870bd52ded9b4f364ce0ad3",
        "src/selective_rope/modules/rotary.py",
        "d9c7097a59ef682500d58865978425c5d33926dc0872ae736dc39ca9185203c3",
        "Apache-2.0",
    ),
    "chijames/KERPLE": (
        "25be3d712e96a3353b374f1f8e36b97d86f97ffa",
        "megatron/mpu/layers.py",
        "814c636a1555860cceb9c92cea50ea6552d184447700c53ac85b6739f181e92d",
        "Apache-2.0",
    ),
    "mcleish7/arithmetic": (
        "86022a57d38c0fde46444d62e8dcbebcc0af614c",
        "cramming/architectures/embeddings.py",
        "77245f99b348e75d43eade317f4b9acdc8f23a5c1f817434b3b96702468b2dd7",
        "MIT",
    ),
    "facebookresearch/RAM": (
        "e6f051fbcfaef4cab69bf2ea1b25f500f94c0c64",
        "projects/cope/src/cope/context_position.py",
        "8e9108dae63ca7f6bbb45caa71bd1aecb8ac315f33d691d7714596bb6e9439c2",
        "MIT",
    ),
}
PACKAGES = ("torch", "transformers", "numpy", "PoPE-pytorch", "x-transformers", "fla-core")
B, T, H, G, K = 2, 12, 4, 2, 8
D = H * K
SCALE = K**-0.5
CAUSAL = np.tril(np.ones((T, T), bool))


class Inputs:
    """Random numbers that float32 holds, as float64."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def normal(self, *shape, scale=1.0):
        return (scale * self.generator.standard_normal(shape)).astype(np.float32).astype(np.float64)

    def uniform(self, low, high, *shape):
        return self.generator.uniform(low, high, shape).astype(np.float32).astype(np.float64)


class Given(nn.Module):
    """A projection that returns what it was given."""

    def __init__(self, value):
        super().__init__()
        self.value = torch.tensor(value)

    def forward(self, _):
        return self.value


def definitions(sources, repository, *names, **namespace):
    """Classes and functions of a file of a checkout as they are, run with `namespace` as what surrounds them."""
    _, name, digest, _ = SOURCES[repository]
    text = (sources / repository.partition("/")[2] / name).read_bytes()
    found = hashlib.sha256(text).hexdigest()
    if found != digest:
        raise SystemExit(f"{repository}'s {name} has SHA-256 {found}, not {digest}: check out the commit in SOURCES")
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    body = ast.Module([nodes[name] for name in names], [])
    names_here = {"torch": torch, "nn": nn, "F": F, "math": math, "rearrange": rearrange, "Optional": Optional}
    namespace = names_here | {"Literal": Literal, "Tuple": tuple, "Parameter": nn.Parameter} | namespace
    exec(compile(body, name, "exec"), namespace)
    return [namespace[name] for name in names]


def by_head(heads_last):
    """[B, T, H, K] to torch's [B, H, T, K]."""
    return torch.tensor(heads_last).transpose(1, 2)


def by_time(heads_first):
    return heads_first.transpose(1, 2).detach().numpy()


def spread(keys):
    """Key heads [B, T, G, K] to heads [B, T, H, K]."""
    return np.repeat(keys, H // keys.shape[2], axis=2)


def logits_of(q, k):
    """[B, H, T, S], not scaled."""
    return np.einsum("bthk,bshk->bhts", q, spread(k))


def attended(logits, v):
    """Causal softmax over `logits` [B, H, T, S], then values: [B, T, H, K]."""
    logits = np.where(CAUSAL, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshk->bthk", weights, spread(v))


def attention(q, k, v, bias=0.0):
    """Plain attention: what is not the scheme's own."""
    return attended(logits_of(q, k) * SCALE + bias, v)


# One function a scheme: the checkouts, the shared inputs, random numbers -> what the file holds of it.


def ssmax(sources, shared, random):
    _, SSMax = definitions(sources, "soda-inria/tabicl", "_logn", "SSMax")
    module = SSMax(H)
    scale = random.uniform(0.1, 1.5, H)
    module.scales.data = torch.tensor(scale)
    rows = [module(by_head(shared["q"])[:, :, i : i + 1], i + 1) for i in range(T)]
    encoded = by_time(torch.cat(rows, dim=2))
    return {"scale": scale, "encoded_q": encoded, "output": attention(encoded, shared["k"], shared["v"])}


def llama4(sources, shared, random):
    def run(q, k, v, **settings):
        config = Llama4TextConfig(
            hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=K, num_hidden_layers=4, **settings
        )
        config._attn_implementation = "eager"
        layer = Llama4TextAttention(config, layer_idx=3).eval()
        assert not layer.use_rope
        for name, value in (("q", q), ("k", k), ("v", v)):
            setattr(layer, f"{name}_proj", Given(value.reshape(*value.shape[:2], -1)))
        layer.o_proj = nn.Identity()
        length = q.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)[None, None]
        return layer(torch.zeros(len(q), length, D), None, mask)[0].detach().numpy().reshape(q.shape)

    # The scale at single positions, through the past length of a cache that holds nothing else.
    positions = np.array([0, 1, 8190, 8191, 8192, 16382, 16383, 65535, 131071, 1048575])
    scales = []
    for position in positions:
        past = SimpleNamespace(get_seq_length=lambda *_, p=position: int(p), update=lambda k, v, *_: (k, v))
        config = Llama4TextConfig(hidden_size=D, num_attention_heads=H, head_dim=K, num_hidden_layers=4)
        config._attn_implementation = "probe"
        layer = Llama4TextAttention(config, layer_idx=3)
        for name in "qkv":
            setattr(layer, f"{name}_proj", Given(np.ones((1, 1, config.num_key_value_heads * K if name != "q" else D))))
        layer.o_proj = nn.Identity()
        seen = []

        def probe(_, query, *__, seen=seen, **___):
            seen.append(query[0, 0, 0, 0].item())
            return query.transpose(1, 2), None

        with mock.patch("transformers.models.llama4.modeling_llama4.ALL_ATTENTION_FUNCTIONS") as functions:
            functions.get_interface.return_value = probe
            layer(torch.zeros(1, 1, D), None, None, past)
        scales += seen
    output = run(shared["q"], shared["k"], shared["v"], floor_scale=4, attn_scale=0.3)
    settings = {"floor_scale": np.array(4), "attn_scale": np.array(0.3)}
    return {**settings, "scale_positions": positions, "scales": np.array(scales), "output": output}


def xpos(sources, shared, random):
    names = ("fixed_pos_embedding", "rotate_every_two", "duplicate_interleave", "apply_rotary_pos_emb", "XPOS")
    *_, XPOS = definitions(sources, "microsoft/torchscale", *names)
    module = XPOS(K, scale_base=512)
    # A small base too, so that the powers are far from 1.
    held = {}
    for prefix, base in (("", 512), ("short_", 8)):
        module.scale_base = base

        def encoded(value, downscale):
            flat = rearrange(torch.tensor(value), "b t h k -> (b h) t k")
            return rearrange(module(flat, downscale=downscale), "(b h) t k -> b t h k", b=B).numpy()

        q, k = encoded(shared["q"], False), encoded(shared["k"], True)
        held[f"{prefix}scale_base"] = np.array(base)
        held |= {f"{prefix}encoded_q": q, f"{prefix}encoded_k": k, f"{prefix}output": attention(q, k, shared["v"])}
    return held


def fope(sources, shared, random, fourier_dim=0):
    class ModelConfig:
        pass

    names = ("BufferCache", "_non_meta_init_device", "RotaryEmbedding", "FourierEmbedding")
    BufferCache, *_, FourierEmbedding = definitions(
        sources,
        "TsinghuaC3I/Fourier-Position-Embedding",
        *names,
        ModelConfig=ModelConfig,
        MutableMapping=MutableMapping,
    )
    head_dim, length, base = 16, 64, 1e4
    rope = {"rope_theta": base, "rope_init_distribution": "exponential", "rope_init_upper_freq": 1.0}
    rope |= {"rope_init_floor_freq": 0.0, "rope_floor_freq_ratio": 1.0, "rope_zero_freq_ratio": -1.0}
    rope |= {"rope_clamp_floor_freq": True, "rope_clamp_floor_to_zero": True, "rope_full_precision": True}
    off = ("rope_learnable", "rope_include_neg_freq", "rope_clamp_upper_freq", "rope_clamp_to_linear", "rope_no_pos")
    rope |= dict.fromkeys(off, False)
    rope |= {"rope_clamp_to_linear_mode": "ceil", "len_extra": False, "max_sequence_length": length}
    fourier = {"fourier": True, "fourier_dim": fourier_dim, "fourier_ignore_zero": True, "fourier_learnable": False}
    fourier |= {"fourier_separate_basis": True, "fourier_separate_head": True, "fourier_norm": False}
    fourier |= {"fourier_init": "eye_xavier_norm", "fourier_init_norm_gain": 0.3}

    def module(heads):
        config = SimpleNamespace(d_model=heads * head_dim, n_heads=heads, init_device="cpu", **rope, **fourier)
        return FourierEmbedding(config, BufferCache(), use_rope_cache=False)

    # Its random initialization is not the point: coefficients are its step matrix and noise, the same within a group.
    by_queries, by_keys = module(H), module(G)
    step = by_keys.get_step_eye(by_keys.sin_coef).numpy()
    if by_keys.input_dim == by_keys.output_dim:
        assert (step == np.eye(by_keys.input_dim)).all()
    sin_coef, cos_coef = (step + random.normal(*step.shape, scale=0.3) for _ in range(2))
    sin_coef, cos_coef = (value.astype(np.float32).astype(np.float64) for value in (sin_coef, cos_coef))
    for made, repeats in ((by_queries, H // G), (by_keys, 1)):
        made.sin_coef.data = torch.tensor(np.repeat(sin_coef, repeats, 0))
        made.cos_coef.data = torch.tensor(np.repeat(cos_coef, repeats, 0))
    q, k, v = (random.normal(B, T, heads, head_dim) for heads in (H, G, G))
    held = {"q": q, "k": k, "v": v, "sin_coef": sin_coef, "cos_coef": cos_coef, "inv_freq": by_keys.inv_freq[0].numpy()}
    held |= {"base": np.array(base), "length": np.array(length)}
    held["encoded_q"] = by_time(by_queries(by_head(q), T))
    held["encoded_k"] = by_time(by_keys(by_head(k), T))

    def paper(value):
        """Eq. 13: a series on the pairs that have one, nothing on the others."""
        angles = np.arange(T)[:, None] * held["inv_freq"]
        repeats = value.shape[2] // G
        sin, cos = (
            np.einsum("td,hdm->thm", wave(angles), np.repeat(coefficients, repeats, 0))
            for wave, coefficients in ((np.sin, sin_coef), (np.cos, cos_coef))
        )
        rest = ((0, 0), (0, 0), (0, head_dim // 2 - sin.shape[-1]))
        sin, cos = np.pad(sin, rest), np.pad(cos, rest, constant_values=1.0)
        first, second = np.split(value, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    held |= {"paper_encoded_q": paper(q), "paper_encoded_k": paper(k)}
    logits = logits_of(held["encoded_q"], held["encoded_k"]) * head_dim**-0.5
    return {**held, "output": attended(logits, v)}


def fope_wide(sources, shared, random):
    return fope(sources, shared, random, fourier_dim=32)


def clipped_rope(sources, shared, random):
    def default(config, device=None, seq_len=None):
        power = torch.arange(0, config.head_dim, 2) / config.head_dim
        return config.base**-power, 1.0

    (Embedding,) = definitions(
        sources, "hrlics/CoPE", "LlamaRotaryEmbedding", LlamaConfig=None, ROPE_INIT_FUNCTIONS={"default": default}
    )

    def auto(head_dim, base, length):
        """mlx-lm: as many pairs as have a wavelength beyond the length."""
        inv_freq = base ** (-np.arange(0, head_dim, 2) / head_dim)
        clip = int((2 * math.pi / inv_freq > length).sum())
        inv_freq[len(inv_freq) - clip :] *= 0.5 * (1 + np.cos(np.linspace(0, math.pi, clip)))
        return inv_freq, clip

    held = {}
    for head_dim, base, length in ((64, 1e4, 160), (128, 5e5, 48000), (16, 1e4, 6)):
        config = SimpleNamespace(
            head_dim=head_dim, base=base, max_position_embeddings=length, use_cope=True, use_hardclip=False
        )
        inv_freq = Embedding(config).inv_freq.numpy()
        expected, clip = auto(head_dim, base, length)
        assert clip == min(20, head_dim // 2), (head_dim, clip)
        np.testing.assert_allclose(inv_freq, expected, rtol=1e-12, atol=1e-20)
        held[f"inv_freq_{head_dim}"] = inv_freq
        held[f"base_{head_dim}"], held[f"length_{head_dim}"] = np.array(base), np.array(length)
    # By numpy: the pull request's own example, one clipped pair (which stays as it is), none, and two.
    cases = [(64, 1e7, 262144), (16, 1e4, 10000), (16, 1e4, 10**6), (16, 1e4, 2000)]
    held["auto_head_dim"], held["auto_base"], held["auto_length"] = (
        np.array(column) for column in zip(*cases, strict=True)
    )
    held["auto_clip"] = np.array([auto(*case)[1] for case in cases])
    assert held["auto_clip"].tolist() == [10, 1, 0, 2]
    for index, case in enumerate(cases):
        held[f"auto_inv_freq_{index}"] = auto(*case)[0]
    return held


def pope(sources, shared, random):
    bias = random.uniform(-8.0, 1.0, G, K)
    module = PoPE(K, heads=G)
    module.bias.data = torch.tensor(bias)
    freqs, clamped = module(torch.tensor(shared["positions"], dtype=torch.float64))
    q, k = by_head(shared["q"]), by_head(shared["k"])
    # The bias is the keys'; one call a side, since the two have other numbers of heads.
    nothing = torch.zeros(H, K)
    encoded_q, _ = apply_pope_to_qk((freqs, nothing), q, q)
    _, encoded_k = apply_pope_to_qk((freqs, clamped), k, k)
    held = {"bias": bias, "encoded_q": by_time(encoded_q), "encoded_k": by_time(encoded_k)}
    return {**held, "output": attended(logits_of(held["encoded_q"], held["encoded_k"]) * SCALE, shared["v"])}


class ShortConvolution(nn.Module):
    """fla's: causal, one filter a channel; the last tap is the token's own. Without activation and cache."""

    def __init__(self, hidden_size, kernel_size, bias=False, activation=None, dtype=None):
        super().__init__()
        assert not bias and activation is None
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(self, x, **_):
        channels, _, width = self.weight.shape
        padded = F.pad(x.transpose(1, 2), (width - 1, 0))
        return F.conv1d(padded, self.weight, groups=channels).transpose(1, 2), None


def selective_rope(sources, shared, random, **settings):
    def l2_norm(value, eps=1e-6):
        return value * torch.rsqrt(value.square().sum(-1, keepdim=True) + eps)

    names = ("rotary_temperature", "ChunkedLinear", "SelectiveRoPE")
    *_, SelectiveRoPE = definitions(
        sources, "timurcarstensen/selective-rope", *names, l2_norm=l2_norm, ShortConvolution=ShortConvolution
    )
    module = SelectiveRoPE(head_k_dim=K, model_dim=D, num_heads=H, phi_proj_rank=3, temp_theta=100.0, **settings)
    plain = {
        "phi_proj.0.weight": "down",
        "phi_proj.1.weight": "up",
        "phi_conv1d.weight": "convolution",
        "phi_bias": "log_bias",
        "phase_gate_proj.weight": "gate",
        "phase_gate_proj.bias": "gate_bias",
    }
    k, v = random.normal(B, T, H, K), random.normal(B, T, H, K)
    held = {
        "k": k,
        "v": v,
        "rank": np.array(3),
        "base": np.array(100.0),
        "temperature": module.temperature.data.numpy()[0, 0, 0],
    }
    for name, parameter in module.named_parameters():
        if name != "temperature":
            value = random.normal(*parameter.shape, scale=0.6)
            parameter.data = torch.tensor(value)
            held[plain[name]] = value.T if value.ndim == 2 else value.squeeze()
    q, k, _ = module(torch.tensor(shared["q"]), torch.tensor(k), torch.tensor(shared["x"]))
    q, k = q.detach().numpy(), k.detach().numpy()
    return {**held, "encoded_q": q, "encoded_k": k, "output": attention(q, k, v)}


def selective_rope_gated(sources, shared, random):
    return selective_rope(sources, shared, random, use_gate=True, use_bias=True)


def selective_rope_difference(sources, shared, random):
    return selective_rope(sources, shared, random, skip_conv=True)


def t5(sources, shared, random):
    config = T5Config(d_model=D, d_kv=K, num_heads=H, is_decoder=True)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table = random.normal(*layer.relative_attention_bias.weight.shape)
    layer.relative_attention_bias.weight.data = torch.tensor(table)
    distances = torch.arange(201)
    # As published, in float32; float64 must not move a bucket.
    with mock.patch.multiple(torch, float=torch.float32, float32=torch.float32):
        buckets = layer._relative_position_bucket(-distances, bidirectional=False)
    assert (buckets == layer._relative_position_bucket(-distances.double(), bidirectional=False)).all()
    bias = layer.compute_bias(T, T)[0].detach().numpy()
    # And a bias far from the diagonal: the last row of a longer sequence.
    long_bias = layer.compute_bias(150, 150)[0, :, -1].detach().numpy()
    output = attention(shared["q"], shared["k"], shared["v"], bias)
    return {"table": table, "buckets": buckets.numpy(), "bias": bias, "last_row_150": long_bias, "output": output}


def kerple(sources, shared, name, pos_emb, **parameters):
    (Kernel,) = definitions(
        sources,
        "chijames/KERPLE",
        name,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )
    arguments = SimpleNamespace(num_attention_heads=H, pos_emb=pos_emb, params_dtype=torch.float64)
    with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        module = Kernel(arguments)
    for parameter, value in parameters.items():
        getattr(module, parameter).data = torch.tensor(value)[:, None, None]
    bias = module(torch.zeros(1, H, T, T))[0].detach().numpy()
    return {"bias": bias, "output": attention(shared["q"], shared["k"], shared["v"], bias)}


def kerple_log(sources, shared, random):
    r1, r2 = random.uniform(0.05, 2, H), random.uniform(0.05, 1, H)
    r1[3], r2[2] = -0.5, 0.001  # clamped at 0.01
    return {"r1": r1, "r2": r2, **kerple(sources, shared, "ParallelKerpleLog", "kerple_log", bias_p=r1, bias_a=r2)}


def kerple_power(sources, shared, random):
    r1, r2 = random.uniform(0.05, 1, H), random.uniform(0.05, 2, H)
    r1[3], r2[2] = -0.5, 2.5  # clamped at 0.01, and at 2
    held = kerple(sources, shared, "ParallelKerplePower", "kerple_power_ap_", bias_a=r1, bias_p=r2)
    return {"r1": r1, "r2": r2, **held}


def learned_alibi(sources, shared, random):
    slopes = random.uniform(0.02, 1, H)
    held = kerple(sources, shared, "ParallelKerplePower", "kerple_power_a_", bias_a=slopes)
    return {"slopes": slopes, **held}


def fire(sources, shared, random):
    (FIRE,) = definitions(sources, "mcleish7/arithmetic", "FIRE")
    module = FIRE(num_heads=H, mlp_width=32, init_c=0.37, init_L=6.0).eval()
    module.L_multiplier.data = torch.tensor(1.25)
    plain = {"mlp.0.weight": "w1", "mlp.0.bias": "b1", "mlp.2.weight": "w2", "mlp.2.bias": "b2"}
    held = {"c": np.array(0.37), "initial_length": np.array(6.0), "length_multiplier": np.array(1.25)}
    for name, parameter in module.named_parameters():
        if name in plain:
            value = random.normal(*parameter.shape, scale=0.5)
            parameter.data = torch.tensor(value)
            held[plain[name]] = value.T  # [in, out]
    bias = module(T, "cpu")[0].detach().numpy()
    return {**held, "bias": bias, "output": attention(shared["q"], shared["k"], shared["v"], bias)}


def forgetting(sources, shared, random):
    weight, gate_bias = random.normal(D, H, scale=0.3), random.normal(H)
    log_gates = F.logsigmoid(torch.tensor(shared["x"] @ weight + gate_bias))
    inputs = (torch.tensor(shared[name]) for name in ("q", "k", "v"))
    output = naive_forgetting_attn(*inputs, log_gates).numpy()
    log_gates = log_gates.numpy()
    total = log_gates.cumsum(1).transpose(0, 2, 1)
    bias = total[..., :, None] - total[..., None, :]
    np.testing.assert_allclose(attention(shared["q"], shared["k"], shared["v"], bias), output, rtol=1e-10)
    np.testing.assert_allclose(
        attention(shared["q"], shared["k"], shared["v"], -total[..., None, :]), output, rtol=1e-10
    )
    return {"weight": weight, "gate_bias": gate_bias, "log_gates": log_gates, "bias": bias, "output": output}


def cope(sources, shared, random):
    positions = 4  # fewer than T: the clamp is felt
    embedding = random.normal(K, positions)
    q, k, v = by_head(shared["q"]), by_head(spread(shared["k"])), by_head(spread(shared["v"]))
    module = CoPE(K, H, positions)
    module.pos_emb.data = torch.tensor(embedding.T.copy())
    logits = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~torch.tensor(CAUSAL), -math.inf)
    bias = module(q, logits).detach().numpy()
    held = {"embedding": embedding, "listing_bias": bias}
    held["listing_output"] = attention(shared["q"], shared["k"], shared["v"], bias)
    (ContextPosSelfAttn,) = definitions(sources, "facebookresearch/RAM", "ContextPosSelfAttn")
    for nodiv in (False, True):
        flags = {"cope_val_gates": False, "cope_sep_key": False, "cope_nodiv": nodiv, "cope_layers": 1}
        layer = ContextPosSelfAttn(
            SimpleNamespace(drop=0.0, cope_npos=positions, head_dim=K, pos_emb="cope", **flags), 0
        )
        layer.pos_emb.data = torch.tensor(embedding)[None]
        flat = [value.reshape(B * H, T, K) for value in (q, k, k, v)]
        output = by_time(layer(*flat, torch.tensor(CAUSAL.astype(np.float64))).reshape(B, H, T, K))
        if nodiv:
            np.testing.assert_allclose(held["listing_output"], output, rtol=1e-10)
        else:
            held["repository_output"] = output
    return held


def gated(sources, shared, random):
    gate = random.normal(D, H, K, scale=0.3)
    config = Qwen3NextConfig(hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=K)
    config._attn_implementation = "eager"
    layer = Qwen3NextAttention(config, layer_idx=0).eval()
    gate_logits = np.einsum("btd,dhk->bthk", shared["x"], gate)
    layer.q_proj = Given(np.concatenate([shared["q"], gate_logits], -1).reshape(B, T, -1))
    for name in "kv":
        setattr(layer, f"{name}_proj", Given(shared[name].reshape(B, T, -1)))
    layer.q_norm = layer.k_norm = layer.o_proj = nn.Identity()
    unrotated = torch.ones(B, T, K), torch.zeros(B, T, K)
    mask = torch.full((T, T), -math.inf).triu(1)[None, None]
    output = layer(torch.tensor(shared["x"]), unrotated, mask)[0].detach().numpy().reshape(B, T, H, K)
    return {"gate": gate, "output": output}


def xsa(sources, shared, random):
    y, v = attention(shared["q"], shared["k"], shared["v"]), spread(shared["v"])
    unit = v / np.linalg.norm(v, axis=-1, keepdims=True)
    return {"plain_output": y, "output": y - (y * unit).sum(-1, keepdims=True) * unit}


def sink(sources, shared, random):
    sinks = random.normal(H)
    module = SimpleNamespace(sinks=torch.tensor(sinks), num_key_value_groups=H // G, training=False)
    mask = torch.full((T, T), -math.inf).triu(1)[None, None]
    inputs = [by_head(shared[name]) for name in ("q", "k", "v")]
    output, _ = eager_attention_forward(module, *inputs, mask, SCALE)
    return {"sinks": sinks, "output": output.numpy()}


SCHEMES = [ssmax, llama4, xpos, fope, fope_wide, clipped_rope, pope, selective_rope, selective_rope_gated]
SCHEMES += [
    selective_rope_difference,
    t5,
    kerple_log,
    kerple_power,
    learned_alibi,
    fire,
    forgetting,
    cope,
    gated,
    xsa,
    sink,
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder with the checkouts of SOURCES")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    random = Inputs(0)
    shared = {"q": random.normal(B, T, H, K), "k": random.normal(B, T, G, K), "v": random.normal(B, T, G, K)}
    shared["x"] = random.normal(B, T, D)
    shared["positions"] = np.array([np.arange(T), [3 * t + (t > 5) * 7 for t in range(T)]])
    arrays = dict(shared)
    for number, scheme in enumerate(SCHEMES):
        with in_float64(), torch.no_grad():
            held = scheme(options.sources, shared, Inputs(number + 1))
        arrays |= {f"{scheme.__name__}/{name}": np.asarray(value) for name, value in held.items()}
    for name, value in arrays.items():
        assert np.isfinite(value).all(), name
        # What was drawn is exactly a float32: half the size.
        if value.dtype == np.float64 and (value == value.astype(np.float32)).all():
            arrays[name] = value.astype(np.float32)
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    sources = {repository: f"{commit} {file}" for repository, (commit, file, *_) in SOURCES.items()}
    np.savez_compressed(options.out, versions=json.dumps(versions), sources=json.dumps(sources), **arrays)
    print(f"{options.out}: {len(arrays)} arrays, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
