"""What families of models differ by, field by field, and two shapes that take all of it: Gemma's and GPT-NeoX's."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_lab.config import ModelConfig, from_dict
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.model.modules import ACTIVATIONS, MLP, Attention, Embedder
from pe_lab.model.norms import NORMS, QK_NORMS, LayerNorm
from pe_lab.positional import build_schedule, layers

TINY = ModelConfig(vocab_size=64, layers=4, d_model=32, d_ff=48, heads=4, kv_heads=2, head_dim=8, dtype="float32")
GEMMA = dataclasses.replace(
    TINY, kv_heads=1, head_dim=16, norm="rms_plus_one", activation="gelu_tanh", embedding_multiplier=32**0.5
)
NEOX = dataclasses.replace(
    TINY,
    kv_heads=4,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    norm="layer",
    activation="gelu",
    gated_mlp=False,
    block="parallel",
    tie_embeddings=False,
)
FLAT = dataclasses.replace(TINY, qk_norm="flat")
FAMILIES = {"gemma": GEMMA, "neox": NEOX, "flat": FLAT}


def schedule_of(config: ModelConfig, description="partial_rope:fraction=0.5"):
    return build_schedule(layers(description, config.layers), config.heads, config.kv_heads, config.head_dim)


def random_like(shapes, plus_one: bool = False, seed: int = 0):
    """Wider than an initialization, so that every norm and bias is felt."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name, values = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "scale":
            values = 0.3 * values + (0 if plus_one else 1)
        elif name.endswith("bias") or "embedding" in name:
            values = 0.5 * values
        else:
            values = 0.2 * values  # about 1 / sqrt(32)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_params(model: Model):
    return random_like(model.shapes, model.config.norm == "rms_plus_one")


def module(make, **changes):
    """One part of a decoder alone, with random parameters: (the module, its parameters in float64)."""
    config = dataclasses.replace(TINY, **changes)
    definition, state = nnx.split(nnx.eval_shape(lambda: make(config, nnx.Rngs(0))))
    params = random_like(nnx.to_pure_dict(state))
    return nnx.merge(definition, params), jax.tree.map(lambda a: np.asarray(a, np.float64), params)


def inputs(*shape: int, seed: int = 1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- parts --------------------------------------------------------------------------------------------------


def numpy_rms(x, scale, axes):
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + TINY.norm_epsilon) * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norm_is_its_formula(dtype):
    """Around a mean far from zero, too: what a norm in bfloat16 would lose."""
    norm = LayerNorm((24,), ("embed",), 1e-3)
    norm.scale[...], norm.bias[...] = jnp.asarray(inputs(24, seed=2)), jnp.asarray(inputs(24, seed=3))
    x = jnp.asarray(3 + inputs(2, 5, 24), dtype)
    wide = np.asarray(x, np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    expected = expected * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])
    ours = norm(x)
    assert ours.dtype == dtype
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, atol=2e-6 if dtype == "float32" else 2e-2)


def test_one_is_added_to_gemmas_scale_which_starts_at_zero():
    plain, plus_one = (NORMS[kind]((24,), ("embed",), 1e-6) for kind in ("rms", "rms_plus_one"))
    x = jnp.asarray(inputs(3, 24))
    assert (plus_one.scale[...] == 0).all()
    np.testing.assert_array_equal(plain(x), plus_one(x))
    scale = jnp.asarray(inputs(24, seed=2))
    plain.scale[...], plus_one.scale[...] = 1 + scale, scale
    np.testing.assert_array_equal(plain(x), plus_one(x))
    # The product is rounded once, after the scale: 1 + w is never a bfloat16.
    narrow = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(plus_one(narrow), plus_one(narrow.astype(jnp.float32)).astype(jnp.bfloat16))


