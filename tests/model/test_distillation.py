"""Distillation: its loss against a plain computation, its zero, and where a teacher does not fit. 20 s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import DistillConfig, MeshConfig, ModelConfig
from pe_lab.errors import ConfigError
from pe_lab.model import Model
from pe_lab.model.distillation import DistilledInputs, DistilledLoss, learns
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import NoPE, Rope, build_schedule, layers

SHAPE = dict(vocab_size=32, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, dtype="float32", loss_chunks=3)
MODEL = Model(ModelConfig(**SHAPE))
ROTATED, BARE = (build_schedule(layers(one, 2), 2, 2, 8) for one in (Rope(base=100.0), NoPE()))


@pytest.fixture(scope="module")
def teacher():
    return jax.jit(MODEL.init)(jax.random.key(1))


@pytest.fixture(scope="module")
def student():
    return jax.jit(MODEL.init)(jax.random.key(2))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (4, 13)).astype(np.int32)
    weights = rng.uniform(0.1, 2.0, (4, 12)).astype(np.float32)
    weights[:, 3] = 0
    found = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return {name: jnp.asarray(x) for name, x in found.items()}


def plain(loss):
    return lambda *arguments: loss.training_loss(*arguments)[0]


def value_and_gradient(how, params, batch, inputs, model=MODEL):
    return jax.jit(jax.value_and_grad(plain(DistilledLoss(model, MODEL, how))))(params, batch, inputs)


def close(one, other, tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_loss_and_its_gradient_are_those_of_whole_logits(teacher, student, batch):
    how = DistillConfig(cross_entropy=0.3, logits=0.7)

    def plain(params):
        ours = jax.nn.log_softmax(MODEL.apply(params, batch["tokens"], None, None, BARE))
        its = jax.nn.log_softmax(MODEL.apply(teacher, batch["tokens"], None, None, ROTATED))
        entropy = -jnp.take_along_axis(ours, batch["targets"][..., None], -1)[..., 0]
        divergence = (jnp.exp(its) * (its - ours)).sum(-1)
        return ((0.3 * entropy + 0.7 * divergence) * batch["weights"]).sum()

    expected = jax.jit(jax.value_and_grad(plain))(student)
    found = value_and_gradient(how, student, batch, DistilledInputs(BARE, teacher, ROTATED))
    close(found, expected, 2e-6)


@pytest.mark.slow
def test_hidden_states_and_attention_are_matched_relative_to_the_teachers(teacher, student, batch):
    inputs = DistilledInputs(BARE, teacher, ROTATED)
    ours, its = (
        MODEL.forward(params, batch["tokens"], None, None, schedule, collect=True).layers
        for params, schedule in ((student, BARE), (teacher, ROTATED))
    )
    for part, a, b in zip(("hidden", "attention"), ours, its, strict=True):
        a, b = (np.asarray(x, np.float64).reshape(2, 4, 12, -1) for x in (a, b))
        expected = ((((a - b) ** 2).mean(-1) / ((b**2).mean(-1) + 1e-6)).mean(0) * batch["weights"]).sum()
        how = DistillConfig(cross_entropy=0.0, logits=0.0, **{part: 2.0})
        loss, gradient = value_and_gradient(how, student, batch, inputs)
        np.testing.assert_allclose(loss, 2 * expected, rtol=1e-5)
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-3


@pytest.mark.parametrize("scan", [True, False])
def test_a_teacher_that_is_the_student_teaches_nothing(teacher, batch, scan):
    how = DistillConfig(cross_entropy=0.0, logits=1.0, hidden=1.0, attention=1.0)
    model = Model(ModelConfig(**SHAPE, scan=scan))
    loss, gradient = value_and_gradient(how, teacher, batch, DistilledInputs(ROTATED, teacher, ROTATED), model)
    assert abs(float(loss)) < 1e-4
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) < 1e-5


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_mesh(teacher, student, batch):
    how, inputs = DistillConfig(hidden=0.5, attention=0.5), DistilledInputs(BARE, teacher, ROTATED)
    expected = value_and_gradient(how, student, batch, inputs)
    mesh, rules = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), AxisRules()
    placed = parameter_shardings(MODEL, mesh, rules)
    loss = DistilledLoss(MODEL, MODEL, how)

    def sharded(params, inputs):
        with use_mesh(mesh, rules):
            return jax.value_and_grad(plain(loss))(params, batch, inputs)

    params, its = (jax.device_put(one, placed) for one in (student, teacher))
    close(jax.jit(sharded)(params, inputs._replace(teacher_params=its)), expected, 2e-5)


def test_a_teacher_of_another_shape_may_teach_logits_alone(student, batch):
    wide = Model(ModelConfig(**{**SHAPE, "d_model": 32, "layers": 1}))
    schedule = build_schedule(layers(Rope(), 1), 2, 2, 16)
    inputs = DistilledInputs(BARE, jax.jit(wide.init)(jax.random.key(0)), schedule)
    assert np.isfinite(jax.jit(plain(DistilledLoss(MODEL, wide, DistillConfig())))(student, batch, inputs))
    with pytest.raises(ConfigError, match="has layers 1, and the model 2; matching hidden states or attention needs"):
        DistilledLoss(MODEL, wide, DistillConfig(hidden=1.0))
    other = Model(ModelConfig(**{**SHAPE, "vocab_size": 64}))
    with pytest.raises(ConfigError, match="vocab_size 64, and the model 32; distillation needs equal ones"):
        DistilledLoss(MODEL, other, DistillConfig())


def test_weights_of_zero_learn_nothing():
    assert not learns(None) and not learns(DistillConfig(logits=0.0))
    assert learns(DistillConfig()) and learns(DistillConfig(logits=0.0, hidden=0.1))
