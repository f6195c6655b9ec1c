"""The logits of transformers with a fault of its positions patched in: its own classes, weights and masks, one change.

    python tests/data/faulty_transformers.py --models=tests/data/hf --out=DIRECTORY

It needs torch and transformers 5. For each of `INJECTED` it writes NAME.npz with `tokens` and `logits`, as
`pe_lab.audit --runtime=logits:` reads them. tests/checkpoints/test_audit_faults.py audits them: `answer` is the fault
that has to be named.
"""

import argparse
import copy
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

LENGTH = 300  # beyond 256, where bfloat16 ends to count
LATE = 200  # the token from which a cache is counted wrong


class Injected(NamedTuple):
    """A fault: the directory of the model, its name in pe_lab, what it does to a loaded model, tokens, and layers."""

    model: str
    answer: str
    inject: Callable[[Any], Any]
    length: int = LENGTH
    layers: tuple[int, ...] | None = None


def _module(model):
    return sys.modules[type(model).__module__]


def _rope_parameters(**parameters):
    """The rotation is made of a config with other rope parameters, as where a runtime does not find them."""

    def inject(model):
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_type": "default", **parameters}
        model.model.rotary_emb = type(model.model.rotary_emb)(config)

    return inject


def _positions(change):
    """What the rotation is given for positions."""

    def inject(model):
        rotary = model.model.rotary_emb
        own = rotary.forward
        rotary.forward = lambda x, position_ids, *rest: own(x, change(position_ids), *rest)

    return inject


def _in_bfloat16(position_ids):
    import torch

    return position_ids.to(torch.bfloat16)


def _without_attention_factor(model):
    model.model.rotary_emb.attention_scaling = 1.0


def _half_ramp(model):
    from transformers import modeling_rope_utils

    source = inspect.getsource(modeling_rope_utils._compute_yarn_parameters)
    faulty = source.replace("(beta_fast, beta_slow, dim, base", "(beta_fast, beta_slow, dim // 2, base")
    assert faulty != source
    scope = vars(modeling_rope_utils).copy()
    exec(faulty, scope)
    model.model.rotary_emb.inv_freq, _ = scope["_compute_yarn_parameters"](model.config)


def _interleaved(model):
    from transformers.models.cohere2 import modeling_cohere2

    def apply(q, k, cos, sin):
        cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
        return modeling_cohere2.apply_rotary_pos_emb(q, k, cos, sin)

    return mock.patch.object(_module(model), "apply_rotary_pos_emb", apply)


