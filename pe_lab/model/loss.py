"""Cross-entropy without an array of the logits of all tokens and the whole vocabulary."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pe_lab.errors import ConfigError
from pe_lab.parallel import constrain, current_mesh, sharding_axes

LOGITS = 2**26  # the most logits of a device at once: 256 MB in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states x: `soft_cap` tanh((x @ embedding.T + bias) / `soft_cap`).

    Attributes:
      embedding: the output embedding.
      bias: on the logits; None: none.
      soft_cap: 0: no cap (Gemma 2 has one). Static.
    """

    embedding: Float[Array, "V D"]
    bias: Float[Array, " V"] | None = None
    soft_cap: float = field(default=0.0, metadata={"static": True})

    def logits(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens V"]:
        """Float32 logits."""
        z = jnp.einsum("...d,vd->...v", x, self.embedding.astype(x.dtype), preferred_element_type=jnp.float32)
        z = z if self.bias is None else z + self.bias
        return self.soft_cap * jnp.tanh(z / self.soft_cap) if self.soft_cap else z

    def parts(self, chunks: int) -> Head:
        """Heads of equal parts of the vocabulary, stacked; part c has the tokens c, c + chunks, c + 2 chunks ..."""
        return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, chunks, *a.shape[1:]), 1, 0), self)

    def before_cap(self, logits: Float[Array, "*tokens V"], d: Float[Array, "*tokens V"]) -> Float[Array, "*tokens V"]:
        """The gradient of the logits before the cap, from d, that of the capped logits."""
        return d * (1 - (logits / self.soft_cap) ** 2) if self.soft_cap else d


