"""Layers that return more than their output: losses that training adds, and metrics that it logs."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_lab.config import MeshConfig, ModelConfig, OptimizerConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Auxiliary, Model, normal, register_feed_forward, train_flops_per_token
from pe_lab.model.modules import FEED_FORWARDS
from pe_lab.parallel import AxisRules, make_mesh
from pe_lab.positional import Rope, build_schedule, import_encodings, layers
from pe_lab.training.optimizer import make_optimizer
from pe_lab.training.step import compile_train_step, init_state, make_shardings, place_batch

experts = import_encodings(str(Path(__file__).parents[2] / "docs/experts.py"))
CONFIG = ModelConfig(
    vocab_size=32, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, dtype="float32", feed_forward="experts",
    init_std=0.3,
)  # fmt: skip
SCHEDULE = build_schedule(layers(Rope(), 2), 2, 2, 8)
NAMES = ("loss", "router_z", "load_balance", "busiest_expert")


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (8, 13)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((8, 12), np.float32)}


def trained(steps=3, mesh=MeshConfig(), accumulate=1, devices=1, **changes):  # noqa: B008
    """The metrics of every step, [steps, 4]."""
    model = Model(dataclasses.replace(CONFIG, **changes))
    mesh, rules = make_mesh(mesh, jax.devices()[:devices]), AxisRules()
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 10, model.axes)
    shardings = make_shardings(model, optimizer, mesh, rules)
    state = jax.device_put(init_state(model, optimizer, model.init(jax.random.key(0))), shardings.state)
    step = compile_train_step(model, optimizer, mesh, rules, accumulate)
    found = []
    for _ in range(steps):
        state, metrics = step(state, place_batch(batch(), shardings.batch), SCHEDULE)
        found.append([float(metrics[name]) for name in NAMES])
    return np.array(found)


@pytest.mark.slow
def test_losses_and_metrics_are_those_of_one_device_on_a_mesh_under_remat_and_in_micro_batches():
    """A sum over layers of losses, a mean of metrics; both over the whole batch."""
    one = trained(accumulate=2)
    many = trained(accumulate=2, mesh=MeshConfig(fsdp=2, tensor=2), devices=4, remat="full")
    np.testing.assert_allclose(many, one, rtol=2e-5)
    # Micro-batches of equal weight: what is a mean over tokens is the same, what is none is nearly.
    np.testing.assert_allclose(trained(1)[0, :2], one[0, :2], rtol=1e-5)
    assert one[-1, 0] < one[0, 0]
    assert 0.02 - 1e-6 < one[0, 2] < 0.05 and 0.25 <= one[0, 3] <= 1  # two layers of at least 0.01


@pytest.mark.slow  # 4 s
def test_training_adds_the_losses_and_not_the_metrics():
    model = Model(CONFIG)
    params = model.init(jax.random.key(0))
    weighted = jax.tree.map(jnp.asarray, {**batch(), "weights": np.full((8, 12), 0.5, np.float32)})
    total, sums = jax.jit(model.training_loss)(params, weighted, SCHEDULE)
    assert set(sums.auxiliary) == set(NAMES[1:])
    np.testing.assert_allclose(sums.loss, jax.jit(model.loss_sum)(params, weighted, SCHEDULE))
    added = sums.auxiliary["router_z"] + sums.auxiliary["load_balance"]
    np.testing.assert_allclose(total - sums.loss, added, rtol=1e-3)
    given = jax.jit(model.forward)(params, weighted["tokens"], None, None, SCHEDULE).auxiliary
    np.testing.assert_allclose(sums.auxiliary["router_z"], 48 * given.losses["router_z"], rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda p: model.training_loss(p, weighted, SCHEDULE)[0]))(params)
    without = jax.jit(jax.grad(model.loss_sum))(params, weighted, SCHEDULE)
    apart = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), gradient, without)
    assert apart["layers"]["feed_forward"]["router"] > 1e-3 and apart["token_embedder"]["embedding"] > 1e-6


def test_a_model_without_auxiliary_numbers_computes_nothing_for_them():
    model = Model(dataclasses.replace(CONFIG, feed_forward=""))
    params = model.init(jax.random.key(0))
    total, sums = jax.jit(model.training_loss)(params, batch(), SCHEDULE)
    assert total == sums.loss and sums.auxiliary == {}
    minimized = lambda *arguments: model.training_loss(*arguments)[0]  # noqa: E731
    alone, whole = (str(jax.make_jaxpr(f)(params, batch(), SCHEDULE)) for f in (model.loss_sum, minimized))
    assert alone == whole


def test_cost_counts_the_weights_of_a_feed_forward_of_ones_own(monkeypatch):
    model, plain = Model(CONFIG), Model(dataclasses.replace(CONFIG, feed_forward="", gated_mlp=False))
    matrices = experts.EXPERTS * (2 * 16 * 32 + 16)
    more = train_flops_per_token(model.config, 12).full - train_flops_per_token(plain.config, 12).full
    assert more == 6 * 2 * (matrices - 2 * 16 * 32)
    monkeypatch.setattr(
        FEED_FORWARDS[CONFIG.feed_forward], "active_weights", staticmethod(lambda config: 2 * 16 * 32), raising=False
    )
    assert train_flops_per_token(model.config, 12) == train_flops_per_token(plain.config, 12)


def test_names_that_are_taken_or_unknown_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="there is no 'expert'. Did you mean 'experts'.* by --encodings=FILE.py"):
        Model(dataclasses.replace(CONFIG, feed_forward="expert"))
    with pytest.raises(ConfigError, match="give Other another name"):
        register_feed_forward("experts")(type("Other", (nnx.Module,), {}))

    class Reserved(nnx.Module):
        def __init__(self, config, rngs):
            self.scale = normal(rngs, (config.d_model,), 0.1, ("vector",))

        def __call__(self, x):
            return x * self.scale[...], Auxiliary({}, {"grad_norm": x.mean()})

    monkeypatch.setitem(FEED_FORWARDS, "reserved", Reserved)
    model = Model(dataclasses.replace(CONFIG, feed_forward="reserved"))
    with pytest.raises(ConfigError, match="'grad_norm' beside its output, and the log has another"):
        jax.eval_shape(model.training_loss, model.shapes, batch(), SCHEDULE)
