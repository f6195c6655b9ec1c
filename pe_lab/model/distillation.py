"""Distillation: a model learns from another one on the same batch, in the same step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pe_lab.config import DistillConfig
from pe_lab.errors import ConfigError
from pe_lab.model.decoder import LossSums, Model, Params, in_order, with_auxiliary
from pe_lab.model.loss import Teacher, distillation_loss
from pe_lab.model.shape import require_equal_heads
from pe_lab.positional import Schedule

EPSILON = 1e-6  # added to the mean square of the teacher's numbers


def learns(config: DistillConfig | None) -> bool:
    """Whether a phase learns anything from a teacher."""
    return config is not None and any((config.logits, config.hidden, config.attention))


class DistilledInputs(NamedTuple):
    """What a step gets in place of the schedule: the student's schedule, and the teacher's parameters and schedule."""

    schedule: Schedule
    teacher_params: Params
    teacher_schedule: Schedule


class DistilledLoss:
    """The loss of a student: a `Model` to `training.step.gradients`, whose schedule is `DistilledInputs`.

    Its parts, each with its weight in the config, are sums over the tokens of the batch's weights times

    - cross_entropy: the cross-entropy with the targets, in nats;
    - logits: the divergence of the student's distribution from the teacher's, in nats;
    - hidden: the mean over layers of |student - teacher|^2 / |teacher|^2 of the layer's output, the residual stream;
    - attention: the same of the attention's output before its projection, over all heads. Attention maps themselves
      would take T x T numbers a head, which fast kernels never have.

    Args:
      model: the student.
      teacher: of the same vocabulary; with `hidden` or `attention`, of the same layers and widths.

    Raises:
      ConfigError: the teacher's shape does not fit.
    """

    def __init__(self, model: Model, teacher: Model, config: DistillConfig):
        self.model, self.teacher, self.how = model, teacher, config
        self.streams = bool(config.hidden or config.attention)
        if config.attention:
            require_equal_heads(model.config, range(model.config.layers), "distill.attention")
        names = ["vocab_size", *(["layers", "d_model", "heads", "head_dim"] if self.streams else [])]
        for name in names:
            mine, its = getattr(model.config, name), getattr(teacher.config, name)
            if mine != its:
                what = "matching hidden states or attention" if name != "vocab_size" else "distillation"
                raise ConfigError(f"The teacher has {name} {its}, and the model {mine}; {what} needs equal ones.")

    def training_loss(
        self, params: Params, batch: Mapping[str, jax.Array], inputs: DistilledInputs
    ) -> tuple[Float[Array, ""], LossSums]:
        """The sum over tokens of weight times the loss, see the class, and what is logged, as `Model.training_loss`."""
        how, given = self.how, (batch["tokens"], batch.get("positions"), batch.get("segments"))
        taught = self.teacher.forward(inputs.teacher_params, *given, inputs.teacher_schedule, self.streams)
        its, its_streams = jax.lax.stop_gradient((taught.hidden, taught.layers))
        x, places, auxiliary, streams = self.model.forward(params, *given, inputs.schedule, self.streams)
        targets, weights = (in_order(batch[name], x.shape[1], places) for name in ("targets", "weights"))
        its_head = jax.lax.stop_gradient(self.teacher.head(inputs.teacher_params))
        loss = distillation_loss(
            x,
            self.model.head(params),
            targets,
            weights,
            Teacher(its, its_head),
            how.cross_entropy,
            how.logits,
            self.model.config.loss_chunks,
        )
        if self.streams:
            parts = zip((how.hidden, how.attention), streams, its_streams, strict=True)
            loss += sum(factor * (weights * _mismatch(a, b)).sum() for factor, a, b in parts if factor)
        return with_auxiliary(loss, auxiliary, batch["weights"])


def _mismatch(student: Shaped[Array, "N B T *any"], teacher: Shaped[Array, "N B T *any"]) -> Float[Array, "B T"]:
    """The mean over layers of |student - teacher|^2 / |teacher|^2 of each token, in float32."""
    student, teacher = (x.astype(jnp.float32).reshape(*x.shape[:3], -1) for x in (student, teacher))
    scale = jnp.square(teacher).mean(-1) + EPSILON
    return (jnp.square(student - teacher).mean(-1) / scale).mean(0)
