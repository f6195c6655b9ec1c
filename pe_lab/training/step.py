"""One step of training: a pure function, compiled for a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pe_lab.checkpoints.source import parameter_shardings
from pe_lab.config import StabilityConfig
from pe_lab.model import LossSums, Model, Params
from pe_lab.model.distillation import DistilledLoss
from pe_lab.parallel import AxisRules, use_mesh
from pe_lab.parallel.compiler import compiler_options
from pe_lab.positional import Schedule
from pe_lab.training.stability import History, empty_history, is_spike, push

Batch = Mapping[str, Any]  # tokens, targets, weights [B, T]; segments and positions [B, T] where documents are masked
Loss = Model | DistilledLoss  # what a step trains, by its `training_loss`
BATCH_AXES = ("batch", None)  # only activations are sharded over a context axis, and in another order


class RandomPositions(NamedTuple):
    """Positions drawn in each step: one per token, ascending, below `longest` (Ruoss et al. 2023).

    The draw is a function of the seed and of the step, so a resumed run draws the same positions.
    """

    longest: int
    seed: tuple[int, int]  # of the run, and the index of the phase

    def draw(self, step: jax.Array, length: int) -> jax.Array:
        """[1, length] int32, without repetition; the same for the whole batch, as in the paper's code."""
        key = jax.random.key(self.seed[0])
        for number in (self.seed[1], step):
            key = jax.random.fold_in(key, number)
        return jnp.sort(jax.random.choice(key, self.longest, (length,), replace=False))[None].astype(jnp.int32)

    def replace(self, batch: Batch, step: jax.Array) -> Batch:
        """The batch with drawn positions. Every document of a window still begins at position 0."""
        drawn = self.draw(step, batch["tokens"].shape[1])
        if "positions" in batch:
            start = jnp.arange(drawn.shape[1]) - batch["positions"]  # of each token's document
            drawn = drawn - jnp.take_along_axis(jnp.broadcast_to(drawn, start.shape), start, axis=1)
        return {**batch, "positions": jnp.broadcast_to(drawn, batch["tokens"].shape)}


class TrainState(NamedTuple):
    """The state that a train step updates."""

    step: jax.Array  # int32 scalar: steps done
    params: Params
    optimizer: Any
    history: History | tuple[()] = ()  # of the accepted steps; only where the step itself judges spikes


def init_state(
    model: Model, optimizer: optax.GradientTransformation, params: Params, policy: StabilityConfig | None = None
) -> TrainState:
    """The state before the first step, from parameters."""
    history = empty_history(policy.window) if policy and policy.on_spike == "skip" else ()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), history)


def gradients(model: Loss, accumulate: int, params: Params, batch: Batch, schedule: Any) -> tuple[LossSums, Params]:
    """The weighted sums of the losses over a batch, and the gradient of all, in `accumulate` micro-batches."""
    gradient = jax.grad(model.training_loss, has_aux=True)
    if accumulate == 1:
        grads, sums = gradient(params, batch, schedule)
        return sums, grads
    # Micro-batch i has the sequences i, i + accumulate, ...: it is sharded over all devices, as the batch is.
    micro = {k: jnp.moveaxis(v.reshape(-1, accumulate, *v.shape[1:]), 1, 0) for k, v in batch.items()}

    def add(carry: tuple[Params, LossSums], part: Batch) -> tuple[tuple[Params, LossSums], None]:
        return jax.tree.map(jnp.add, carry, gradient(params, part, schedule)), None

    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], micro), schedule)
    (grads, sums), _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), micro)
    return sums, grads


