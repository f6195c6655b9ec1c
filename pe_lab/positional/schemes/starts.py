"""What schemes share: the choice of initial values, and parameters that stay within bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pe_lab.positional.scalings import Limits

# Of the field `start`, whose type codec.py reads as it is written: Literal["published", "unchanged"].
# `published`: the authors' initial values. `unchanged`: values at which the scheme changes no function, so that surgery
# can add it to a trained model.
START: Limits = {"start": (lambda x: x in ("published", "unchanged"), "it must be published or unchanged.")}

DEVIATION = 0.02  # standard deviation of the initial weights of language models


def normal(key: Array, index: int, *shape: int, deviation: float = DEVIATION) -> Float[Array, "*shape"]:
    """Normal numbers; `index` tells the parameters of one encoding apart."""
    return deviation * jax.random.normal(jax.random.fold_in(key, index), shape)


def uniform(key: Array, index: int, low: float, high: float, *shape: int) -> Float[Array, "*shape"]:
    """Uniform numbers; `index` tells the parameters of one encoding apart."""
    return jax.random.uniform(jax.random.fold_in(key, index), shape, minval=low, maxval=high)


def bounded(x: Float[Array, "*axes"], low: float, high: float | None = None) -> Float[Array, "*axes"]:
    """x between bounds, with the gradient of x: a parameter beyond a bound can come back.

    Where authors clamp a parameter in place before each step, its gradient passes in the same way.
    """
    return x + jax.lax.stop_gradient(jnp.clip(x, low, high) - x)
