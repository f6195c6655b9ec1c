"""The decoder against transformers: llama_golden.npz and family_golden.npz, which make_family_golden.py writes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pe_lab.attention import LayerEncoding, attention
from pe_lab.config import ModelConfig
from pe_lab.model import Model, complete
from pe_lab.model.modules import Attention
from pe_lab.positional import PartialRope, Rope, Yarn, build_schedule, layers, rotation_tables

DATA = Path(__file__).parents[1] / "data"
LLAMA, FAMILIES = np.load(DATA / "llama_golden.npz"), np.load(DATA / "family_golden.npz")
SHAPE = dict(vocab_size=64, layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, norm_epsilon=1e-5, dtype="float32")


def weights_of(file, name: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/weights/"
    return {k.removeprefix(prefix): file[k].astype(np.float32) for k in file.files if k.startswith(prefix)}


# Linear weights are [out, in] and heads merged; pe_lab's are [in, heads, head_dim], layers stacked.


def heads_out(w, K: int):
    return w.T.reshape(w.shape[1], -1, K)


def heads_in(w, K: int):
    return w.T.reshape(-1, K, w.shape[0])


def from_llama(weights: dict[str, np.ndarray], config: ModelConfig):
    """Llama's names, which Qwen2, Qwen3 and Gemma share, in the parameter tree of pe_lab."""
    K = config.head_dim

    def stack(key: str, convert=lambda w: w):
        return jnp.stack([convert(weights[f"model.layers.{n}.{key}"]) for n in range(config.layers)])

    attention = {
        ours: stack(f"self_attn.{ours[0]}_proj.weight", lambda w: heads_out(w, K)) for ours in ("query", "key", "value")
    }
    attention["out"] = stack("self_attn.o_proj.weight", lambda w: heads_in(w, K))
    if config.attention_bias:
        for ours in ("query", "key", "value"):
            attention[f"{ours}_bias"] = stack(f"self_attn.{ours[0]}_proj.bias", lambda b: b.reshape(-1, K))
    if config.qk_norm == "head":
        attention["query_norm"] = {"scale": stack("self_attn.q_norm.weight")}
        attention["key_norm"] = {"scale": stack("self_attn.k_norm.weight")}
    embedder = {
        "embedding": jnp.asarray(weights["model.embed_tokens.weight"]),
        "final_norm": {"scale": jnp.asarray(weights["model.norm.weight"])},
    }
    if not config.tie_embeddings:
        embedder["unembedding"] = jnp.asarray(weights["lm_head.weight"])
    return {
        "token_embedder": embedder,
        "layers": {
            "attention": attention,
            "attention_norm": {"scale": stack("input_layernorm.weight")},
            "mlp": {ours: stack(f"mlp.{ours}_proj.weight", np.transpose) for ours in ("gate", "up", "down")},
            "mlp_norm": {"scale": stack("post_attention_layernorm.weight")},
        },
    }


def canonical_from_neox(head_dim: int, rotated: int) -> np.ndarray:
    """The channel of a GPT-NeoX head for each channel of pe_lab.

    NeoX pairs channels i and i + r/2 of the first r, and lets the rest pass. We pair i and i + K/2 of the whole head,
    of which the first r/2 pairs rotate.
    """
    channels, half, rest = np.arange(head_dim), rotated // 2, (head_dim + rotated) // 2
    return np.concatenate([channels[:half], channels[rotated:rest], channels[half:rotated], channels[rest:]])


def from_neox(weights: dict[str, np.ndarray], config: ModelConfig, rotated: int):
    """GPT-NeoX's names in our tree, channels of queries and keys in our order."""
    D, H, K = config.d_model, config.heads, config.head_dim
    order = canonical_from_neox(K, rotated)

    def stack(key: str, convert=lambda w: w):
        return jnp.stack([convert(weights[f"gpt_neox.layers.{n}.{key}"]) for n in range(config.layers)])

    def norm(key: str):
        return {"scale": stack(f"{key}.weight"), "bias": stack(f"{key}.bias")}

    attention = {}
    # Rows of the fused projection are [head, (query, key, value), channel].
    for part, ours in enumerate(("query", "key", "value")):
        channels = np.arange(K) if ours == "value" else order

        def weight(w, part=part, channels=channels):
            return w.reshape(H, 3, K, D)[:, part, channels].transpose(2, 0, 1)

        def bias(b, part=part, channels=channels):
            return b.reshape(H, 3, K)[:, part, channels]

        attention[ours] = stack("attention.query_key_value.weight", weight)
        attention[f"{ours}_bias"] = stack("attention.query_key_value.bias", bias)
    attention["out"] = stack("attention.dense.weight", lambda w: heads_in(w, K))
    attention["out_bias"] = stack("attention.dense.bias")
    return {
        "token_embedder": {
            "embedding": jnp.asarray(weights["gpt_neox.embed_in.weight"]),
            "final_norm": {
                "scale": jnp.asarray(weights["gpt_neox.final_layer_norm.weight"]),
                "bias": jnp.asarray(weights["gpt_neox.final_layer_norm.bias"]),
            },
            "unembedding": jnp.asarray(weights["lm_head.weight"]),
        },
        "layers": {
            "attention": attention,
            "attention_norm": norm("input_layernorm"),
            "mlp": {
                "up": stack("mlp.dense_h_to_4h.weight", np.transpose),
                "up_bias": stack("mlp.dense_h_to_4h.bias"),
                "down": stack("mlp.dense_4h_to_h.weight", np.transpose),
                "down_bias": stack("mlp.dense_4h_to_h.bias"),
            },
            "mlp_norm": norm("post_attention_layernorm"),
        },
    }


