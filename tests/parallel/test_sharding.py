"""Logical axes on a mesh: a table of partitions, errors, and equal results on any number of devices."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pe_lab.config import MeshConfig, ModelConfig, from_dict
from pe_lab.errors import ConfigError
from pe_lab.model import Model, preset
from pe_lab.parallel import AxisRules, constrain, make_mesh, use_mesh
from pe_lab.positional import build_schedule, layers

DROPE_494M = ModelConfig(
    vocab_size=151936, layers=24, d_model=896, d_ff=4864, heads=14, kv_heads=2, tie_embeddings=True
)


def flat(tree):
    """'layers.attention.query' -> leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def specs(config: ModelConfig, mesh) -> dict[str, P]:
    model = Model(config)
    shapes = flat(model.shapes)
    assert flat(model.axes).keys() == shapes.keys()
    axes = flat(model.axes)
    return {name: AxisRules().spec(axes[name], shapes[name].shape, mesh, name) for name in axes}


def test_the_partition_of_every_parameter_of_the_494m_model():
    expected = {
        "token_embedder.embedding": P("tensor", "fsdp"),
        "token_embedder.final_norm.scale": P(None),
        "layers.attention_norm.scale": P(None, None),
        "layers.attention.query": P(None, "fsdp", "tensor", None),
        "layers.attention.key": P(None, "fsdp", "tensor", None),
        "layers.attention.value": P(None, "fsdp", "tensor", None),
        "layers.attention.out": P(None, "tensor", None, "fsdp"),
        "layers.mlp_norm.scale": P(None, None),
        "layers.mlp.gate": P(None, "fsdp", "tensor"),
        "layers.mlp.up": P(None, "fsdp", "tensor"),
        "layers.mlp.down": P(None, "tensor", "fsdp"),
    }
    assert specs(DROPE_494M, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))) == expected
    # The same on a slice of 256 chips, which no test has.
    assert specs(DROPE_494M, AbstractMesh((16, 16, 1), ("data", "fsdp", "tensor"))) == expected
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 2 * 896
    assert Model(DROPE_494M).num_parameters == 24 * layer + 151936 * 896 + 896


def test_the_optional_parameters_of_a_family_have_a_partition():
    config = dataclasses.replace(DROPE_494M, qk_norm="head", attention_bias=True, tie_embeddings=False)
    added = {
        "token_embedder.unembedding": P("tensor", "fsdp"),
        "layers.attention.query_bias": P(None, "tensor", None),
        "layers.attention.key_bias": P(None, "tensor", None),
        "layers.attention.value_bias": P(None, "tensor", None),
        "layers.attention.query_norm.scale": P(None, None),
        "layers.attention.key_norm.scale": P(None, None),
    }
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert specs(config, mesh) == specs(DROPE_494M, mesh) | added
    # A flat QK-norm has a scale per head, sharded like the heads.
    config = dataclasses.replace(DROPE_494M, qk_norm="flat")
    flat_scales = {
        "layers.attention.query_norm.scale": P(None, "tensor", None),
        "layers.attention.key_norm.scale": P(None, "tensor", None),
    }
    assert specs(config, mesh) == specs(DROPE_494M, mesh) | flat_scales
    query_only = {"layers.attention.query_norm.scale": P(None, "tensor", None)}
    assert specs(dataclasses.replace(config, qk_norm="query_flat"), mesh) == specs(DROPE_494M, mesh) | query_only


def test_the_partition_of_every_parameter_of_pythia():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert specs(from_dict(ModelConfig, preset("pythia_1b")), mesh) == {
        "token_embedder.embedding": P("tensor", "fsdp"),
        "token_embedder.unembedding": P("tensor", "fsdp"),
        "token_embedder.final_norm.scale": P(None),
        "token_embedder.final_norm.bias": P(None),
        "layers.attention_norm.scale": P(None, None),
        "layers.attention_norm.bias": P(None, None),
        "layers.attention.query": P(None, "fsdp", "tensor", None),
        "layers.attention.key": P(None, "fsdp", "tensor", None),
        "layers.attention.value": P(None, "fsdp", "tensor", None),
        "layers.attention.out": P(None, "tensor", None, "fsdp"),
        "layers.attention.query_bias": P(None, "tensor", None),
        "layers.attention.key_bias": P(None, "tensor", None),
        "layers.attention.value_bias": P(None, "tensor", None),
        "layers.attention.out_bias": P(None, None),
        "layers.mlp_norm.scale": P(None, None),
        "layers.mlp_norm.bias": P(None, None),
        "layers.mlp.up": P(None, "fsdp", "tensor"),
        "layers.mlp.up_bias": P(None, "tensor"),
        "layers.mlp.down": P(None, "tensor", "fsdp"),
        "layers.mlp.down_bias": P(None, None),
    }


