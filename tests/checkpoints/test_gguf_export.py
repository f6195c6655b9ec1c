"""GGUF files that pe_lab writes: what they hold, what is refused, what is left behind; test_gguf_out.py has them run.

Costs 40 s.
"""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
from checkpoints.external import DATA, NAMES, copy_of

from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.checkpoints.families import leaf_shapes
from pe_lab.checkpoints.gguf.export import plan_gguf, write_gguf
from pe_lab.checkpoints.gguf.gemma4 import read_kv_heads, read_shapes
from pe_lab.checkpoints.gguf.source import GgufSource
from pe_lab.config import LayerShape
from pe_lab.convert import main
from pe_lab.errors import CheckpointError, UserError
from pe_lab.positional import (
    NTK,
    PI,
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    frequencies,
)

BASE = 500.0
REFUSED = ("exaone4", "gptj", "granite_swa", "llama_drope", "llama_dynamic", "mpt", "opt", "phi3", "starcoder2")
# The other models of the llama family differ in their scaling alone.
OWN = ("llama_bias", "llama_head_dim", "llama_yarn")
SAME = [name for name in NAMES if name.startswith("llama_") and name not in OWN]
FOLDED = ("gemma2", "gemma3")  # have a scale of products that goes into the queries
SHAPES = {  # of Gemma 4's metadata
    "block_count": 3,
    "attention": {
        "key_length": 16, "key_length_swa": 8, "head_count_kv": [2, 1, 2], "shared_kv_layers": 0,
        "sliding_window_pattern": [True, False, True],
    },
    "feed_forward_length": 32,
    "tensors": {"without_values": [1]},
}  # fmt: skip


def test_shapes_of_gemma_4():
    full = LayerShape("full", (1,), 16, 1, values_are_keys=True)
    assert read_shapes(SHAPES) == (full,) and read_kv_heads(SHAPES) == 2
    shared = {**SHAPES["attention"], "shared_kv_layers": 1}
    wide = {**SHAPES, "attention": shared, "feed_forward_length": [32, 32, 64]}
    assert read_shapes(wide) == (full, LayerShape("shared", (2,), d_ff=64, keys_of=0))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("shared_kv_layers", 3, "shared_kv_layers is 3, of 3 layers"),
        ("shared_kv_layers", 2, "shared_kv_layers) is 2, and no other layer has layer 1's type"),
        ("head_count_kv", [2, 1], "it must be one int, or one for each of 3 layers"),
        ("sliding_window_pattern", [1, 0, 1], "it must be one bool, or one for each of 3 layers"),
        ("key_length", None, "key_length is missing"),
    ],
)
def test_shapes_of_gemma_4_that_cannot_be(key, value, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_shapes({**SHAPES, "attention": {**SHAPES["attention"], key: value}})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*REFUSED, *SAME)])
def test_a_file_holds_every_weight_and_encoding(name, tmp_path):
    source = open_source(f"hf:{DATA / name}")
    export = plan_gguf(source, "f32")
    write_gguf(source, export, tmp_path / "model.gguf", "model", {})
    found = GgufSource(tmp_path / "model.gguf")
    assert found.layers == source.layers and found.training_length == source.training_length
    for leaf, (_, at) in leaf_shapes(source.model, source.layers).items():
        if name in FOLDED and leaf.startswith("layers.attention.query"):
            continue
        for index in range(len(at)) if at is not None else [None]:
            ours, theirs = (np.asarray(one.read(leaf, index), np.float32) for one in (source, found))
            # Norms that multiply by 1 + w are stored as 1 + w.
            tolerance = 1e-6 if source.model.norm == "rms_plus_one" and leaf.endswith("norm.scale") else 0
            np.testing.assert_allclose(theirs, ours, atol=tolerance, rtol=0, err_msg=leaf)


def edited(base, *encodings):
    """A model with other encodings or layers, repeated over its layers."""
    source = open_source(f"hf:{DATA / base}")
    layers = [one if isinstance(one, Layer) else Layer(one) for one in encodings]
    source.layers = tuple(layers[n % len(layers)] for n in range(source.model.layers))
    return source