def _keys_by_query_heads(model):
    """Meta's weights are permuted for transformers, as convert_llama_weights_to_hf.py does it; keys by all heads."""
    import torch

    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight
        (rows, columns), kv_heads = weight.shape, model.config.num_key_value_heads
        of_meta = weight.view(kv_heads, 2, rows // kv_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
        heads = model.config.num_attention_heads
        permuted = of_meta.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        layer.self_attn.k_proj.weight = torch.nn.Parameter(permuted)


def _proportional(model):
    """GPT-NeoX's first channels with frequencies of the whole head."""
    import torch

    rotary = model.gpt_neox.rotary_emb
    theta, head_dim = model.config.rope_parameters["rope_theta"], model.config.hidden_size // 2
    rotary.inv_freq = theta ** -(2 * torch.arange(len(rotary.inv_freq), dtype=torch.float32) / head_dim)


def _rotates(layer, yes):
    def inject(model):
        model.model.layers[layer].self_attn.use_rope = yes

    return inject


def _window(change):
    def inject(model):
        from transformers import masking_utils

        own = masking_utils.sliding_window_overlay
        return mock.patch.object(masking_utils, "sliding_window_overlay", lambda size: own(change(size)))

    return inject


def _windows_on_the_other_layers(model):
    model.config.layer_types = model.config.layer_types[::-1]


def _exchanged(model):
    rotary = model.model.rotary_emb
    names = ("sliding_attention_inv_freq", "full_attention_inv_freq")
    for name, other in zip(names, [getattr(rotary, name) for name in names[::-1]], strict=True):
        setattr(rotary, name, other)


def _cache_counted_wrong(model):
    """The second part of the tokens is computed with the first one in the cache, one position too late."""
    import torch

    def forward(tokens):
        first = own(tokens[:, :LATE], use_cache=True)
        places = torch.arange(LATE, tokens.shape[1])[None].expand(len(tokens), -1) + 1
        second = own(tokens[:, LATE:], past_key_values=first.past_key_values, position_ids=places)
        first.logits = torch.cat([first.logits, second.logits], 1)
        return first

    own = model.forward
    model.forward = forward


def _frequencies_in_bfloat16(model):
    import torch

    model.model.rotary_emb.to(torch.bfloat16)


def _short_table(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.rope_type = rotary.original_inv_freq, "yarn"  # one that no length updates


def _no_positions(model):
    model.transformer.wpe.weight.data.zero_()


def _no_slopes(model):
    modeling = _module(model)
    own = modeling._get_alibi_slopes
    return mock.patch.object(modeling, "_get_alibi_slopes", lambda *arguments: 0 * own(*arguments))


def _table_from_another_place(model):
    model.model.decoder.embed_positions.offset = 3


# Gemma 4: p-RoPE of a quarter in layers without a window, which have wider heads than the others.


def _full_frequencies(channels, kept):
    """The first `kept` frequencies of a head of so many channels."""

    def inject(model):
        import torch

        rotary, theta = model.model.rotary_emb, model.config.rope_parameters["full_attention"]["rope_theta"]
        found = torch.zeros_like(rotary.full_attention_inv_freq)
        found[:kept] = theta ** -(torch.arange(0, channels, 2)[:kept] / channels)
        rotary.full_attention_inv_freq = found

    return inject


def _pairs_within_the_first_quarter(model):
    import torch

    modeling = _module(model)
    own = modeling.apply_rotary_pos_emb
    frequency = model.config.rope_parameters["full_attention"]["rope_theta"] ** -torch.tensor([0.0, 0.5])
    angles = torch.arange(LENGTH)[:, None] * frequency
    cos, sin = (torch.cat([function(angles)] * 2, -1)[None] for function in (torch.cos, torch.sin))

    def apply(x, *of_layer, **settings):
        if x.shape[-1] != 16:
            return own(x, *of_layer, **settings)
        return torch.cat([own(x[..., :4], cos, sin, **settings), x[..., 4:]], -1)

    return mock.patch.object(modeling, "apply_rotary_pos_emb", apply)


def _not_rotated(layer):
    """Neither are its keys where other layers attend to them."""

    def inject(model):
        def identity(module, args, kwargs):
            cos, sin = kwargs["position_embeddings"]
            return args, {**kwargs, "position_embeddings": (cos**0, 0 * sin)}

        model.model.layers[layer].self_attn.register_forward_pre_hook(identity, with_kwargs=True)

    return inject


def _queries_and_keys_interleaved(model):
    """By a converter; values that are keys, too."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for module in (attention.q_proj, attention.k_proj, attention.q_norm, attention.k_norm):
            weight = module.weight
            pairs = weight.reshape(-1, 2, attention.head_dim // 2, *weight.shape[1:])
            weight.data = pairs.transpose(1, 2).reshape(weight.shape).clone()


INJECTED = {
    "base": Injected("llama", "base ignored", _rope_parameters(rope_theta=10000.0)),
    "scaling": Injected("llama_yarn", "scaling ignored", _rope_parameters(rope_theta=100.0)),
    "both": Injected("llama_yarn", "base and scaling ignored", _rope_parameters(rope_theta=10000.0)),
    "llama3": Injected("llama_llama3", "scaling ignored", _rope_parameters(rope_theta=100.0)),
    "linear_twice": Injected("llama_linear", "scaling applied twice", _positions(lambda places: places / 4)),
    "attention_factor": Injected("llama_yarn", "attention factor", _without_attention_factor),
    "half_ramp": Injected("llama_yarn", "YaRN's ramp", _half_ramp),
    "short_table": Injected("llama_longrope", "length ignored", _short_table),
    "interleaved": Injected("llama", "query/key permutation", _interleaved),
    "interleaved_qk_norm": Injected("qwen3", "query/key permutation", _interleaved),
    "keys_by_query_heads": Injected("llama", "query/key permutation", _keys_by_query_heads),
    "proportional_whole": Injected(
        "llama_proportional", "proportional and partial", _rope_parameters(rope_theta=100.0)
    ),
    "partial_proportional": Injected("gpt_neox", "proportional and partial", _proportional),
    "nope_rotated": Injected("smollm3", "unrotated layers rotated", _rotates(3, 1)),
    "not_rotated": Injected("smollm3", "rotated layers not rotated", _rotates(1, 0)),
    "window_longer": Injected("qwen2_window", "windows off by one", _window(lambda size: size + 1)),
    "window_shorter": Injected("gemma3", "windows off by one", _window(lambda size: size - 1)),
    "no_window": Injected("mistral", "windows ignored", _window(lambda size: 10**6)),
    "other_windows": Injected("qwen2_window", "windows on the wrong layers", _windows_on_the_other_layers),
    "exchanged": Injected("gemma3", "bases exchanged", _exchanged),
    "cache": Injected("llama", "positions offset", _cache_counted_wrong),
    "bfloat16": Injected("llama", "positions in bfloat16", _positions(_in_bfloat16)),
    "bfloat16_gemma3": Injected("gemma3", "positions in bfloat16", _positions(_in_bfloat16)),
    "frequencies": Injected("llama", "frequencies in bfloat16", _frequencies_in_bfloat16),
    "no_table": Injected("gpt2", "encoding ignored", _no_positions, 60),
    "no_slopes": Injected("bloom", "encoding ignored", _no_slopes),
    "other_place": Injected("opt", "positions offset", _table_from_another_place, 60),
    "gemma4_whole": Injected("gemma4", "proportional and partial", _full_frequencies(16, 8)),
    "gemma4_partial": Injected("gemma4", "proportional and partial", _pairs_within_the_first_quarter),
    "gemma4_head_size": Injected("gemma4", "head size", _full_frequencies(8, 2)),
    "gemma4_interleaved": Injected("gemma4", "query/key permutation", _queries_and_keys_interleaved),
    "gemma4_shared_partial": Injected(
        "gemma4_shared", "proportional and partial", _pairs_within_the_first_quarter, layers=(2, 4)
    ),
    # Layer 4 attends to the keys of layer 2.
    "gemma4_of_shared_keys": Injected("gemma4_shared", "rotated layers not rotated", _not_rotated(2), layers=(2,)),
    "gemma4_with_shared_keys": Injected("gemma4_shared", "rotated layers not rotated", _not_rotated(4), layers=(4,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    tokens = np.random.default_rng(0).integers(0, 64, (2, LENGTH))
    for name, injected in INJECTED.items():
        model = AutoModelForCausalLM.from_pretrained(
            arguments.models / injected.model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        chosen = tokens[:, : injected.length]
        with torch.inference_mode():
            sound = model(torch.from_numpy(chosen)).logits
            with injected.inject(model) or mock.MagicMock():
                logits = model(torch.from_numpy(chosen)).logits
        difference = float((logits - sound).abs().max() / sound.abs().max())
        assert math.isfinite(difference) and difference > 1e-4, (name, difference)
        np.savez(arguments.out / f"{name}.npz", tokens=chosen, logits=logits.numpy())
        print(f"{name}: differs by {difference:.1e} of the largest logit", flush=True)


if __name__ == "__main__":
    main()
