"""Which architecture says which model, what is folded, what is fixed, and what is refused with the nearest."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoints.external import Memory, logits

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.families import FAMILIES, TensorTable
from pe_lab.checkpoints.forms import choose_form
from pe_lab.checkpoints.hf_export import plan_export, write_huggingface
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.checkpoints.runtimes import RUNTIMES, fails
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import complete
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Beta,
    DynamicNTK,
    DynamicYarn,
    HeadEdit,
    Layer,
    LongRope,
    NoPE,
    PartialRope,
    Rope,
    Yarn,
)
from pe_lab.positional.notebook import NotebookBias, NotebookYarn

LLAMA = ModelConfig(
    vocab_size=64, layers=4, d_model=32, d_ff=48, heads=4, kv_heads=2, tie_embeddings=False, dtype="float32"
)
GEMMA = dataclasses.replace(
    LLAMA, norm="rms_plus_one", activation="gelu_tanh", embedding_multiplier=32**0.5, tie_embeddings=True
)
NEOX = dataclasses.replace(
    LLAMA,
    kv_heads=4,
    norm="layer",
    activation="gelu",
    gated_mlp=False,
    block="parallel",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 40)).astype(np.int32)


def with_(model=LLAMA, **fields):
    return dataclasses.replace(model, **fields)


def layers(*encodings, **fields):
    return tuple(Layer(encodings[n % len(encodings)], **fields) for n in range(4))


def config_of(model, stack, family=None, length=256):
    return chosen(model, stack, family and FAMILIES[family], length).config


def chosen(model, stack, family=None, length=256, runtimes=()):
    return choose_form(complete(model), stack, WriteOptions(length), "float32", family, runtimes)[0]


CHOSEN = {
    "plain": (LLAMA, layers(Rope()), "llama"),
    "dropped": (LLAMA, layers(NoPE()), "llama"),
    "biases everywhere": (with_(attention_bias=True, output_bias=True, mlp_bias=True), layers(Rope()), "smollm3"),
    "stretched": (LLAMA, layers(Rope(scaling=Yarn(4.0, 256))), "llama"),
    "windows": (LLAMA, layers(Rope(), window=8), "granite_swa"),
    "windows here and there": (LLAMA, (Layer(Rope(), 8), Layer(Rope())) * 2, "granite_swa"),
    "bare layers": (LLAMA, layers(Rope(), Rope(), Rope(), NoPE()), "smollm3"),
    "windows and bare layers": (LLAMA, (Layer(Rope(), 8), Layer(NoPE())) * 2, "granite_swa"),
    "windows on bare layers alone": (LLAMA, layers(NoPE(), window=8), "granite_swa"),
    "a norm of heads": (with_(qk_norm="head"), layers(Rope()), "qwen3"),
    "a norm of heads, dropped": (with_(qk_norm="head"), layers(NoPE()), "qwen3"),
    "a norm of heads and windows": (with_(qk_norm="head"), (Layer(Rope(), 8), Layer(Rope())) * 2, "qwen3"),
    "bias on queries, keys, values": (with_(attention_bias=True), layers(Rope()), "qwen2"),
    "that with windows": (with_(attention_bias=True), layers(Rope(), window=8), "qwen2"),
    "gemma": (GEMMA, layers(Rope()), "gemma"),
    "neox": (NEOX, layers(PartialRope()), "gpt_neox"),
    "a base per layer": (LLAMA, layers(Rope(), Rope(500.0), NoPE()), "granite_swa"),
    "bases and windows": (LLAMA, (Layer(Rope(), 8), Layer(Rope(500.0))) * 2, "granite_swa"),
    "heads that do not divide the width": (with_(heads=5, kv_heads=5, head_dim=8), layers(Rope()), "smollm3"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_architecture_that_says_it_all_is_chosen(case):
    model, stack, family = CHOSEN[case]
    assert chosen(model, stack).family.model_type == family
    assert config_of(model, stack)["architectures"] == [FAMILIES[family].architecture]


REFUSED = {
    "alibi": (LLAMA, layers(Alibi()), r"Alibi, which this architecture does not have. Nearest: rope, or no .*\(drop\)"),
    "notebook yarn": (LLAMA, layers(NotebookYarn()), "NotebookYarn, which this arch.*Nearest: rope"),
    "notebook bias": (LLAMA, layers(NotebookBias()), "NotebookBias, which this arch.*Nearest: rope"),
    "edited heads": (
        LLAMA,
        layers(Rope(), heads=(HeadEdit((0,), NoPE()),)),
        r"layer 0 has heads that differ \(1 edits\).*Nearest: the same layer with one encoding",
    ),
    "two rotations": (
        LLAMA,
        layers(Rope(), Rope(scaling=Yarn(4.0, 256))),
        r"one rotation, and these layers have .*Yarn(.|\n)*granite_swa: its layers differ in their base alone",
    ),
    "two windows": (LLAMA, (Layer(Rope(), 8), Layer(Rope(), 16)) * 2, "one size of windows, and these .* have 8, 16"),
    "a flat norm": (with_(qk_norm="flat"), layers(Rope()), "Nearest: surgery --add-qk-norm=head, which Qwen3 has"),
    "a norm of queries": (with_(qk_norm="query_head"), layers(Rope()), "Nearest: surgery --add-qk-norm=head"),
    "a flat norm of queries": (with_(qk_norm="query_flat"), layers(Rope()), "Nearest: surgery --add-qk-norm=head"),
    "bare layers under a norm": (
        with_(qk_norm="head"),
        layers(Rope(), NoPE()),
        "qwen3: it rotates on all layers or on none",
    ),
    "bare layers in gemma": (GEMMA, layers(Rope(), NoPE()), "gemma: it rotates on all layers or on none"),
    "windows in neox": (NEOX, layers(Rope(), window=8), "gpt_neox, falcon: it has no sliding windows"),
    "dynamic yarn": (LLAMA, layers(Rope(scaling=DynamicYarn(256))), "no dynamic YaRN. Nearest.*--length"),
    "bias on the output alone": (with_(output_bias=True), layers(Rope()), "together, or on none"),
    "a parallel llama": (with_(block="parallel"), layers(Rope()), "block is 'parallel', not 'pre_norm'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_architecture_says_is_refused_with_the_nearest(case):
    model, stack, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        chosen(model, stack)


def test_an_architecture_that_is_asked_for_says_why_it_cannot():
    def refused(model, stack, family):
        with pytest.raises(UserError) as caught:
            config_of(model, stack, family)
        return str(caught.value)

    assert "qk_norm is 'head', not 'none'" in refused(with_(qk_norm="head"), layers(Rope()), "llama")
    bare = refused(LLAMA, layers(Rope(), NoPE()), "llama")
    assert "llama cannot express these layers: it rotates on all layers or on none, and here 2 of 4" in bare
    assert "without encoding: drop it" in refused(with_(qk_norm="flat"), layers(Rope()), "llama_drope")
    assert "kv_heads is 2, not heads 4" in refused(with_(NEOX, kv_heads=2), layers(Rope()), "gpt_neox")
    assert "attention_bias is False, not True" in refused(LLAMA, layers(Rope()), "qwen2")
    source = Memory(LLAMA, layers(Rope()))
    with pytest.raises(UserError, match="--family 'lama' is not known. Did you mean 'llama'"):
        plan_export(source, family="lama")


def test_keys_that_would_be_another_vocabularys_are_written_empty():
    """SmolLM3's padding id is 128004 by default: torch refuses it in a smaller embedding."""
    config = config_of(LLAMA, layers(Rope(), NoPE()))
    assert config["model_type"] == "smollm3"
    assert all(config[f"{name}_token_id"] is None for name in ("pad", "bos", "eos"))


