"""Checks of what an encoding says of itself, on a tiny model: causality, positions, caches, packing, meshes, gradients.

Every token of the check has an embedding of its own, so that the gradient of the embedding is that of the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pe_lab.attention import attention
from pe_lab.config import MeshConfig, ModelConfig
from pe_lab.errors import ConfigError, UserError
from pe_lab.model.chunked_forward import ChunkedForward
from pe_lab.model.decoder import Model, Params, layer_arrays
from pe_lab.model.learned import learned_of_layer
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Layer, Schedule, build_schedule, label
from pe_lab.positional.hooks import is_external

LENGTH = 24  # tokens of a sequence
SHIFT = 20_000  # how far positions are moved: across two steps of a temperature by floor(n / 8192)
TOLERANCE = 2e-4  # of float32 outputs of size 1, after two layers
CONFIG = ModelConfig(
    vocab_size=2 * LENGTH, layers=2, d_model=64, d_ff=64, heads=4, kv_heads=2, head_dim=16, dtype="float32",
    attention="chunked", attention_chunk=8,
    init_std=0.2,  # attention changes the outputs as much as in a trained model
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One property of an encoding.

    Attributes:
      name: of the property.
      found: whether it holds; None: not measured here.
      claimed: whether the encoding says that it holds; None: every encoding must, or it says nothing.
      detail: the largest difference, or the reason why nothing was measured.
    """

    name: str
    found: bool | None
    claimed: bool | None = None
    detail: str = ""

    @property
    def fails(self) -> bool:
        """Whether the encoding claims what does not hold, or lacks what every encoding must have."""
        return self.found is False and self.claimed is not False


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` that compiles in half the time on a CPU: a check computes for milliseconds."""
    cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0} if cpu else None)


class Subject:
    """An encoding on the layers of a tiny model, with parameters away from their initial values."""

    def __init__(self, layer: Layer, config: ModelConfig = CONFIG, seed: int = 0):
        self.layer, self.config = layer, config
        layers = (layer,) * config.layers
        self.schedule = build_schedule(layers, config.heads, config.kv_heads, config.head_dim)
        self.model = Model(config, hooks=self.schedule.hooks)
        key = jax.random.key(seed)
        self.initial = jit(self.model.init)(key)
        blocks = self.initial["layers"]
        if "positional" in blocks:
            # At zero, most parameters hide what they do.
            leaves, tree = jax.tree.flatten(blocks["positional"])
            keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
            moved = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
            blocks = {**blocks, "positional": jax.tree.unflatten(tree, moved)}
        embedder = self.initial["token_embedder"]
        embedding = jax.random.normal(jax.random.fold_in(key, 2), embedder["embedding"].shape)
        self.params = {"token_embedder": {**embedder, "embedding": embedding}, "layers": blocks}
        self.tokens = jnp.arange(2 * LENGTH, dtype=jnp.int32).reshape(2, LENGTH)

    @functools.cached_property
    def hidden(self) -> Callable[..., Float[Array, "B T D"]]:
        """The compiled hidden states by parameters, tokens, positions and segments."""
        return jit(functools.partial(_hidden, self.model, self.schedule))

    def claims(self, name: str) -> bool:
        """Whether all encodings of the layer say that a property holds."""
        return all(getattr(one, name) for _, one in self.layer.acting())


def _hidden(model: Model, schedule: Schedule, params: Params, tokens: Any, positions: Any, segments: Any) -> jax.Array:
    return model.hidden(params, tokens, positions, segments, schedule)


def _difference(name: str, a: Any, b: Any, claimed: bool | None = None) -> Check:
    worst = float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
    return Check(name, worst <= TOLERANCE, claimed, f"{worst:.1g}")


def causality(subject: Subject) -> Check:
    """The gradient of a token's output with respect to later tokens, which must be exactly zero."""
    worst = 0.0

    @jit
    def gradient(params: Params, at: jax.Array) -> jax.Array:
        def output(embedding: jax.Array) -> jax.Array:
            changed = {**params, "token_embedder": {**params["token_embedder"], "embedding": embedding}}
            hidden = _hidden(subject.model, subject.schedule, changed, subject.tokens[:1], None, None)
            return (jnp.take(hidden[0], at, axis=0) * jnp.linspace(-1, 1, hidden.shape[-1])).sum()

        return jax.grad(output)(params["token_embedder"]["embedding"])[:LENGTH]

    for at in (0, LENGTH // 2, LENGTH - 2):
        later = np.abs(np.asarray(gradient(subject.params, jnp.int32(at)))[at + 1 :])
        worst = max(worst, float(np.nan_to_num(later, nan=np.inf).max()))
    return Check("causal", worst == 0, None, f"{worst:.1g}")


def relative(subject: Subject) -> Check:
    """Outputs at positions 0, 1, 2, ... and at positions that are all `SHIFT` higher."""
    at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    here, there = (subject.hidden(subject.params, subject.tokens, one, None) for one in (at, at + SHIFT))
    return _difference("relative", here, there, subject.claims("relative"))


def by_distance(subject: Subject) -> Check:
    """Outputs where positions are indices, for which relative biases are tables, and where the same are given."""
    at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    tables, given = (subject.hidden(subject.params, subject.tokens, one, None) for one in (None, at))
    return _difference("tables", tables, given)


def content(subject: Subject) -> Check:
    """Whether attention to the same queries, keys and values depends on the hidden states."""
    config, params = subject.config, subject.params
    arrays = jax.tree.map(lambda a: jnp.asarray(a)[0], layer_arrays(subject.schedule))
    structure = subject.schedule.structure[0]
    learned = learned_of_layer(params["layers"], subject.schedule.structure, 0)
    at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)  # noqa: E731
    q = draw(3, 1, LENGTH, config.heads, config.head_dim)
    k, v = (draw(n, 1, LENGTH, config.kv_heads, config.head_dim) for n in (4, 5))

    @jit
    def out(x: jax.Array) -> jax.Array:
        encoding = subject.model.layer_encoding(arrays, structure, at, learned=learned)
        return attention(q, k, v, encoding, x=x, implementation="chunked", chunk=8)

    found = [out(draw(n, 1, LENGTH, config.d_model)) for n in (6, 7)]
    depends = float(jnp.abs(found[0] - found[1]).max()) > TOLERANCE
    # Claiming to depend and not depending harms nobody: what matters is an encoding that says it does not.
    says = any(one.content for _, one in subject.layer.acting())
    return Check("static", not depends, not says, "")


def cached(subject: Subject) -> Check:
    """A pass in chunks of 8 and of 1 against a KV cache, and one pass."""
    whole = np.asarray(subject.hidden(subject.params, subject.tokens, None, None))
    every = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    worst = 0.0
    for chunk in (8, 1):
        chunked = ChunkedForward(subject.config, chunk=chunk)
        found = chunked.hidden(subject.params, np.asarray(subject.tokens), every, subject.schedule)
        worst = max(worst, float(np.abs(np.asarray(found) - whole).max()))
    return Check("cached", worst <= TOLERANCE, subject.claims("exact_cache"), f"{worst:.1g}")


def packed(subject: Subject) -> Check:
    """Two documents in one window, with positions that begin anew, and each alone."""
    cut = LENGTH // 2  # of equal lengths, for one compilation; within a block of attention
    segments = jnp.asarray([[0] * cut + [1] * (LENGTH - cut)] * 2, jnp.int32)
    positions = jnp.asarray([[*range(cut), *range(LENGTH - cut)]] * 2, jnp.int32)
    together = subject.hidden(subject.params, subject.tokens, positions, segments)
    apart = [
        subject.hidden(subject.params, subject.tokens[:, part], None, None) for part in (slice(cut), slice(cut, None))
    ]
    return _difference("packed", together, jnp.concatenate(apart, 1))


def context_parallel(subject: Subject) -> Check:
    """A sequence that is sharded over two devices, and one device."""
    if len(jax.devices()) < 2:
        return Check("sharded", None, None, "one device")
    whole = subject.hidden(subject.params, subject.tokens, None, None)
    try:
        with use_mesh(make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2]), AxisRules()):
            shared = functools.partial(_hidden, subject.model, subject.schedule)
            found = jit(shared)(subject.params, subject.tokens, None, None)
            return _difference("sharded", whole, np.asarray(found))
    except UserError as error:  # refused, which is no failure
        return Check("sharded", None, None, str(error).splitlines()[0])


def finite_gradients(subject: Subject) -> Check:
    """The gradients of a bfloat16 model, at the initial parameters and away from them."""
    half = Model(dataclasses.replace(subject.config, dtype="bfloat16"), hooks=subject.schedule.hooks)
    tokens = subject.tokens
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": jnp.ones(tokens.shape)}
    gradient = jit(jax.grad(lambda params: half.loss_sum(params, batch, subject.schedule)))
    bad = [
        jax.tree_util.keystr(path)
        for params in (subject.params, subject.initial)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(params))
        if not bool(jnp.isfinite(leaf).all())
    ]
    return Check("bfloat16", not bad, None, bad[0] if bad else "")


CHECKS = (causality, relative, by_distance, content, cached, packed, context_parallel, finite_gradients)


def check(layer: Layer) -> list[Check]:
    """All checks of an encoding, in some seconds.

    Raises:
      ConfigError: a hook returned a wrong shape; names the encoding.
    """
    subject = Subject(layer)
    return [one(subject) for one in CHECKS]


def require_causal(layers: tuple[Layer, ...]) -> None:
    """Raises a `ConfigError` for an encoding from outside that lets a token see later ones, or returns wrong shapes."""
    for layer in dict.fromkeys(layers):
        if not any(is_external(type(one)) for _, one in layer.acting()):
            continue
        found = causality(Subject(dataclasses.replace(layer, heads=(), window=None)))
        if found.fails:
            raise ConfigError(
                f"The encoding '{label(layer)}' is not causal: the output of a token depends on later ones (the "
                f"largest gradient is {found.detail}, expected 0). pe_lab.analyze --study=check shows more."
            )
