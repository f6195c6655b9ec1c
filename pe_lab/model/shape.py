"""The shape of a model: the config completed and checked, stacks of layers, their schedules, parameters and FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from pe_lab.attention import IMPLEMENTATIONS
from pe_lab.attention.key_block import RESIDUALS
from pe_lab.config import LayerShape, ModelConfig, check_bounds
from pe_lab.errors import ConfigError, UnsupportedError, did_you_mean
from pe_lab.model import parametrization
from pe_lab.model.modules import ACTIVATIONS, BLOCKS, FEED_FORWARDS, parameter_sizes
from pe_lab.model.norms import NORMS, QK_NORMS
from pe_lab.positional import Encoding, HeadShape, Layer, LayerHeads, LayerStructure, Schedule, build_schedule, label
from pe_lab.positional.hooks import has, parameter_settings

Params = dict[str, Any]


def check_shapes(config: ModelConfig) -> None:
    """`ConfigError` for `layer_shapes` that contradict each other or the model."""
    found: dict[int, LayerShape] = {}
    names = [shape.name for shape in config.layer_shapes]
    for shape in config.layer_shapes:
        where = f"model.layer_shapes '{shape.name}'"
        if not shape.name.isidentifier() or shape.name == BASE or names.count(shape.name) > 1:
            raise ConfigError(f"{where}: give each shape a name of letters, another one than the others and '{BASE}'.")
        for n in shape.layers:
            if not 0 <= n < config.layers or n in found:
                why = "it has another shape already" if n in found else f"the model has layers 0 to {config.layers - 1}"
                raise ConfigError(f"{where}: it has layer {n}; {why}.")
            found[n] = shape
        if shape.head_dim % 2:
            raise ConfigError(
                f"{where}: head_dim is {shape.head_dim}; it must be even, since channels rotate in pairs."
            )
        if config.heads % (shape.kv_heads or config.kv_heads):
            raise ConfigError(f"{where}: kv_heads is {shape.kv_heads}; it must divide heads, {config.heads}.")
    for shape in config.layer_shapes:
        if (source := shape.keys_of) < 0:
            continue
        other = found.get(source)
        its, own = (
            (one.head_dim or config.head_dim, one.kv_heads or config.kv_heads)
            if one
            else (config.head_dim, config.kv_heads)
            for one in (other, shape)
        )
        if source >= min(shape.layers, default=source + 1) or (other and other.keys_of >= 0) or its != own:
            raise ConfigError(
                f"model.layer_shapes '{shape.name}': keys_of is layer {source}; it must come before these layers, "
                "have keys of its own, and equally many heads and channels."
            )


BASE = "base"  # the shape of the layers that `layer_shapes` does not list


class Stack(NamedTuple):
    """The layers of one shape, whose parameters are stacked.

    Attributes:
      name: the stack is `layers.shapes.NAME`; "": all layers have one shape, and it is `layers`.
      config: the model's, with what these layers have of their own.
      layers: their numbers, ascending.
      keys_of: the layer whose keys and values they attend to; None: their own.
    """

    name: str
    config: ModelConfig
    layers: tuple[int, ...]
    keys_of: int | None = None


@functools.lru_cache(maxsize=256)
def stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """The stacks of a completed config's layers, in the order of `LayerHeads.shape`."""
    if not config.layer_shapes:
        return (Stack("", config, tuple(range(config.layers))),)
    listed = {n for shape in config.layer_shapes for n in shape.layers}
    plain = dataclasses.replace(config, layer_shapes=())
    found = [Stack(BASE, plain, tuple(n for n in range(config.layers) if n not in listed))]
    for shape in config.layer_shapes:
        own = {name: getattr(shape, name) or getattr(config, name) for name in _OWN}
        source = shape.keys_of if shape.keys_of >= 0 else None
        found.append(Stack(shape.name, dataclasses.replace(plain, **own), tuple(sorted(shape.layers)), source))
    return tuple(stack for stack in found if stack.layers)


