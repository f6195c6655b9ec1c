"""Positions that are added to the embeddings: learned ones and sines, once, whichever layers have them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.checkpoints.surgery import carried
from pe_lab.config import ModelConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.positional import (
    Drop,
    HeadEdit,
    Layer,
    LearnedPositions,
    NoPE,
    Rope,
    Sinusoidal,
    build_schedule,
    layer_hooks,
    layers,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "sinusoidal_golden.json").read_text())
CONFIG = ModelConfig(vocab_size=32, layers=4, d_model=12, d_ff=16, heads=2, kv_heads=1, head_dim=6, dtype="float32")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)), jnp.int32)


def schedule_of(described, length=None):
    return build_schedule(described, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, length)


def model_of(described):
    schedule = schedule_of(described)
    model = Model(CONFIG, hooks=schedule.hooks)
    return model, model.init(jax.random.key(0)), schedule


def test_sines_are_those_of_ctrl():
    at = jnp.asarray(GOLDEN["positions"])[None]
    x = jnp.ones((1, at.shape[1], 12))
    np.testing.assert_allclose(Sinusoidal().embed({}, x, at)[0], 1 + np.asarray(GOLDEN["waves"]), atol=1e-6)
    half = Sinusoidal(amplitude=0.5).embed({}, 0 * x, at)[0]
    np.testing.assert_allclose(half, 0.5 * np.asarray(GOLDEN["waves"]), atol=1e-6)
    assert Sinusoidal().embed({}, jnp.ones((1, at.shape[1], 7), jnp.bfloat16), at).dtype == jnp.bfloat16


def test_learned_positions_are_rows_behind_the_offset():
    table = jnp.arange(20.0).reshape(10, 2)
    found = LearnedPositions(8, offset=2).embed({"table": table}, jnp.zeros((1, 3, 2)), jnp.asarray([[0, 3, 7]]))
    np.testing.assert_array_equal(found[0], table[jnp.asarray([2, 5, 9])])


@pytest.mark.parametrize("encoding", [LearnedPositions(9), Sinusoidal()], ids=["learned", "sinusoidal"])
def test_they_are_added_once_to_a_program_without_angles(encoding):
    """As of a model without encoding whose embedding has them."""
    model, params, schedule = model_of([Layer(encoding)] * 4)
    found = model.hidden(params, TOKENS, None, None, schedule)
    added = encoding.embed(
        jax.tree.map(lambda a: a[0], params["layers"].get("positional", {}).get("learned_positions", {})),
        jnp.zeros((2, 9, 12)),
        jnp.arange(9)[None],
    )
    bare = Model(CONFIG)
    rows = jnp.concatenate([params["token_embedder"]["embedding"][TOKENS] + added]).reshape(18, 12)
    alone = {
        "token_embedder": {**params["token_embedder"], "embedding": rows},
        "layers": {name: one for name, one in params["layers"].items() if name != "positional"},
    }
    wide = Model(dataclasses.replace(CONFIG, vocab_size=18))
    tokens = jnp.arange(18).reshape(2, 9)
    expected = wide.hidden(alone, tokens, None, None, schedule_of([Layer(NoPE())] * 4))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    shapes = jax.tree.map(lambda a: a.shape, params["layers"].get("positional", {}))
    assert shapes == ({"learned_positions": {"table": (1, 9, 12)}} if isinstance(encoding, LearnedPositions) else {})
    assert not schedule.structure[0].hooks and len(set(schedule.structure)) == 1  # all layers share a program
    assert bare.num_parameters == model.num_parameters - (108 if shapes else 0)


def test_longer_sequences_than_positions_are_refused():
    with pytest.raises(UserError, match="learned_positions has 8 positions, and the sequences have 9 tokens"):
        schedule_of([Layer(LearnedPositions(8))] * 4, length=9)
    schedule_of([Layer(LearnedPositions(8))] * 4, length=8)


def test_a_drop_of_some_layers_keeps_the_table_and_of_all_removes_it():
    described = layers("learned_positions:size=9", 4)
    _, params, schedule = model_of(described)
    some = Drop((0, 2)).apply(described)
    kept, told = carried(params, schedule.hooks, layer_hooks(some, 2), Model(CONFIG).config)
    table = params["layers"]["positional"]["learned_positions"]["table"]
    np.testing.assert_array_equal(kept["layers"]["positional"]["learned_positions"]["table"], table)
    assert told == ""
    model = Model(CONFIG, hooks=layer_hooks(some, 2))
    np.testing.assert_allclose(
        model.hidden(kept, TOKENS, None, None, schedule_of(some)),
        model.hidden(params, TOKENS, None, None, schedule),
        atol=1e-6,
    )
    bare, told = carried(params, schedule.hooks, layer_hooks(Drop().apply(described), 2), Model(CONFIG).config)
    assert "positional" not in bare["layers"] and "those of learned_positions left out" in told


def test_they_act_beside_a_rotation_and_on_no_single_head():
    both = [Layer(Rope(), extras=(LearnedPositions(9),))] * 4
    model, params, schedule = model_of(both)
    assert schedule.structure[0].rotates and schedule.embeddings[0][0] == 0
    without = schedule_of([Layer(Rope())] * 4)
    apart = model.hidden(params, TOKENS, None, None, schedule) - Model(CONFIG).hidden(
        {**params, "layers": {k: v for k, v in params["layers"].items() if k != "positional"}},
        TOKENS,
        None,
        None,
        without,
    )
    assert np.abs(apart).max() > 0.01
    with pytest.raises(UserError, match="LearnedPositions is added to the embeddings, which no head has of its own"):
        Layer(Rope(), heads=(HeadEdit((0,), LearnedPositions(9)),))
