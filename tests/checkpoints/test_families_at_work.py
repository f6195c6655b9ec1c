"""Every family of transformers' checkpoints in use: in chunks, packed, edited, scored, trained on a mesh.

Slow: 15 s a family. The logits of whole sequences are those of transformers (test_family_tables.py), and cached
decoding is that of whole passes (tests/test_checkpoint_tables.py).
"""

import functools

import jax
import numpy as np
import pytest
from checkpoints.external import DATA, NAMES, golden

import pe_lab
from pe_lab.config import MeshConfig, OptimizerConfig
from pe_lab.evaluation.scoring.forward import Forward
from pe_lab.model import Model
from pe_lab.model.programs import ChunkedForward
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import Alibi, NoPE, Rope, drop, layer_hooks
from pe_lab.positional import layers as layers_of
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_train_step, init_state, make_shardings, place_batch, train_step

# One model of each family, and those whose blocks differ.
FAMILIES = [name for name in NAMES if not name.startswith("llama_") or name == "llama_drope"]
TOLERANCE = 2e-5  # of logits of size 1 to 10
T = 40  # tokens: five windows

of_family = pytest.mark.parametrize("name", FAMILIES)
pytestmark = pytest.mark.slow


@functools.lru_cache(maxsize=2)
def opened(name):
    return pe_lab.load(f"hf:{DATA / name}")


@of_family
def test_a_sequence_in_chunks_is_the_whole_pass(name):
    """4 s: prefilled in chunks of 16 tokens, the last one of 8."""
    lm, (tokens, expected) = opened(name), golden(name)
    reader = ChunkedForward(lm.config, chunk=16)
    params, schedule = lm.checkpoint.params, lm.schedule_for(T)
    for n in range(2):
        hidden = reader.hidden(params, tokens[n : n + 1], np.arange(T)[None], schedule)
        np.testing.assert_allclose(Model(lm.config).logits(params, hidden)[0], expected[n], atol=2.5 * TOLERANCE)


@of_family
def test_packed_documents_are_those_alone(name):
    """3 s: two documents of 24 and 16 tokens in one sequence, positions that begin anew."""
    lm, (tokens, _) = opened(name), golden(name)
    cut, schedule = 24, opened(name).schedule_for(24)
    model, params = Model(lm.config), lm.checkpoint.params
    at = np.concatenate([np.arange(cut), np.arange(T - cut)])[None].astype(np.int32)
    segments = np.repeat([1, 2], [cut, T - cut])[None].astype(np.int32)
    apply = jax.jit(model.apply)
    packed = apply(params, tokens[:1], at, segments, schedule)[0]
    for part in (slice(0, cut), slice(cut, T)):
        alone = apply(params, tokens[:1, part], None, None, schedule)[0]
        np.testing.assert_allclose(packed[part], alone, atol=TOLERANCE)


@of_family
def test_other_encodings_on_the_same_weights(name, tmp_path):
    """6 s: dropped and saved, and with a rotation, slopes and an own encoding instead."""
    lm, (tokens, expected) = opened(name), golden(name)
    dropped = lm.drop_positional()
    assert all(isinstance(layer.encoding, NoPE) for layer in dropped.layers)
    logits = np.asarray(dropped.logits(tokens))
    order = np.abs(logits - expected).max()
    assert order > 0.05 if name not in ("llama_drope",) else order <= TOLERANCE
    dropped.save(tmp_path / "dropped")
    saved = pe_lab.load(tmp_path / "dropped")
    np.testing.assert_allclose(np.asarray(saved.logits(tokens)), logits, atol=TOLERANCE)
    for encoding in (Rope(50.0), Alibi()):
        other = np.asarray(lm.with_positional(encoding).logits(tokens))
        assert np.isfinite(other).all() and np.abs(other - logits).max() > 0.05


@of_family
def test_scores_are_those_of_the_logits(name):
    """4 s: what evaluation measures, as written by sequence and device."""
    lm, (tokens, expected) = opened(name), golden(name)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    forward = Forward(lm.config)
    losses = forward.losses(forward.place(lm.checkpoint.params), batch, lm.layers)
    shifted = expected[:, :-1].astype(np.float64)
    log_sums = np.log(np.exp(shifted - shifted.max(-1, keepdims=True)).sum(-1)) + shifted.max(-1)
    right = log_sums - np.take_along_axis(shifted, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(losses, right, atol=5 * TOLERANCE)


@of_family
def test_ten_steps_on_a_mesh_are_those_of_one_device(name):
    """10 s: fsdp and tensor axes of two devices each. On eight, XLA's CPU devices may wait for each other for ever."""
    lm = opened(name)
    hooks = layer_hooks(lm.layers, lm.config.heads)
    model, schedule = Model(lm.config, hooks=hooks), lm.schedule_for(16)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10, model.axes, learned=model.encoding_settings)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((8, 16), np.float32)}

    def trained(step, state, batch):
        losses = []
        for _ in range(10):
            state, metrics = step(state, batch, schedule)
            losses.append(float(metrics["loss"]))
        return losses

    def start():
        return init_state(model, optimizer, jax.tree.map(np.array, lm.checkpoint.params))

    plain = jax.jit(train_step, static_argnums=(0, 1, 2))
    alone = trained(functools.partial(plain, model, optimizer, 1), start(), batch)
    mesh, rules = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]), AxisRules()
    shardings = make_shardings(model, optimizer, mesh, rules)
    step = compile_train_step(model, optimizer, mesh, rules)
    sharded = trained(step, jax.device_put(start(), shardings.state), place_batch(batch, shardings.batch))
    assert alone[-1] < alone[0] - 0.02, alone
    np.testing.assert_allclose(sharded, alone, rtol=1e-4)


def test_an_edit_of_some_layers_keeps_the_others():
    """3 s: in a model with two rotations, windows and layers without either."""
    lm = opened("granite_swa")
    edited = lm.with_positional(drop([1]))
    assert edited.layers[1].encoding == NoPE() and edited.layers[1].window == 8 and edited.layers[1].extras
    assert edited.layers[0] == lm.layers[0] and layers_of(drop([1]), 4, lm.layers) == edited.layers
