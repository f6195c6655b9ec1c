"""Damaged external files: each gives one message, before anything is computed or written."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from checkpoints.external import as_array, copy_of, edit_config, golden, logits, read_file, write_tensors

from pe_lab.checkpoints.checkpoint import open_checkpoint, open_source
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.convert import main
from pe_lab.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def change(directory, edit):
    tensors = read_file(directory / SINGLE)
    edit(tensors)
    write_tensors(directory / SINGLE, tensors)


def holding(value, name="model.layers.1.mlp.up_proj.weight"):
    def edit(tensors):
        array = as_array(tensors[name]).copy()
        array[2, 3] = value
        tensors[name] = (*tensors[name][:2], array.tobytes())

    return lambda directory: change(directory, edit)


def truncated(share):
    """Cut within the header's length, the header, its end, or the weights."""

    def cut(directory):
        raw = (directory / SINGLE).read_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        at = {"empty": 0, "length": 5, "header": header // 2, "no weights": header, "a byte": len(raw) - 1}[share]
        (directory / SINGLE).write_bytes(raw[:at])

    return cut


def index_of(directory, edit):
    index = json.loads((directory / INDEX).read_text())
    edit(index)
    (directory / INDEX).write_text(json.dumps(index))


def first_elsewhere(index):
    name = min(index["weight_map"])
    index["weight_map"][name] = next(f for f in index["weight_map"].values() if f != index["weight_map"][name])


def only_pickles(directory):
    os.rename(directory / SINGLE, directory / "pytorch_model.bin")


def empty(directory):
    for file in directory.iterdir():
        file.unlink()


def repeated(name, scale=1.0):
    """lm_head beside the embedding it is tied to."""

    def edit(tensors):
        kind, shape, data = tensors["model.embed_tokens.weight"]
        tensors[name] = (kind, shape, (as_array((kind, shape, data)) * scale).astype(np.float32).tobytes())

    return lambda directory: change(directory, edit)


def in_float64(value):
    def edit(tensors):
        array = as_array(tensors["model.norm.weight"]).astype(np.float64)
        array[3] = value
        tensors["model.norm.weight"] = ("F64", [32], array.tobytes())

    return edit


def another_type(tensors):
    name = "model.norm.weight"
    tensors[name] = ("I8", [32], bytes(32))


BROKEN = {
    **{
        f"truncated: {where}": ("llama", truncated(where), "truncated, or not safetensors")
        for where in ("empty", "length", "header", "no weights", "a byte")
    },
    "a shard that is not there": (
        "llama_sharded",
        lambda d: (d / "model-00003-of-00004.safetensors").unlink(),
        "lists 'model-00003-of-00004.safetensors', which do not exist",
    ),
    "a truncated shard": (
        "llama_sharded",
        lambda d: os.truncate(d / "model-00002-of-00004.safetensors", 4000),
        "model-00002-of-00004.safetensors is truncated",
    ),
    "a tensor that is elsewhere": (
        "llama_sharded",
        lambda d: index_of(d, first_elsewhere),
        "lists 'lm_head.weight', which are in other files",
    ),
    "an index of nothing": ("llama_sharded", lambda d: index_of(d, dict.clear), "has no weight_map"),
    "an index of numbers": (
        "llama_sharded",
        lambda d: index_of(d, lambda index: index["weight_map"].update({"lm_head.weight": 4})),
        "has no weight_map",
    ),
    **{
        f"an index that leads out: {where}": (
            "llama_sharded",
            lambda d, where=where: index_of(d, lambda index: index["weight_map"].update({"lm_head.weight": where})),
            f"lists '{where}', which lie outside of its directory",
        )
        for where in ("../other/model.safetensors", "/etc/model.safetensors", "a/../../model.safetensors")
    },
    "an index that is no JSON": (
        "llama_sharded",
        lambda d: (d / INDEX).write_text("{"),
        "is damaged: it holds no JSON object",
    ),
    "NaN": ("llama", holding(np.nan), "'model.layers.1.mlp.up_proj.weight' has 1 of 1,536 values that are NaN"),
    "infinity": ("llama", holding(-np.inf, "lm_head.weight"), "'lm_head.weight' has 1 of 2,048 values"),
    "float64 beyond float32": (
        "llama",
        lambda d: change(d, in_float64(1e300)),
        "'model.norm.weight' has 1 of 32 values beyond float32",
    ),
    "NaN in a fused tensor": (
        "gpt_neox",
        holding(np.nan, "gpt_neox.layers.0.attention.query_key_value.weight"),
        "'gpt_neox.layers.0.attention.query_key_value.weight' has 1 of",
    ),
    "a tensor missing": (
        "llama",
        lambda d: change(d, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")),
        "lacks 'model.layers.1.self_attn.k_proj.weight', which LlamaForCausalLM has",
    ),
    "a tensor left over": (
        "llama",
        lambda d: change(d, lambda t: t.update({"model.layers.2.extra": ("F32", [1], bytes(4))})),
        "has 'model.layers.2.extra', which LlamaForCausalLM does not know",
    ),
    "biases left over": (
        "llama_bias",
        lambda d: edit_config(d, attention_bias=False),
        "layers.0.self_attn.o_proj.bias.*does not know",
    ),
    "a layer left over": ("llama", lambda d: edit_config(d, num_hidden_layers=1), "layers.1.*does not know"),
    "a norm left over": (
        "qwen3",
        lambda d: edit_config(d, model_type="llama"),
        "k_norm.*LlamaForCausalLM does not know",
    ),
    "another shape": (
        "llama",
        lambda d: edit_config(d, intermediate_size=40),
        r"'model.layers.0.mlp.gate_proj.weight' has shape \[48, 32\], and config.json gives \[40, 32\]",
    ),
    "a transposed tensor": (
        "llama",
        lambda d: change(d, lambda t: t.update({"lm_head.weight": ("F32", [32, 64], t["lm_head.weight"][2])})),
        r"'lm_head.weight' has shape \[32, 64\]",
    ),
    "another type": ("llama", lambda d: change(d, another_type), "has weights of type I8"),
    "tied and yet not": (
        "llama",
        lambda d: edit_config(d, tie_word_embeddings=True),
        "has tie_word_embeddings, and 'lm_head.weight' differs from 'model.embed_tokens.weight'",
    ),
    "untied without a head": ("gemma", lambda d: edit_config(d, tie_word_embeddings=False), "lacks 'lm_head.weight'"),
    "pickles": ("llama", only_pickles, "pytorch_model.bin, a pickle. Save it as safetensors first"),
    "no weights": ("llama", lambda d: (d / SINGLE).unlink(), "has neither model.safetensors nor"),
    "an empty directory": ("llama", empty, r"There is no '.*config.json'"),
    "a config that is no JSON": (
        "llama",
        lambda d: (d / "config.json").write_text("{,"),
        "is damaged: it holds no JSON object",
    ),
    "a config that is no text": ("llama", lambda d: (d / "config.json").write_bytes(b"\xff\xfe{"), "is damaged"),
    "a config that is a list": ("llama", lambda d: (d / "config.json").write_text("[]"), "holds no JSON object"),
    "an unknown family": (
        "llama",
        lambda d: edit_config(d, model_type="mamba"),
        "'mamba', an architecture that pe_lab",
    ),
    "quantized": ("llama", lambda d: edit_config(d, quantization_config={"bits": 4}), "quantization_config is"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damage_is_one_message_and_leaves_nothing(case, tmp_path, capsys):
    name, damage, message = BROKEN[case]
    directory = copy_of(name, tmp_path / "theirs")
    damage(directory)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(f"hf:{directory}")
    assert "\n" not in str(caught.value)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    for to in (tmp_path / "ours", f"hf:{tmp_path / 'exported'}"):
        assert main([f"--from=hf:{directory}", f"--to={to}", "--parity=off"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and len(err.splitlines()) == 1 and "Traceback" not in err
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_head_that_repeats_the_embedding_is_accepted(tmp_path):
    directory = copy_of("gemma", tmp_path / "same")
    repeated("lm_head.weight")(directory)
    tokens, expected = golden("gemma")
    assert np.abs(logits(open_checkpoint(directory), tokens) - expected).max() <= 2e-4
    other = copy_of("gemma", tmp_path / "other")
    repeated("lm_head.weight", 1.001)(other)
    with pytest.raises(UserError, match="'lm_head.weight' differs"):
        HuggingFaceSource(other)


def test_buffers_of_old_files_are_passed_over(tmp_path):
    buffers = {
        "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias"),
        "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"),
    }
    for name, found in buffers.items():
        directory = copy_of(name, tmp_path / name)
        change(directory, lambda tensors, found=found: tensors.update({b: ("F32", [1], bytes(4)) for b in found}))
        tokens, expected = golden(name)
        assert np.abs(logits(open_checkpoint(directory), tokens) - expected).max() <= 2e-4


def test_a_single_file_counts_before_an_index(tmp_path):
    """As for transformers: an index that was left behind says nothing."""
    directory = copy_of("llama", tmp_path / "both")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    assert HuggingFaceSource(directory).model.layers == 2


def test_mixed_types_are_read_as_float32(tmp_path):
    directory = copy_of("llama", tmp_path / "mixed")

    def edit(tensors):
        for name, tensor in tensors.items():
            if "proj" in name:
                tensors[name] = ("BF16", tensor[1], as_array(tensor).astype(ml_dtypes.bfloat16).tobytes())

    change(directory, edit)
    source = HuggingFaceSource(directory)
    assert source.dtype == np.float32
    tokens, expected = golden("llama")  # whose weights are bfloat16's in any type
    assert np.abs(logits(open_checkpoint(directory), tokens) - expected).max() <= 2e-4


def test_addresses_that_lead_nowhere_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no directory 'nowhere', and it is no repository ORG/NAME.*by hand"):
        open_source("hf:nowhere")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="huggingface_hub, which could download it, is not installed.*Place its files"):
        open_source("hf:org/name")
    with pytest.raises(UserError, match="There is no GGUF file"):
        open_source("gguf:nothing.gguf")
    with pytest.raises(UserError, match="There is no checkpoint at"):
        open_source("runs/nothing")
