"""The pure step: weights of the loss, micro-batches, donated memory, and where things lie on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import Layer, Rope, build_schedule, layers
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_loss, compile_train_step, init_state, make_shardings, place_batch, train_step

CONFIG = ModelConfig(vocab_size=32, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, dtype="float32")
MODEL = Model(CONFIG)
SCHEDULE = build_schedule(layers(Rope(), 2), 2, 2, 8)
SGD = optax.sgd(1.0)  # parameters move by the gradient itself


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.1, 2.0, (8, 12)).astype(np.float32)
    weights[2:4] *= 10  # micro-batches of very different weight
    weights[5] = 0
    weights[:, 7] = 0
    return {
        "tokens": rng.integers(0, 32, (8, 12)).astype(np.int32),
        "targets": rng.integers(0, 32, (8, 12)).astype(np.int32),
        "weights": weights,
    }


@pytest.fixture(scope="module")
def step():
    return jax.jit(train_step, static_argnums=(0, 1, 2))


@pytest.fixture(scope="module")
def after(params, batch, step):
    return step(MODEL, SGD, 1, init_state(MODEL, SGD, params), batch, SCHEDULE)


def moved(params, state) -> np.ndarray:
    return np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (params, state.params)), strict=True)])


def test_four_micro_batches_are_one_batch(params, batch, step, after):
    state, metrics = step(MODEL, SGD, 4, init_state(MODEL, SGD, params), batch, SCHEDULE)
    whole = moved(params, after[0])
    assert np.abs(whole).max() > 1e-2
    np.testing.assert_allclose(moved(params, state), whole, rtol=0, atol=1e-6)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], after[1][name], rtol=1e-6)
    assert int(state.step) == int(after[0].step) == 1


def test_unrolled_layers_on_a_mesh_are_the_scan_with_one_layer_ahead(params, batch, after):
    """2 s. Beside products, weights of one layer more are gathered, and gradients of one layer more reduced."""
    model, mesh, rules = Model(dataclasses.replace(CONFIG, scan=False)), make_mesh(MeshConfig(fsdp=8)), AxisRules()
    shardings = make_shardings(model, SGD, mesh, rules)
    state = jax.device_put(init_state(model, SGD, MODEL.init(jax.random.key(0))), shardings.state)
    step = compile_train_step(model, SGD, mesh, rules)
    inputs = place_batch(batch, shardings.batch), SCHEDULE
    # Between two layers, forward and backward; the others are of the loss.
    barriers = step.lower(state, *inputs).as_text().count("stablehlo.optimization_barrier")
    alone = jax.jit(train_step, static_argnums=(0, 1, 2)).lower(model, SGD, 1, state, *inputs).as_text()
    assert barriers - alone.count("stablehlo.optimization_barrier") == 2
    found, metrics = step(state, *inputs)
    np.testing.assert_allclose(moved(params, found), moved(params, after[0]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], after[1]["loss"], rtol=1e-6)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_unrolled_layers_with_two_rotations_on_a_mesh_are_the_scan(params, batch, step, remat):
    """1.5 s each. As in Gemma 3: each layer has tables, without gradient behind the barrier between layers too."""
    two = build_schedule((Layer(Rope(10.0)), Layer(Rope(1000.0))), 2, 2, 8)
    assert not two.same_rotation
    scanned, _ = step(MODEL, SGD, 1, init_state(MODEL, SGD, params), batch, two)
    model, rules = Model(dataclasses.replace(CONFIG, scan=False, remat=remat)), AxisRules()
    mesh = make_mesh(MeshConfig(fsdp=8))
    shardings = make_shardings(model, SGD, mesh, rules)
    state = jax.device_put(init_state(model, SGD, MODEL.init(jax.random.key(0))), shardings.state)
    found, _ = compile_train_step(model, SGD, mesh, rules)(state, place_batch(batch, shardings.batch), two)
    assert np.abs(moved(params, scanned)).max() > 1e-2
    np.testing.assert_allclose(moved(params, found), moved(params, scanned), rtol=0, atol=1e-6)


def test_the_loss_is_the_weighted_mean_of_the_cross_entropy(params, batch, after):
    logits = np.asarray(jax.jit(MODEL.apply)(params, batch["tokens"], None, None, SCHEDULE), np.float64)
    logits -= logits.max(-1, keepdims=True)
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    expected = (nats * batch["weights"]).sum() / batch["weights"].sum()
    np.testing.assert_allclose(after[1]["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(after[1]["grad_norm"], np.linalg.norm(moved(params, after[0])), rtol=1e-5)


def test_tokens_of_weight_zero_teach_nothing_and_weights_are_relative(params, batch, step, after):
    targets = np.where(batch["weights"] == 0, (batch["targets"] + 1) % 32, batch["targets"])
    assert (targets != batch["targets"]).any()
    other = {**batch, "targets": targets, "weights": 3 * batch["weights"]}
    state, metrics = step(MODEL, SGD, 1, init_state(MODEL, SGD, params), other, SCHEDULE)
    np.testing.assert_allclose(moved(params, state), moved(params, after[0]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], after[1]["loss"], rtol=1e-6)
    nothing = {**batch, "weights": 0 * batch["weights"]}
    state, metrics = step(MODEL, SGD, 1, init_state(MODEL, SGD, params), nothing, SCHEDULE)
    assert not moved(params, state).any() and metrics["loss"] == metrics["grad_norm"] == 0


def test_the_compiled_step_takes_the_old_state_over(params, batch):
    mesh, rules = make_mesh(MeshConfig(), jax.devices()[:1]), AxisRules()
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 10, MODEL.axes)
    shardings = make_shardings(MODEL, optimizer, mesh, rules)
    state = jax.device_put(init_state(MODEL, optimizer, jax.tree.map(jnp.copy, params)), shardings.state)
    on_device = place_batch(batch, shardings.batch)
    schedule = jax.device_put(SCHEDULE, shardings.replicated)
    validate = compile_loss(MODEL, mesh, rules, shardings)
    before = validate(state.params, on_device, schedule)
    np.testing.assert_allclose(before[0], jax.jit(MODEL.loss_sum)(params, batch, SCHEDULE), rtol=1e-6)
    np.testing.assert_allclose(before[1], batch["weights"].sum(), rtol=1e-6)
    new, metrics = compile_train_step(MODEL, optimizer, mesh, rules)(state, on_device, schedule)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.optimizer)))
    np.testing.assert_allclose(metrics["loss"], before[0] / before[1], rtol=1e-5)
    assert float(validate(new.params, on_device, schedule)[0]) < float(before[0])
    assert int(new.step) == 1


def test_moments_lie_where_their_parameters_do():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10, MODEL.axes)
    shardings = make_shardings(MODEL, optimizer, mesh, AxisRules())
    assert shardings.state.params["layers"]["mlp"]["up"].spec == PartitionSpec(None, "fsdp", "tensor")
    adam = next(
        s for s in jax.tree.leaves(shardings.state.optimizer, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu")
    )
    assert adam.mu == adam.nu == shardings.state.params
    assert adam.count.spec == PartitionSpec()
    assert shardings.batch.spec == PartitionSpec(("data", "fsdp"), None)


def test_an_uneven_division_names_the_parameter():
    model = Model(ModelConfig(vocab_size=32, layers=1, d_model=16, d_ff=33, heads=2, kv_heads=2))
    mesh = make_mesh(MeshConfig(tensor=2))
    with pytest.raises(UserError, match=r"parameter layers.mlp.down of shape \(1, 33, 16\)"):
        make_shardings(model, optax.sgd(1.0), mesh, AxisRules())
