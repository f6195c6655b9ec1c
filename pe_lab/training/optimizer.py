"""AdamW or Muon under a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pe_lab.config import ModelConfig, OptimizerConfig, ProlongedConfig
from pe_lab.errors import ConfigError
from pe_lab.model.parametrization import folded, width_ratio
from pe_lab.positional import Parameter
from pe_lab.training.muon import add_cautious_decay, is_matrix, scale_by_muon


class OptimizerNumbers(NamedTuple):
    """What an optimizer takes as arrays where the runs of a stack differ; of a run alone they are constants."""

    learning_rate: jax.Array  # of the step at hand
    weight_decay: jax.Array


def learning_rate(config: OptimizerConfig, steps: int, prolonged: Sequence[ProlongedConfig] = ()) -> optax.Schedule:
    """Learning rate by step (the first step is 0): linear warm-up, then cosine, WSD or constant.

    `cosine` falls to `final_fraction` of the peak, which it reaches one step after the last. `wsd` (warm-up, stable,
    decay) holds the peak and falls linearly to the same value over the last `decay_fraction` of the steps. Of a phase
    that was made longer it is what `prolonged` says: see `_prolonged`.

    Raises:
      ConfigError: the schedule is unknown, or its parts do not fit in the steps.
    """
    if prolonged:
        return _prolonged(config, steps, prolonged)
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup_steps
    if warmup >= steps:
        raise ConfigError(f"optimizer.warmup_steps is {warmup}, but the phase has {steps} steps; warm up for fewer.")
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps - warmup, config.final_fraction)
    elif config.schedule == "wsd":
        decay = int(steps * config.decay_fraction)
        if decay < 1:
            raise ConfigError(
                f"optimizer.decay_fraction {config.decay_fraction} of {steps} steps is less than one step; increase "
                "it, or choose optimizer.schedule=constant."
            )
        if warmup + decay > steps:
            raise ConfigError(
                f"optimizer.decay_fraction {config.decay_fraction} of {steps} steps does not fit beside {warmup} "
                "warm-up steps; decrease one of them."
            )
        stable = steps - warmup - decay
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)], [stable]
        )
    elif config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        raise ConfigError(f"optimizer.schedule is '{config.schedule}'; it must be cosine, wsd or constant.")
    if warmup == 0:
        return after
    # Warm-up is 1/w, 2/w, ... w/w of the peak, so the first step is not lost.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def _prolonged(config: OptimizerConfig, steps: int, prolonged: Sequence[ProlongedConfig]) -> optax.Schedule:
    """The schedule of a phase that was made longer: up to step `at` of the last time the former one, and then

    stretch: the schedule of `steps`, as if they had been planned from the start.
    hold: the rate at which the former schedule ended.
    rewarm: from that rate up to the peak in `warmup_steps`, and then the schedule's shape over the added steps (Ibrahim
      et al. 2024, "Simple and Scalable Strategies to Continually Pre-train Large Language Models").
    """
    last = prolonged[-1]
    before, added = learning_rate(config, last.steps, prolonged[:-1]), steps - last.steps
    if added < 1 or last.at > last.steps:
        raise ConfigError(f"prolonged: {last.steps} steps, from step {last.at} on made {steps}, are not more steps.")
    if last.how == "stretch":
        after, origin = learning_rate(config, steps), 0
    elif last.how == "hold":
        rate = float(before(last.steps))
        if rate == 0:
            raise ConfigError(
                "optimizer.on_prolong is 'hold', but the schedule ended at the rate 0, with which nothing is trained. "
                "Choose on_prolong=rewarm, or a final_fraction above 0."
            )
        after, origin = optax.constant_schedule(rate), last.at
    else:
        if config.warmup_steps >= added:
            raise ConfigError(
                f"optimizer.warmup_steps is {config.warmup_steps}, but {added} steps are added, which begin with a "
                "warm-up (on_prolong=rewarm): warm up for fewer, or add more."
            )
        lowest, peak, origin = float(before(last.steps)), config.learning_rate, last.at
        shape, warmup = learning_rate(config, added), max(config.warmup_steps, 1)

        def after(step: Any) -> Any:
            rising = lowest + (peak - lowest) * (step + 1) / warmup
            return jnp.where(step < config.warmup_steps, rising, shape(step))

    return lambda step: jnp.where(step < last.at, before(step), after(step - origin))


def decays(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> bool:
    """Whether weight decay acts on a parameter: on matrices, not on norms' scales or biases."""
    name = str(getattr(path[-1], "key", path[-1]))
    # The bias of a projection to heads and the scale of a flat QK-norm have two axes, so names are checked too.
    return not name.endswith(("bias", "scale")) and len([axis for axis in axes if axis != "layers"]) > 1


