"""Which checkpoints of a phase are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a phase are kept; all others are deleted once a newer one is committed.

    Attributes:
      latest: how many of the newest.
      every: all steps that it divides; 0: none.
      milestones: these steps.
      best: the step with the lowest value of this metric, such as `validation_loss`; "": none.
    """

    latest: int = 2
    every: int = 0
    milestones: tuple[int, ...] = ()
    best: str = ""

    def kept(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, of ascending `steps`; `metrics` of those that have some."""
        kept = {*steps[-self.latest :], *(step for step in steps if step in self.milestones)}
        if self.every:
            kept |= {step for step in steps if step and step % self.every == 0}
        measured = [step for step in steps if self.best in metrics.get(step, {})]
        if measured:
            kept.add(min(measured, key=lambda step: metrics[step][self.best]))  # the first one of equals
        return kept