def test_what_the_keys_say_layer_by_layer():
    config = config_of(LLAMA, (Layer(Rope(500.0), 8), Layer(NoPE())) * 2, "smollm3")
    assert config["no_rope_layers"] == [1, 0, 1, 0] and config["sliding_window"] == 8 and config["use_sliding_window"]
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    dropped = config_of(with_(qk_norm="head"), layers(NoPE()))
    assert dropped["rope_scaling"]["short_factor"] == [1e30] * 4 and not dropped["use_sliding_window"]
    drope = config_of(with_(qk_norm="flat"), layers(NoPE()), "llama_drope")
    assert drope["attention_type"] == "qk_norm_nope" and drope["model_type"] == "llama_drope"
    assert config_of(LLAMA, layers(NoPE()), "llama_drope")["attention_type"] == "nope"
    for model in (LLAMA, GEMMA, NEOX):
        written = config_of(with_(model, norm_epsilon=1.2345678901234567e-5), layers(Rope(123456.78901234567)))
        text = json.loads(json.dumps(written))
        assert text.get("rms_norm_eps", text.get("layer_norm_eps")) == 1.2345678901234567e-5
        assert text["rope_theta"] == 123456.78901234567  # to the last digit


def written(source, tmp_path, **options):
    export = plan_export(source, **options)
    write_huggingface(source, export, tmp_path)
    return open_checkpoint(f"hf:{tmp_path}"), export


SCALED = {
    "with biases": with_(attention_bias=True, output_bias=True),
    "with a norm": with_(qk_norm="head"),
    "neox": NEOX,
}


