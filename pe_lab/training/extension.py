"""Extending a run: the last phase gets more steps, and a schedule that goes on; what run.json knows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pe_lab.checkpoints.locating import DIRECTORY, steps_in
from pe_lab.config import Config, ExtensionConfig, PhaseConfig, from_dict
from pe_lab.errors import ConfigError, UserError
from pe_lab.storage import AnyPath
from pe_lab.training.optimizer import last_at_peak, learning_rate


def extend(config: Config, workdir: AnyPath, steps: int) -> Config:
    """The config with `steps` steps in its last phase, from `train --extend`; itself if it has these steps already.

    Raises:
      ConfigError: the schedule cannot be extended that way; see `optimizer.on_extend`.
    """
    phase = config.phases[-1]
    if steps == phase.steps:
        return config
    if steps < phase.steps:
        raise ConfigError(
            f"--extend={steps}: phase '{phase.name}' has {phase.steps} steps, and --extend is their new number in all. "
            f"Give more than {phase.steps}."
        )
    how = phase.optimizer.on_extend
    if how == "auto":
        how = "rewarm" if phase.optimizer.schedule == "cosine" else "stretch"
    try:
        at = _last_useful(phase, workdir) if how == "stretch" else phase.steps
        extensions = (*phase.extensions, ExtensionConfig(phase.steps, at, how))
        learning_rate(phase.optimizer, steps, extensions)
    except ConfigError as error:
        raise ConfigError(f"--extend={steps}: phase '{phase.name}': {error}") from None
    return _with(config, len(config.phases) - 1, steps, extensions)


def _last_useful(phase: PhaseConfig, workdir: AnyPath) -> int:
    """The step of the last checkpoint that a stretched schedule can go on from; 0 if nothing was trained yet."""
    kept = [step for step in steps_in(workdir / phase.name / DIRECTORY) if step]
    if not kept or phase.optimizer.schedule != "wsd":
        return max(kept, default=0)
    limit = last_at_peak(phase.optimizer, phase.steps, phase.extensions)
    before = [step for step in kept if step <= limit]
    if not before:
        raise ConfigError(
            f"optimizer.on_extend is 'stretch', and the rate of wsd began to decay after step {limit}: the run would "
            f"go on from a checkpoint before that, and the kept ones are of steps {', '.join(map(str, kept))}. Choose "
            "optimizer.on_extend=rewarm or hold; next time, checkpoint.milestones keeps such a step."
        )
    return before[-1]


def recorded(config: Config, saved: Mapping[str, Any] | None) -> Config:
    """The config of a recipe with the extensions of its run, whose config so far is `saved`, as JSON.

    A phase of `epochs` gets the steps that its run found for them: an extension begins there.

    Raises:
      ConfigError: the recipe has another number of steps than the run had before it was extended, and has now.
    """
    phases = (saved or {}).get("phases")
    for before in filter(lambda phase: isinstance(phase, dict), phases if isinstance(phases, list) else []):
        index = next((i for i, phase in enumerate(config.phases) if phase.name == before.get("name")), None)
        if index is None or config.phases[index].extensions:
            continue
        now, epochs, extensions = config.phases[index].steps, config.phases[index].epochs, before.get("extensions", [])
        if not extensions and not epochs:
            continue
        try:
            phase = from_dict(PhaseConfig, {"name": before["name"], "steps": before["steps"], "extensions": extensions})
        except (UserError, KeyError):
            continue  # of no version of pe_lab, or damaged
        if not epochs and now not in (phase.steps, *(extension.steps for extension in phase.extensions)):
            planned = phase.extensions[0].steps
            raise ConfigError(
                f"config.phases[{index}] ('{phase.name}').steps is {now}, and the run was extended from {planned} to "
                f"{phase.steps} steps. Leave the recipe at {planned}, and give --extend=STEPS for more."
            )
        config = _with(config, index, phase.steps, phase.extensions)
    return config


def _with(config: Config, index: int, steps: int, extensions: tuple[ExtensionConfig, ...]) -> Config:
    phases = list(config.phases)
    phases[index] = dataclasses.replace(phases[index], steps=steps, extensions=extensions)
    return dataclasses.replace(config, phases=tuple(phases))


def extension_text(before: Mapping[str, Any], phase: PhaseConfig) -> str:
    """What a checkpoint's lineage has of the extensions that came after it; `before` is its phase's config, as JSON."""
    totals = [*(extension.steps for extension in phase.extensions[1:]), phase.steps]
    made = list(zip(phase.extensions, totals, strict=False))[len(before.get("extensions", ())) :]
    return "; ".join(f"extended from {e.steps} to {total} steps ({e.how})" for e, total in made)
