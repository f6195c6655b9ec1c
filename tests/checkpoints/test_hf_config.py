"""Reading config.json with transformers' defaults and contradictions, refused keys, and edits by hand."""

import json

import pytest
from checkpoints.external import DATA, NAMES, copy_of, edit_config, golden, logits

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.families import FAMILIES
from pe_lab.checkpoints.hf_config import read_config, write_config
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import complete
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    HeadEdit,
    Layer,
    Layout,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    to_json,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def read(family, names=(), **keys):
    return read_config(SIZES | {"model_type": family} | keys, names, "config.json")


def test_what_a_file_leaves_out_is_what_transformers_takes():
    llama, qwen3, smollm3 = (read(family) for family in ("llama", "qwen3", "smollm3"))
    gemma, neox = read("gemma"), read("gpt_neox")
    assert llama.model.head_dim == 8 and llama.model.kv_heads == 4 and llama.model.norm_epsilon == 1e-6
    assert not llama.model.attention_bias and not llama.model.mlp_bias and not llama.model.tie_embeddings
    assert llama.layers == (Layer(Rope(10000.0)),) * 4
    assert qwen3.model.head_dim == 128 and gemma.model.head_dim == 256
    assert smollm3.model.tie_embeddings and gemma.model.tie_embeddings and not neox.model.tie_embeddings
    assert smollm3.layers == (Layer(Rope(2e6)),) * 3 + (Layer(NoPE()),)
    assert neox.layers == (Layer(PartialRope(10000.0, 0.25)),) * 4 and neox.layout == Layout("half", 2)
    assert neox.model.block == "parallel" and neox.model.attention_bias and neox.model.norm_epsilon == 1e-5
    assert neox.model.activation == "gelu" and gemma.model.activation == "gelu_tanh"
    assert read("qwen2").model.attention_bias and not read("qwen2").model.output_bias
    assert read("llama", num_key_value_heads=None, head_dim=None, rope_theta=None).model == llama.model


def test_keys_of_other_families_count_for_nothing():
    assert read("llama", rms_norm_eps=1e-5, layer_norm_eps=1e-3).model.norm_epsilon == 1e-5
    assert read("gpt_neox", rms_norm_eps=1e-3).model.norm_epsilon == 1e-5
    assert read("llama", sliding_window=8, use_sliding_window=True).layers == read("llama").layers
    assert read("llama", rotary_pct=0.5, rotary_emb_base=7).layers == read("llama").layers
    assert read("qwen2", attention_bias=False).model.attention_bias
    assert read("gpt_neox", num_key_value_heads=2).model.kv_heads == 4
    assert read("llama", no_rope_layers=[0] * 4).layers == read("llama").layers
    assert read("llama", hidden_activation="gelu").model.activation == "silu"


def test_neox_without_biases_has_none_in_its_attention():
    model = read("gpt_neox", attention_bias=False, use_parallel_residual=False, hidden_act="gelu_new").model
    assert not model.attention_bias and not model.output_bias and model.mlp_bias and model.block == "pre_norm"
    assert model.activation == "gelu_tanh"
    names = [tensor.name for tensor in FAMILIES["gpt_neox"].tensors.tensors(model)]
    assert not [name for name in names if name.endswith(("query_key_value.bias", "attention.dense.bias"))]
    assert any(name.endswith("dense_4h_to_h.bias") for name in names)


def test_gelu_in_gemma_means_its_approximation_and_nothing_else_does():
    assert read("gemma", hidden_act="gelu").model.activation == "gelu_tanh"
    assert read("gemma", hidden_act="gelu_pytorch_tanh").model.activation == "gelu_tanh"
    with pytest.raises(UserError, match="hidden_act is 'silu', and GemmaForCausalLM has gelu_tanh"):
        read("gemma", hidden_act="silu")