@pytest.mark.parametrize("case", SCALED)
def test_a_constant_scale_is_folded_and_computes_the_same(case, tmp_path):
    stack = tuple(Layer(Rope(500.0), logit_scale=scale) for scale in (1.0, 1.5, 0.7, 1.5))
    source = Memory(SCALED[case], stack)
    found, export = written(source, tmp_path)
    assert all(layer.logit_scale == 1 for layer in found.layers)
    expected = logits(source.checkpoint(), TOKENS)
    np.testing.assert_allclose(logits(found, TOKENS), expected, atol=1e-4)
    # And it does something: without the scale they differ.
    unscaled = dataclasses.replace(source.checkpoint(), layers=layers(Rope(500.0)))
    assert np.abs(logits(unscaled, TOKENS) - expected).max() > 1e-3
    where = "q_norm's weight" if case == "with a norm" else r"q_proj (weight and bias)"
    assert export.notes[1:] == (f"Logit scale 0.7, 1.5 folded into {where} of 3 layers.",)


def test_a_scale_that_follows_the_length_is_fixed_or_refused(tmp_path):
    source = Memory(LLAMA, layers(NoPE(), logit_scale=Beta(0.4, 16)))
    with pytest.raises(
        UserError, match=r"layer 0 scales its logits by 1 \+ 0.4 ln\(n / 16\).*Nearest.*--length=TOKENS"
    ):
        plan_export(source)
    found, export = written(source, tmp_path, length=40)
    assert "its value at 40 tokens" in export.notes[1]
    # 40 tokens are read with what beta is at 40 tokens.
    constant = layers(NoPE(), logit_scale=Beta(0.4, 16).at(40))
    expected = logits(dataclasses.replace(source.checkpoint(), layers=constant), TOKENS)
    np.testing.assert_allclose(logits(found, TOKENS), expected, atol=1e-4)


RAMP = tuple(np.linspace(1, 3, 4))
FOLLOWING = {
    "dynamic yarn": Rope(100.0, scaling=DynamicYarn(16, beta_fast=2.0, beta_slow=0.25)),
    "dynamic ntk": Rope(500.0, scaling=DynamicNTK(16, 2.0)),
    "p-rope that follows": Rope(500.0, 0.5, DynamicNTK(16)),
    "longrope": Rope(500.0, scaling=LongRope((1.0,) * 4, RAMP, 16, 4.0)),
    "p-rope by tables": Rope(500.0, 0.5, LongRope((1.0,) * 4, RAMP, 16, 4.0)),
}


@pytest.mark.parametrize("case", FOLLOWING)
def test_length_fixes_what_follows_it(case, tmp_path):
    source = Memory(LLAMA, layers(FOLLOWING[case]))
    found, export = written(source, tmp_path, length=40)
    assert export.notes[1:] == ("Encodings that depend on the length are written for 40 tokens.",)
    expected = logits(source.checkpoint(), TOKENS)
    np.testing.assert_allclose(logits(found, TOKENS), expected, atol=1e-4)
    # Fixed: a short text is read with the same frequencies.
    short = dataclasses.replace(found, layers=found.layers)
    np.testing.assert_allclose(logits(short, TOKENS[:, :8]), expected[:, :8], atol=1e-4)


OTHERS = {
    "partial in llama": (LLAMA, PartialRope(500.0, 0.5)),
    "partial in neox": (NEOX, PartialRope(500.0, 0.5)),
    "partial, stretched, in neox": (NEOX, PartialRope(500.0, 0.5, NTK(3.0))),
    "p-rope": (LLAMA, Rope(500.0, 0.5)),
    "ntk": (LLAMA, Rope(500.0, scaling=NTK(3.0))),
    "pi in gemma": (GEMMA, Rope(500.0, scaling=PI(2.0))),
    "nope in neox": (NEOX, NoPE()),
}


LIKE_OTHERS = ("partial in llama", "partial, stretched, in neox", "ntk", "nope in neox")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in LIKE_OTHERS)) for case in OTHERS]
)
def test_encodings_under_other_names_compute_the_same(case, tmp_path):
    model, encoding = OTHERS[case]
    source = Memory(model, layers(encoding))
    found, _ = written(source, tmp_path)
    expected = logits(source.checkpoint(), TOKENS)
    np.testing.assert_allclose(logits(found, TOKENS), expected, atol=1e-4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "pe_lab"}))
    np.testing.assert_allclose(logits(open_checkpoint(tmp_path), TOKENS), expected, atol=1e-4)


