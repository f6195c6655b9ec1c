"""Every committed model of transformers: its logits, its bytes through a round trip, and that mistakes are felt."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from checkpoints.external import DATA, NAMES, as_array, copy_of, golden, logits, read_file, read_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.checkpoints import huggingface
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.families import FAMILIES, LEAVES, Fused, Leaf, leaf_shapes
from pe_lab.checkpoints.gguf.architectures import TENSORS
from pe_lab.checkpoints.hf_export import plan_export, write_huggingface
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.config import LayerShape, ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import complete
from pe_lab.positional import CANONICAL, Layer, Layout, LearnedPositions, LearnedSink, NoPE, frequencies

TOLERANCE = 2e-5


def difference(directory, name) -> float:
    tokens, expected = golden(name)
    return float(np.abs(logits(open_checkpoint(f"hf:{directory}"), tokens) - expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    assert difference(DATA / name, name) <= TOLERANCE


WITH_4 = [name for name in NAMES if (DATA / name / "config.v4.json").is_file()]


@pytest.mark.parametrize("name", WITH_4)
def test_the_config_of_transformers_4_says_the_same(name, tmp_path):
    now = HuggingFaceSource(DATA / name)
    old = json.loads((DATA / name / "config.v4.json").read_text())
    assert "rope_parameters" not in old
    (copy_of(name, tmp_path / name) / "config.json").write_text(json.dumps(old))
    then = HuggingFaceSource(tmp_path / name)
    for field in ("model", "layers", "training_length", "_layout", "family"):
        assert getattr(then, field) == getattr(now, field), field


@pytest.mark.parametrize("name", NAMES)
def test_in_and_out_and_in_changes_no_byte(name, tmp_path):
    source = HuggingFaceSource(DATA / name)
    export = plan_export(source, source.family.model_type)
    write_huggingface(source, export, tmp_path)
    theirs, ours = read_tensors(DATA / name), read_tensors(tmp_path)
    assert ours.keys() == theirs.keys()
    assert [key for key in theirs if ours[key] != theirs[key]] == []
    again = HuggingFaceSource(tmp_path)
    assert (again.model, again.training_length) == (source.model, source.training_length)
    assert again.layers == source.layers and again.dtype == source.dtype
    if name in ("olmo3", "gemma4", "gemma4_shared"):  # transformers 4.56 has none
        return
    # And either schema alone is enough: transformers 4 reads the keys without rope_parameters.
    config = json.loads((tmp_path / "config.json").read_text())
    for absent in (("rope_parameters", "pe_lab"), ("rope_scaling", "rope_theta", "pe_lab")):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in absent}))
        one = HuggingFaceSource(tmp_path)
        assert one._layout == source._layout
        for a, b in zip(one.layers, source.layers, strict=True):
            assert a.window == b.window
            for length in (None, 16, 17, 4096):
                for x, y in zip(
                    *(frequencies(la.encoding, source.model.head_dim, length) for la in (a, b)), strict=True
                ):
                    np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-25)


@pytest.mark.slow  # 3 s
def test_shards_are_filled_in_order_and_indexed(tmp_path, monkeypatch):
    from pe_lab.checkpoints import hf_export

    limit = 8192  # bytes of the embedding, of two projections of queries, or of four of keys
    monkeypatch.setattr(hf_export, "SHARD_BYTES", limit)
    source = HuggingFaceSource(DATA / "llama")
    write_huggingface(source, plan_export(source), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (
        files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)] and len(files) > 3
    )
    assert sorted(set(index["weight_map"].values())) == files
    # Greedily: no file has space for the next file's first tensor, and one that is full to the last byte is used.
    sizes = [[len(data) for _, _, data in read_file(tmp_path / name).values()] for name in files]
    assert all(sum(size) + after[0] > limit >= sum(size) for size, after in itertools.pairwise(sizes))
    assert limit in map(sum, sizes[1:])
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in read_tensors(tmp_path).values())
    assert read_tensors(tmp_path) == read_tensors(DATA / "llama")
    assert difference(tmp_path, "llama") <= TOLERANCE


# Mistakes that load and run: (model, leaf, what it is mistaken for).
def _heads_inside_out(leaf: Leaf) -> Leaf:
    """Channels before heads, where a row is [head, channel]."""
    return dataclasses.replace(leaf, to_native=lambda x, s: x.reshape(s[2], s[1], s[0]).transpose(2, 1, 0))


def _rows_shifted(leaf: Leaf) -> Leaf:
    return dataclasses.replace(leaf, to_native=lambda x, s: np.roll(leaf.to_native(x, s), 1, axis=-1))


@pytest.mark.parametrize(
    "leaf, mistake",
    [
        ("attention.query", _heads_inside_out),
        ("attention.key", _heads_inside_out),
        ("attention.value", _heads_inside_out),
        ("attention.query", _rows_shifted),
        ("attention.out", _rows_shifted),
        ("mlp.up", _rows_shifted),
    ],
)
def test_a_wrong_permutation_is_felt(leaf, mistake, monkeypatch):
    monkeypatch.setitem(LEAVES, leaf, mistake(LEAVES[leaf]))
    assert difference(DATA / "llama", "llama") > 0.1


@pytest.mark.parametrize("name, layout", [("llama", Layout("interleaved")), ("gpt_neox", CANONICAL)])
def test_a_wrong_layout_is_felt(name, layout, monkeypatch):
    read = huggingface.read_config
    monkeypatch.setattr(huggingface, "read_config", lambda *a: dataclasses.replace(read(*a), layout=layout))
    assert difference(DATA / name, name) > 0.01


def swapped(table, one, other):
    modules = {**table.modules, one: table.modules[other], other: table.modules[one]}
    return dataclasses.replace(table, modules=modules)


@pytest.mark.parametrize(
    "name, tensors",
    [
        ("llama", ("model.layers.{n}.mlp.gate_proj", "model.layers.{n}.mlp.up_proj")),
        ("llama", ("model.layers.{n}.self_attn.k_proj", "model.layers.{n}.self_attn.v_proj")),
        ("qwen3", ("model.layers.{n}.self_attn.k_norm", "model.layers.{n}.self_attn.q_norm")),
        ("llama", ("model.embed_tokens", "lm_head")),
    ],
)
def test_swapped_names_are_felt(name, tensors, monkeypatch):
    family = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, dataclasses.replace(family, tensors=swapped(family.tensors, *tensors)))
    assert difference(DATA / name, name) > 0.01


def test_the_order_of_a_fused_tensor_is_felt(monkeypatch):
    family = FAMILIES["gpt_neox"]
    names = {
        name: Fused(leaf.paths[::-1], leaf.how) if isinstance(leaf, Fused) else leaf
        for name, leaf in family.tensors.modules.items()
    }
    table = dataclasses.replace(family.tensors, modules=names)
    monkeypatch.setitem(FAMILIES, "gpt_neox", dataclasses.replace(family, tensors=table))
    assert difference(DATA / "gpt_neox", "gpt_neox") > 0.1


def shape_of(family: str, heads: int, groups: int, head_dim: int) -> ModelConfig:
    """A model of a family with every leaf that its table can have."""
    fixed = {} if family == "gguf" else FAMILIES[family].one_value
    biased = {key: True for key in ("attention_bias", "output_bias", "mlp_bias") if family == "gguf"}
    if family != "gguf":
        biased = {key: True for key in ("attention_bias", "output_bias", "mlp_bias") if key in FAMILIES[family].keys}
    more = {"llama_drope": {"qk_norm": "flat"}, "stablelm": {"qk_norm": "layer_heads"}, "falcon": {"block": "parallel"}}
    full = LayerShape("full", (1,), head_dim + 2, groups, values_are_keys=True)
    more["gemma4_text"] = {"per_layer_input": 3, "layer_shapes": (full,)}
    shape = dict(vocab_size=10, layers=2, d_model=6, d_ff=7, heads=heads * groups, kv_heads=groups, head_dim=head_dim)
    model = ModelConfig(**shape, tie_embeddings=False, **{**fixed, **biased, **more.get(family, {})})
    if family not in ("gguf", "bloom", "gpt2", "gpt_neox", "gptj", "mpt", "opt"):
        return complete(model)
    return complete(dataclasses.replace(model, kv_heads=model.heads if family != "gguf" else groups))


@settings(max_examples=15)
@given(
    family=st.sampled_from([*FAMILIES, "gguf"]),
    heads=st.integers(1, 3),
    groups=st.integers(1, 2),
    half=st.integers(1, 4),
    pairs=st.sampled_from(["half", "interleaved"]),
    rotated=st.integers(0, 4),
)
def test_split_and_join_undo_each_other(family, heads, groups, half, pairs, rotated):
    model = shape_of(family, heads, groups, 2 * half)
    table = TENSORS if family == "gguf" else FAMILIES[family].table(model)
    extra = {"granite_swa": LearnedSink(), "gpt2": LearnedPositions(5), "opt": LearnedPositions(5, 2)}.get(family)
    tensors = table.tensors(model, (Layer(NoPE(), extras=(extra,) if extra else ()),) * 2)
    rotated = 2 * min(rotated, half) if pairs == "half" or rotated else None
    layout = Layout(pairs, rotated)
    if model.qk_norm in ("flat", "layer_heads"):
        layout = CANONICAL  # a norm over all heads has no channels of one
    seen = set()
    for tensor in tensors:
        array = np.arange(np.prod(tensor.shape), dtype=np.float32).reshape(tensor.shape)
        seen |= {(path, tensor.index) for path in tensor.paths}
        if tensor.row is not None:  # of a leaf of several tensors
            leaf = np.zeros(tensor.shapes[0], np.float32)
            leaf[tensor.row] = array
            assert tensor.join([leaf], layout).tobytes() == array.tobytes()
            continue
        pieces = [tensor.split(array, path, layout) for path in tensor.paths]
        assert [piece.shape for piece in pieces] == list(tensor.shapes)
        assert sorted(np.concatenate([p.ravel() for p in pieces])) == sorted(array.ravel())  # nothing lost, or twice
        assert tensor.join(pieces, layout).tobytes() == array.tobytes()
    leaves = leaf_shapes(model, (Layer(NoPE(), extras=(extra,) if extra else ()),) * 2)
    places = {path: [None] if at is None else range(len(at)) for path, (_, at) in leaves.items()}
    assert seen == {(path, n) for path, those in places.items() for n in those}


def test_a_family_without_names_for_a_leaf_says_which():
    model = shape_of("qwen3", 2, 1, 4)
    with pytest.raises(UserError, match=r"no tensors for layers.attention.key_norm.scale, layers.attention.query_norm"):
        TENSORS.changed(without=("blk.{n}.attn_q_norm", "blk.{n}.attn_k_norm")).tensors(model)


def test_the_committed_weights_are_where_the_table_says():
    """One leaf looked up by hand, for the stacking and the transposition."""
    source = HuggingFaceSource(DATA / "llama")
    tensors = read_tensors(DATA / "llama")
    theirs = as_array(tensors["model.layers.1.self_attn.k_proj.weight"])
    ours = source.read("layers.attention.key", 1)
    for group in range(2):
        for channel in range(8):
            assert (ours[:, group, channel] == theirs[group * 8 + channel]).all()
    rows = source.read("token_embedder.embedding", rows=slice(3, 9))
    assert (rows == as_array(tensors["model.embed_tokens.weight"])[3:9]).all()