def test_a_function_has_several_names():
    """Those of transformers 5.23's `ACT2CLS` that compute the same."""
    names = {
        "silu": ("silu", "swish"),
        "gelu": ("gelu", "gelu_python"),
        "gelu_tanh": ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    }
    for function, same in names.items():
        assert {read("gpt_neox", hidden_act=name).model.activation for name in same} == {function}
    for other in ("gelu_10", "quick_gelu", "relu6", "mish"):
        with pytest.raises(UserError, match=f"hidden_act is '{other}', .* does not compute") as caught:
            read("gpt_neox", hidden_act=other)
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family):
    def windows(**keys):
        return [layer.window for layer in read(family, **keys).layers]

    assert windows(sliding_window=8, max_window_layers=1) == [None] * 4  # not used
    assert windows(use_sliding_window=True, sliding_window=8, max_window_layers=1) == [None, 8, 8, 8]
    assert windows(use_sliding_window=True, sliding_window=8) == [None] * 4  # from layer 28 on
    assert windows(use_sliding_window=True, max_window_layers=0) == [4096] * 4
    assert windows(use_sliding_window=True, sliding_window=None, max_window_layers=0) == [None] * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(use_sliding_window=True, sliding_window=8, layer_types=kinds) == [None, 8, None, 8]


def test_windows_and_bare_layers_of_smollm3():
    def layers(**keys):
        return [(layer.encoding != NoPE(), layer.window) for layer in read("smollm3", **keys).layers]

    assert layers(no_rope_layers=[1, 0, 0, 1, 1]) == [(True, None), (False, None), (False, None), (True, None)]
    assert [rope for rope, _ in layers(no_rope_layer_interval=2)] == [True, False] * 2
    # Without layer_types, the layers without a rotation are those with a window.
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    assert layers(**windowed) == [(True, None)] * 3 + [(False, 8)]
    assert layers(use_sliding_window=True) == layers()
    kinds = ["sliding_attention", "full_attention"] * 2
    assert [window for _, window in layers(**windowed, layer_types=kinds)] == [8, None, 8, None]
    # SmolLM3's mask follows layer_types whatever use_sliding_window says.
    assert [window for _, window in layers(sliding_window=8, layer_types=kinds)] == [8, None, 8, None]


def test_drope_has_a_flat_norm_where_it_says_so_and_where_its_tensors_do():
    with_norm = ["model.layers.0.self_attn.q_norm.weight"]
    assert read("llama_drope", with_norm).model.qk_norm == "flat"
    assert read("llama_drope").model.qk_norm == "none"
    assert read("llama_drope", with_norm, attention_type="qk_norm_nope").model.qk_norm == "flat"
    assert read("llama_drope", rope_theta=5e5).layers == (Layer(NoPE()),) * 4
    for kind in ("q_norm_nope", "k_norm_nope", "rope"):
        with pytest.raises(UserError, match=f"attention_type is '{kind}'"):
            read("llama_drope", with_norm, attention_type=kind)
    # softmax_scale replaces 1 / sqrt(head_dim).
    assert read("llama_drope", softmax_scale=0.5).layers[0].logit_scale == pytest.approx(0.5 * 8**0.5)
    bare = {"kinds": [to_json(Layer(NoPE()))], "layers": [0] * 4, "training_length": 16}
    edited = read("llama_drope", softmax_scale=0.5, pe_lab=bare)
    assert edited.layers[0].logit_scale == pytest.approx(0.5 * 8**0.5)
    for scale in ("0.5", 0, True):
        with pytest.raises(UserError, match=f"config.json: softmax_scale is {scale!r}"):
            read("llama_drope", softmax_scale=scale)