_OWN = ("head_dim", "kv_heads", "d_ff", "values_are_keys")


def layer_heads(config: ModelConfig) -> tuple[LayerHeads, ...] | None:
    """The heads of every layer of a completed config; None: all layers have those of the config."""
    if not config.layer_shapes:
        return None
    of_stacks = stacks(config)
    read = {stack.keys_of for stack in of_stacks}
    found = {
        n: LayerHeads(one.config.kv_heads, one.config.head_dim, shape, n if n in read else one.keys_of)
        for shape, one in enumerate(of_stacks)
        for n in one.layers
    }
    return tuple(found[n] for n in range(config.layers))


def require_one_shape(config: ModelConfig, what: str) -> None:
    """`UnsupportedError` for a model whose layers differ in shape, or whose values are its keys."""
    if config.layer_shapes or config.values_are_keys:
        raise UnsupportedError(
            f"{what} needs layers of one shape with keys and values of their own, and this model has others "
            "(model.layer_shapes, model.values_are_keys)."
        )


def require_equal_heads(config: ModelConfig, layers: Sequence[int], what: str) -> None:
    """`ConfigError` for layers whose heads differ in number or channels, for what holds all of them in one array."""
    own = layer_heads(config)
    if own and len({(own[n].num_kv_heads, own[n].head_dim) for n in layers}) > 1:
        raise ConfigError(f"{what} needs layers with equal heads, and these differ: choose layers of one shape.")


def model_schedule(config: ModelConfig, layers: Sequence[Layer], length: int | None = None) -> Schedule:
    """`build_schedule` of these layers for a model of this shape, completed.

    Raises:
      ConfigError: as that does, and for a layer with another encoding than the one whose keys it attends to.
    """
    own = layer_heads(config)
    schedule = build_schedule(layers, config.heads, config.kv_heads, config.head_dim, length, own)
    _check_shared_keys(layers, own or ())
    return schedule


def _check_shared_keys(layers: Sequence[Layer], own: Sequence[LayerHeads]) -> None:
    """`ConfigError` for a layer that attends to another one's keys, and could not read them as that one caches them."""
    for n, one in enumerate(own):
        if (source := one.keys_of) is None:
            continue
        layer = layers[n]
        of_keys = dataclasses.replace(layer, logit_scale=layers[source].logit_scale)
        if of_keys != layers[source]:
            raise ConfigError(
                f"Layer {n} attends to the keys of layer {source}, which has another encoding or window: "
                f"{label(layers[source])}, and here {label(layer)}. Keys are encoded once: give both the same one."
            )
        if own := [hook for _, e in layer.acting() for hook in ("encode", "key_bias", "running_sum") if has(e, hook)]:
            raise ConfigError(
                f"Layer {n} attends to the keys of layer {source}, and its encoding {label(layer)} acts on keys by "
                f"'{own[0]}'. Use an encoding without that on both."
            )


