"""Gates on rotations: open is RoPE, closed is NoPE, between is a mix, and what surgery makes of them. 25 s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.config import ModelConfig
from pe_lab.model import Model
from pe_lab.positional import HeadEdit, Layer, NoPE, Rope, build_schedule, layer_hooks
from pe_lab.positional.schemes.rotations import GATE_STRETCH, GatedRope, gates

SHAPE = ModelConfig(vocab_size=32, layers=2, d_model=16, d_ff=32, heads=2, kv_heads=1, dtype="float32")
GATED = [Layer(GatedRope(base=100.0, penalty_per_head=0.25))] * 2
MODEL = Model(SHAPE, hooks=layer_hooks(GATED, 2))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)), jnp.int32)


def parameter(gate):
    """The parameter of a gate in 0..1, by the inverse of the logistic function."""
    share = (np.asarray(gate) + GATE_STRETCH) / (1 + 2 * GATE_STRETCH)
    return jnp.asarray(np.log(share / (1 - share)), jnp.float32)


def logits(layers, params):
    model = Model(SHAPE, hooks=layer_hooks(layers, 2))
    return model.apply(params, TOKENS, None, None, build_schedule(layers, 2, 1, 8))


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


def with_gates(params, gate):
    positional = {"gated_rope": {"gate": jnp.broadcast_to(parameter(gate), (2, 2))}}
    return {**params, "layers": {**params["layers"], "positional": positional}}


def plain(params):
    return {**params, "layers": {k: v for k, v in params["layers"].items() if k != "positional"}}


@pytest.mark.parametrize(
    ("gate", "layer"),
    [
        pytest.param(1.0, Layer(Rope(base=100.0)), marks=pytest.mark.slow),
        (0.0, Layer(NoPE())),
        ([1.0, 0.0], Layer(Rope(base=100.0), heads=(HeadEdit((1,), NoPE()),))),
    ],
    ids=["open", "closed", "one of two"],
)
def test_gates_at_their_ends_are_the_encodings(params, gate, layer):
    found = logits(GATED, with_gates(params, gate))
    np.testing.assert_allclose(found, logits([layer] * 2, plain(params)), rtol=1e-4, atol=1e-5)


def test_a_general_schedule_computes_the_same(params):
    """As a loaded model has it; its heads of 2K channels take no rotation by angle 0."""
    schedule, weights = build_schedule(GATED, 2, 1, 8), with_gates(params, [0.3, 0.8])
    for general in (schedule.generalize(), schedule.generalize("split", slopes=True)):
        found = MODEL.apply(weights, TOKENS, None, None, general)
        np.testing.assert_allclose(found, logits(GATED, weights), rtol=1e-5, atol=1e-5)


def test_a_gate_mixes_the_logits_of_attention():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 6, 2, 8)), jnp.float32) for _ in range(2))
    x, positions = jnp.zeros((1, 6, 16)), jnp.arange(6, dtype=jnp.int32)[None]

    def products(gate):
        encoding = GatedRope(base=100.0)
        a, b = encoding.encode({"gate": jnp.broadcast_to(parameter(gate), (2,))}, q, k, positions, x)
        return np.einsum("bthk,bshk->bhts", a, b)

    np.testing.assert_allclose(products(0.3), 0.3 * products(1.0) + 0.7 * products(0.0), rtol=1e-4, atol=1e-4)


def test_the_penalty_is_that_of_all_open_gates(params):
    of = with_gates(params, [0.5, 1.0])
    np.testing.assert_allclose(MODEL.penalties(of)["gated_rope.penalty"], 0.25 * 2 * 1.5, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: MODEL.penalties(p)["gated_rope.penalty"]))(of)
    gradient = gradient["layers"]["positional"]["gated_rope"]["gate"]
    assert (gradient[:, 0] > 0).all()


def test_a_half_open_gate_costs_most_where_gates_are_polarized():
    layers = [Layer(GatedRope(base=100.0, polarize_per_head=0.5))] * 2
    model = Model(SHAPE, hooks=layer_hooks(layers, 2))

    def cost(gate):
        return model.penalties(with_gates({"layers": {}}, gate))["gated_rope.penalty"]

    np.testing.assert_allclose([cost([1.0, 0.0]), cost([0.5, 1.0])], [0.0, 2 * 0.5], atol=1e-6)
    of = lambda a: {"layers": {"positional": {"gated_rope": {"gate": a}}}}  # noqa: E731
    slope = jax.grad(lambda a: model.penalties(of(a))["gated_rope.penalty"])
    assert (jnp.sign(slope(jnp.asarray([[-0.3, 0.3]] * 2))) == jnp.asarray([1, -1])).all()


def test_gates_start_open_and_reach_both_ends(params):
    start = gates(params["layers"]["positional"]["gated_rope"]["gate"])
    assert ((start > 0.9) & (start < 1)).all()
    np.testing.assert_array_equal(gates(jnp.asarray([-5.0, 5.0])), [0.0, 1.0])
