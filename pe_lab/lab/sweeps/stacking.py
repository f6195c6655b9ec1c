"""Which cells of a sweep train as one program, and why the others do not."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.config import flat, to_json
from pe_lab.errors import UserError
from pe_lab.lab.sweeps.cells import SweepCell

# Keys in which the cells of a stack may differ. Those of the first two lines make arguments of the compiled step, as
# an encoding does: see `_compiled`. The others concern the host: names, files, the order of data, when to save.
ARGUMENTS = re.compile(
    r"seed|phases\.\d+\.(steps|prolonged\..*|optimizer\.(learning_rate|schedule|warmup_steps|decay_fraction"
    r"|final_fraction|on_prolong|weight_decay))"
    r"|name|notes\..*|checkpoint\..*|log\..*|evaluation\..*|data\.(seed|cache_dir|workers|sources\.\d+\.weight)"
    r"|phases\.\d+\.(name|epochs|weights|init_from)(\..*)?"
)
SHOWN = 2  # keys in the reason of one cell


@dataclass(frozen=True)
class Stacking:
    """The cells of a sweep, by how they train.

    Attributes:
      stacks: cells that train together.
      alone: {cell: why it trains alone}.
    """

    stacks: tuple[tuple[SweepCell, ...], ...]
    alone: Mapping[str, str]

    def __str__(self) -> str:
        """A line for each stack and each cell that is alone."""
        lines = [f"stack of {len(stack)}: {', '.join(cell.name for cell in stack)}" for stack in self.stacks]
        return "\n".join([*lines, *(f"alone: {name} ({why})" for name, why in self.alone.items())])


def stack_cells(cells: Sequence[SweepCell], most: int) -> Stacking:
    """The stacks of at most so many cells, of equal sizes where they can be, in the order of the cells."""
    alike: list[tuple[dict[str, Any], list[SweepCell]]] = []
    alone: dict[str, str] = {}
    for cell in cells:
        try:
            compiled = _compiled(cell)
        except UserError as error:
            alone[cell.name] = str(error)
            continue
        for other, members in alike:
            if other == compiled:
                members.append(cell)
                break
        else:
            alike.append((compiled, [cell]))
    stacks: list[tuple[SweepCell, ...]] = []
    for compiled, members in alike:
        if len(members) == 1:
            alone[members[0].name] = _difference(compiled, [other for other, _ in alike if other is not compiled])
            continue
        count = math.ceil(len(members) / most)
        bounds = [len(members) * n // count for n in range(count + 1)]
        for part in (tuple(members[first:last]) for first, last in itertools.pairwise(bounds)):
            if len(part) > 1:
                stacks.append(part)
            else:
                alone[part[0].name] = f"left over by --stack={most}"
    return Stacking(tuple(stacks), alone)


def _compiled(cell: SweepCell) -> dict[str, Any]:
    """What the compiled steps of a cell depend on, by key: equal for cells that can be stacked.

    Raises:
      UserError: it cannot be stacked with any; or its phases cannot be planned yet.
    """
    import jax

    from pe_lab.model.distillation import learns
    from pe_lab.training.plan import given_layers, plan_phases

    config, given = cell.config, given_layers(cell.config)
    found = {key: value for key, value in flat(to_json(config)) if not ARGUMENTS.fullmatch(key)}
    for phase in plan_phases(config, given):
        if phase.config.distill is not None and learns(phase.config.distill):
            raise UserError(f"phase '{phase.name}' learns from a teacher")
        key = f"phases.{phase.index}.positional"
        found = {name: value for name, value in found.items() if name != key and not name.startswith(f"{key}.")}
        arrays, structure = jax.tree.flatten(phase.schedule)
        found[key] = structure, [array.shape for array in arrays]
        if phase.config.transition is not None:  # its schedules have a structure of both ends
            found[key] = phase.layers, given.get(phase.index)
    return found


def _difference(compiled: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """In which keys a cell differs from those that are most like it."""
    if not others:
        return "there is no other cell"
    differing = [[key for key in sorted({*compiled, *one}) if compiled.get(key) != one.get(key)] for one in others]
    keys = min(differing, key=len)
    shown = [key if key.endswith(".positional") else f"{key}={compiled.get(key, 'absent')}" for key in keys[:SHOWN]]
    return f"no other cell has its {', '.join(shown)}{' ...' if len(keys) > SHOWN else ''}"