def check_schedule(config: ModelConfig, schedule: Schedule) -> None:
    """`ConfigError` for a schedule of another number of layers than the model's, or of other heads."""
    if schedule.num_layers != config.layers:
        raise ConfigError(f"The schedule has {schedule.num_layers} layers and the model {config.layers}.")
    own = layer_heads(config)
    channels = config.head_dim if own is None else max(one.head_dim for one in own)
    wanted = [(one.shape, one.keys_of) for one in own] if own else [(0, None)] * config.layers
    if schedule.inv_freq.shape[1:] != (config.heads, channels // 2):
        raise ConfigError(
            f"The schedule is for {schedule.inv_freq.shape[1]} heads of {2 * schedule.inv_freq.shape[2]} "
            f"channels, and the model has {config.heads} of {channels}."
        )
    if [(one.shape, one.keys_of) for one in schedule.structure] != wanted:
        raise ConfigError("The layers of the model differ in shape: build its schedule with `model_schedule`.")


def head_shape(config: ModelConfig) -> HeadShape:
    """The sizes on which parameters of encodings depend, of layers of this shape."""
    return HeadShape(config.heads, config.kv_heads, config.head_dim, config.d_model)


def sizes_for(config: ModelConfig, encoding: Encoding, layers: Sequence[int]) -> HeadShape:
    """The sizes on which the parameters of an encoding on these layers depend.

    Raises:
      ConfigError: it has parameters of several shapes there.
    """
    found = {head_shape(stack.config) for stack in stacks(config) if set(stack.layers) & set(layers)}
    settings = [parameter_settings(encoding, one) for one in found]
    if len({str({name: one.value.shape for name, one in each.items()}) for each in settings}) > 1:
        sizes = " and ".join(f"{one.num_kv_heads} key heads of {one.head_dim} channels" for one in sorted(found))
        raise ConfigError(
            f"{type(encoding).__name__} has parameters for each head or channel, and is on layers that differ in "
            f"them ({sizes}): give it to layers of one shape."
        )
    return max(found)


def stacked_blocks(blocks: Params, of_stacks: Sequence[Stack]) -> tuple[Params, ...]:
    """The parameters of blocks, stacked over the layers of each stack, from the first part of `split_layers`."""
    return tuple(blocks["shapes"][stack.name] if stack.name else blocks for stack in of_stacks)


def from_stacks(found: Sequence[Params], of_stacks: Sequence[Stack]) -> Params:
    """The inverse of `stacked_blocks`."""
    if not of_stacks[0].name:
        return found[0]
    return {"shapes": {stack.name: one for stack, one in zip(of_stacks, found, strict=True)}}


_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def _attention(primitive: Any, *_: Any, **settings: Any) -> bool:
    """Whether a value is an output of attention, or its logsumexp."""
    return settings.get("name") == RESIDUALS or primitive.name == "dot_product_attention_fwd_wrapper"  # cuDNN's


# What is kept of a layer for the backward pass, beside its input. None: everything.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots_attention": jax.checkpoint_policies.save_from_both_policies(_products, _attention),
    "dots": _products,
    "dots_offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def complete(config: ModelConfig) -> ModelConfig:
    """The config with head_dim set. Raises a `ConfigError` that names an invalid field."""
    check_bounds(config, "model")
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"model.heads is {config.heads} and model.kv_heads {config.kv_heads}; kv_heads must divide heads."
        )
    if config.head_dim == 0:
        if config.d_model % config.heads:
            raise ConfigError(
                f"model.d_model {config.d_model} does not divide into {config.heads} heads; set model.head_dim."
            )
        config = dataclasses.replace(config, head_dim=config.d_model // config.heads)
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"model.head_dim is {config.head_dim}; it must be even, since channels rotate in pairs.")
    if config.vocab_size < 1:
        raise ConfigError(f"model.vocab_size is {config.vocab_size}; it must be positive.")
    if config.feed_forward not in ("", *FEED_FORWARDS):
        advice = did_you_mean(config.feed_forward, [*FEED_FORWARDS]) if FEED_FORWARDS else "None is registered."
        raise ConfigError(
            f"model.feed_forward: there is no '{config.feed_forward}'. {advice} Import the file that registers it, in "
            "the recipe or by --encodings=FILE.py."
        )
    choices = {
        "norm": NORMS,
        "block": BLOCKS,
        "activation": ACTIVATIONS,
        "qk_norm": QK_NORMS,
        "remat": ("auto", *REMAT_POLICIES),
        "attention": ("auto", *IMPLEMENTATIONS),
    }
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise ConfigError(f"model.{field} is '{value}'. " + did_you_mean(str(value), list(allowed)))
    if config.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"model.dtype is '{config.dtype}'; it must be float32 or bfloat16.")
    check_shapes(config)
    parametrization.check(config)
    return config


class Repetition(NamedTuple):
    """Layers `start` .. `start + period * repeats`, whose structure repeats with `period`."""

    start: int
    period: int
    repeats: int