def train_step(
    model: Loss,
    optimizer: optax.GradientTransformation,
    accumulate: int,
    state: TrainState,
    batch: Batch,
    schedule: Any,
    policy: StabilityConfig | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update on the mean loss per unit of weight over the whole batch.

    With `accumulate` micro-batches, the gradients of weighted sums are added and divided once, by the weight of the
    whole batch. The result is that of one large batch, also where micro-batches have different weights.

    The metrics have the numbers of `Auxiliary` too, by their names, as means over the batch.

    The update of a step that the `policy` skips is not applied, and the metric `skipped` is 1; the learning rate goes
    on as if the step had been taken.
    """
    total = batch["weights"].sum()
    total = jnp.where(total > 0, total, 1.0)  # a batch of chats may have no answer: its loss and gradient are 0
    sums, grads = gradients(model, accumulate, state.params, batch, schedule)
    grads = jax.tree.map(lambda g: g / total, grads)
    with jax.named_scope("optimizer"):
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
    metrics = {"loss": sums.loss / total, "grad_norm": optax.tree.norm(grads)}
    metrics |= {name: one / total for name, one in sums.auxiliary.items()}
    if policy is None:
        return TrainState(state.step + 1, params, optimizer_state, state.history), metrics

    skipped, history = jnp.zeros((), bool), state.history
    if policy.on_nonfinite == "skip":
        skipped = ~(jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"]))
    if policy.on_spike == "skip":
        skipped |= is_spike(history, metrics["loss"], metrics["grad_norm"], policy.spike_sigma)
        history = push(history, metrics["loss"], metrics["grad_norm"], ~skipped)

    def unless_skipped(new: Any, old: Any) -> Any:
        return new if isinstance(new, optax.ScaleByScheduleState) else jnp.where(skipped, old, new)

    params, optimizer_state = jax.tree.map(
        unless_skipped,
        (params, optimizer_state),
        (state.params, state.optimizer),
        is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState),
    )
    metrics["skipped"] = skipped.astype(jnp.int32)
    return TrainState(state.step + 1, params, optimizer_state, history), metrics


class Shardings(NamedTuple):
    """The shardings of a run."""

    state: TrainState
    batch: NamedSharding
    replicated: NamedSharding


def make_shardings(
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rules: AxisRules,
    policy: StabilityConfig | None = None,
) -> Shardings:
    """Shardings of state and batch from logical axes. Optimizer moments are sharded as their parameters."""
    replicated = NamedSharding(mesh, PartitionSpec())
    params = parameter_shardings(model, mesh, rules)
    optimizer_state = optax.tree_map_params(
        optimizer,
        lambda moment, sharding: moment if isinstance(moment, optax.MaskedNode) else sharding,
        jax.eval_shape(optimizer.init, model.shapes),
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),  # Muon's matrices have no moments of AdamW
    )
    batch = NamedSharding(mesh, rules.spec(BATCH_AXES))
    history = History(replicated, replicated, replicated) if policy and policy.on_spike == "skip" else ()
    return Shardings(TrainState(replicated, params, optimizer_state, history), batch, replicated)


def compile_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rules: AxisRules,
    accumulate: int = 1,
    random_positions: RandomPositions | None = None,
    options: Mapping[str, Any] | None = None,
    policy: StabilityConfig | None = None,
    distilled: tuple[Loss, Any] | None = None,
) -> Any:
    """The jitted step: (state, batch, schedule) -> (state, metrics). The old state is donated.

    `options` of the recipe override those of `parallel.compiler`. `distilled` is the loss of a model with a teacher,
    and the shardings of what replaces the schedule.
    """
    shardings = make_shardings(model, optimizer, mesh, rules, policy)
    loss, of_schedule = distilled or (model, shardings.replicated)

    def step(state: TrainState, batch: Batch, schedule: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        if random_positions is not None:
            batch = random_positions.replace(batch, state.step)
        with use_mesh(mesh, rules):
            return train_step(loss, optimizer, accumulate, state, batch, schedule, policy)

    return jax.jit(
        step,
        in_shardings=(shardings.state, shardings.batch, of_schedule),
        out_shardings=(shardings.state, shardings.replicated),
        donate_argnums=0,
        compiler_options=compiler_options(mesh, accumulate, model.config.scan, options or {}),
    )


def compile_loss(model: Model, mesh: Mesh, rules: AxisRules, shardings: Shardings) -> Any:
    """The jitted validation: (params, batch, schedule) -> (weighted sum of the loss, sum of the weights)."""

    def loss(params: Params, batch: Batch, schedule: Schedule) -> tuple[jax.Array, jax.Array]:
        with use_mesh(mesh, rules):
            return model.loss_sum(params, batch, schedule), batch["weights"].sum()

    return jax.jit(
        loss,
        in_shardings=(shardings.state.params, shardings.batch, shardings.replicated),
        out_shardings=shardings.replicated,
    )


def place_batch(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> Batch:
    """Puts this process's sequences of a global batch onto the devices.

    One CPU device gets the host's arrays as they are: to make them arrays of JAX first takes four times as long as the
    compiled step does with them.
    """
    devices = sharding.device_set
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return dict(batch)
    return jax.make_array_from_process_local_data(sharding, dict(batch))
