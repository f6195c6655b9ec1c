"""Parameters of modules, and products with them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pe_lab.parallel import context_size, platform


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter of normal numbers. `axes`: the logical name of each axis (see `AxisRules`), None: never sharded."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * std, logical_axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter of equal numbers; `axes` as in `normal`."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), logical_axes=axes)


def project(
    name: str, x: Float[Array, "B T *in"], weights: nnx.Param, bias: nnx.Param | None = None, inputs: int = 1
) -> Float[Array, "B T *out"]:
    """x times weights [*in, *out], plus bias [*out], in the dtype of x; `inputs` counts the axes summed over."""
    rows, size = x.shape[: x.ndim - inputs], math.prod(weights.shape[:inputs])
    with jax.named_scope(name):
        # One product of two matrices, because XLA on a CPU copies the larger operand of the gradient's products into
        # another layout if there are more axes. Two sharded axes cannot become one: XLA would gather the sequence.
        x = x.reshape(*(rows if context_size() > 1 else (-1,)), size)
        multiply = _wide_product if platform() == "cpu" and x.dtype == jnp.bfloat16 else jnp.matmul
        product = multiply(x, weights[...].reshape(size, -1).astype(x.dtype))
        product = product.reshape(*rows, *weights.shape[inputs:])
        return product if bias is None else product + bias[...].astype(x.dtype)


@jax.custom_vjp
def _wide_product(x: Float[Array, "*tokens in"], weights: Float[Array, "in out"]) -> Float[Array, "*tokens out"]:
    # XLA on a CPU computes products of bfloat16 with the matrix instructions of the processor (AMX) only if the result
    # is float32, and else in float32, which takes five times as long.
    return jnp.matmul(x, weights, preferred_element_type=jnp.float32).astype(x.dtype)


def _wide_forward(x, weights):  # noqa: ANN001, ANN202
    return _wide_product(x, weights), (x, weights)


def _wide_backward(saved, gradient):  # noqa: ANN001, ANN202
    x, weights = saved
    d_x = jnp.einsum("...o,io->...i", gradient, weights, preferred_element_type=jnp.float32)
    d_weights = jnp.einsum("...i,...o->io", x, gradient, preferred_element_type=jnp.float32)
    return d_x.astype(x.dtype), d_weights.astype(weights.dtype)


_wide_product.defvjp(_wide_forward, _wide_backward)
