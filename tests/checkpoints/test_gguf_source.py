"""GGUF files, written here as llama.cpp's converter and gguf-split write them."""

import os

import gguf
import numpy as np
import pytest
from checkpoints.external import DATA, as_array, golden, logits, read_tensors

from pe_lab import load
from pe_lab.checkpoints import source
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.gguf.source import GgufSource
from pe_lab.convert import main
from pe_lab.errors import UserError
from pe_lab.positional import PI, Layer, LongRope, NoPE, Rope, Yarn, frequencies

KIND = gguf.GGMLQuantizationType
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Of tests/data/hf/llama; the other models differ where stated.
SHAPE = {
    "llama.block_count": 2,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 256,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 500.0,
    "llama.attention.layer_norm_rms_epsilon": 0.02,
}
WIDE = SHAPE | {
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 100.0,
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first half of a head goes to 2i, of the second half to 2i + 1: llama.cpp's LlamaModel.permute."""
    width = rows.shape[0] // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(width // 2):
            out[head * width + 2 * i] = rows[head * width + i]
            out[head * width + 2 * i + 1] = rows[head * width + width // 2 + i]
    return out


def tensors_of(name: str, heads: int, groups: int) -> dict[str, np.ndarray]:
    found = {}
    for key, tensor in read_tensors(DATA / name).items():
        array = as_array(tensor).astype(np.float32)
        stem, _, what = key.rpartition(".")
        if stem.startswith("model.layers."):
            layer, _, stem = stem.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{layer}."
        else:
            prefix = ""
        if stem in ("self_attn.q_proj", "self_attn.k_proj"):
            array = permuted(array, heads if stem.endswith("q_proj") else groups)
        found[f"{prefix}{NAMES[stem]}.{what}"] = array
    return found


def write(path, tensors, fields=SHAPE, kind="F32", architecture="llama", norms="F32"):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, array in tensors.items():
        # Rows that no block divides stay as they are, as the converter has it.
        this = norms if array.ndim == 1 else kind
        if KIND[this] not in (KIND.F32, KIND.F16):
            block = gguf.GGML_QUANT_SIZES[KIND[this]][0]
            this = this if array.shape[-1] % block == 0 else "F16"
        if array.dtype == np.float64:
            writer.add_tensor(name, array)
        elif this in ("F32", "F16"):
            writer.add_tensor(name, array.astype(np.float32 if this == "F32" else np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(array, KIND[this]), raw_dtype=KIND[this])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def difference(path, name) -> float:
    tokens, expected = golden(name)
    return float(np.abs(logits(open_checkpoint(f"gguf:{path}"), tokens) - expected).max())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_weights_that_are_not_quantized_give_the_logits_of_transformers(kind, tmp_path):
    path = write(tmp_path / "model.gguf", tensors_of("llama", 4, 2), kind=kind)
    assert difference(path, "llama") <= 2e-4
    opened = GgufSource(path)
    assert str(opened.dtype) == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind]
    assert opened.model.norm_epsilon == 0.02 and opened.training_length == 256
    assert opened.layers == (Layer(Rope(500.0)),) * 2


def test_a_file_without_a_vocabulary_is_a_model_without_a_tokenizer(tmp_path, capsys):
    path = write(tmp_path / "model.gguf", tensors_of("llama", 4, 2), SHAPE | {"tokenizer.ggml.model": "no_vocab"})
    assert GgufSource(path).tokenizer == ""
    tokens, expected = golden("llama")
    lm = load(f"gguf:{path}")
    assert lm.tokenizer is None
    np.testing.assert_allclose(lm.logits(tokens), expected, atol=2e-4)
    assert main([f"--from=gguf:{path}", f"--to={tmp_path / 'ours'}", "--parity=off"]) == 0
    assert "It has no tokenizer" in capsys.readouterr().out


def test_norms_in_bfloat16_too(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", tensors_of("llama", 4, 2), kind="BF16", norms="BF16")
    assert difference(path, "llama") <= 2e-4
    monkeypatch.setattr(source, "ROW_BYTES", 500)
    assert difference(path, "llama") <= 2e-4


def test_the_permutation_is_felt(tmp_path):
    tensors = tensors_of("llama", 4, 2)
    tensors["blk.0.attn_k.weight"] = permuted(tensors["blk.0.attn_k.weight"], 2)
    assert difference(write(tmp_path / "model.gguf", tensors), "llama") > 0.01


def test_tied_embeddings_and_biases(tmp_path):
    tied = write(tmp_path / "tied.gguf", tensors_of("llama_tied_bf16", 4, 2), kind="BF16")
    assert GgufSource(tied).model.tie_embeddings and difference(tied, "llama_tied_bf16") <= 2e-4
    biased = write(tmp_path / "biased.gguf", tensors_of("llama_bias", 4, 2))
    assert GgufSource(biased).model.output_bias and difference(biased, "llama_bias") <= 2e-4
    fields = SHAPE | {"llama.attention.key_length": 12, "llama.rope.dimension_count": 12}
    assert (
        difference(write(tmp_path / "wide.gguf", tensors_of("llama_head_dim", 4, 2), fields), "llama_head_dim") <= 2e-4
    )


@pytest.mark.parametrize("kind, error", [("Q8_0", 0.05), ("Q4_0", 0.7)])
def test_quantized_weights_are_what_gguf_multiplies_out(kind, error, tmp_path):
    tensors = tensors_of("llama", 4, 2)
    path = write(tmp_path / "quantized.gguf", tensors, kind=kind)
    rounded = {
        name: gguf.dequantize(gguf.quantize(array, KIND[kind]), KIND[kind])
        if array.ndim == 2 and array.shape[1] % 32 == 0
        else array
        for name, array in tensors.items()
    }
    rounded |= {name: array.astype(np.float16).astype(np.float32) for name, array in tensors.items() if "down" in name}
    plain = write(tmp_path / "plain.gguf", rounded)
    tokens, expected = golden("llama")
    found, same = (logits(open_checkpoint(str(p)), tokens) for p in (path, plain))
    assert (found == same).all()
    assert 0 < np.abs(found - expected).mean() < error
    assert GgufSource(path).dtype == np.float32


SCALED = {
    "llama_linear": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "llama_yarn": {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
        "llama.context_length": 64,
    },
    "llama_nope": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e30},
}


@pytest.mark.parametrize("name", SCALED)
def test_scalings_in_the_metadata(name, tmp_path):
    path = write(tmp_path / "model.gguf", tensors_of(name, 2, 1), WIDE | SCALED[name])
    assert difference(path, name) <= 2e-4
    found = GgufSource(path)
    assert found.training_length == (16 if name == "llama_yarn" else 256)
    assert (found.layers[0] == Layer(NoPE())) == (name == "llama_nope")


@pytest.mark.parametrize("name", ["llama_llama3", "llama_longrope"])
def test_frequencies_divided_by_a_tensor(name, tmp_path):
    tensors, fields = tensors_of(name, 2, 1), dict(WIDE)
    theirs = open_checkpoint(f"hf:{DATA / name}").layers[0].encoding
    full = frequencies(Rope(100.0), 16)[0]
    if name == "llama_llama3":
        tensors["rope_freqs.weight"] = (full / frequencies(theirs, 16)[0]).astype(np.float32)
    else:
        for which in ("short", "long"):
            tensors[f"rope_factors_{which}.weight"] = np.float32(getattr(theirs.scaling, f"{which}_factor"))
        fields |= {
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.original_context_length": 16,
            "llama.rope.scaling.attn_factor": float(frequencies(theirs, 16)[1][0]),
            "llama.context_length": 64,
        }
    assert difference(write(tmp_path / "model.gguf", tensors, fields), name) <= 2e-4


def rope_of(tmp_path, fields, tensors=None):
    found = GgufSource(write(tmp_path / "model.gguf", tensors or tensors_of("llama", 4, 2), SHAPE | fields))
    return found.layers[0].encoding


def test_scalings_as_llama_cpp_reads_them(tmp_path):
    """llama.cpp takes a type that is not there for linear, knows an older key, and ignores a factor under `none`."""
    key = "llama.rope.scaling"
    assert rope_of(tmp_path, {f"{key}.factor": 4.0}) == Rope(500.0, 1.0, PI(4.0))
    assert rope_of(tmp_path, {"llama.rope.scale_linear": 2.0}) == Rope(500.0, 1.0, PI(2.0))
    assert rope_of(tmp_path, {f"{key}.type": "none", f"{key}.factor": 4.0}) == Rope(500.0)
    assert rope_of(tmp_path, {f"{key}.type": "linear"}) == Rope(500.0)
    yarn = {f"{key}.type": "yarn", f"{key}.factor": 4.0, f"{key}.original_context_length": 64}
    betas = {f"{key}.yarn_beta_fast": 32.0, f"{key}.yarn_beta_slow": 1.0}
    assert rope_of(tmp_path, yarn | betas) == Rope(500.0, 1.0, Yarn(4.0, 64))
    with pytest.raises(UserError, match="yarn_beta_fast and yarn_beta_slow are 8 and 1, which llama.cpp ignores"):
        rope_of(tmp_path, yarn | betas | {f"{key}.yarn_beta_fast": 8.0})
    tables = {f"rope_factors_{which}.weight": np.ones(4, np.float32) for which in ("short", "long")}
    found = rope_of(tmp_path, {f"{key}.type": "longrope"}, tensors_of("llama", 4, 2) | tables)
    assert isinstance(found.scaling, LongRope) and frequencies(found, 8)[1][0] == 1.0  # no factor given is none


def test_logits_are_not_compared_where_transformers_ignores_the_scaling(tmp_path, monkeypatch, capsys):
    """/bin/true can "import" all packages, and computes no logits."""
    monkeypatch.setattr("pe_lab.data.tokenizers.load_tokenizer", lambda where: None)
    factors = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e30}
    path = write(tmp_path / "model.gguf", tensors_of("llama", 4, 2), SHAPE | factors)
    assert main([f"--from=gguf:{path}", f"--to={tmp_path / 'ours'}", "--parity-python=/bin/true"]) == 0
    assert "Logits not compared: transformers ignores the rope scaling of a GGUF file." in capsys.readouterr().out


def without(key):
    return lambda tensors, fields: (tensors, {k: v for k, v in fields.items() if k != key})


def saying(**more):
    return lambda tensors, fields: (tensors, fields | {f"llama.{k.replace('__', '.')}": v for k, v in more.items()})


def with_tensor(name, array):
    return lambda tensors, fields: (tensors | {name: array}, fields)


def lacking(name):
    return lambda tensors, fields: ({k: v for k, v in tensors.items() if k != name}, fields)


ONE = np.ones(4, np.float32)
BROKEN = {
    "no layers": (without("llama.block_count"), "block_count is missing"),
    "no heads": (without("llama.attention.head_count"), "attention.head_count is missing"),
    "experts": (saying(expert_count=8), "mixture of 8 experts"),
    "part of a head": (saying(rope__dimension_count=4), "4 of 8 channels rotate"),
    "an unknown scaling": (saying(rope__scaling__type="su"), "rope scaling 'su' is unknown"),
    "another scale of logits": (saying(attention__scale=0.5), "llama.attention.scale is 0.5"),
    "windows": (saying(attention__sliding_window=8), "llama.attention.sliding_window is 8"),
    "yarn of another strength": (
        saying(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__yarn_attn_factor=0.5),
        "yarn_attn_factor is 0.5",
    ),
    "a strength that is no number": (saying(rope__scaling__attn_factor="x"), "attn_factor is 'x'; it must be a number"),
    "another shape": (
        saying(feed_forward_length=40),
        r"'blk.0.ffn_gate.weight' has shape \[48, 32\], and its metadata gives \[40, 32\]",
    ),
    "more layers": (saying(block_count=3), "lacks 'blk.2"),
    "too many layers": (saying(block_count=2**31), "layers is 2147483648; it must be at most 2,048"),
    "fewer layers": (saying(block_count=1), "has 'blk.1.*which pe_lab does not know"),
    "no embedding": (lacking("token_embd.weight"), "has no tensor 'token_embd.weight'"),
    "a tensor missing": (lacking("blk.1.attn_v.weight"), "lacks 'blk.1.attn_v.weight"),
    "a tensor left over": (with_tensor("blk.0.ssm.weight", ONE), "has 'blk.0.ssm.weight', which pe_lab does not know"),
    "one of two tables": (
        with_tensor("rope_factors_long.weight", ONE),
        "rope_factors_long.weight: an unknown combination",
    ),
    "a table and a factor": (
        lambda t, f: (t | {"rope_freqs.weight": ONE}, f | {"llama.rope.scaling.factor": 2.0}),
        "linear by 2, its attention factor 1, its tables rope_freqs.weight: an unknown combination",
    ),
    "a table with NaN": (with_tensor("rope_freqs.weight", ONE * np.nan), "'rope_freqs.weight' has 4 of 4 values"),
    "a short table": (with_tensor("rope_freqs.weight", ONE[:3]), "has 3 numbers; 8 rotated channels need 4"),
    "float64 beyond float32": (
        with_tensor("output_norm.weight", np.full(32, 1e39)),
        "'output_norm.weight' has 32 of 32 values beyond float32",
    ),
    "NaN": (with_tensor("output_norm.weight", np.full(32, np.nan, np.float32)), "'output_norm.weight' has 32 of 32"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damage_is_one_message_and_leaves_nothing(case, tmp_path, capsys):
    edit, message = BROKEN[case]
    path = write(tmp_path / "model.gguf", *edit(tensors_of("llama", 4, 2), SHAPE))
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert_refused(path, tmp_path, capsys)


def assert_refused(path, tmp_path, capsys):
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert main([f"--from=gguf:{path}", f"--to={tmp_path / 'ours'}", "--parity=off"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and "Traceback" not in err
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.03, 0.3, 0.9, 0.9999])
def test_a_truncated_file_says_so(share, tmp_path, capsys):
    path = write(tmp_path / "model.gguf", tensors_of("llama", 4, 2))
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(UserError, match="truncated|not a GGUF file") as caught:
        GgufSource(path)
    assert "\n" not in str(caught.value)
    assert_refused(path, tmp_path, capsys)


def test_other_files_and_architectures(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(UserError, match="is not a GGUF file: it does not begin with GGUF"):
        GgufSource(path)
    assert_refused(path, tmp_path, capsys)
    write(path, {}, {}, architecture="qwen3moe")
    with pytest.raises(UserError, match="the architecture is 'qwen3moe'; pe_lab reads qwen2, llama.* from"):
        GgufSource(path)


def split(directory, parts=3):
    """The files of a split model, by the gguf package."""
    tensors = tensors_of("llama", 4, 2)
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama", split_max_tensors=-(-len(tensors) // parts))
    for key, value in SHAPE.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(directory.glob("*.gguf"))
    assert [file.name for file in files] == [f"model-{n:05}-of-{parts:05}.gguf" for n in range(1, parts + 1)]
    return files


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_split_model_is_read_by_any_of_its_files(given, tmp_path):
    files = split(tmp_path)
    assert difference(files[given], "llama") <= 2e-4
    assert GgufSource(files[given]).path == files[0]


def test_a_split_model_with_a_file_that_is_missing_or_misplaced(tmp_path, capsys):
    first, second, third = split(tmp_path)
    third.rename(tmp_path / "third")
    with pytest.raises(UserError, match="one of 3 files, of which 'model-00003-of-00003.gguf' are missing"):
        GgufSource(first)
    assert_refused(second, tmp_path, capsys)
    third.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match="00003-of-00003.gguf says that it is file 2 of 3, and its name says 3 of 3"):
        GgufSource(first)
    third.write_bytes((tmp_path / "third").read_bytes())
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(UserError, match="names end in -00001-of-00003.gguf"):
        GgufSource(tmp_path / "renamed.gguf")


QUANTS = np.load(DATA.parent / "gguf_quants_golden.npz")  # by tests/data/make_gguf_quants_golden.py, with ggml


@pytest.mark.parametrize("kind", [name.removesuffix("_bytes") for name in QUANTS if name.endswith("_bytes")])
def test_every_format_gives_the_numbers_of_ggml(kind, tmp_path):
    """The embedding of a model of 256 channels, and one that gguf does not know."""
    eye, ones = np.zeros((256, 256), np.float32), np.ones(256, np.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    fields = {"block_count": 1, "embedding_length": 256, "feed_forward_length": 256, "attention.head_count": 1}
    for key, value in fields.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", QUANTS[f"{kind}_bytes"], raw_dtype=KIND[kind])
    for name in NAMES.values():
        if not name.startswith(("token", "output")):
            writer.add_tensor(f"blk.0.{name}.weight", ones if "norm" in name else eye)
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(tmp_path / "model.gguf")
    if kind == "Q1_0":
        with pytest.raises(UserError, match="is Q1_0, which gguf cannot dequantize"):
            source.read("token_embedder.embedding")
        return
    np.testing.assert_array_equal(source.read("token_embedder.embedding"), QUANTS[f"{kind}_numbers"])
    np.testing.assert_array_equal(
        source.read("token_embedder.embedding", rows=slice(1, 2)), QUANTS[f"{kind}_numbers"][1:]
    )