def repetitions(structure: Sequence[Hashable]) -> list[Repetition]:
    """The repetitions that make up a stack of layers; only one period of each is compiled.

    Greedy from the first layer: at each layer, the pattern that saves most layers is taken, the shorter one among
    equals. 3 windowed + 1 full, repeated, is one of period 4; 12 rotary layers before 12 without are two of
    period 1.
    """
    found, start, total = [], 0, len(structure)
    while start < total:
        best = Repetition(start, 1, 1)
        for period in range(1, (total - start) // 2 + 1):
            pattern, repeats = structure[start : start + period], 1
            while structure[start + period * repeats : start + period * (repeats + 1)] == pattern:
                repeats += 1
            if period * (repeats - 1) > best.period * (best.repeats - 1):
                best = Repetition(start, period, repeats)
        found.append(best)
        start += best.period * best.repeats
    return found


def least_parameters(config: ModelConfig) -> int:
    """The parameters of the matrices of a completed config, by arithmetic alone; norms and biases are left out."""
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.d_model
    embeddings += config.vocab_size * config.layers * config.per_layer_input
    return sum(len(stack.layers) * layer_weights(stack) for stack in stacks(config)) + embeddings


def layer_weights(stack: Stack) -> int:
    """The parameters of one layer that a token is multiplied with; norms and biases are left out.

    Those of the projection of the embedding to the layer's own input are among them.
    """
    config = stack.config
    projections = 0 if stack.keys_of is not None else 2 - config.values_are_keys  # of keys and values
    attention = config.d_model * config.head_dim * (2 * config.heads + projections * config.kv_heads)
    return attention + feed_forward_weights(config) + 3 * config.d_model * config.per_layer_input


def feed_forward_weights(config: ModelConfig) -> int:
    """The parameters of one layer's feed-forward that a token is multiplied with; norms and biases are left out.

    A registered class says it by `active_weights(config)`, a static method; without one, all of its matrices count.
    """
    if not config.feed_forward:
        return (3 if config.gated_mlp else 2) * config.d_model * config.d_ff
    kind = FEED_FORWARDS[config.feed_forward]
    if hasattr(kind, "active_weights"):
        return kind.active_weights(config)
    return sum(math.prod(shape) for shape in parameter_sizes(kind, config) if len(shape) > 1)


class Flops(NamedTuple):
    """Floating-point operations per trained token, under two conventions of MFU.

    `full` counts every query with every key, as PaLM and MaxText do; `causal` counts only visible keys. Neither counts
    rematerialization.
    """

    full: float
    causal: float

    @property
    def forward(self) -> Flops:
        """Those of a forward pass: a third of a train step's."""
        return Flops(self.full / 3, self.causal / 3)

    def plus(self, other: Flops) -> Flops:
        """Both together."""
        return Flops(self.full + other.full, self.causal + other.causal)


def train_flops_per_token(
    config: ModelConfig, sequence_length: int, structure: Sequence[LayerStructure] | None = None
) -> Flops:
    """FLOPs per token of a train step: 6 per weight of a matrix product, and attention's two products three times.

    They are computed from the shape, because compilers count the body of a scan only once.

    Args:
      config: completed (`model.complete`).
      sequence_length: T of the training windows.
      structure: of the layers; their windows matter for the causal count. None: full attention.
    """
    T = sequence_length
    weights = sum(len(stack.layers) * layer_weights(stack) for stack in stacks(config))
    full = causal = 6.0 * (weights + config.d_model * config.vocab_size)
    for stack in stacks(config):
        channels = stack.config.heads * stack.config.head_dim
        for n in stack.layers:
            window = structure[n].window if structure else None
            seen = min(window or T, T)
            # The mean number of visible keys: the first `seen` queries see 1, 2, ... keys, the others `seen`.
            mean_keys = (seen * (seen + 1) / 2 + (T - seen) * seen) / T
            full += 12.0 * channels * T
            causal += 12.0 * channels * mean_keys
    return Flops(full, causal)
