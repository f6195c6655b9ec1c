"""The parameters of encodings, in `layers.positional` of a model: by name, stacked over the layers that have them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pe_lab.errors import ConfigError
from pe_lab.model.shape import Repetition
from pe_lab.positional import Encoding, HeadShape, LayerHooks, LayerStructure, Schedule
from pe_lab.positional.hooks import call_for_array, initial

Params = dict[str, Any]


def split_layers(layers: Params) -> tuple[Params, dict[str, Params]]:
    """The parameters that all layers have, and those of encodings: `layers.positional`."""
    return {name: one for name, one in layers.items() if name != "positional"}, layers.get("positional", {})


def learned_encodings(
    hooks: Sequence[tuple[LayerHooks, ...]],
) -> dict[str, tuple[Encoding, tuple[int, ...]]]:
    """The encodings with parameters, by name, each with its layers."""
    found: dict[str, tuple[Encoding, tuple[int, ...]]] = {}
    for n, of_layer in enumerate(hooks):
        for encoding, name, _ in of_layer:
            if name is not None:
                found[name] = (encoding, (*found.get(name, (encoding, ()))[1], n))
    return found


def added_to_embeddings(
    learned: Mapping[str, Params], schedule: Schedule, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
) -> Float[Array, "B T D"]:
    """The embeddings x after the `embed` hooks of a schedule, in the dtype of x; `learned`: `layers.positional`."""
    for n, (encoding, name, _) in schedule.embeddings:
        params = {}
        if name is not None:
            at = learned_encodings(schedule.hooks)[name][1].index(n)
            params = jax.tree.map(lambda a, at=at: a[at], learned[name])
        found = call_for_array(encoding, "embed", params, x, positions)
        if found.shape != x.shape:
            raise ConfigError(
                f"{type(encoding).__name__}.embed returned shape {list(found.shape)}; it must return [B, T, D], which "
                f"is {list(x.shape)}."
            )
        x = found.astype(x.dtype)
    return x


def check_learned(learned: Mapping[str, Params], hooks: Sequence[tuple[LayerHooks, ...]]) -> None:
    """Raises a `ConfigError` if the parameters of encodings are not those that a schedule's hooks need."""
    wanted = {name: len(layers) for name, (_, layers) in learned_encodings(hooks).items()}
    for name, count in wanted.items():
        if name not in learned:
            raise ConfigError(
                f"The encoding '{name}' has parameters, and these weights have none of it (layers.positional has "
                f"{sorted(learned) or 'nothing'}). Add it by surgery, which initializes them."
            )
        stacked = {len(leaf) for leaf in jax.tree.leaves(learned[name])}
        if stacked - {count}:
            raise ConfigError(
                f"The encoding '{name}' is on {count} layers, and its weights are those of {sorted(stacked)[0]}. "
                "Change the layers by surgery, which takes the parameters along."
            )


def learned_of_repetition(
    learned: Mapping[str, Params], structure: Sequence[LayerStructure], repetition: Repetition
) -> list[dict[str, Params]]:
    """For each layer of a pattern the parameters of its encodings, stacked over the pattern's repeats."""
    found = []
    for i in range(repetition.period):
        of_layer = {}
        for _, name, _ in structure[repetition.start + i].hooks:
            if name is not None:
                having = [n for n, one in enumerate(structure) if any(hook.parameters == name for hook in one.hooks)]
                places = [having.index(repetition.start + i + repetition.period * r) for r in range(repetition.repeats)]
                step = places[1] - places[0] if repetition.repeats > 1 else 1
                part = slice(places[0], places[-1] + 1, step)
                of_layer[name] = jax.tree.map(lambda a, part=part: a[part], learned[name])
        found.append(of_layer)
    return found


def learned_of_layer(layers: Params, structure: Sequence[LayerStructure], n: int) -> dict[str, Params]:
    """The parameters of the encodings of layer n, from those of all layers."""
    (found,) = learned_of_repetition(split_layers(layers)[1], structure, Repetition(n, 1, 1))
    return jax.tree.map(lambda a: a[0], found)


def init_encoding(
    name: str, encoding: Encoding, layers: Sequence[int], key: jax.Array, shape: HeadShape, num_layers: int
) -> Params:
    """Initial parameters of an encoding on some of `num_layers` layers, stacked over them; `key` is the model's."""

    def of_layer(key: jax.Array) -> Params:
        return {field: jnp.asarray(one.value, jnp.float32) for field, one in initial(encoding, shape, key).items()}

    # A key for each layer of the model: an encoding or a layer that is added later does not change the others.
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 2**31
    keys = jax.random.split(jax.random.fold_in(key, salt), num_layers)
    return jax.vmap(of_layer)(keys[np.asarray(layers)])


def learned_values(learned: Mapping[str, Params]) -> dict[str, jax.Array]:
    """{"ENCODING.PARAMETER": [3, L]}, the mean, the lowest and the highest value of each of L layers, to be logged."""
    found = {}
    for name, parameters in learned.items():
        for parameter, stacked in parameters.items():
            flat = stacked.astype(jnp.float32).reshape(len(stacked), -1)
            found[f"{name}.{parameter}"] = jnp.stack([flat.mean(1), flat.min(1), flat.max(1)])
    return found
