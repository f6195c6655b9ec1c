"""Presets against transformers' own count of their parameters: preset_counts.json, by make_preset_counts.py."""

import dataclasses
import json
from pathlib import Path

import pytest

from pe_lab.checkpoints.hf_config import read_config
from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import UserError
from pe_lab.model import PRESETS, Model, complete, preset
from pe_lab.positional import PI, Layer, Rope, Yarn, layers, pattern

COUNTS = json.loads((Path(__file__).parents[1] / "data" / "preset_counts.json").read_text())["counts"]


def test_every_preset_was_counted():
    assert COUNTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_transformers_counts(name):
    model = Model(from_dict(ModelConfig, preset(name)))
    assert model.config.vocab_size == COUNTS[name]["vocab_size"]
    assert model.num_parameters == COUNTS[name]["parameters"]
    assert complete(model.config) == model.config


# config.json as published, without keys of the tokenizer and of training. OLMo's name the types of its layers too.
GEMMA_3 = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "head_dim": 256,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
    "sliding_window_pattern": 6,
}  # fmt: skip
OLMO = {
    "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 500000,
    "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "gemma3_1b": GEMMA_3 | {
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "rope_scaling": None, "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gemma3_4b": GEMMA_3 | {
        "hidden_size": 2560, "intermediate_size": 10240, "max_position_embeddings": 131072, "num_attention_heads": 8,
        "num_hidden_layers": 34, "num_key_value_heads": 4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024, "vocab_size": 262208,
    },
    "olmo2_1b": OLMO | {
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "rope_scaling": None, "vocab_size": 100352,
    },
    "olmo3_7b": OLMO | {
        "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "max_position_embeddings": 65536,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "sliding_window": 4096,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "vocab_size": 100278,
    },
}  # fmt: skip
WIDE = Rope(1e6)
YARN = Rope(5e5, scaling=Yarn(8, 8192, attention_factor=1.2079441541679836))
LAYERS = {
    "gemma3_1b": ([Layer(Rope(1e4), 512)] * 5 + [Layer(WIDE)], 32768),
    "gemma3_4b": ([Layer(Rope(1e4), 1024)] * 5 + [Layer(dataclasses.replace(WIDE, scaling=PI(8)))], 131072),
    "olmo2_1b": ([Layer(Rope(5e5))], 4096),
    "olmo3_7b": ([Layer(Rope(5e5), 4096)] * 3 + [Layer(YARN)], 8192),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_model_of_the_published_file(name):
    """So that a recipe of the preset may start from it; and its layers are those that the preset's comment gives."""
    read = read_config(PUBLISHED[name], (), name)
    free = ("init_std", "dtype", "remat", "scan", "attention", "attention_chunk", "loss_chunks")
    mine, its = (dataclasses.asdict(complete(one)) for one in (from_dict(ModelConfig, preset(name)), read.model))
    assert {k: v for k, v in mine.items() if k not in free} == {k: v for k, v in its.items() if k not in free}
    period, length = LAYERS[name]
    assert read.layers == layers(pattern(period, cut=True), read.model.layers)
    assert read.training_length == length


def test_a_preset_can_be_changed_without_changing_it_for_others():
    before = preset("gemma_2b")
    changed = preset("gemma_2b", layers=2, qk_norm="head")
    assert changed == before | {"layers": 2, "qk_norm": "head"}
    changed["layers"] = 3
    assert preset("gemma_2b") == before == PRESETS["gemma_2b"]


def test_drope_trains_qwen2_without_its_bias():
    qwen, drope = (from_dict(ModelConfig, preset(name)) for name in ("qwen2_0_5b", "drope_494m"))
    assert dataclasses.replace(qwen, attention_bias=False) == drope != qwen


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="There is no preset 'gemma2b'. Did you mean 'gemma_2b'"):
        preset("gemma2b")
    with pytest.raises(UserError, match="There is no preset 'zzz'. Allowed: drope_494m, gemma3_1b"):
        preset("zzz")
    with pytest.raises(UserError, match="preset 'gemma_2b' has no key 'layer'. Did you mean 'layers'"):
        preset("gemma_2b", layer=2)
