"""Muon against a float64 computation of its paper, on one device and on a mesh, and where a run goes on with it."""

import dataclasses
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tiny_runs import assert_same_training, compilations_kept, tiny, train  # noqa: F401

from pe_lab.config import MeshConfig, ModelConfig, MuonConfig, OptimizerConfig, from_dict
from pe_lab.errors import ConfigError
from pe_lab.identity import may_change
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Rope, build_schedule, layers
from pe_lab.training.muon import coefficients, is_matrix, matrices, newton_schulz_flops, orthogonalize
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_train_step, init_state, make_shardings, place_batch

SHAPE = ModelConfig(
    vocab_size=32, layers=2, d_model=16, d_ff=24, heads=4, kv_heads=2, qk_norm="head", tie_embeddings=False,
    attention_bias=True, output_bias=True, mlp_bias=True, dtype="float32",
)  # fmt: skip
MODEL = Model(SHAPE)
EXACT = MuonConfig(dtype="float32")
COMMON = dict(name="muon", warmup_steps=0, schedule="constant", clip_norm=1e9)


def named(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(x, np.float64)
            for p, x in jax.tree_util.tree_leaves_with_path(tree)}  # fmt: skip


def polar(x: np.ndarray, config: MuonConfig) -> np.ndarray:
    """The iteration on the singular values alone: s <- a s + b s^3 + c s^5."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (np.linalg.norm(x) * (1.02 if config.newton_schulz == "polar_express" else 1.0))
    for a, b, c in coefficients(config):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def by_hand(name: str, x: np.ndarray, config: MuonConfig) -> np.ndarray:
    """The scaled direction of a stacked parameter, matrix by matrix."""
    out = np.empty_like(x)
    kind = name.rpartition(".")[2]

    def one(matrix: np.ndarray) -> np.ndarray:  # [inputs, outputs]
        rows, columns = matrix.shape
        size = 0.2 * math.sqrt(max(rows, columns)) if config.scale == "rms" else math.sqrt(max(1, columns / rows))
        return size * polar(matrix, config)

    for n in range(len(x)):
        if kind in ("query", "key", "value") and config.per_head:
            for h in range(x.shape[2]):
                out[n, :, h] = one(x[n, :, h])
        elif kind == "out":
            out[n] = one(x[n].reshape(-1, x.shape[-1])).reshape(x[n].shape)
        else:
            out[n] = one(x[n].reshape(x.shape[1], -1)).reshape(x[n].shape)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        EXACT,
        dataclasses.replace(EXACT, per_head=False, scale="spectral", newton_schulz="jordan", nesterov=False),
        dataclasses.replace(EXACT, cautious_decay=True, newton_schulz_steps=7, momentum_warmup_steps=0),
    ],
    ids=["default", "jordan", "cautious"],
)
def test_three_steps_are_those_of_the_papers(config):
    """Jordan et al. 2024 and arXiv:2502.16982, in float64; AdamW has what is no matrix of a layer."""
    rate, decay = 0.1, 0.3
    optimizer = make_optimizer(
        OptimizerConfig(**COMMON, learning_rate=rate, weight_decay=decay, muon=config, head_multiplier=0.5,
                        embedding_multiplier=2.0, vector_multiplier=3.0, decay_embeddings=False, epsilon=1e-6),
        10, MODEL.axes,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = MODEL.init(jax.random.key(0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    weights = named(params)
    momentum, first, second = ({k: np.zeros_like(v) for k, v in weights.items()} for _ in range(3))
    for t in range(3):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        beta = 0.95 if config.momentum_warmup_steps == 0 else 0.85 + 0.1 * t / 300
        for k, g in named(grads).items():
            if k.startswith("layers") and k.rpartition(".")[2] in (
                "query",
                "key",
                "value",
                "out",
                "gate",
                "up",
                "down",
            ):
                momentum[k] = beta * momentum[k] + (1 - beta) * g
                used = beta * momentum[k] + (1 - beta) * g if config.nesterov else momentum[k]
                step = by_hand(k, used, config)
                shrinks = step * weights[k] > 0 if config.cautious_decay else 1.0
                weights[k] = weights[k] - rate * (step + decay * shrinks * weights[k])
            else:
                group = {"token_embedder.embedding": 2.0, "token_embedder.unembedding": 0.5}.get(k, 3.0)
                first[k], second[k] = 0.9 * first[k] + 0.1 * g, 0.95 * second[k] + 0.05 * g**2
                step = first[k] / (1 - 0.9 ** (t + 1)) / (np.sqrt(second[k] / (1 - 0.95 ** (t + 1))) + 1e-6)
                weights[k] = weights[k] - group * rate * step
    found = named(params)
    for k, expected in weights.items():
        np.testing.assert_allclose(found[k], expected, atol=2e-4, err_msg=k)


def test_matrices_are_those_of_the_layers():
    found = {}
    for path, shape in jax.tree_util.tree_leaves_with_path(MODEL.shapes):
        if is_matrix(path):
            names = MODEL.axes
            for key in path:
                names = names[key.key]
            found[path[-1].key] = [matrices(path, names, shape.shape, heads)[1:] for heads in (True, False)]
    assert found == {
        "query": [((2, 4), 16, 4), ((2,), 16, 16)],
        "key": [((2, 2), 16, 4), ((2,), 16, 8)],  # grouped: a matrix per key head
        "value": [((2, 2), 16, 4), ((2,), 16, 8)],
        "out": [((2,), 16, 16)] * 2,
        "gate": [((2,), 16, 24)] * 2,
        "up": [((2,), 16, 24)] * 2,
        "down": [((2,), 24, 16)] * 2,
    }


def test_the_coefficients_orthogonalize():
    """Of matrices that have singular values over three orders of magnitude, to those of each iteration's range."""
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.normal(size=(n, 12)))[0] for n in (12, 40))
    x = jnp.asarray((u * np.geomspace(1, 1e-3, 12)) @ v.T, jnp.float32)[None]
    for name, steps, low, high in (
        ("polar_express", 5, 0.7, 1.15),
        ("polar_express", 9, 0.98, 1.02),
        ("jordan", 9, 0.65, 1.3),
    ):
        for dtype, more in (("float32", 0.0), ("bfloat16", 0.06)):
            config = MuonConfig(newton_schulz=name, newton_schulz_steps=steps, dtype=dtype)
            for matrix in (x, x.transpose(0, 2, 1)):
                out = np.asarray(orthogonalize(matrix, config)[0], np.float64)
                values = np.linalg.svd(out, compute_uv=False)
                assert low - more < values.min() and values.max() < high + more, (name, steps, dtype, values)
    assert not np.isnan(orthogonalize(jnp.zeros((1, 3, 4)), EXACT)).any()  # a weight that no gradient reaches


