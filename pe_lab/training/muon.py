"""Muon: momentum whose update of each matrix is replaced by the nearest orthogonal one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.config import ModelConfig, MuonConfig
from pe_lab.model.parametrization import folded, width_ratio
from pe_lab.parallel import constrain, current_mesh

_MATRICES = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
# a, b, c of each iteration X <- a X + (b A + c A^2) X, A = X X^T. Beyond the last ones, the classical iteration.
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_CLASSICAL = (15 / 8, -10 / 8, 3 / 8)
_JORDAN = (3.4445, -4.7750, 2.0315)


class Matrices(NamedTuple):
    """How a stacked parameter is a batch of matrices: `order` puts batch axes first, then inputs, then outputs."""

    order: tuple[int, ...]
    batch: tuple[int, ...]  # sizes
    inputs: int
    outputs: int

    @property
    def count(self) -> int:
        return math.prod(self.batch)


class MuonState(NamedTuple):
    """The number of updates, and the momentum of each parameter."""

    count: jax.Array
    momentum: optax.Updates


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Whether Muon has a parameter: a projection of attention or of the feed-forward of a layer."""
    names = [str(getattr(key, "key", key)) for key in path]
    names = ["layers", *names[3:]] if names[:2] == ["layers", "shapes"] else names  # layers.shapes.NAME
    return len(names) == 3 and names[0] == "layers" and names[2] in _MATRICES.get(names[1], ())


def matrices(path: tuple[Any, ...], axes: tuple[str, ...], shape: tuple[int, ...], per_head: bool) -> Matrices:
    """The matrices of a stacked parameter [layers, inputs..., outputs...].

    Each layer has a matrix of its own. With `per_head`, each head of the queries, keys and values has one too.
    """
    heads = str(getattr(path[-1], "key", path[-1])) in ("query", "key", "value")
    batch = [0, 2] if heads and per_head else [0]
    inputs = [1, 2] if axes[1] == "heads" else [1]
    outputs = [axis for axis in range(1, len(axes)) if axis not in batch + inputs]

    def size(of: list[int]) -> int:
        return math.prod(shape[axis] for axis in of)

    return Matrices((*batch, *inputs, *outputs), tuple(shape[axis] for axis in batch), size(inputs), size(outputs))


def coefficients(config: MuonConfig) -> tuple[tuple[float, float, float], ...]:
    """(a, b, c) of each step: Jordan et al.'s, or those of Polar Express (arXiv:2505.16932, for 5 steps)."""
    steps = config.newton_schulz_steps
    if config.newton_schulz == "jordan":
        return (_JORDAN,) * steps
    return (*_POLAR_EXPRESS, *(_CLASSICAL,) * (steps - 5))[:steps]


def orthogonalize(x: Float[Array, "M inputs outputs"], config: MuonConfig) -> Float[Array, "M inputs outputs"]:
    """U V^T, approximately, of each matrix U S V^T, by Newton-Schulz iteration in `config.dtype`."""
    wide = x.astype(jnp.float32)
    # The coefficients of Polar Express allow for singular values up to 1 / 1.02, so that rounding does no harm.
    margin = 1.02 if config.newton_schulz == "polar_express" else 1.0
    x = (wide / (margin * jnp.linalg.norm(wide, axis=(1, 2), keepdims=True) + 1e-7)).astype(config.dtype)
    tall = x.shape[1] > x.shape[2]
    x = jnp.swapaxes(x, 1, 2) if tall else x
    for a, b, c in coefficients(config):
        square = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return jnp.swapaxes(x, 1, 2) if tall else x


def newton_schulz_flops(config: MuonConfig, shapes: Any, axes: Any) -> float:
    """FLOPs of the products of all iterations of one step, over all devices together."""
    total = 0.0
    for count, m, n in _sizes(config, shapes, axes):
        total += count * config.newton_schulz_steps * (4.0 * m * m * n + 2.0 * m**3)
    return total


def newton_schulz_bytes(config: MuonConfig, shapes: Any, axes: Any, devices: int) -> int:
    """Bytes per device of the largest parameter's iteration: two copies of the matrices and two of their squares."""
    largest = 0
    for count, m, n in _sizes(config, shapes, axes):
        here = count // math.gcd(count, devices)
        largest = max(largest, here * (2 * m * n + 2 * m * m) * jnp.dtype(config.dtype).itemsize)
    return largest


