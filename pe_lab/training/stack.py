"""A stack of runs: their loops are the ordinary ones, and the steps of all are computed in one program.

The program is the train step under `jax.vmap`, over a leading axis of cells, one for each run. What may differ between
them is an argument: the state, the batch, the schedule of the encoding, the learning rate of the step, the weight decay
and the seed of random positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from pe_lab.errors import ConfigError
from pe_lab.parallel import use_mesh
from pe_lab.parallel.compiler import compiler_options
from pe_lab.parallel.stopping import Stopped, StopRequests
from pe_lab.parallel.topology import GIB, chip_of
from pe_lab.positional import Schedule
from pe_lab.training.optimizer import OptimizerNumbers
from pe_lab.training.plan import MARGIN
from pe_lab.training.step import Batch, RandomPositions, Shardings, TrainState, place_batch, train_step
from pe_lab.training.step_call import StepCall, Steps

T = TypeVar("T")


class StackedNumbers(NamedTuple):
    """What a stacked step takes of each cell beside its state, batch and schedule."""

    optimizer: OptimizerNumbers  # float32
    seed: jax.Array  # of the run, uint32


class StackedState:
    """The state of one cell of a stack. Each part is taken out when it is read, before the next step."""

    def __init__(self, stack: PhaseStack, index: int):
        self._stack, self._index = stack, index

    def __getattr__(self, name: str) -> Any:
        if name not in TrainState._fields:
            raise AttributeError(name)
        return self._stack.take(name, self._index)

    def whole(self) -> TrainState:
        """All parts."""
        return TrainState(*(getattr(self, name) for name in TrainState._fields))


class StackedMetric:
    """A number of one cell. The numbers of all cells come from the device together, when one is read."""

    def __init__(self, of_all: jax.Array, index: int):
        self._of_all, self._index = of_all, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.asarray(self._of_all)[self._index], dtype)

    def block_until_ready(self) -> StackedMetric:
        self._of_all.block_until_ready()
        return self


class PhaseStack:
    """The cells of a stack that are in one phase: their states as one, and the program of their steps.

    The program is compiled anew when a cell leaves. A cell that is left alone has the program of a single run.
    """

    def __init__(self) -> None:
        self._names: list[str] = []  # of the cells in the state
        self._cells: list[StackedState] = []
        self._state: TrainState | None = None
        self._step: Callable[..., Any] | None = None
        self._take: dict[str, Callable[..., Any]] = {}
        self._rates: dict[str, Float[np.ndarray, " steps"]] = {}
        self._schedules: tuple[list[Schedule], Schedule | None] = [], None  # those of the last step, and all as one

    def compute(self, calls: Mapping[str, StepCall]) -> None:
        """Computes a step of each cell. An error is that of all, and raised in the loop of each."""
        try:
            if len(calls) > 1:
                self._together(calls)
                return
            (call,) = calls.values()
            if isinstance(call.state, StackedState):
                call.state = call.state.whole()
            self._state, self._names = None, []
            call.batch = place_batch(call.batch, call.programs.shardings.batch)
            call.compute()
        except BaseException as error:
            for call in calls.values():
                call.fail(error)

    def take(self, part: str, index: int) -> Any:
        """A part of the state of one cell, such as `params`."""
        return self._take[part](getattr(self._state, part), index)

    def _together(self, calls: Mapping[str, StepCall]) -> None:
        asked = [*calls.values()]
        states = [call.state for call in asked]
        if [*calls] != self._names or [*map(id, states)] != [*map(id, self._cells)]:
            self._stack(calls)
        batch = {name: np.stack([call.batch[name] for call in asked]) for name in asked[0].batch}
        batch = place_batch(batch, _stacked(asked[0].programs.shardings.batch))
        decay = [call.phase.config.optimizer.weight_decay for call in asked]
        rate = [self._rates[name][call.step] for name, call in calls.items()]
        seeds = np.asarray([call.run.config.seed for call in asked], np.uint32)
        numbers = StackedNumbers(OptimizerNumbers(np.asarray(rate, np.float32), np.asarray(decay, np.float32)), seeds)
        state, self._state = self._state, None  # its arrays are donated
        assert self._step is not None
        self._state, metrics = self._step(state, batch, self._schedule([call.inputs for call in asked]), numbers)
        for n, call in enumerate(asked):
            of_cell = {name: StackedMetric(of_all, n) for name, of_all in metrics.items()}
            call.give(self._cells[n], of_cell, len(asked))

    def _stack(self, calls: Mapping[str, StepCall]) -> None:
        """Makes one state of the cells', and the programs, which are compiled when they are called."""
        asked = [*calls.values()]
        shardings = asked[0].programs.shardings.state
        _check(asked)
        if self._step is None:
            self._step = compile_stacked_step(asked[0])
            for part in TrainState._fields:
                self._take[part] = jax.jit(_of_cell, out_shardings=getattr(shardings, part))
        states = [call.state.whole() if isinstance(call.state, StackedState) else call.state for call in asked]
        for call in asked:
            call.state = None
        self._state = None
        join = jax.jit(lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees), out_shardings=_stacked(shardings))
        self._state = join(*states)
        self._names, self._cells = [*calls], [StackedState(self, n) for n in range(len(calls))]
        for name, call in calls.items():
            if name not in self._rates:
                self._rates[name] = rates(call.run.plan.learning_rate(call.phase), call.phase.config.steps)

    def _schedule(self, of_cells: list[Schedule]) -> Schedule:
        """The schedules as one, which is kept as long as they are the same objects."""
        before, kept = self._schedules
        if kept is None or [*map(id, before)] != [*map(id, of_cells)]:
            kept = jax.tree.map(lambda *x: np.stack([np.asarray(one) for one in x]), *of_cells)
            self._schedules = of_cells, kept
        return kept