def fields_of(path):
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def test_what_the_metadata_and_the_divisors_say(tmp_path):
    """As llama.cpp reads them: base, type, factor, attn_factor, and one divisor for each pair."""
    yarn = 0.1 * np.log(4) + 1
    cases = {
        "ntk": (Rope(BASE, scaling=NTK(4)), {"freq_base": BASE * 4 ** (8 / 6)}, None),
        "pi": (Rope(BASE, scaling=PI(4)), {"scaling.type": "linear", "scaling.factor": 4}, None),
        "yarn": (
            Rope(BASE, scaling=Yarn(4, 16)),
            {"scaling.type": "yarn", "scaling.original_context_length": 16},
            None,
        ),
        "parts": (Rope(BASE, scaling=NTKByParts(4, 16)), {"scaling.attn_factor": 1 / yarn}, None),
        "factor": (Rope(BASE, scaling=Yarn(4, 16, attention_factor=1.3)), {"scaling.attn_factor": 1.3 / yarn}, None),
        "none": (NoPE(), {"scaling.type": "linear", "scaling.factor": 1e30}, None),
        "p": (Rope(BASE, 0.5), {"freq_base": BASE}, [1, 1, 1e30, 1e30]),
        "llama3": (Rope(BASE, scaling=Llama3(4, original_length=16)), {"freq_base": BASE}, ...),
        "betas": (Rope(BASE, scaling=Yarn(4, 16, 8, 0.25)), {"scaling.attn_factor": yarn, "scaling.type": "none"}, ...),
    }
    for name, (encoding, wanted, table) in cases.items():
        source = edited("llama", encoding)
        write_gguf(source, plan_gguf(source), tmp_path / f"{name}.gguf", name, {})
        fields = fields_of(tmp_path / f"{name}.gguf")
        for key, value in wanted.items():
            found = fields[f"llama.rope.{key}"]
            assert found == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6)), (name, key)
        tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
        assert ("rope_freqs.weight" in tensors) == (table is not None), name
        if table is not None:
            full = frequencies(Rope(BASE), 8)[0]
            inv_freq = frequencies(encoding, 8)[0] if table is ... else full / np.array(table)
            np.testing.assert_allclose(full / tensors["rope_freqs.weight"], inv_freq, rtol=1e-6, atol=1e-25)


def test_layers_that_differ_need_an_architecture_that_has_them():
    rope, bare = Rope(BASE), NoPE()
    assert plan_gguf(edited("smollm3", rope, rope, rope, bare)).plan.family.model_type == "smollm3"
    source = edited("smollm3", Layer(rope, 8), bare)
    export = plan_gguf(source)
    assert export.plan.family.model_type == "granite_swa" and "granite_swa" in export.notes[0]
    with pytest.raises(UserError, match="smollm3 cannot express these layers: it has no sliding windows"):
        plan_gguf(source, family="smollm3")
    source = edited("smollm3", rope, bare)
    with pytest.raises(UserError, match="but every fourth: layer 1 has no rotation, and would get one"):
        plan_gguf(source, family="smollm3")
    with pytest.raises(UserError, match="llama cannot .*: it rotates on all layers or on none: layer 1"):
        plan_gguf(source, family="llama")
    with pytest.raises(UserError, match=r"qwen3: No architecture of llama.cpp can express(.|\n)*would get one"):
        plan_gguf(edited("qwen3", rope, bare))


