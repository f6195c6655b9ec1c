"""A step as the loop asks for it: whoever drives the loop computes it, alone or with those of other runs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from pe_lab.training.plan import PhasePlan
from pe_lab.training.run import Run

if TYPE_CHECKING:
    from pe_lab.training.loop import PhasePrograms

T = TypeVar("T")


class StepCall:
    """A step that a phase waits for: what it is computed from, and then its results or its error.

    Attributes:
      step: its number in the phase, from 0.
      state, batch, inputs: the arguments of the train step.
      cells: the runs whose steps were computed in one program; 1: this one alone.
    """

    def __init__(
        self, run: Run, phase: PhasePlan, programs: PhasePrograms, step: int, state: Any, batch: Any, inputs: Any
    ):
        self.run, self.phase, self.programs, self.step = run, phase, programs, step
        self.state, self.batch, self.inputs, self.cells = state, batch, inputs, 1
        self._results: tuple[Any, Any] | None = None
        self._error: BaseException | None = None

    def compute(self) -> None:
        """Computes this step alone. An error is raised by `take`, inside the loop."""
        state, self.state = self.state, None  # its arrays are donated
        try:
            self.give(*self.programs.train_step(state, self.batch, self.inputs))
        except BaseException as error:
            self.fail(error)

    def give(self, state: Any, metrics: Any, cells: int = 1) -> None:
        """Sets the results: the state after the step, and its metrics."""
        self.state, self._results, self.cells = None, (state, metrics), cells

    def fail(self, error: BaseException) -> None:
        """Sets the error that the loop meets."""
        self._error = error

    def take(self) -> tuple[Any, Any]:
        """The results, which this object then holds no longer: after a rewind there is memory for another state."""
        results, self._results = self._results, None
        if self._error is not None:
            raise self._error
        assert results is not None
        return results


Steps = Generator[StepCall, None, T]  # a loop that yields its steps, and then returns its result


def alone(steps: Steps[T]) -> T:
    """The result of a loop, each of whose steps is computed by itself."""
    with contextlib.closing(steps):
        try:
            while True:
                next(steps).compute()
        except StopIteration as ended:
            return ended.value