def _check(asked: Sequence[StepCall]) -> None:
    """`ConfigError` for cells whose compiled steps differ, or that do not fit into a chip's memory together."""
    first = asked[0]
    for call in asked[1:]:
        same = call.run.models[call.phase.index].config == first.run.models[first.phase.index].config
        if not same or jax.tree.structure(call.inputs) != jax.tree.structure(first.inputs):
            raise ConfigError(
                f"'{call.run.workdir}' and '{first.run.workdir}' are no stack: the compiled steps of phase "
                f"'{call.phase.name}' differ in their model or encoding. Train them without --stack."
            )
    needed, memory = first.run.plan.memory(first.phase).total, chip_of(first.run.mesh.devices.flat[0]).memory
    if memory and len(asked) * needed > MARGIN * memory:
        raise ConfigError(
            f"A step of {len(asked)} cells of '{first.phase.name}' needs about {len(asked) * needed / GIB:.1f} GiB "
            f"of {memory / GIB:.4g} GiB a chip. Give at most --stack={int(MARGIN * memory // needed)}."
        )


def rates(schedule: optax.Schedule, steps: int) -> Float[np.ndarray, " steps"]:
    """The learning rate of every step, as the compiled step of a single run computes it."""
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(steps, dtype=np.int32)), np.float32)


def compile_stacked_step(call: StepCall) -> Any:
    """The jitted step: (states, batches, schedules, numbers) -> (states, metrics) of cells that are like `call`'s.

    Each argument and result has a leading axis of cells, which is not sharded. The old states are donated.
    """
    run, phase, shardings, positions = call.run, call.phase, call.programs.shardings, None
    model, accumulate = run.models[phase.index], phase.config.accumulate
    if phase.config.random_positions:
        positions = RandomPositions(phase.config.random_positions, (run.config.seed, phase.index))

    def step(
        state: TrainState, batch: Batch, schedule: Schedule, numbers: StackedNumbers
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        if positions is not None:
            batch = positions._replace(seed=(numbers.seed, phase.index)).replace(batch, state.step)
        with use_mesh(run.mesh, run.rules):
            optimizer = run.plan.optimizer(phase, numbers.optimizer)
            return train_step(model, optimizer, accumulate, state, batch, schedule, run.plan.policy)

    placed = _stacked(Shardings(shardings.state, shardings.batch, shardings.replicated))
    return jax.jit(
        jax.vmap(step),
        in_shardings=(placed.state, placed.batch, shardings.replicated, shardings.replicated),
        out_shardings=(placed.state, shardings.replicated),
        donate_argnums=0,
        compiler_options=compiler_options(run.mesh, accumulate, model.config.scan, run.config.compiler_options),
    )


def _stacked(shardings: Any) -> Any:
    """Shardings of arrays with an axis of cells in front."""
    return jax.tree.map(lambda one: NamedSharding(one.mesh, PartitionSpec(None, *one.spec)), shardings)


def _of_cell(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def train_together(
    runs: Mapping[str, Steps[T]],
    stops: StopRequests,
    inside: Callable[[str], AbstractContextManager[Any]],
    ended: Callable[[str, T | BaseException], None],
) -> None:
    """Drives the loops of several runs: those that are in the same phase are computed as one stack, step by step.

    A run that fails, diverges, or is stopped ends alone, and the others go on.

    Args:
      runs: the loops, by the name of their cell.
      stops: the requests to stop, which each loop looks at.
      inside: the context in which the loop of a cell goes on.
      ended: is told, in that context, what a run has returned or raised.
    """
    stacks: dict[int, PhaseStack] = {}
    left, can_save = dict(runs), dict.fromkeys(runs, False)
    with contextlib.ExitStack() as opened:
        for steps in runs.values():
            opened.enter_context(contextlib.closing(steps))
        while left:
            calls: dict[int, dict[str, StepCall]] = {}
            for name, steps in [*left.items()]:
                # A request to stop raises where nothing is to be saved; here in the loop of this cell alone.
                stops.can_save = can_save[name]
                with inside(name):
                    outcome = _advance(steps, stops.received is not None and not can_save[name])
                    if isinstance(outcome, StepCall):
                        calls.setdefault(outcome.phase.index, {})[name] = outcome
                    else:
                        del left[name]
                        ended(name, *outcome)
                can_save[name] = stops.can_save and name in left
                stops.can_save = any(can_save.values())
            if stops.received is None or stops.can_save:
                for index, of_phase in calls.items():
                    stacks.setdefault(index, PhaseStack()).compute(of_phase)


def _advance(steps: Steps[T], stopped: bool) -> StepCall | tuple[T | BaseException]:
    """The next step of a loop, or what it has returned or raised, in a tuple; `stopped` raises `Stopped` in it."""
    try:
        return steps.throw(Stopped("stopped before a step was trained; run it again")) if stopped else next(steps)
    except StopIteration as end:
        return (end.value,)
    except BaseException as error:
        return (error,)