REFUSED = {
    "unknown family": (
        {"model_type": "lama"},
        "model_type is 'lama', an architecture that pe_lab does not compute. It computes .*llama, .*smollm3",
    ),
    "a family with a name alike": (
        {"model_type": "qwen2_moe"},
        "under one of these names the weights would be another",
    ),
    "no family": ({"model_type": None}, "an architecture that pe_lab does not compute. .*gemma.*smollm3"),
    "experts by name": ({"model_type": "gpt_oss"}, "architecture that pe_lab does not compute: it has experts"),
    "latent attention": ({"model_type": "deepseek_v3"}, "it has multi-head latent attention"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
    "soft caps": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8"),
    "no size": ({"hidden_size": None}, "hidden_size is missing; it must be a whole number"),
    "a size as text": ({"vocab_size": "64"}, "vocab_size is '64'; it must be a whole number"),
    "a size as truth": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "no layers": ({"num_hidden_layers": 0}, "layers is 0"),
    "odd heads": ({"head_dim": 7}, "head_dim is 7; it must be even"),
    "heads that do not divide": ({"num_attention_heads": 5}, "does not divide into 5 heads"),
    "groups that do not divide": ({"num_key_value_heads": 3}, "kv_heads must divide heads"),
    "an epsilon as text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    "no epsilon": ({"rms_norm_eps": None}, "rms_norm_eps is null"),
    "another activation": ({"hidden_act": "relu6"}, "hidden_act is 'relu6', a function that pe_lab does not compute"),
    "an activation with a name alike": ({"hidden_act": "quick_gelu"}, "with one of these it would be another model"),
    "an activation of another family": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and LlamaForCausalLM has silu"),
    "an activation that is no text": ({"hidden_act": ["silu"]}, "hidden_act is"),
    "partial heads": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; .* rotates whole heads"),
    "a pattern of length 0": (
        {"model_type": "smollm3", "no_rope_layer_interval": 0},
        "no_rope_layers None with interval 0",
    ),
    "a short pattern": ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
    "a pattern that is none": ({"model_type": "smollm3", "no_rope_layers": 1}, "no_rope_layers 1 with interval 4"),
    "unknown kinds of layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
        "linear_attention",
    ),
    "too few kinds of layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types has 1 entries for 4 layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_left_out_or_guessed_is_refused(case):
    edits, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        read_config({"model_type": "llama"} | SIZES | edits, (), "config.json")
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("name", NAMES)
def test_a_number_of_layers_is_checked_before_anything_is_made_for_each(name):
    config = json.loads((DATA / name / "config.json").read_text("utf-8"))
    config.pop("layer_types", None)
    config[FAMILIES[config["model_type"]].keys["layers"].name] = 2**31
    with pytest.raises(UserError, match="model.layers is 2147483648; it must be at most 2,048"):
        read_config(config, (), "config.json")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"rope_theta": 7.0}, r"rope_theta is 7.0, and rope_parameters.full_attention has"),
        ({"rope_local_base_freq": 7.0}, r"rope_local_base_freq is 7.0, and rope_parameters.sliding_attention has"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling.rope_type is 'yarn', and .* has 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, r"rope_scaling.factor is 3.0, and .* has 4.0"),
    ],
)
def test_flat_keys_that_contradict_those_by_type_of_layers_are_refused(edits, message):
    config = json.loads((DATA / "gemma3" / "config.json").read_text())
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    nested = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    agreeing = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    config |= {"rope_parameters": nested, **agreeing}
    read_config(config, (), "config.json")
    with pytest.raises(UserError, match=message):
        read_config(config | edits, (), "config.json")


# Our own key, in an exported config.json.
LLAMA = complete(ModelConfig(vocab_size=64, layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, tie_embeddings=False))


def exported(encoding, family="llama", model=LLAMA, length=256):
    config, layout = write_config(
        FAMILIES[family], model, (Layer(encoding),) * model.layers, WriteOptions(length), "float32"
    )
    return json.loads(json.dumps(config)), layout


def test_our_own_names_come_back_while_the_other_keys_agree():
    config, _ = exported(Rope(500.0, 0.5))  # written as LongRoPE's table
    found = read_config(config, (), "c")
    assert found.layers == (Layer(Rope(500.0, 0.5)),) * 2 and found.training_length == 256
    config, _ = exported(Rope(500.0, 1.0, NTK(4.0)))
    assert config["max_position_embeddings"] == 1024
    assert read_config(config, (), "c").training_length == 256  # which the keys of transformers do not say
    for scaling in (PI(4.0), Yarn(2.3, 256)):
        found = read_config(exported(Rope(500.0, 0.5, scaling))[0], (), "c")
        assert found.layers == (Layer(Rope(500.0, 0.5, scaling)),) * 2 and found.training_length == 256