@pytest.mark.slow  # 3 s
def test_numbers_that_do_not_fit_are_refused(tmp_path):
    source = Memory(LLAMA, layers(Rope()))
    source.arrays["token_embedder.embedding"][3, 4] = 1e6
    with pytest.raises(UserError, match="'model.embed_tokens.weight' does not fit into float16.*Choose bfloat16"):
        written(source, tmp_path, dtype="float16")
    found, _ = written(source, tmp_path, dtype="bfloat16")
    assert found.params["token_embedder"]["embedding"][3, 4] == 999424.0  # the nearest that 8 bits have
    source.arrays["token_embedder.embedding"][3, 4] = np.finfo(np.float32).max
    with pytest.raises(UserError, match="does not fit into bfloat16.*Choose float32"):
        written(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(UserError, match="written as int8; give --dtype, one of float32"):
        plan_export(source, dtype="int8")


def test_a_refusal_names_the_checkpoint(monkeypatch):
    with pytest.raises(UserError, match="^memory: No architecture of transformers can express this model"):
        plan_export(Memory(LLAMA, layers(Alibi())))
    table = TensorTable({k: v for k, v in FAMILIES["llama"].tensors.modules.items() if "mlp.up" not in k})
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], tensors=table))
    with pytest.raises(UserError, match="^memory: LlamaForCausalLM has no tensors for layers.mlp.up"):
        plan_export(Memory(LLAMA, layers(Rope())), "llama")


FORMS = {
    "dropped, for llama.cpp's converter": (layers(NoPE()), ("transformers", "llama.cpp"), "llama", "linear"),
    "dropped, for servers": (layers(NoPE()), ("vLLM", "SGLang"), "llama", "longrope"),
    "dropped, for all": (layers(NoPE()), tuple(RUNTIMES), "phi3", "longrope"),
    "stretched, for all": (layers(Rope(scaling=Yarn(4.0, 256))), tuple(RUNTIMES), "llama", "yarn"),
    "windows, for all": (layers(Rope(), window=8), tuple(RUNTIMES), "granite_swa", None),
    "windows, for transformers alone": (layers(Rope(), window=8), ("transformers",), "smollm3", None),
}


@pytest.mark.parametrize("case", FORMS)
def test_the_form_is_one_that_all_named_runtimes_compute_right(case):
    stack, runtimes, family, kind = FORMS[case]
    form = chosen(LLAMA, stack, runtimes=runtimes)
    assert not [name for name in runtimes if fails(form.reasons[name])]
    assert (form.family.model_type, (form.config["rope_parameters"])["rope_type"]) == (family, kind or "default")


def test_a_form_that_a_runtime_computes_otherwise_is_refused_with_the_nearest():
    windows = (Layer(Rope(), 8), Layer(Rope())) * 2
    with pytest.raises(UserError) as caught:
        chosen(with_(qk_norm="head"), windows, runtimes=("transformers", "SGLang"))
    assert str(caught.value).splitlines() == [
        "No form of this model is right in transformers, SGLang:",
        "  qwen3: SGLang: wrong: it has no windows in these models",
        "Nearest: qwen3, --for=transformers.",
    ]
    with pytest.raises(UserError, match=r"Nearest: qwen3, --for=transformers.\n.*--to=gguf:FILE"):
        chosen(with_(qk_norm="head"), windows, runtimes=("transformers", "llama.cpp"))


def test_the_choice_is_explained():
    def why(model, stack, origin=""):
        return choose_form(complete(model), stack, WriteOptions(256), "float32", origin=origin)[1]

    assert why(GEMMA, layers(Rope())) == "--family=auto: gemma (the only architecture that can express it)."
    assert why(LLAMA, layers(Rope(), Rope(), Rope(), NoPE())) == (
        "--family=auto: smollm3 (3 of transformers, vLLM, SGLang read it right; granite_swa can express it too). "
        "Not llama: it rotates on all layers or on none, and here 1 of 4 are without."
    )
    windows = (Layer(Rope(), 8), Layer(NoPE())) * 2
    assert why(LLAMA, windows, "smollm3").startswith("--family=auto: smollm3 (as the weights came; granite_swa can")


def test_weights_go_out_as_the_family_that_they_came_from():
    """SGLang computes the windows of SmolLM3 otherwise; `--for=sglang` is what asks for another architecture."""
    windows = (Layer(Rope(), 8), Layer(NoPE())) * 2
    source = Memory(LLAMA, windows)
    assert plan_export(source).family.model_type == "granite_swa"
    source.origin = "smollm3"
    assert plan_export(source).family.model_type == "smollm3"
    assert plan_export(source, runtimes=("SGLang",)).family.model_type == "granite_swa"
    source.layers = layers(Rope(), Rope(500.0))  # which SmolLM3 has not
    assert plan_export(source).family.model_type == "granite_swa"