def test_few_key_value_heads_are_replicated():
    """Two of them on four tensor devices; with 16 query heads, which do divide."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    found = specs(dataclasses.replace(DROPE_494M, heads=16, head_dim=64, qk_norm="flat"), mesh)
    assert found["layers.attention.key"] == found["layers.attention.value"] == P(None, "fsdp", None, None)
    assert found["layers.attention.key_norm.scale"] == P(None, None, None)
    assert found["layers.attention.query_norm.scale"] == P(None, "tensor", None)
    assert found["layers.attention.query"] == P(None, "fsdp", "tensor", None)


def test_unequal_shards_are_refused():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    message = r"layers\.attention\.out of shape \(24, 14, 64, 896\).*'heads', 14.*4 devices.*'tensor'"
    with pytest.raises(ConfigError, match=message):
        specs(DROPE_494M, mesh)
    with pytest.raises(ConfigError, match=r"'embed', 896.*256 devices"):
        specs(DROPE_494M, AbstractMesh((1, 256, 1), ("data", "fsdp", "tensor")))


def test_two_dimensions_cannot_use_one_mesh_axis():
    with pytest.raises(ConfigError, match=r"token_embedder\.embedding.*\('vocab', 'embed'\).*'fsdp' twice"):
        AxisRules(vocab="fsdp").spec(("vocab", "embed"), name="token_embedder.embedding")
    with pytest.raises(ConfigError, match="'data' twice"):
        AxisRules(activation_embed=("tensor", "data")).spec(("batch", "length", "activation_embed"))


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="'embedd'. Did you mean 'embed'"):
        AxisRules().spec(("embedd",))
    with pytest.raises(ConfigError, match="no logical axis is called 'spec'"):
        AxisRules().spec(("spec",))
    with pytest.raises(ConfigError, match="'fsdq'.*data, fsdp, tensor"):
        AxisRules(embed="fsdq").spec(("embed",), (8,), make_mesh(MeshConfig()))


def test_constrain_does_nothing_outside_a_mesh():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    x = jnp.zeros((8, 4))
    assert constrain(x, "batch", "mlp") is x
    with use_mesh(mesh, AxisRules()):
        placed = jax.jit(lambda x: constrain(x, "batch", "mlp"))(x)
    assert placed.sharding == NamedSharding(mesh, P(("data", "fsdp"), "tensor"))
    assert constrain(x, "batch", "mlp") is x


# --- the model on a mesh ------------------------------------------------------------------------------------

# Nothing else is as large as the logits [8, 32, 96], of which a device of eight holds [2, 32, 48].
B, T, V = 8, 32, 96
CONFIG = ModelConfig(
    vocab_size=V, layers=2, d_model=16, d_ff=24, heads=4, kv_heads=2, tie_embeddings=False, dtype="float32"
)
MESHES = {
    "fsdp 4": MeshConfig(data=1, fsdp=4, tensor=1),
    "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
}


def arguments(model: Model):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: np.asarray(rng.standard_normal(s.shape) * 0.3, np.float32), model.shapes)
    tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}
    return params, batch, build_schedule(layers(("rope/window=9", "alibi"), 2), 4, 2, 4)


def value_and_grad(config: ModelConfig, mesh=None):
    """The jitted loss and gradients, parameters and batch laid out on the mesh as training does."""
    model, rules = Model(config), AxisRules()

    def loss(params, batch, schedule):
        with use_mesh(mesh, rules) if mesh is not None else contextlib.nullcontext():
            return model.token_loss(params, batch, schedule).mean()

    if mesh is None:
        return jax.jit(jax.value_and_grad(loss))
    shardings = jax.tree.map(lambda s, axes: rules.sharding(mesh, axes, s.shape), model.shapes, model.axes)
    batch = NamedSharding(mesh, rules.spec(("batch", "length")))
    whole = NamedSharding(mesh, P())
    return jax.jit(jax.value_and_grad(loss), in_shardings=(shardings, batch, whole), out_shardings=(whole, shardings))


@pytest.fixture(scope="module")
def alone():
    return value_and_grad(CONFIG)(*arguments(Model(CONFIG)))


def same_on(mesh, args, loss_and_gradients, config: ModelConfig) -> str:
    """Checks a compiled step against the loss and gradients of one device, and returns its HLO."""
    compiled = value_and_grad(config, mesh).lower(*args).compile()
    loss, grads = compiled(*jax.device_put(args, compiled.input_shardings[0]))
    np.testing.assert_allclose(loss, loss_and_gradients[0], rtol=1e-5)
    for (name, ours), expected in zip(flat(grads).items(), flat(loss_and_gradients[1]).values(), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(ours) / scale, expected / scale, atol=1e-5, err_msg=name)
    return compiled.as_text()


def gathered_logits(hlo: str) -> list[str]:
    """The shapes of gathered arrays over the whole vocabulary, for at least the tokens of one device."""
    shapes = re.findall(r"= \(?\w+\[([\d,]+)\]\S* all-(?:gather|to-all)(?:-start)?\(", hlo)
    sizes = [[int(n) for n in shape.split(",")] for shape in shapes]
    return [str(size) for size in sizes if V in size and np.prod(size) >= B // 4 * T * V]


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh, chunks, alone):
    mesh = make_mesh(mesh, jax.devices()[: abs(mesh.data * mesh.fsdp * mesh.tensor)])
    config = dataclasses.replace(CONFIG, loss_chunks=chunks)
    assert gathered_logits(same_on(mesh, arguments(Model(config)), alone, config)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(qk_norm="flat", norm="rms_plus_one", activation="gelu_tanh", embedding_multiplier=8.0),
        dict(norm="layer", gated_mlp=False, block="parallel", attention_bias=True, output_bias=True, mlp_bias=True),
    ],
    ids=["flat QK-norm", "parallel block"],
)
def test_the_optional_parts_of_a_family_do_not_depend_on_the_mesh(changes):
    """A flat QK-norm averages over heads on two devices."""
    config, mesh = dataclasses.replace(CONFIG, **changes), make_mesh(MESHES["data 2, fsdp 2, tensor 2"])
    args = arguments(Model(config))
    same_on(mesh, args, value_and_grad(config)(*args), config)


def test_gathered_logits_are_found():
    """`gathered_logits` on a program that gathers the vocabulary."""
    mesh = make_mesh(MESHES["data 2, fsdp 2, tensor 2"])
    whole = NamedSharding(mesh, P(("data", "fsdp")))
    cut = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
    program = jax.jit(lambda x: x * 2, in_shardings=cut, out_shardings=whole)
    text = program.lower(jax.ShapeDtypeStruct((B, T, V), jnp.float32)).compile().as_text()
    assert gathered_logits(text)
