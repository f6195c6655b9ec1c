"""Models whose layers differ in shape: the stacks of their weights, their schedules, and what needs equal layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pe_lab.config import LayerShape, ModelConfig
from pe_lab.errors import ConfigError, UnsupportedError
from pe_lab.positional import Encoding, HeadShape, Layer, LayerHeads, Schedule, build_schedule, label
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