def momentum_of(state):
    found = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "momentum"))
    return next(part.momentum for part in found if hasattr(part, "momentum"))


@pytest.mark.slow
def test_an_update_on_a_mesh_is_that_of_one_device():
    """Where 8 devices divide the matrices (of queries), where 2 do, and where the parameter is sharded twice."""
    optimizer = make_optimizer(OptimizerConfig(**COMMON, learning_rate=0.02, muon=EXACT), 10, MODEL.axes)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    shardings = make_shardings(MODEL, optimizer, mesh, AxisRules()).state
    for name in ("query", "out"):
        wanted = shardings.params["layers"]["attention"][name]
        assert (
            momentum_of(shardings.optimizer)["layers"]["attention"][name] == wanted and wanted.spec != PartitionSpec()
        )
    params = MODEL.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)

    def on_mesh(grads, state, params):
        with use_mesh(mesh, AxisRules()):
            return optimizer.update(grads, state, params)

    state = optimizer.init(params)
    where = (shardings.params, shardings.optimizer, shardings.params)
    placed = jax.jit(on_mesh, in_shardings=where, out_shardings=where[:2])
    alone, together = jax.jit(optimizer.update)(grads, state, params), placed(grads, state, params)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=8)])
def test_steps_on_a_mesh_are_those_of_one_device(mesh):
    """5 s each."""
    optimizer = make_optimizer(OptimizerConfig(**COMMON, learning_rate=0.02, muon=EXACT), 10, MODEL.axes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (8, 12)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, 1, 1), "weights": np.ones((8, 12), np.float32)}
    schedule = build_schedule(layers(Rope(), 2), 4, 2, 4)
    results = []
    for devices in (make_mesh(MeshConfig(), jax.devices()[:1]), make_mesh(mesh)):
        shardings = make_shardings(MODEL, optimizer, devices, AxisRules())
        state = jax.device_put(init_state(MODEL, optimizer, MODEL.init(jax.random.key(0))), shardings.state)
        step = compile_train_step(MODEL, optimizer, devices, AxisRules())
        for _ in range(2):
            state, _ = step(state, place_batch(batch, shardings.batch), jax.device_put(schedule, shardings.replicated))
        results.append(state)
    for one, other in zip(*(jax.tree.leaves((s.params, s.optimizer)) for s in results), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_flops_of_the_iteration_by_hand():
    per_head = 2 * 8 * (4 * 4 * 4 * 16 + 2 * 4**3)  # 8 heads of queries, keys and values, 4 x 16
    whole = 2 * ((4 * 16**3 + 2 * 16**3) + 3 * (4 * 16 * 16 * 24 + 2 * 16**3))
    assert newton_schulz_flops(EXACT, MODEL.shapes, MODEL.axes) == 5 * (per_head + whole)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bytes(tmp_path, compilations_kept):  # noqa: F811
    config = tiny(tmp_path, phases__0__optimizer__name="muon", phases__0__steps=6)
    config = dataclasses.replace(config, phases=config.phases[:1])
    train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/pretrain/checkpoints/6")
    train(config, tmp_path / "again")
    assert_same_training(tmp_path / "whole", tmp_path / "again", ["pretrain"])


def test_the_optimizer_of_a_run_is_named_and_stays():
    assert from_dict(OptimizerConfig, {"name": "muon", "muon": {"per_head": False}}).muon.per_head is False
    for wrong, says in (
        ({"name": "moun"}, "optimizer.name is 'moun'. Did you mean 'muon'?"),
        ({"muon": {"newton_schulz": "polar"}}, "Allowed: jordan, polar_express"),
        ({"muon": {"newton_schulz_steps": 0}}, "newton_schulz_steps is 0; it must be positive"),
        ({"muon": {"heads": 1}}, "has no key 'heads'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            from_dict(OptimizerConfig, wrong, "optimizer")
    assert may_change("phases.0.optimizer.muon.momentum", 1)
    assert not may_change("phases.0.optimizer.name", 1)  # its state is another one
