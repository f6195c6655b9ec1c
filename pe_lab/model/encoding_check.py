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
from pe_lab.errors import ConfigError, UnsupportedError, UserError, is_external
from pe_lab.model.decoder import Model, Params, layer_arrays
from pe_lab.model.learned import learned_of_layer
from pe_lab.model.programs import ChunkedForward
from pe_lab.model.shape import model_schedule
from pe_lab.parallel import AxisRules, make_mesh, use_mesh
from pe_lab.positional import Layer, label
from pe_lab.positional.hooks import has

ArrayLike = jax.Array | np.ndarray

LENGTH = 24  # tokens of a sequence
CUT = 10  # where the second of two documents begins: within a block of attention, and within a chunk of a ring
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
    """`jax.jit` that compiles in a fifth of the time on a CPU: a check compiles for seconds and computes for little."""
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    options: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    if jax.version.__version_info__ < (0, 11):  # later ones have no other way of emitting fused loops
        options["xla_cpu_use_fusion_emitters"] = False
    return jax.jit(function, compiler_options=options)


class TinyModel:
    """An encoding on the layers of a tiny model, with parameters away from their initial values."""

    def __init__(self, layer: Layer, config: ModelConfig = CONFIG, seed: int = 0):
        self.layer, self.config = layer, config
        layers = (layer,) * config.layers
        self.schedule = model_schedule(config, layers)
        self.model = Model(config, hooks=self.schedule.hooks)
        self.initial = jit(self.model.init)(jax.random.key(seed))
        blocks, random = self.initial["layers"], np.random.default_rng(seed)
        if "positional" in blocks:
            # At zero, most parameters hide what they do.
            moved = jax.tree.map(lambda x: x + np.float32(0.3) * _normal(random, *x.shape), blocks["positional"])
            blocks = {**blocks, "positional": moved}
        embedder = self.initial["token_embedder"]
        embedding = _normal(random, *embedder["embedding"].shape)
        self.params = {"token_embedder": {**embedder, "embedding": embedding}, "layers": blocks}
        self.tokens = jnp.arange(2 * LENGTH, dtype=jnp.int32).reshape(2, LENGTH)
        self.direction = _normal(random, 2, LENGTH, config.d_model)

    @functools.cached_property
    def hidden(self) -> Callable[..., Float[Array, "B T D"]]:
        """The compiled hidden states by parameters, tokens, positions and segments."""
        return jit(functools.partial(self.model.hidden, schedule=self.schedule))

    @functools.cached_property
    def pulled(self) -> Callable[..., tuple[Float[Array, "B T D"], Params]]:
        """The compiled hidden states and gradients of their product with a direction."""
        return self.compile_pulled()

    def compile_pulled(self, penalties: bool = True) -> Callable[..., tuple[Float[Array, "B T D"], Params]]:
        """`pulled`, compiled for the current mesh; with or without the gradients of penalties."""

        def product(
            params: Params, tokens: Any, positions: Any, segments: Any, direction: Any
        ) -> tuple[jax.Array, jax.Array]:
            hidden = self.model.hidden(params, tokens, positions, segments, self.schedule)
            total = (hidden * direction).sum()
            return total + sum(self.model.penalties(params).values()) if penalties else total, hidden

        def pulled(*inputs: Any) -> tuple[jax.Array, Params]:
            gradients, hidden = jax.grad(product, has_aux=True)(*inputs)
            return hidden, gradients

        return jit(pulled)

    def of_documents(
        self, direction: ArrayLike, cut: int = 0, first: int = 0, moved: int = 0, pulled: Any = None
    ) -> tuple[Any, Any]:
        """`pulled` of two documents, the second from token `cut` on, or of one (0).

        `first` is where positions begin. The first `moved` tokens are at the end.
        """
        at = np.arange(LENGTH)
        positions, segments = (np.tile(x, (2, 1)).astype(np.int32) for x in (first + at - cut * (at >= cut), at >= cut))
        tokens = jnp.roll(self.tokens, -moved, axis=1)
        return (pulled or self.pulled)(self.params, tokens, positions, segments, direction)

    def claims(self, name: str) -> bool:
        """Whether all encodings of the layer say that a property holds."""
        return all(getattr(one, name) for _, one in self.layer.acting())