def last_at_peak(config: OptimizerConfig, steps: int, prolonged: Sequence[ProlongedConfig] = ()) -> int:
    """The last step of a `wsd` phase whose checkpoint the decay has not touched."""
    start, last = 0, prolonged[-1] if prolonged else None
    if last is not None and last.how == "hold":
        return last_at_peak(config, last.steps, prolonged[:-1])
    if last is not None and last.how == "rewarm":
        start = last.steps
    return steps - int((steps - start) * config.decay_fraction) + 1  # the first step of the decay has the peak


def group(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> str:
    """The learning-rate group of a parameter: matrix, embedding, head or vector (norms and biases).

    An embedding that is also the head is an embedding.
    """
    name = str(getattr(path[-1], "key", path[-1]))
    if not decays(path, axes):
        return "vector"
    return {"embedding": "embedding", "unembedding": "head"}.get(name, "matrix")


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    axes: Any,
    prolonged: Sequence[ProlongedConfig] = (),
    learned: Mapping[str, Mapping[str, Parameter]] | None = None,
    shape: ModelConfig | None = None,
    numbers: OptimizerNumbers | None = None,
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, or Muon for the matrices of the layers and AdamW for the rest.

    The weight decay is decoupled, and multiplied by the learning rate of its group. Parameters of encodings have the
    rates and the decay that their encodings choose. `axes` is `Model.axes`, `learned` `Model.encoding_settings`. The
    rates of a `shape` with muP follow `model.parametrization`; its weight decay does not depend on the width. With
    `numbers` it is the same optimizer, with the same state, for one step.
    """

    def by_parameter(function: Callable[..., Any]) -> Any:
        return jax.tree_util.tree_map_with_path(function, axes, is_leaf=lambda x: isinstance(x, tuple))

    def of_encoding(path: tuple[Any, ...]) -> Parameter | None:
        names = [str(getattr(key, "key", key)) for key in path]
        return learned[names[2]][names[3]] if learned and names[:2] == ["layers", "positional"] else None

    def decayed(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> bool:
        if (own := of_encoding(path)) is not None:
            return own.decay
        embeds = group(path, axes) in ("embedding", "head")
        return decays(path, axes) and (config.decay_embeddings or not embeds)

    of_group = {
        "matrix": 1.0,
        "embedding": config.embedding_multiplier,
        "head": config.head_multiplier,
        "vector": config.vector_multiplier,
    }

    def multiplier(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> float:
        own = of_encoding(path)
        return of_group[group(path, axes)] if own is None else own.learning_rate

    def fold(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> float:
        return 1.0 if shape is None or of_encoding(path) is not None else folded(path, shape)

    def of_width(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> float:
        """The factor on an update of AdamW, before weight decay is added."""
        own, ratio = of_encoding(path), 1.0 if shape is None else width_ratio(shape)
        wide = group(path, axes) == "matrix" if own is None else "embed" in own.axes
        return fold(path, axes) / (ratio if wide else 1.0)

    mask, multipliers = by_parameter(decayed), by_parameter(multiplier)
    clip = (*_scale_by(by_parameter(fold)), optax.clip_by_global_norm(config.clip_norm))
    adam = (optax.scale_by_adam(config.b1, config.b2, config.epsilon), *_scale_by(by_parameter(of_width)))
    rate, decay = learning_rate(config, steps, prolonged), config.weight_decay
    if numbers is not None:
        rate, decay = (lambda count: numbers.learning_rate), numbers.weight_decay
    if config.name == "adamw":
        updated = optax.chain(*adam, optax.add_decayed_weights(decay, mask))
    else:
        decay_matrices = add_cautious_decay(decay) if config.muon.cautious_decay else optax.add_decayed_weights(decay)
        parts = {
            "muon": optax.chain(scale_by_muon(config.muon, axes, shape), decay_matrices),
            "adamw": optax.chain(*adam, optax.add_decayed_weights(decay, mask)),
        }
        updated = optax.partition(parts, by_parameter(lambda path, _: "muon" if is_matrix(path) else "adamw"))
    chained = optax.chain(*clip, updated, optax.scale_by_learning_rate(rate))
    if set(jax.tree.leaves(multipliers)) == {1.0}:
        return chained

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        updates, state = chained.update(updates, state, params)
        return jax.tree.map(jnp.multiply, multipliers, updates), state

    return optax.GradientTransformation(chained.init, update)  # with the state of `chained`, whatever the multipliers


def _scale_by(factors: Any) -> list[optax.GradientTransformation]:
    """The product with a factor for each parameter; none where all are 1."""
    by_path = {jax.tree_util.keystr(path): one for path, one in jax.tree_util.tree_leaves_with_path(factors)}
    if set(by_path.values()) == {1.0}:
        return []

    def scaled(updates: optax.Updates, _: Any) -> optax.Updates:  # `optax.partition` leaves leaves out
        return jax.tree_util.tree_map_with_path(lambda path, u: u * by_path[jax.tree_util.keystr(path)], updates)

    return [optax.stateless(scaled)]
