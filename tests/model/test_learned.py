"""Parameters of encodings: their places and initial values, how they are trained, how a child takes them over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pe_lab.checkpoints.surgery import carried
from pe_lab.config import ModelConfig, OptimizerConfig
from pe_lab.model import Model
from pe_lab.model.learned import learned_of_repetition
from pe_lab.model.shape import Repetition
from pe_lab.positional import LayerStructure, T5Bias, build_schedule, layer_hooks, layers
from pe_lab.training.optimizer import make_optimizer

CONFIG = ModelConfig(vocab_size=16, layers=4, d_model=16, d_ff=16, heads=2, kv_heads=2, dtype="float32")


def model_of(described):
    return Model(CONFIG, hooks=layer_hooks(layers(described, 4), 2))


def test_entries_are_named_by_encoding_and_settings():
    model = model_of(["rope/with=t5", "rope/with=t5:buckets=8", "rope/with=ssmax/with=t5", "nope"])
    found = jax.tree.map(jnp.shape, jax.eval_shape(model.init, jax.random.key(0))["layers"]["positional"])
    assert found == {"t5": {"table": (2, 32, 2)}, "t5_2": {"table": (1, 8, 2)}, "ssmax": {"scale": (1, 2)}}
    assert model.axes["layers"]["positional"]["t5"]["table"] == ("layers", None, "heads")


def test_a_run_of_layers_has_its_slices():
    hooks = layer_hooks(layers(["rope/with=t5", "rope/with=t5/with=ssmax"], 4), 2)
    structure = [LayerStructure(hooks=one) for one in hooks]
    learned = {"t5": {"table": jnp.arange(4)}, "ssmax": {"scale": jnp.arange(10, 12)}}
    first, second = learned_of_repetition(learned, structure, Repetition(0, 2, 2))
    assert first["t5"]["table"].tolist() == [0, 2] and second["t5"]["table"].tolist() == [1, 3]
    assert second["ssmax"]["scale"].tolist() == [10, 11]


def test_an_encoding_that_is_added_changes_no_other_parameter():
    before, after = model_of("rope").init(jax.random.key(3)), model_of("rope/with=t5").init(jax.random.key(3))
    after["layers"].pop("positional")
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_rates_and_decay_are_those_that_an_encoding_chooses():
    model = model_of("rope/with=fope:original_length=64,trained=1/with=t5")
    settings = {name: one for of in model.encoding_settings.values() for name, one in of.items()}
    learned = {
        name: {field: one._replace(learning_rate=3.0, decay=name == "t5") for field, one in of.items()}
        for name, of in model.encoding_settings.items()
    }
    params = jax.tree.map(lambda x: jnp.ones(x.shape), model.shapes)
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, schedule="constant", weight_decay=0.5, clip_norm=1e9)
    optimizer = make_optimizer(config, 10, model.axes, learned=learned)
    updates, _ = jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params))(params)
    # Adam's first update is the sign of the gradient.
    np.testing.assert_allclose(updates["layers"]["positional"]["t5"]["table"], -0.1 * 3 * 1.5, rtol=1e-5)
    np.testing.assert_allclose(updates["layers"]["mlp"]["up"], -0.1 * 1.5, rtol=1e-5)
    assert not settings["table"].decay


def test_a_child_carries_initializes_and_leaves_out():
    parent = model_of(["rope/with=t5", "rope/with=t5/with=sink"])
    child = model_of(["rope/with=t5", "rope/with=t5", "rope/with=t5:buckets=8", "nope/with=ssmax/with=t5"])
    params = parent.init(jax.random.key(0))
    before = layer_hooks(layers(["rope/with=t5", "rope/with=t5/with=sink"], 4), 2)
    after = layer_hooks(
        layers(["rope/with=t5", "rope/with=t5", "rope/with=t5:buckets=8", "nope/with=ssmax/with=t5"], 4), 2
    )
    found, what = carried(params, before, after, child.config)
    old, new = params["layers"]["positional"], found["layers"]["positional"]
    np.testing.assert_array_equal(new["t5"]["table"], old["t5"]["table"][np.array([0, 1, 3])])
    assert set(new) == {"t5", "t5_2", "ssmax"} and new["t5_2"]["table"].shape == (1, 8, 2)
    initialized = [f"parameters of {name} initialized on layers {n}" for name, n in (("t5_2", 2), ("ssmax", 3))]
    assert what == "; ".join([*initialized, "those of sink left out"])
    same, nothing = carried(params, before, before, parent.config)
    assert same is params and nothing == ""
    dropped, what = carried(params, before, layer_hooks(layers("nope", 4), 2), parent.config)
    assert "positional" not in dropped["layers"] and what == "those of sink left out; those of t5 left out"
    jax.tree.map(np.testing.assert_array_equal, dropped["layers"]["mlp"], params["layers"]["mlp"])


def test_an_unchanged_start_changes_nothing():
    tokens = jnp.arange(12)[None] % 16
    described = layers("rope/with=t5:start=unchanged", 4)
    assert described[0].extras == (T5Bias(start="unchanged"),)
    params = jax.jit(model_of("rope").init)(jax.random.key(0))
    child = model_of("rope/with=t5:start=unchanged")
    more, _ = carried(params, [()] * 4, layer_hooks(described, 2), child.config)
    apply = jax.jit(child.apply)
    with_bias = apply(more, tokens, None, None, build_schedule(described, 2, 2, 8))
    without = apply(params, tokens, None, None, build_schedule(layers("rope", 4), 2, 2, 8))
    np.testing.assert_array_equal(with_bias, without)
