"""A transition between two schedules: the encodings of all layers change gradually, in one compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from pe_lab.errors import ConfigError
from pe_lab.positional.rotation import fixed_point_frequencies
from pe_lab.positional.schedule import Schedule

How = Literal["scale", "pairs", "layers"]


@dataclasses.dataclass(frozen=True)
class ScheduleTransition:
    """From one schedule to another. Frequencies, gains, slopes and logit scales move linearly.

    Attributes:
      start, end: with equal windows and hooks.
      how: `scale`: everything together; towards NoPE all angles shrink. `pairs`: the pairs of a head one after another,
        those that rotate slowest in `start` first: towards NoPE the model is p-RoPE with a falling fraction. `layers`:
        one layer after another, the last one first.

    Raises:
      ConfigError: the schedules differ in what is compiled.
    """

    start: Schedule
    end: Schedule
    how: How = "scale"

    def __post_init__(self) -> None:
        for n, (a, b) in enumerate(zip(self.start.structure, self.end.structure, strict=True)):
            if (a.window, a.hooks) != (b.window, b.hooks):
                raise ConfigError(
                    f"There is no gradual way for layer {n}: its window or its encodings with hooks change, and only "
                    "frequencies, gains, slopes and logit scales can move."
                )

    def at(self, t: float) -> Schedule:
        """The schedule at `t` in 0..1, on the host. All have one structure, so that one program serves them."""
        moved = self._moved(min(max(t, 0.0), 1.0))
        by_layer, by_head = moved.mean((1, 2)), moved.mean(2)

        def between(name: str, share: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
            a, b = (np.asarray(getattr(one, name), np.float64) for one in (self.start, self.end))
            return (1 - share) * a + share * b

        inv_freq = between("inv_freq", moved)
        # What has not moved, or has arrived, has its exact angles: `inv_freq` is rounded to float32.
        exact = np.where(moved[..., None] < 1, self.start.fixed_freq, self.end.fixed_freq)
        between_ends = ((moved > 0) & (moved < 1))[..., None]
        fixed_freq = np.where(between_ends, fixed_point_frequencies(inv_freq), exact).astype(np.uint32)
        order = ("shared", "grouped", "split")
        structure = tuple(
            dataclasses.replace(
                a,
                rotates=a.rotates or b.rotates,
                slopes=a.slopes or b.slopes,
                heads=max(a.heads, b.heads, key=order.index),
            )
            for a, b in zip(self.start.structure, self.end.structure, strict=True)
        )
        return dataclasses.replace(
            self.end,
            inv_freq=inv_freq.astype(np.float32),
            gain=between("gain", moved).astype(np.float32),
            fixed_freq=fixed_freq,
            alibi_slope=between("alibi_slope", by_head).astype(np.float32),
            logit_scale=between("logit_scale", by_layer).astype(np.float32),
            structure=structure,
            same_rotation=False,
        )

    def _moved(self, t: float) -> Float[np.ndarray, "N H R"]:
        """How far each pair of each head of each layer has moved, in 0..1."""
        shape = self.start.inv_freq.shape
        if self.how == "pairs":
            slowest_first = np.argsort(np.argsort(np.asarray(self.start.inv_freq), axis=-1, kind="stable"), axis=-1)
            return in_turn(t, slowest_first, shape[2])
        if self.how == "layers":
            last_first = np.arange(shape[0])[::-1, None, None]
            return np.broadcast_to(in_turn(t, last_first, shape[0]), shape)
        return np.full(shape, t)


def in_turn(t: float, place: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """How far each of `count` things has moved at `t`, by its place: one begins when the one before has arrived."""
    return np.clip(t * count - np.asarray(place), 0.0, 1.0)