@pytest.mark.parametrize("qk_norm", QK_NORMS)
def test_queries_and_keys_are_normalized_as_the_name_says(qk_norm):
    attention, p = module(Attention, qk_norm=qk_norm, attention_bias=True)
    x = inputs(2, 5, 32)
    q, k, v = jax.jit(attention.queries_keys_values)(jnp.asarray(x))
    expected = {w: np.einsum("btd,dhk->bthk", x, p[w]) + p[f"{w}_bias"] for w in ("query", "key", "value")}
    axes = (-2, -1) if "flat" in qk_norm else -1
    whole = "flat" in qk_norm or qk_norm == "layer_heads"  # a scale for each channel of each head
    shape = (lambda heads: (heads, 8)) if whole else (lambda heads: (8,))
    normalized = {"none": {}, "query_head": {"query": 4}, "query_flat": {"query": 4}}
    for which, heads in normalized.get(qk_norm, {"query": 4, "key": 2}).items():
        scale = p.pop(f"{which}_norm")["scale"]
        assert scale.shape == shape(heads)
        if qk_norm == "layer_heads":
            expected[which] = expected[which] - expected[which].mean(-1, keepdims=True)
        expected[which] = numpy_rms(expected[which], scale, axes)
    assert not [name for name in p if "norm" in name]
    for ours, which in ((q, "query"), (k, "key"), (v, "value")):
        np.testing.assert_allclose(ours, expected[which], atol=1e-5)


NUMPY_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_feed_forward_is_its_formula(gated, bias, activation):
    mlp, p = module(MLP, gated_mlp=gated, mlp_bias=bias, activation=activation)
    names = {"up", "down", *(["gate"] if gated else [])}
    assert p.keys() == names | {f"{name}_bias" for name in names if bias}
    x = 2 * inputs(2, 5, 32)
    up, gate = (x @ p[w] + p.get(f"{w}_bias", 0) if w in p else None for w in ("up", "gate"))
    hidden = NUMPY_ACTIVATIONS[activation](gate) * up if gated else NUMPY_ACTIVATIONS[activation](up)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ p["down"] + p.get("down_bias", 0), rtol=1e-6, atol=2e-5)


def test_embeddings_are_scaled_by_a_root_that_was_rounded_first():
    """sqrt(20) is 4.472, and 4.46875 in bfloat16; as numpy's bfloat16 multiplies."""
    embedder, p = module(Embedder, d_model=20, embedding_multiplier=20**0.5)
    tokens = jnp.arange(64)[None]
    np.testing.assert_allclose(embedder.embed(tokens, jnp.dtype("float32"))[0], p["embedding"] * 20**0.5, rtol=1e-6)
    expected = p["embedding"].astype(jnp.bfloat16) * np.asarray(4.46875, jnp.bfloat16)
    ours = embedder.embed(tokens, jnp.dtype("bfloat16"))[0]
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours), expected)
    plain, p = module(Embedder)
    np.testing.assert_array_equal(plain.embed(tokens, jnp.dtype("float32"))[0], p["embedding"].astype(np.float32))


# --- whole --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_no_output_depends_on_a_later_token(config):
    """By the gradient of each output in each token's embedding; all tokens differ, so each has its own."""
    model = Model(dataclasses.replace(config, layers=2))
    params, T = random_params(model), 7
    tokens = jnp.asarray(np.random.default_rng(0).permutation(64)[None, :T], jnp.int32)
    direction, schedule = jnp.asarray(inputs(32)), schedule_of(model.config)

    @jax.jit
    @jax.jacobian
    def of_embedding(embedding):
        embedder = params["token_embedder"] | {"embedding": embedding}
        return model.hidden(params | {"token_embedder": embedder}, tokens, None, None, schedule)[0] @ direction

    sizes = np.abs(of_embedding(params["token_embedder"]["embedding"])).max(-1)[
        :, np.asarray(tokens[0])
    ]  # [T out, T in]
    assert (sizes[np.triu_indices(T, 1)] == 0).all()
    assert (sizes[np.tril_indices(T)] > 1e-4).all()