@pytest.mark.parametrize("schema", ["rope_parameters", "old keys"])
def test_an_edit_by_hand_wins_over_our_own_names(schema):
    config, _ = exported(Rope(500.0))
    config["rope_theta"] = 700.0
    if schema == "rope_parameters":
        config["rope_parameters"]["rope_theta"] = 700.0
    else:
        del config["rope_parameters"]
    assert read_config(config, (), "c").layers == (Layer(Rope(700.0)),) * 2
    config, _ = exported(Rope(500.0, 1.0, Yarn(4.0, 256)))
    for key in ("rope_parameters", "rope_scaling"):
        config[key]["factor"] = 8.0
    assert read_config(config, (), "c").layers[0].encoding.scaling.factor == 8.0
    smollm3, _ = exported(Rope(500.0), "smollm3")
    assert read_config(smollm3 | {"no_rope_layers": [1, 0]}, (), "c").layers == (Layer(Rope(500.0)), Layer(NoPE()))
    windowed = smollm3 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    assert read_config(windowed, (), "c").layers == (Layer(Rope(500.0), 8),) * 2


@pytest.mark.parametrize(
    "named",
    [
        Layer(Rope(500.0), logit_scale=2.0),
        Layer(Rope(500.0), heads=(HeadEdit((0,), NoPE()),)),
        Layer(Rope(501.0)),
        Layer(Rope(500.0), window=8),
        "no layer",
        {"encoding": {"kind": "rope", "bas": 1}},
    ],
)
def test_our_own_key_says_nothing_that_the_others_do_not(named):
    config, _ = exported(Rope(500.0))
    config["pe_lab"]["kinds"] = [to_json(named) if isinstance(named, Layer) else named]
    assert read_config(config, (), "c").layers == (Layer(Rope(500.0)),) * 2
    bare, _ = exported(NoPE())
    bare["pe_lab"]["kinds"] = [to_json(Layer(Alibi()))]
    assert read_config(bare, (), "c").layers == (Layer(NoPE()),) * 2


@pytest.mark.parametrize(
    "key", [{}, [], None, {"kinds": []}, {"kinds": 3, "layers": [0]}, {"kinds": [], "layers": [5, 5]}]
)
def test_a_damaged_key_of_our_own_is_passed_over(key):
    config, _ = exported(Rope(500.0))
    assert read_config(config | {"pe_lab": key}, (), "c").layers == (Layer(Rope(500.0)),) * 2
    config["pe_lab"]["training_length"] = "long"
    assert read_config(config, (), "c").training_length == 256


def test_a_table_of_partial_heads_covers_the_channels_that_rotate():
    """A stretch that no yarn of transformers says, where heads may rotate in part, and elsewhere."""
    model = read("gpt_neox").model
    for scaling in (None, NTKByParts(1.1, 1001)):
        config, written = exported(PartialRope(10000.0, 0.25, scaling), "gpt_neox", model)
        assert written == read_config(config, (), "c").layout == Layout("half", 2)
    assert len(config["rope_scaling"]["short_factor"]) == 1 and config["rotary_pct"] == 0.25
    config, written = exported(PartialRope(10000.0, 0.25, NTKByParts(1.1, 1001)))
    assert len(config["rope_scaling"]["short_factor"]) == 4 and written == Layout()


def test_edits_of_a_real_directory_change_what_is_computed(tmp_path):
    tokens, expected = golden("llama")
    for n, edit in enumerate(
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rms_norm_eps": 0.5},
            {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": None},
        )
    ):
        directory = copy_of("llama", tmp_path / str(n), **edit)
        assert abs(logits(open_checkpoint(directory), tokens) - expected).max() > 0.01, edit
    rope = {"rope_type": "default", "rope_theta": 500.0}
    edit_config(
        directory,
        rope_scaling=None,
        rope_parameters=rope,
        use_cache=False,
        transformers_version="4.0",
        torch_dtype="float64",
    )
    assert abs(logits(open_checkpoint(directory), tokens) - expected).max() <= 2e-4
    assert HuggingFaceSource(directory).model == HuggingFaceSource(DATA / "llama").model
