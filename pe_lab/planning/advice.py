"""What to change in a recipe whose step does not fit: settings by name, with the smallest value that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pe_lab.config import Config
from pe_lab.errors import UserError
from pe_lab.planning.plan import PhaseNumbers, Plan, make_plan

RULED_OUT = 1.3  # an estimate that exceeds the memory by this factor is not compiled: estimates are within a quarter


def ruled_out(plan: Plan, phase: PhaseNumbers) -> bool:
    """Whether the estimate leaves no doubt that the step does not fit the chip."""
    return 0 < plan.topology.chip.memory * RULED_OUT < phase.memory.total


def step_advice(plan: Plan, phase: PhaseNumbers, needed: int | None) -> str:
    """The smallest changes, each alone or else together, with which the step of `phase` would fit; by the estimate.

    `needed`: bytes that the compiler found, by which the estimate is corrected.
    """
    memory = plan.topology.chip.memory
    factor = max(1.0, (needed or 0) / phase.memory.total)
    found = []
    for name, values in _settings(plan, phase):
        for value in values:
            changed = _estimate(plan, phase, {name: value})
            if changed is not None and changed * factor <= memory:
                where = f" (phase '{phase.plan.name}')" if name.startswith("phases.") else ""
                found.append(f"--config.{name}={value}{where}")
                break
    if found:
        return "Try " + ", or ".join(found) + "."
    together: dict[str, Any] = {}
    for name, values in _settings(plan, phase):
        for value in values:
            changed = _estimate(plan, phase, together | {name: value})
            if changed is not None and changed * factor <= memory:
                together[name] = value
                return "Try " + " ".join(f"--config.{key}={value}" for key, value in together.items()) + "."
        together |= {name: values[-1]} if values else {}
    return "Use more chips."


def _settings(plan: Plan, phase: PhaseNumbers) -> Iterator[tuple[str, list[Any]]]:
    """Keys of the recipe that reduce the memory of a step, each with its values in descending need."""
    model, mesh, config = phase.model.config, plan.mesh_shape, phase.plan.config
    remats = ["none", "dots_attention", "dots", "full"]
    at = remats.index(model.remat) if model.remat in remats else len(remats)
    yield "model.remat", remats[at + 1 :]
    yield "model.loss_chunks", [n for n in (2, 4, 8, 16, 32, 64) if n > model.loss_chunks]
    shards = mesh["data"] // plan.topology.slices
    yield "mesh.fsdp", [mesh["fsdp"] * n for n in range(2, shards + 1) if shards % n == 0]
    each = config.batch_size // config.accumulate // (mesh["data"] * mesh["fsdp"])
    steps = [config.accumulate * n for n in range(2, each + 1) if each % n == 0]
    yield f"phases.{phase.plan.index}.accumulate", steps


def _estimate(plan: Plan, phase: PhaseNumbers, changes: dict[str, Any]) -> int | None:
    """The estimate of the phase with these keys changed; None if they do not fit each other."""
    try:
        changed = make_plan(_changed(plan.config, changes), plan.topology)
    except UserError:
        return None
    return changed.phases[phase.plan.index].memory.total


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    for key, value in changes.items():
        part, *rest = key.split(".")
        if part == "phases":
            phases = list(config.phases)
            phases[int(rest[0])] = dataclasses.replace(phases[int(rest[0])], **{rest[1]: value})
            config = dataclasses.replace(config, phases=tuple(phases))
        else:
            section = dataclasses.replace(getattr(config, part), **{rest[0]: value})
            if key == "mesh.fsdp":  # what fsdp takes, data gives
                section = dataclasses.replace(section, data=-1)
            config = dataclasses.replace(config, **{part: section})
    return config
