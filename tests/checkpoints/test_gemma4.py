"""Gemma 4: what its files may say beside the committed ones, and models whose layers differ in shape. 15 s."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints.external import DATA, copy_of, edit_config, golden, logits, read_tensors, write_tensors

import pe_lab
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.hf_export import plan_export
from pe_lab.checkpoints.huggingface import HuggingFaceSource
from pe_lab.config import LayerShape, ModelConfig, OptimizerConfig, from_dict, to_json
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError
from pe_lab.model import Model, complete, model_schedule
from pe_lab.model.programs import ChunkedForward
from pe_lab.model.shape import Repetition, check_schedule, repetitions
from pe_lab.positional import ForgettingGate, Layer, PartialRope, Rope, drop
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import init_state, train_step

TOLERANCE = 2e-5


def test_published_keys_say_the_same(tmp_path):
    """Google's files have a key for layers without a window; transformers 5.23 writes each layer's sizes."""
    for name, own in (("gemma4", dict(num_global_key_value_heads=1)), ("gemma4_shared", {})):
        there = copy_of(name, tmp_path / name, per_layer_config=..., global_head_dim=16, **own)
        assert HuggingFaceSource(there).model == HuggingFaceSource(DATA / name).model
    model = HuggingFaceSource(DATA / "gemma4").model
    assert model.layer_shapes == (LayerShape("full", (1, 3), 16, 1, values_are_keys=True),)
    shared = HuggingFaceSource(DATA / "gemma4_shared").model
    assert [(one.name, one.layers, one.keys_of, one.d_ff) for one in shared.layer_shapes] == [
        ("full", (2,), -1, 0),
        ("shared", (3,), 1, 64),
        ("shared_full", (4,), 2, 64),
    ]


def test_keys_of_layers_that_do_not_use_them_are_ignored(tmp_path):
    """Published files have them, and transformers does not read them."""
    there, tensors = copy_of("gemma4_shared", tmp_path / "it"), read_tensors(DATA / "gemma4_shared")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = tensors[f"model.layers.1.self_attn.{name}.weight"]
    write_tensors(there / "model.safetensors", tensors)
    tokens, expected = golden("gemma4_shared")
    np.testing.assert_allclose(logits(open_checkpoint(f"hf:{there}"), tokens), expected, atol=TOLERANCE)
    tensors["model.layers.2.self_attn.extra.weight"] = tensors["model.layers.1.self_attn.k_norm.weight"]
    write_tensors(there / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="extra"):
        HuggingFaceSource(there)


def test_the_text_of_a_model_with_images(tmp_path):
    """As transformers 5.23 saves Gemma4ForConditionalGeneration."""
    there, tensors = copy_of("gemma4_shared", tmp_path / "it"), read_tensors(DATA / "gemma4_shared")
    whole = {f"model.language_model.{name.removeprefix('model.')}": one for name, one in tensors.items()}
    whole["model.vision_tower.patch_embedder.input_proj.weight"] = whole["model.language_model.norm.weight"]
    write_tensors(there / "model.safetensors", whole)
    text = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    source, (tokens, expected) = HuggingFaceSource(there), golden("gemma4_shared")
    assert source.note.startswith("The text alone: 1 tensor")
    np.testing.assert_allclose(logits(open_checkpoint(f"hf:{there}"), tokens), expected, atol=TOLERANCE)
    (there / "config.json").write_text(json.dumps({"model_type": "gemma4"}))
    with pytest.raises(CheckpointError, match="no text_config"):
        HuggingFaceSource(there)


@pytest.mark.parametrize(
    "edit, message",
    [
        (dict(enable_moe_block=True), "enable_moe_block is True"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention is 'all'"),
        (dict(vocab_size_per_layer_input=32), "vocab_size_per_layer_input is 32, and vocab_size 64"),
        (dict(per_layer_config={"1": {"intermediate_size": 7}}), "per_layer_config"),
        (dict(num_kv_shared_layers=4), "is 4, and no other layer has layer 2's type"),
        (dict(layer_types=["full_attention"] * 4 + ["sliding_attention"]), "last of layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(edit, message, tmp_path):
    there = copy_of("gemma4_shared", tmp_path / "it")
    edit_config(there, **edit)
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        HuggingFaceSource(there)


def test_an_export_needs_windows_where_the_shapes_are():
    source = HuggingFaceSource(DATA / "gemma4")
    source.layers = tuple(dataclasses.replace(layer, window=None) for layer in source.layers)
    with pytest.raises(UnsupportedError, match=r"without a window are those of another shape, \[1, 3\]"):
        plan_export(source, "gemma4_text")


def test_an_export_has_no_tables():
    """transformers 5.23 fails on them where layers differ in head size."""
    source = HuggingFaceSource(DATA / "gemma4")
    table = PartialRope(500.0, 0.5)
    source.layers = tuple(one if one.window else dataclasses.replace(one, encoding=table) for one in source.layers)
    with pytest.raises(UnsupportedError, match=r"transformers fails on tables .* Nearest: p-RoPE"):
        plan_export(source, "gemma4_text")


def test_readers_of_keys_need_the_encoding_of_their_source():
    lm = pe_lab.load(f"hf:{DATA / 'gemma4_shared'}")
    with pytest.raises(ConfigError, match="Layer 3 attends to the keys of layer 1, which has another encoding"):
        lm.with_positional(drop([3])).logits(golden("gemma4_shared")[0])
    both = lm.with_positional(drop([1, 3]))
    assert np.isfinite(both.logits(golden("gemma4_shared")[0])).all()
    with pytest.raises(ConfigError, match="acts on keys by"):
        lm.with_positional(ForgettingGate()).logits(golden("gemma4_shared")[0])


@pytest.mark.slow  # 7 s
@pytest.mark.parametrize("name", ["gemma4", "gemma4_shared"])
def test_decoding_with_a_cache_is_that_of_a_whole_pass(name):
    """5 s: past the windows of 8 tokens."""
    lm, (tokens, _) = pe_lab.load(f"hf:{DATA / name}"), golden(name)
    found = np.asarray(lm.generate([int(t) for t in tokens[0, :13]], max_new_tokens=14))
    whole = np.concatenate([tokens[0, :13], found])[None]
    np.testing.assert_array_equal(np.asarray(lm.logits(whole))[0, 12:-1].argmax(-1), found)


@pytest.mark.slow
def test_repeated_readers_of_keys_compute_in_a_scan_what_they_do_unrolled():
    """25 s: losses, gradients under both remat policies, and chunks; and training that keeps the scales of layers."""
    sizes = dict(vocab_size=64, layers=8, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=8, dtype="float32")
    full, shared = (LayerShape("full", (1, 3), 16, 1), LayerShape("shared", (4, 6), d_ff=96, keys_of=2))
    shapes = (full, shared, LayerShape("shared_full", (5, 7), 16, 1, keys_of=3))
    config = complete(ModelConfig(**sizes, value_norm=True, layer_scale=True, per_layer_input=4, layer_shapes=shapes))
    schedule = model_schedule(config, [Layer(Rope(100.0), 8), Layer(Rope(500.0, 0.25))] * 4)
    assert repetitions(schedule.structure)[-1] == Repetition(4, 2, 2)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 40)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((2, 39), np.float32)}
    params, results = Model(config).init(jax.random.key(0)), []
    for scan, remat in ((True, "full"), (False, "none")):
        model = Model(dataclasses.replace(config, scan=scan, remat=remat))
        results.append(jax.jit(jax.value_and_grad(model.loss_sum))(params, batch, schedule))
        hidden = ChunkedForward(model.config, chunk=16).hidden(params, tokens, np.tile(np.arange(40), (2, 1)), schedule)
        whole = model.apply(params, jnp.asarray(tokens), None, None, schedule)
        np.testing.assert_allclose(model.logits(params, hidden), whole, atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(np.abs(b).max()) + 1e-6)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1, name="muon"), 3, model.axes)
    state = init_state(model, optimizer, jax.tree.map(np.array, params))
    for _ in range(2):
        state, _ = jax.jit(train_step, static_argnums=(0, 1, 2))(model, optimizer, 1, state, batch, schedule)
    for shape, stack in state.params["layers"]["shapes"].items():
        before = params["layers"]["shapes"][shape]
        np.testing.assert_array_equal(stack["layer_scale"], before["layer_scale"])
        assert not np.array_equal(stack["attention"]["query"], before["attention"]["query"])


def test_shapes_that_contradict_the_model_are_named():
    plain = ModelConfig(vocab_size=8, layers=4, d_model=16, d_ff=16, heads=2, kv_heads=1)
    for shape, message in (
        (LayerShape("base", (1,)), "another one than the others and 'base'"),
        (LayerShape("a", (4,)), "it has layer 4; the model has layers 0 to 3"),
        (LayerShape("a", (1,), head_dim=3), "must be even"),
        (LayerShape("a", (1, 2), keys_of=1), "must come before these layers"),
        (LayerShape("a", (2,), head_dim=4, keys_of=0), "equally many heads and channels"),
    ):
        with pytest.raises(ConfigError, match=message):
            complete(dataclasses.replace(plain, layer_shapes=(shape,)))
    config = dataclasses.replace(plain, layer_shapes=(LayerShape("a", (2, 3), d_ff=8),))
    assert from_dict(ModelConfig, json.loads(json.dumps(to_json(config)))) == config
    with pytest.raises(ConfigError, match="build its schedule with `model_schedule`"):
        check_schedule(complete(config), model_schedule(complete(plain), [Layer(Rope())] * 4))