def test_branches_side_by_side_read_the_same_input():
    """Not what branches one after the other give, and the same where the attention adds nothing."""
    model = Model(dataclasses.replace(NEOX, layers=1))
    other = Model(dataclasses.replace(NEOX, layers=1, block="pre_norm"))
    params, schedule = random_params(model), schedule_of(model.config)
    tokens = jnp.arange(9)[None]

    def outputs(model, params):
        return np.asarray(jax.jit(model.hidden)(params, tokens, None, None, schedule))

    assert np.abs(outputs(model, params) - outputs(other, params)).max() > 0.1
    for name in ("out", "out_bias"):
        params["layers"]["attention"][name] = jnp.zeros_like(params["layers"]["attention"][name])
    np.testing.assert_allclose(outputs(model, params), outputs(other, params), atol=1e-6)


def loss_and_gradients(config: ModelConfig):
    model = Model(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 18)), jnp.int32)
    schedule = schedule_of(config, ("rope:base=100/window=6", "partial_rope:fraction=0.5"))
    return jax.jit(jax.value_and_grad(lambda p, b, s: model.token_loss(p, b, s).mean()))(
        random_params(model), {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, schedule
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_scan_unroll_and_rematerialization_agree(config):
    loss, grads = loss_and_gradients(config)
    assert np.isfinite(loss) and all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    for changes in (dict(scan=False), dict(remat="full")):
        other_loss, other_grads = loss_and_gradients(dataclasses.replace(config, **changes))
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), other_grads, grads)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_bfloat16_computes_near_float32_over_the_same_parameters(config):
    model, narrow = (Model(dataclasses.replace(config, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    params, schedule = random_params(model), schedule_of(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)), jnp.int32)
    exact, rounded = (jax.jit(m.hidden)(params, tokens, None, None, schedule) for m in (model, narrow))
    assert rounded.dtype == jnp.bfloat16
    error = np.abs(np.asarray(rounded, np.float32) - exact)
    assert 0 < error.max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_at_the_start_norms_scale_by_one_and_biases_are_zero(config):
    params = jax.jit(Model(config).init)(jax.random.key(0))
    found = set()
    for path, a in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name == "scale" or name.endswith("bias"):
            stream = config.norm if "_norm" in path[-2].key else None
            assert (a == (1 if name == "scale" and stream != "rms_plus_one" else 0)).all(), path
            found.add(name)
    biases = {f"{w}_bias" for w in ("query", "key", "value", "out", "up", "down")} | {"bias"}
    assert found == {"scale"} | (biases if config is NEOX else set())


# --- the fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(norm="rms_plus_on"), "model.norm is 'rms_plus_on'. Did you mean 'rms_plus_one'"),
        (dict(norm="batch"), "model.norm is 'batch'. Allowed: layer, layer_no_bias, rms, rms_plus_one"),
        (dict(activation="gelu_tan"), "model.activation is 'gelu_tan'. Did you mean 'gelu_tanh'"),
        (dict(activation="?"), "model.activation is '\\?'. Allowed: gelu, gelu_tanh, relu, relu2, silu"),
        (dict(qk_norm="heads"), "model.qk_norm is 'heads'. Did you mean 'head'"),
        (dict(qk_norm=""), "model.qk_norm is ''. Allowed: flat, head, layer_heads, none, query_flat, query_head"),
    ],
    ids=str,
)
def test_a_value_that_does_not_exist_names_its_field(changes, says):
    with pytest.raises(UserError, match=says):
        Model(dataclasses.replace(TINY, **changes))


@pytest.mark.parametrize(
    "field", ["gated_mlp", "embedding_norm", "unembedding_bias", "output_bias", "mlp_bias", "attention_bias"]
)
def test_a_switch_is_true_or_false(field):
    with pytest.raises(UserError, match=f"config.{field} is 'yes'; it must be of type bool"):
        from_dict(ModelConfig, {field: "yes"})