def test_encodings_that_no_key_has_are_refused_with_the_nearest():
    refused = {
        Rope(BASE, 0.5): "no divisors of single pairs for it, which Rope.* needs. Nearest: a larger base, PI or YaRN",
        Rope(BASE, scaling=Llama3(4, original_length=16)): "no divisors of single pairs",
        Rope(BASE, scaling=Yarn(4, 16, 8, 0.25)): "no divisors of single pairs",
    }
    for encoding, message in refused.items():
        with pytest.raises(UserError, match=message):
            plan_gguf(edited("qwen3", encoding))
    part = PartialRope(BASE, 0.5, Yarn(4, 16))
    with pytest.raises(UserError, match="one attention factor, .* only the rotary ones. Nearest: the same without"):
        plan_gguf(edited("llama", part), family="llama")
    two = Rope(BASE, scaling=LongRope((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 16, 4.0))
    export = plan_gguf(edited("llama", two))
    assert "long table for all tokens of a context (-c) of more than 16" in export.notes[0]


def test_number_formats(tmp_path, monkeypatch):
    source = open_source(f"hf:{DATA / 'llama_tied_bf16'}")
    sizes = {}
    for kind in (None, "f32", "f16", "bf16", "q8_0"):
        export = plan_gguf(source, kind)
        path = tmp_path / f"{kind}.gguf"
        write_gguf(source, export, path, "model", {})
        tensors = gguf.GGUFReader(path).tensors
        sizes[kind] = sum(tensor.n_bytes for tensor in tensors)
        assert export.size == sizes[kind]
        kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
        assert {name for name, one in kinds.items() if one == "F32"} >= {name for name in kinds if "norm" in name}
        assert kinds["blk.0.attn_q.weight"] == (kind or "bf16").upper()
        # 48 is no multiple of 32.
        assert kinds["blk.0.ffn_down.weight"] == ("F16" if kind == "q8_0" else (kind or "bf16").upper())
        assert fields_of(path)["general.file_type"] == {"f32": 0, "f16": 1, "q8_0": 7}.get(kind, 32)
        found = GgufSource(path)
        for leaf in ("layers.mlp.up", "layers.attention.query"):
            ours, theirs = (np.asarray(one.read(leaf, 1), np.float32) for one in (source, found))
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            wanted = gguf.dequantize(gguf.quantize(ours.T, q8_0), q8_0)
            if kind == "q8_0" and leaf == "layers.mlp.up":
                np.testing.assert_array_equal(theirs, wanted.T)
            elif kind != "q8_0":
                np.testing.assert_allclose(theirs, ours, rtol=2e-3 if kind == "f16" else 0, atol=1e-7)
    assert sizes[None] == sizes["bf16"] < sizes["f32"]
    read = source.read
    monkeypatch.setattr(source, "read", lambda *args, **options: 7e4 + 0 * read(*args, **options).astype(np.float32))
    with pytest.raises(UserError, match="'token_embd.weight' does not fit into float16"):
        write_gguf(source, plan_gguf(source, "f16"), tmp_path / "large.gguf", "model", {})


def test_tied_embeddings_are_written_twice_where_llama_cpp_wants_both(tmp_path):
    copy = copy_of("gpt_neox", tmp_path / "tied", tie_word_embeddings=True)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors.pop("embed_out.weight")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    source = open_source(f"hf:{copy}")
    export = plan_gguf(source)
    assert "The embedding is written twice: this architecture has no tied ones." in export.notes
    write_gguf(source, export, tmp_path / "model.gguf", "model", {})
    found = GgufSource(tmp_path / "model.gguf")
    head, embedding = (found.read(f"token_embedder.{name}") for name in ("unembedding", "embedding"))
    np.testing.assert_array_equal(head, embedding)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to=gguf:{to}:q4"], "ends in ':q4'; the number formats are f32, f16, bf16, q8_0"),
        (["--to=gguf:{to}", "--dtype=float16"], "--dtype goes with --to=hf:DIR; of a GGUF file it is a suffix"),
        (["--to=gguf:{to}", "--family=lama"], "--family 'lama' is not known. Did you mean 'llama'"),
        (["--to=gguf:{to}", "--family=qwen3"], "qwen3 cannot hold this model: qk_norm is 'none', not 'head'"),
        (["--to=gguf:{there}"], "exists. Remove it, or give another name"),
        (["--to=gguf:{there}/model.gguf"], "cannot be written"),
        (["--to=gguf:{to}", "--parity=require"], "--parity=require: llama_cpp are not installed"),
    ],
)
def test_a_bad_argument_is_one_message_and_leaves_nothing(arguments, message, tmp_path, capsys):
    there = tmp_path / "there.gguf"
    there.write_bytes(b"")
    given = [one.format(to=tmp_path / "model.gguf", there=there) for one in arguments]
    assert main([f"--from=hf:{DATA / 'llama'}", *given]) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("error: ") and len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"] and not there.stat().st_size


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, capsys):
    def fails(*args, **options):
        raise UserError("the weights are gone")

    monkeypatch.setattr("pe_lab.checkpoints.gguf.export.external", fails)
    assert main([f"--from=hf:{DATA / 'llama'}", f"--to=gguf:{tmp_path / 'model.gguf'}"]) == 2
    assert "the weights are gone" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    to = tmp_path / "new" / "model.gguf"
    assert main([f"--from=hf:{DATA / 'gemma2'}", f"--to=gguf:{to}:q8_0", "--parity=off"]) == 0
    out = capsys.readouterr().out
    assert "as llama.cpp's gemma2, q8_0, f32, f16" in out and "declared for 256 tokens" in out
    assert "Logit scale" in out and "folded into q_proj" in out and "written as f16" in out
    assert "It has no tokenizer" in out and "with its model card model.gguf.md" in out
    assert sorted(path.name for path in to.parent.iterdir()) == ["model.gguf", "model.gguf.md"]
