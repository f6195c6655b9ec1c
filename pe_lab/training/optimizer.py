"""AdamW under a learning-rate schedule."""

from __future__ import annotations

from typing import Any

import jax
import optax

from pe_lab.config import OptimizerConfig
from pe_lab.errors import ConfigError


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step (the first step is 0): linear warm-up, then cosine, WSD or constant.

    `cosine` falls to `final_fraction` of the peak, which it reaches one step after the last. `wsd` (warm-up, stable,
    decay) holds the peak and falls linearly to the same value over the last `decay_fraction` of the steps.

    Raises:
      ConfigError: the schedule is unknown, or its parts do not fit in the steps.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup_steps
    if warmup >= steps:
        raise ConfigError(f"optimizer.warmup_steps is {warmup}, but the phase has {steps} steps; warm up for fewer.")
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps - warmup, config.final_fraction)
    elif config.schedule == "wsd":
        decay = int(steps * config.decay_fraction)
        if decay < 1 or warmup + decay > steps:
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


def decays(path: tuple[Any, ...], axes: tuple[str, ...]) -> bool:
    """Whether weight decay acts on a parameter: on matrices, not on norms' scales or biases."""
    name = str(getattr(path[-1], "key", path[-1]))
    # The bias of a projection to heads and the scale of a flat QK-norm have two axes, so names are checked too.
    return not name.endswith(("bias", "scale")) and len([axis for axis in axes if axis != "layers"]) > 1


def make_optimizer(config: OptimizerConfig, steps: int, axes: Any) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW. `axes` is `Model.axes`."""
    mask = jax.tree_util.tree_map_with_path(decays, axes, is_leaf=lambda x: isinstance(x, tuple))
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=mask,
        ),
    )