def vocabulary_chunks(tokens: int, vocabulary: int) -> int:
    """The least number of equal parts of the vocabulary whose logits of `tokens` tokens are at most LOGITS.

    Each part divides over the devices that the vocabulary is sharded over, on the mesh that is being traced for.
    """
    shards = 1
    if (current := current_mesh()) is not None:
        mesh, rules = current
        shards = math.prod(mesh.shape[axis] for axis in sharding_axes(mesh, rules.vocab))
    if vocabulary % shards:  # `AxisRules.spec` refuses it
        shards = 1
    fitting = [n for n in range(1, vocabulary // shards + 1) if vocabulary % (n * shards) == 0]
    return next((n for n in fitting if tokens * vocabulary // (n * shards) <= LOGITS), fitting[-1])


def tokens_per_device(tokens: int, axes: tuple[str, ...] = ("batch", "length")) -> int:
    """The tokens of each device on the mesh that is being traced for, of tokens sharded over these logical axes."""
    current = current_mesh()
    if current is None:
        return tokens
    mesh, rules = current
    parts = math.prod(mesh.shape[one] for axis in axes for one in sharding_axes(mesh, getattr(rules, axis)))
    return -(-tokens // parts)


def cross_entropy(
    hidden: Float[Array, "B T D"], head: Head, targets: Int[Array, "B T"], chunks: int | None = None
) -> Float[Array, "B T"]:
    """-log softmax(logits of hidden)[target], in nats per token; float32.

    A loop over `chunks` parts of the vocabulary (None: `vocabulary_chunks`) computes a running logsumexp; its gradient
    computes the logits again. Chunk c has the tokens c, c + chunks, c + 2 chunks ..., so that an unembedding sharded
    over the vocabulary is not moved. To train, `weighted_cross_entropy` needs a product less.
    """
    V = head.embedding.shape[0]
    if chunks is None:
        chunks = vocabulary_chunks(tokens_per_device(targets.size), V)
    if chunks < 1 or V % chunks:
        raise ConfigError(f"{chunks} chunks of the logits do not divide a vocabulary of {V}.")

    @jax.checkpoint
    def step(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, Head]) -> tuple[tuple[jax.Array, ...], None]:
        highest, total, at_target = carry
        index, part = chunk
        logits = constrain(part.logits(hidden), "batch", "length", "vocab")
        new_highest = jax.lax.stop_gradient(jnp.maximum(highest, logits.max(-1)))
        total = total * jnp.exp(highest - new_highest) + jnp.exp(logits - new_highest[..., None]).sum(-1)
        # A comparison, because a gather from a sharded vocabulary would first collect the logits.
        place = jnp.where(targets % chunks == index, targets // chunks, -1)
        at_target += jnp.where(_is_target(place, logits.shape[-1]), logits, 0).sum(-1)
        return (new_highest, total, at_target), None

    start = (jnp.full(targets.shape, -jnp.inf), jnp.zeros(targets.shape), jnp.zeros(targets.shape))
    parts = head.parts(chunks)
    if chunks == 1:
        (highest, total, at_target), _ = step(start, (0, jax.tree.map(lambda a: a[0], parts)))
    else:
        (highest, total, at_target), _ = jax.lax.scan(step, start, (jnp.arange(chunks), parts))
    return highest + jnp.log(total) - at_target


def _is_target(place: Int[Array, "*tokens"], width: int) -> Array:
    return place[..., None] == jnp.arange(width)


class _Axes(NamedTuple):
    """The mesh axes of the loss: those that shard tokens, D and the vocabulary."""

    tokens: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()


def weighted_cross_entropy(
    hidden: Float[Array, "B T D"],
    head: Head,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    chunks: int = 1,
) -> Float[Array, ""]:
    """The sum over tokens of weight times cross-entropy, in nats; float32.

    The gradient is computed with the loss, chunk after chunk of each device's tokens: no logits are kept, and none are
    computed twice. Each device gathers the unembedding once in the dtype of `hidden`, adds its gradient over the chunks
    in float32, and reduces the sum once, in the dtype of `hidden`, as the gradients of the layers are.

    Args:
      hidden: the input of the head, in the compute dtype.
      head: of float32 arrays.
      weights: of the tokens; they are data, and have no gradient.
      chunks: parts of a device's tokens. More chunks need less memory, and add the gradient more often.
    """
    if chunks < 1:
        raise ConfigError(f"model.loss_chunks is {chunks}; it must be positive.")
    with jax.named_scope("loss"):
        return _weighted(hidden, head, targets, weights, None, (chunks, 1.0, 0.0))


class Teacher(NamedTuple):
    """The input of a teacher's head, and the head; neither has a gradient."""

    hidden: Float[Array, "B T Dt"]
    head: Head


def distillation_loss(
    hidden: Float[Array, "B T D"],
    head: Head,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    teacher: Teacher,
    cross_entropy: float,
    logits: float,
    chunks: int = 1,
) -> Float[Array, ""]:
    """The sum over tokens of weight times `cross_entropy` * CE + `logits` * KL(teacher || student), in nats; float32.

    CE is the cross-entropy with the targets, KL the divergence of the student's distribution from the teacher's (Hinton
    et al. 2015, at temperature 1). Computed in chunks with its gradient, as `weighted_cross_entropy`: no logits of
    either model are kept.
    """
    with jax.named_scope("loss"):
        return _weighted(hidden, head, targets, weights, teacher, (chunks, cross_entropy, logits))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _weighted(hidden, head, targets, weights, teacher, how):  # noqa: ANN001, ANN202
    return _on_mesh(hidden, head, targets, weights, teacher, how, gradient=False)


def _forward_rule(hidden, head, targets, weights, teacher, how):  # noqa: ANN001, ANN202
    loss, d_hidden, d_head = _on_mesh(hidden, head, targets, weights, teacher, how, gradient=True)
    return loss, (d_hidden, d_head, jax.tree.map(jnp.zeros_like, teacher))


def _backward_rule(how, saved, d_loss):  # noqa: ANN001, ANN202
    d_hidden, d_head, no_teacher = saved
    nothing = np.zeros(d_hidden.shape[:2], jax.dtypes.float0)
    no_weights = jnp.zeros(d_hidden.shape[:2], jnp.float32)
    d_head = jax.tree.map(lambda d: d * d_loss, d_head)
    return d_hidden * d_loss.astype(d_hidden.dtype), d_head, nothing, no_weights, no_teacher


_weighted.defvjp(_forward_rule, _backward_rule)


def _on_mesh(hidden, head, targets, weights, teacher, how, gradient):  # noqa: ANN001, ANN202
    current = current_mesh()
    if current is None or current[0].size == 1:
        return _local(hidden, head, targets, weights, teacher, _Axes(), how, gradient)
    mesh, rules = current
    tokens = rules.spec(("batch", "length", None), hidden.shape, mesh, "hidden states")
    table = rules.spec(("vocab", "embed"), head.embedding.shape, mesh, "unembedding")

    def specs(one: Head) -> Head:
        return replace(one, embedding=table, bias=None if one.bias is None else PartitionSpec(*table[:1]))

    axes = _Axes(*(sharding_axes(mesh, *parts) for parts in (tokens[:2], table[1:], table[:1])))
    by_token = PartitionSpec(*tokens[:2])
    return jax.shard_map(
        functools.partial(_local, axes=axes, how=how, gradient=gradient),
        mesh=mesh,
        in_specs=(
            tokens, specs(head), by_token, by_token, None if teacher is None else Teacher(tokens, specs(teacher.head))
        ),
        out_specs=(PartitionSpec(), tokens, specs(head)) if gradient else PartitionSpec(),
        check_vma=False,
    )(hidden, head, targets, weights, teacher)  # fmt: skip


def _local(hidden, head, targets, weights, teacher, axes, how, gradient):  # noqa: ANN001, ANN202
    """Loss, and with `gradient` the gradients of hidden states and head, on one device's part of the mesh."""
    chunks, of_targets, of_teacher = how
    own = _gathered(head, hidden.dtype, axes)
    teacher_head = None if teacher is None else _gathered(teacher.head, teacher.hidden.dtype, axes)
    table = own.embedding
    (V, D), count = table.shape, targets.size
    first = jax.lax.axis_index(axes.vocab) * V if axes.vocab else 0
    size = -(-count // chunks)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(count, *x.shape[2:])
        padding = [(0, size * chunks - count), *[(0, 0)] * (x.ndim - 1)]  # of weight 0
        return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])

    def step(carry, chunk):  # noqa: ANN001, ANN202
        loss, d_table, d_bias = carry
        x, target, weight, x_teacher = chunk
        hit = _is_target(target - first, V)
        logits, logsumexp, at_target = _logits(x, own, hit, axes)
        if teacher is None:
            of_token = logsumexp - at_target
        else:
            known, known_sum, _ = _logits(x_teacher, teacher_head, hit, axes)
            likely = jnp.exp(known - known_sum[:, None])
            divergence = _over(jax.lax.psum, (likely * (known - logits)).sum(-1), axes.vocab) + logsumexp - known_sum
            of_token = of_targets * (logsumexp - at_target) + of_teacher * divergence
        loss += (of_token * weight).sum()
        if not gradient:
            return (loss, d_table, d_bias), None
        d_logits = jnp.exp(logits - logsumexp[:, None])
        if teacher is None:
            d_logits = d_logits - hit
        else:
            d_logits = of_targets * (d_logits - hit) + of_teacher * (d_logits - likely)
        d_logits = own.before_cap(logits, d_logits * weight[:, None])
        d_bias = None if d_bias is None else d_bias + d_logits.sum(0)
        d_logits = d_logits.astype(x.dtype)
        d_x = jnp.einsum("nv,vd->nd", d_logits, table, preferred_element_type=jnp.float32).astype(x.dtype)
        # [D, V], the transpose of the result: XLA on a CPU would else transpose d_logits, the largest array.
        d_table += jnp.einsum("nd,nv->dv", x, d_logits, preferred_element_type=jnp.float32)
        return (loss, d_table, d_bias), _over(jax.lax.psum, d_x, axes.vocab)

    with_bias = gradient and head.bias is not None
    start = jnp.zeros(()), jnp.zeros((D, V) if gradient else ()), jnp.zeros(V) if with_bias else None
    parts = split(hidden), split(targets), split(weights), None if teacher is None else split(teacher.hidden)
    if chunks == 1:
        (loss, d_table, d_bias), d_hidden = step(start, jax.tree.map(lambda x: x[0], parts))
    else:
        (loss, d_table, d_bias), d_hidden = jax.lax.scan(step, start, parts)
    loss = _over(jax.lax.psum, loss, axes.tokens)
    if not gradient:
        return loss
    d_hidden = d_hidden.reshape(size * chunks, D)[:count].reshape(hidden.shape)
    d_table = jax.lax.optimization_barrier(d_table).astype(hidden.dtype)
    if axes.embed:
        # As one part of D for each device: slices within a dimension that is stored in tiles would be all-reduced.
        d_table = d_table.reshape(-1, head.embedding.shape[1], V)
        d_table = jax.lax.psum_scatter(d_table, axes.embed, scatter_dimension=0)
    d_table = _over(jax.lax.psum, d_table, tuple(axis for axis in axes.tokens if axis not in axes.embed))
    # Without the barrier, the compiler reduces the sum after the backward pass of all layers, and keeps it until then.
    d_hidden, d_table = jax.lax.optimization_barrier((d_hidden, d_table))
    d_bias = None if d_bias is None else _over(jax.lax.psum, d_bias, axes.tokens).astype(head.bias.dtype)
    return loss, d_hidden, replace(head, embedding=d_table.T.astype(head.embedding.dtype), bias=d_bias)


def _gathered(head: Head, dtype: jnp.dtype, axes: _Axes) -> Head:
    """A head whose output embedding is in the compute dtype, gathered over the axes that shard D."""
    table = head.embedding.astype(dtype)
    table = jax.lax.all_gather(table, axes.embed, axis=1, tiled=True) if axes.embed else table
    return replace(head, embedding=table)


def _logits(x: jax.Array, head: Head, hit: jax.Array, axes: _Axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logits of this device's part of the vocabulary, and over all of it their logsumexp and the target's logit."""
    logits = head.logits(x)
    # XLA computes the maximum of a GPU's logits after the product, and would read them again for each of the sums.
    highest, total, at_target = jax.lax.platform_dependent(logits, hit, cuda=_in_one_pass, default=_one_by_one)
    of_all = _over(jax.lax.pmax, highest, axes.vocab)
    total = _over(jax.lax.psum, total * jnp.exp(highest - of_all) if axes.vocab else total, axes.vocab)
    return logits, of_all + jnp.log(total), _over(jax.lax.psum, at_target, axes.vocab)


def _one_by_one(logits: jax.Array, hit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token's logits the maximum, the sum of exp(logit - maximum), and the target's."""
    highest = logits.max(-1)
    return highest, jnp.exp(logits - highest[:, None]).sum(-1), jnp.where(hit, logits, 0).sum(-1)


def _in_one_pass(logits: jax.Array, hit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_one_by_one` as one reduction (Milakov and Gimelshein 2018, algorithm 3)."""

    def combined(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (highest, total, at_target), (its_highest, its_total, its_at_target) = one, other
        factor = jnp.exp(-jnp.abs(highest - its_highest))  # of the sum with the smaller maximum
        total = jnp.where(highest > its_highest, total + its_total * factor, total * factor + its_total)
        return jnp.maximum(highest, its_highest), total, at_target + its_at_target

    operands = logits, jnp.ones_like(logits), jnp.where(hit, logits, 0)
    start = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0), jnp.float32(0)
    return jax.lax.reduce(operands, start, combined, (1,))


def _over(collective, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:  # noqa: ANN001
    return collective(x, axes) if axes else x