def _sizes(config: MuonConfig, shapes: Any, axes: Any) -> list[tuple[int, int, int]]:
    """Of each parameter that Muon has: how many matrices it is, and their shorter and longer side."""
    names = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    sizes = []
    for (path, x), of in zip(jax.tree_util.tree_leaves_with_path(shapes), names, strict=True):
        if is_matrix(path):
            found = matrices(path, of, x.shape, config.per_head)
            sizes.append((found.count, *sorted((found.inputs, found.outputs))))
    return sizes


def momentum_at(config: MuonConfig, count: Int[Array, ""]) -> Float[Array, ""]:
    """The momentum of an update, which rises linearly over the first `momentum_warmup_steps`."""
    if config.momentum_warmup_steps == 0:
        return jnp.float32(config.momentum)
    done = jnp.minimum(count / config.momentum_warmup_steps, 1.0)
    return config.momentum_start + done * (config.momentum - config.momentum_start)


def update_scale(config: MuonConfig, inputs: float, outputs: float) -> float:
    """The spectral norm of an update: AdamW's root mean square (arXiv:2502.16982, section 2.2), or Jordan et al.'s."""
    return 0.2 * max(inputs, outputs) ** 0.5 if config.scale == "rms" else max(1.0, outputs / inputs) ** 0.5


def mup_scale(config: MuonConfig, found: Matrices, shape: ModelConfig) -> float:
    """The factor of muP on an update, which is 1 at the base width and keeps its norm ~ sqrt(outputs / inputs)."""
    per_head = len(found.batch) == 2
    wider = shape.head_dim / (shape.mup_base_head_dim or shape.head_dim) if per_head else width_ratio(shape)
    inputs, outputs = found.inputs / width_ratio(shape), found.outputs / wider
    wanted = ((found.outputs / found.inputs) / (outputs / inputs)) ** 0.5
    return wanted * update_scale(config, inputs, outputs) / update_scale(config, found.inputs, found.outputs)


def scale_by_muon(
    config: MuonConfig, axes: Mapping[str, Any], shape: ModelConfig | None = None
) -> optax.GradientTransformation:
    """The direction of Muon for parameters that `is_matrix` names; `axes` is `Model.axes`, `shape` one with muP.

    The momentum is sharded as its parameter. For the iteration, each device gets whole matrices of its own where the
    mesh divides their number: one exchange, where products of shards would need two in each iteration.
    """
    names = {
        jax.tree_util.keystr(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda node: isinstance(node, tuple))
    }

    def init(params: optax.Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def direction(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        axes = names[jax.tree_util.keystr(path)]
        found = matrices(path, axes, x.shape, config.per_head)
        moved = x.transpose(found.order)
        flat = _whole(moved.reshape(found.count, found.inputs, found.outputs).astype(jnp.float32))
        back = sorted(range(x.ndim), key=found.order.__getitem__)
        # Sent back to where the parameter is in the iteration's dtype.
        near = constrain(_whole(orthogonalize(flat, config)).reshape(moved.shape).transpose(back), *axes)
        scale = update_scale(config, found.inputs, found.outputs)
        if shape is not None and shape.mup_base_width:
            scale *= folded(path, shape) * mup_scale(config, found, shape)
        return scale * near.astype(x.dtype)

    def update(updates: optax.Updates, state: MuonState, params: Any = None) -> tuple[optax.Updates, MuonState]:
        del params
        beta = momentum_at(config, state.count)
        # As (1 - beta) times Jordan's sum: the iteration divides by the norm.
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, updates)
        if config.nesterov:
            updates = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, updates)
        else:
            updates = momentum
        directions = jax.tree_util.tree_map_with_path(direction, updates)
        return directions, MuonState(optax.safe_increment(state.count), momentum)

    return optax.GradientTransformation(init, update)


def add_cautious_decay(weight_decay: float | jax.Array) -> optax.GradientTransformation:
    """Adds the decay of weights that the update moves towards 0 as well (cautious weight decay, arXiv:2510.12402)."""

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        decayed = jax.tree.map(lambda u, p: u + weight_decay * jnp.where(u * p > 0, p, 0), updates, params)
        return decayed, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _whole(x: Float[Array, "M inputs outputs"]) -> Float[Array, "M inputs outputs"]:
    """The matrices, dealt to devices: sharded over as many axes of the current mesh as divide their number."""
    current = current_mesh()
    if current is None:
        return x
    mesh, parts, chosen = current[0], 1, []
    for axis in ("fsdp", "tensor", "context", "data"):
        if x.shape[0] % (parts * mesh.shape[axis]) == 0:
            parts *= mesh.shape[axis]
            chosen.append(axis)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(tuple(chosen))))