def check_logits(model: Model, params, tokens, expected, encoding) -> None:
    jax.tree.map(lambda ours, expected: np.testing.assert_equal(ours.shape, expected.shape), params, model.shapes)
    config = model.config
    schedule = build_schedule(layers(encoding, config.layers), config.heads, config.kv_heads, config.head_dim)
    logits = jax.jit(lambda p, t, s: model.apply(p, t, None, None, s))(params, jnp.asarray(tokens), schedule)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected).max() <= 2e-5


@pytest.mark.parametrize(
    "name, changes, encoding",
    [
        ("llama_tied", {}, Rope(10000.0)),
        ("llama_untied", dict(tie_embeddings=False, head_dim=16), Rope(500.0)),
        ("llama_yarn", dict(head_dim=16), Rope(10000.0, scaling=Yarn(4.0, 32))),
        ("qwen2", dict(attention_bias=True), Rope(10000.0)),
        ("qwen3", dict(qk_norm="head", tie_embeddings=False, head_dim=16), Rope(10000.0)),
    ],
)
def test_logits_are_those_of_transformers(name, changes, encoding):
    model = Model(ModelConfig(**SHAPE | changes))
    params = from_llama(weights_of(LLAMA, name), model.config)
    check_logits(model, params, LLAMA["tokens"], LLAMA[f"{name}/logits"], encoding)


def test_gemma():
    changes = dict(
        kv_heads=1,
        head_dim=16,
        norm="rms_plus_one",
        activation="gelu_tanh",
        embedding_multiplier=SHAPE["d_model"] ** 0.5,
    )
    model = Model(ModelConfig(**SHAPE | changes))
    params = from_llama(weights_of(FAMILIES, "gemma"), model.config)
    check_logits(model, params, FAMILIES["tokens"], FAMILIES["gemma/logits"], Rope(10000.0))


def test_gpt_neox():
    """Parallel blocks, LayerNorm, plain feed-forward, a bias everywhere, and a quarter of the channels rotating."""
    changes = dict(heads=2, kv_heads=2, attention_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=False)
    changes |= dict(norm="layer", activation="gelu", gated_mlp=False, block="parallel")
    model, encoding = Model(ModelConfig(**SHAPE | changes)), PartialRope(10000.0, 0.25)
    params = from_neox(weights_of(FAMILIES, "gpt_neox"), model.config, encoding.rotated_channels(16))
    check_logits(model, params, FAMILIES["tokens"], FAMILIES["gpt_neox/logits"], encoding)


def test_the_attention_of_olmo2_normalizes_over_all_heads_at_once():
    config = complete(ModelConfig(**SHAPE | dict(qk_norm="flat")))
    weights = weights_of(FAMILIES, "olmo2_attention")
    params = {ours: heads_out(weights[f"{ours[0]}_proj.weight"], 8) for ours in ("query", "key", "value")}
    params["out"] = heads_in(weights["o_proj.weight"], 8)
    for ours in ("query", "key"):
        params[f"{ours}_norm"] = {"scale": weights[f"{ours[0]}_norm.weight"].reshape(-1, 8)}
    definition, state = nnx.split(nnx.eval_shape(lambda: Attention(config, nnx.Rngs(0))))
    params = jax.tree.map(jnp.asarray, params)
    expected_shapes = nnx.to_pure_dict(state)
    jax.tree.map(lambda ours, expected: np.testing.assert_equal(ours.shape, expected.shape), params, expected_shapes)

    @jax.jit
    def outputs(params, inputs, schedule):
        positions = jnp.arange(inputs.shape[1])[None]
        cos, sin = rotation_tables(schedule.fixed_freq[0][:1], schedule.gain[0][:1], positions)
        row = LayerEncoding(cos, sin, None, schedule.logit_scale[0])
        module = nnx.merge(definition, params)
        return module.project_out(attention(*module.queries_keys_values(inputs), row))

    schedule = build_schedule(layers(Rope(10000.0), 1), config.heads, config.kv_heads, config.head_dim)
    ours = outputs(params, jnp.asarray(FAMILIES["olmo2_attention/inputs"]), schedule)
    assert np.abs(ours - FAMILIES["olmo2_attention/outputs"]).max() <= 2e-5