def _normal(random: np.random.Generator, *shape: int) -> Float[Array, "*shape"]:
    return jnp.asarray(random.standard_normal(shape), jnp.float32)


def _difference(name: str, a: Any, b: Any, claimed: bool | None = None) -> Check:
    """Whether hidden states, or trees of gradients, are equal.

    Differences are in parts of the largest number of the array, or of 1 if that is larger. NaN is equal to NaN alone.
    """
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        apart = np.where(np.isnan(x) & np.isnan(y), 0.0, np.abs(x - y))
        worst = max(worst, float(np.nan_to_num(apart, nan=np.inf).max() / max(1.0, np.nan_to_num(np.abs(y)).max())))
    return Check(name, worst <= TOLERANCE, claimed, f"{worst:.1g}")


def causality(subject: TinyModel) -> Check:
    """The gradient of a token's output with respect to later tokens and other sequences, which must be exactly zero."""
    worst = 0.0
    for at in (0, LENGTH // 2, LENGTH - 2):
        direction = np.zeros((2, LENGTH, subject.config.d_model), np.float32)
        direction[0, at] = np.linspace(-1, 1, subject.config.d_model)
        gradient = np.asarray(subject.of_documents(direction)[1]["token_embedder"]["embedding"])
        worst = max(worst, float(np.nan_to_num(np.abs(gradient[at + 1 :]), nan=np.inf).max()))
    return Check("causal", worst == 0, None, f"{worst:.1g}")


def relative(subject: TinyModel) -> Check:
    """Outputs at positions 0, 1, 2, ... and at positions that are all `SHIFT` higher."""
    here, there = (subject.of_documents(subject.direction, first=first)[0] for first in (0, SHIFT))
    return _difference("relative", here, there, subject.claims("relative"))


def by_distance(subject: TinyModel) -> Check:
    """Where positions are the indices, and relative biases become tables, and where the same are given."""
    tables = subject.hidden(subject.params, subject.tokens, None, None)
    return _difference("tables", tables, subject.of_documents(subject.direction)[0])


def content(subject: TinyModel) -> Check:
    """Whether attention to the same queries, keys and values depends on the hidden states."""
    config, params = subject.config, subject.params
    arrays = jax.tree.map(lambda a: jnp.asarray(a)[0], layer_arrays(subject.schedule))
    structure = subject.schedule.structure[0]
    learned = learned_of_layer(params["layers"], subject.schedule.structure, 0)
    at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    random = np.random.default_rng(3)
    q = _normal(random, 1, LENGTH, config.heads, config.head_dim)
    k, v = (_normal(random, 1, LENGTH, config.kv_heads, config.head_dim) for _ in range(2))

    @jit
    def out(x: jax.Array) -> jax.Array:
        encoding = subject.model.layer_encoding(arrays, structure, at, learned=learned)
        return attention(q, k, v, encoding, x=x, implementation="reference")

    found = [out(_normal(random, 1, LENGTH, config.d_model)) for _ in range(2)]
    # Claiming to depend and not depending harms nobody: what matters is an encoding that says it does not.
    says = any(one.content for _, one in subject.layer.acting())
    return _difference("static", *found, not says)


def cached(subject: TinyModel) -> Check:
    """A pass in chunks of 8 and of 1 against a KV cache, and one pass; not measured for what refuses a cache."""
    if not subject.claims("exact_cache"):
        return Check("cached", None, False, "exact_cache is False")
    whole = subject.hidden(subject.params, subject.tokens, None, None)
    every = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    found = []
    for chunk in (8, 1):
        chunked = ChunkedForward(subject.config, chunk=chunk)
        chunked._hidden = jit(chunked._forward_hidden)
        found.append(chunked.hidden(subject.params, np.asarray(subject.tokens), every, subject.schedule))
    return _difference("cached", found, [whole, whole], True)


def packed(subject: TinyModel) -> Check:
    """Two documents in one sequence, with positions that begin anew, and each alone: outputs and gradients.

    Alone, a document is at the beginning of a sequence whose rest is later, and does not count.
    """
    at = np.arange(LENGTH)
    together, alone = [], []
    for document, moved in ((at < CUT, 0), (at >= CUT, CUT)):
        direction = subject.direction * document[None, :, None]
        tokens = np.flatnonzero(document)
        hidden, gradients = subject.of_documents(direction, CUT)
        together.append((hidden[:, tokens], gradients))
        hidden, gradients = subject.of_documents(jnp.roll(direction, -moved, axis=1), moved=moved)
        alone.append((hidden[:, tokens - moved], gradients))
    return _difference("packed", together, alone)


def context_parallel(subject: TinyModel, devices: int = 2) -> Check:
    """A sequence that is sharded over devices, and one device: outputs and gradients, of two documents and of one.

    In a ring, and by heads where the encoding allows it.
    """
    if len(jax.devices()) < devices:
        return Check("sharded", None, None, f"{len(jax.devices())} of {devices} devices")
    # Before the mesh: the first call compiles it, and in the mesh that would be a sharded pass too.
    whole = [subject.of_documents(subject.direction, cut) for cut in (0, CUT)]
    found, mesh = [], make_mesh(MeshConfig(data=1, context=devices), jax.devices()[:devices])
    for way in ("ring", "ulysses"):
        try:
            with use_mesh(mesh, AxisRules(context_attention=way)):
                # As training begins.
                subject.model.attention_by_layer(subject.schedule.structure, LENGTH, segments=True)
                sharded = subject.compile_pulled()
                for cut in (0, CUT):
                    found.append(subject.of_documents(subject.direction, cut, pulled=sharded))
        except UserError as error:
            # A combination that is refused is no failure; any other error is one.
            refused = isinstance(error, UnsupportedError)
            if refused and found:
                break
            return Check("sharded", None if refused else False, None, str(error).splitlines()[0])
    return _difference("sharded", found, whole * (len(found) // len(whole)))


def learned(subject: TinyModel) -> Check:
    """Whether every parameter that is trained has a gradient of the outputs: one that is exactly zero never learns.

    A penalty moves a parameter that does nothing, too.
    """
    alone = None
    if any(has(encoding, "penalty") for encoding, _ in subject.model.learned.values()):
        alone = subject.compile_pulled(penalties=False)
    gradients = subject.of_documents(subject.direction, pulled=alone)[1]["layers"].get("positional", {})
    without = []
    for name, settings in subject.model.encoding_settings.items():
        for field, one in settings.items():
            by_layer = np.asarray(gradients[name][field])
            if one.learning_rate and not by_layer.any(axis=tuple(range(1, by_layer.ndim))).all():
                without.append(f"a gradient of zero of '{field}'")
    if not gradients:
        return Check("learned", None, None, "no parameters")
    return Check("learned", not without, None, ", ".join(without))


def finite_gradients(subject: TinyModel) -> Check:
    """The gradients of a bfloat16 model, at the initial parameters and away from them."""
    half = Model(dataclasses.replace(subject.config, dtype="bfloat16"), hooks=subject.schedule.hooks)
    tokens = subject.tokens
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": jnp.ones(tokens.shape)}
    gradient = jit(jax.grad(lambda params: half.loss_sum(params, batch, subject.schedule)))
    bad = [
        jax.tree_util.keystr(path)
        for params in (subject.params, subject.initial)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(params))
        if not bool(np.isfinite(np.asarray(leaf, np.float32)).all())
    ]
    return Check("bfloat16", not bad, None, bad[0] if bad else "")


CHECKS = (causality, relative, by_distance, content, cached, packed, context_parallel, learned, finite_gradients)


def check(layer: Layer) -> list[Check]:
    """All checks of an encoding, in some seconds.

    Raises:
      ConfigError: a hook returned a wrong shape; names the encoding.
    """
    subject = TinyModel(layer)
    return [one(subject) for one in CHECKS]


def require_causal(layers: tuple[Layer, ...]) -> None:
    """Raises a `ConfigError` for an encoding from outside that lets a token see later ones, or returns wrong shapes."""
    for layer in dict.fromkeys(layers):
        if not any(is_external(type(one)) for _, one in layer.acting()):
            continue
        found = causality(TinyModel(dataclasses.replace(layer, heads=(), window=None)))
        if found.fails:
            raise ConfigError(
                f"The encoding '{label(layer)}' is not causal: the output of a token depends on later ones (the "
                f"largest gradient is {found.detail}, expected 0). pe_lab.analyze check shows more."
            )
