"""Spikes of the loss and of its gradient: what is one, and what a run does about it.

A spike is judged against the accepted steps before it, by the same few operations on float32 inside the compiled
step, where an update is skipped, and on the host, where a run warns or rewinds. A resumed run judges as one that never
stopped: the history is saved with every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pe_lab.config import StabilityConfig
from pe_lab.data.pipeline import Pipeline

MOST_SKIPS = 10  # in a row; a run that refuses more of its batches does not learn
MOST_REWINDS = 10  # from one checkpoint


class History(NamedTuple):
    """Loss and gradient norm of the last accepted steps, oldest first, at the end of arrays of `window` elements."""

    losses: Any  # [window] float32
    grad_norms: Any  # [window] float32
    count: Any  # int32 scalar: how many there are


def skip_policy(config: StabilityConfig) -> StabilityConfig | None:
    """The config, where the compiled step skips updates; None if it applies every update."""
    return config if "skip" in (config.on_nonfinite, config.on_spike) else None


def empty_history(window: int, xp: Any = jnp) -> History:
    """A history without a step. `xp` is `jnp` or `np`, here and below."""
    return History(xp.zeros(window, xp.float32), xp.zeros(window, xp.float32), xp.zeros((), xp.int32))


def is_spike(history: History, loss: Any, grad_norm: Any, sigma: float, xp: Any = jnp) -> Any:
    """Whether a loss or a gradient norm is more than `sigma` standard deviations above the mean of the history.

    Nothing is a spike as long as the history is less than half full.
    """
    window = history.losses.shape[0]
    known = xp.arange(window) >= window - history.count

    def above(values: Any, value: Any) -> Any:
        number = xp.maximum(history.count, 2).astype(xp.float32)
        mean = xp.sum(xp.where(known, values, 0), dtype=xp.float32) / number
        squares = xp.sum(xp.where(known, (values - mean) ** 2, 0), dtype=xp.float32)
        return value - mean > xp.float32(sigma) * xp.sqrt(squares / (number - 1))

    enough = history.count >= window // 2
    return enough & (above(history.losses, loss) | above(history.grad_norms, grad_norm))


def push(history: History, loss: Any, grad_norm: Any, accepted: Any, xp: Any = jnp) -> History:
    """The history after a step; a step that is not accepted leaves it as it is."""

    def add(values: Any, value: Any) -> Any:
        return xp.where(accepted, xp.concatenate([values[1:], xp.asarray(value, xp.float32)[None]]), values)

    count = xp.minimum(history.count + xp.asarray(accepted, xp.int32), history.losses.shape[0])
    return History(add(history.losses, loss), add(history.grad_norms, grad_norm), count.astype(xp.int32))


@dataclass(frozen=True)
class Event:
    """A step whose loss or gradient norm was not as those before it, and what is done about it."""

    step: int
    action: str  # warn, skip, rewind or stop
    cause: str  # spike or nonfinite
    loss: float
    grad_norm: float
    mean_loss: float | None  # of the accepted steps before
    mean_grad_norm: float | None

    @property
    def sentence(self) -> str:
        """`step 812: loss 9.812, gradient norm 41.2 (mean 3.1 and 0.9 before): the update was skipped`."""
        before = f" (mean {self.mean_loss:.4g} and {self.mean_grad_norm:.4g} before)" if self.mean_loss else ""
        done = {"skip": "the update was skipped", "rewind": "back to the last checkpoint", "warn": "a spike"}
        return f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}{before}: " + done.get(
            self.action, "training stops"
        )

    def record(self, tokens: int, batches: Sequence[int]) -> dict[str, Any]:
        """The event as a record of metrics.jsonl; numbers that JSON lacks are text."""

        def plain(value: float | None) -> Any:
            return value if value is None or math.isfinite(value) else str(value)

        return {
            "step": self.step,
            "tokens": tokens,
            "event": self.action,
            "cause": self.cause,
            "batches": list(batches),
            "at": {"loss": plain(self.loss), "grad_norm": plain(self.grad_norm)},
            "before": {"loss": self.mean_loss, "grad_norm": self.mean_grad_norm},
        }


class Monitor:
    """Judges every step of a phase from its metrics, on the host, and keeps the history that a checkpoint saves.

    The judgement is a function of the phase's losses and gradient norms alone, so that all processes come to the same
    one, and a resumed run too. `saved` is the `state` of the checkpoint; None at the start of a phase.
    """

    def __init__(self, config: StabilityConfig, saved: Mapping[str, Any] | None = None):
        self._config = config
        self.skips_in_a_row = int(saved["skips_in_a_row"]) if saved else 0
        history = empty_history(config.window, np)
        if saved:
            pairs = list(zip(saved["losses"], saved["grad_norms"], strict=True))[-config.window :]
            for n, (loss, norm) in enumerate(pairs, config.window - len(pairs)):
                history.losses[n], history.grad_norms[n] = loss, norm
            history = history._replace(count=np.int32(len(pairs)))
        self.history = history

    def state(self) -> dict[str, Any]:
        """The history as JSON: Python writes a float so that it reads the same float."""
        first = self._config.window - int(self.history.count)
        return {
            "losses": [float(x) for x in self.history.losses[first:]],
            "grad_norms": [float(x) for x in self.history.grad_norms[first:]],
            "skips_in_a_row": self.skips_in_a_row,
        }

    def judge(self, step: int, metrics: Mapping[str, float]) -> Event | None:
        """What to do about a step, given its `loss`, `grad_norm` and, with a skip policy, `skipped`; None: nothing."""
        loss, grad_norm = np.float32(metrics["loss"]), np.float32(metrics["grad_norm"])
        finite, skipped = bool(np.isfinite(loss) and np.isfinite(grad_norm)), metrics.get("skipped", 0.0) != 0
        cause, action = "", ""
        if not finite:
            cause, action = "nonfinite", self._config.on_nonfinite
        elif skipped or (
            self._config.on_spike != "skip"  # the compiled step has judged
            and is_spike(self.history, loss, grad_norm, self._config.spike_sigma, np)
        ):
            cause, action = "spike", self._config.on_spike
        means: tuple[float | None, float | None] = (None, None)
        if count := int(self.history.count):
            means = float(np.mean(self.history.losses[-count:])), float(np.mean(self.history.grad_norms[-count:]))
        event = Event(step, action, cause, float(loss), float(grad_norm), *means) if action else None
        if action in ("", "warn"):
            self.history = push(self.history, loss, grad_norm, True, np)
        self.skips_in_a_row = self.skips_in_a_row + 1 if action == "skip" else 0
        return event


class Rewind(Exception):
    """A step was judged bad enough to go back to the last checkpoint."""

    def __init__(self, event: Event):
        super().__init__(event.sentence)
        self.event = event


@dataclass
class Rewinds:
    """What the rewinds of a phase have led to."""

    in_a_row: int = 0  # since a checkpoint was saved
    last: Event | None = None  # led to the state at hand
    batches: Sequence[int] = ()  # left out by the last one
    left_out: frozenset[int] = frozenset()  # by all rewinds of this process

    def leave_out(self, pipeline: Pipeline, step: int, count: int) -> None:
        """Leaves out the last `count` batches up to that of the last event; the pipeline is at `step`.

        The batches up to the checkpoint are trained on, and stay.
        """
        if self.last is not None:
            pipeline.leave_out(sorted(self.left_out))
            first = max(step, self.last.step - count)
            self.batches = [pipeline.batch_index(position) for position in range(first, self.last.step)]
            self.left_out = self.left_out | set(self.batches)
            pipeline.leave_out(self.batches)
