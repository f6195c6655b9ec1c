"""What the loop measures between steps: the validation loss, and whatever else is an `Evaluator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from pe_lab.evaluation.command_line import parse_variants
from pe_lab.evaluation.live import LiveEvaluation
from pe_lab.evaluation.suites import SUITES, parse_suites
from pe_lab.evaluation.variants import possible_variants
from pe_lab.model import Model, Params
from pe_lab.model.learned import learned_values, split_layers
from pe_lab.positional import Schedule
from pe_lab.results.records import Record
from pe_lab.training.plan import PhasePlan
from pe_lab.training.run import Run, held_out_batches
from pe_lab.training.step import Shardings, compile_loss, place_batch


class Evaluator(NamedTuple):
    """A measurement inside the loop: before the first step, at every step that `every_steps` divides, and at the last.

    All processes measure together: numbers by name, from the step and the parameters.
    """

    name: str  # under which its time is counted, one of `logs.WAITS`
    measure: Callable[[int, Params], Mapping[str, float]]
    every_steps: int


def validation(run: Run, phase: PhasePlan, shardings: Shardings, schedule: Schedule) -> Evaluator:
    """The loss on held-out batches, in nats per token, and the learned values of encodings.

    `validation_loss` is the mean over all sources, `validation_loss/SOURCE` that of one.
    """
    log, model = run.config.log, run.models[phase.index]
    held_out = held_out_batches(run.plan, phase, log.validation_batches)
    loss, learned = compile_loss(model, run.mesh, run.rules, shardings), learned_numbers(model, shardings)

    def measure(step: int, params: Params) -> dict[str, float]:
        total, weight, losses = 0.0, 0.0, {}
        for source, batches in held_out.items():
            sums = [loss(params, place_batch(batch, shardings.batch), schedule) for batch in batches]
            nats, weights = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
            losses[f"validation_loss/{source}"] = float(nats / weights)
            total, weight = total + nats, weight + weights
        found = {"validation_loss": float(total / weight), **losses} if weight else {}
        return found | learned(params)

    return Evaluator("validation", measure, log.validate_every_steps)


def suites(run: Run, phase: PhasePlan) -> Evaluator:
    """The suites of `config.evaluation` on the parameters in memory; see `evaluation.live`.

    Each number is the main metric of a suite, named SUITE/LENGTH/SOURCE/VARIANT: `suite/needles/256/needles/YaRN`. The
    variant as trained has no name; variants that are not possible for the phase's encodings are left out.

    Raises:
      UserError: there is no such suite or variant; from the first measurement, for one that is impossible here.
    """
    asked = run.config.evaluation
    length = phase.config.sequence_length
    named = parse_variants(",".join(asked.variants)) if asked.variants else ()
    variants = [name for name in possible_variants(phase.layers, length) if name in named]

    live = LiveEvaluation(
        run.models[phase.index].config,
        phase.layers,
        length,
        run.config.data,
        parse_suites(",".join(asked.suites)) if asked.suites else None,
        [factor * length for factor in asked.factors],
        variants,
        asked.options,
        asked.seed,
        run.tokenizer,
        run.mesh,
        run.config.name,
        phase.name,
    )

    def measure(step: int, params: Params) -> dict[str, float]:
        return {f"suite/{name}": value for name, value in main_numbers(live.measure(params, step)).items()}

    return Evaluator("suites", measure, asked.every_steps)


def main_numbers(records: Sequence[Record]) -> dict[str, float]:
    """The main metric of each record, as `suites` names it; what is not finite is left out."""
    found = {}
    for record in records:
        variant = "" if record["variant"] == "as trained" else record["variant"]
        parts = (record["suite"], str(record["length"]), record.get("source", ""), variant)
        value = record.get(SUITES[record["suite"]].metrics[0].key)
        if value is not None and math.isfinite(value):
            found["/".join(filter(None, parts))] = float(value)
    return found


def learned_numbers(model: Model, shardings: Shardings) -> Callable[[Params], dict[str, float]]:
    """A function from parameters to the learned values of encodings, by layer, for the log.

    `learned/wave.height/3` is the mean of that parameter in layer 3; where it has several values in a layer, the lowest
    and the highest one follow as `learned/wave.height/3/low` and `/high`. Values that are not finite are left out.
    """
    values = jax.jit(
        lambda params: learned_values(split_layers(params["layers"])[1]), out_shardings=shardings.replicated
    )

    def numbers(params: Params) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, of_layers in jax.device_get(values(params)).items() if model.learned else ():
            encoding, parameter = name.split(".")
            several = math.prod(model.encoding_settings[encoding][parameter].value.shape) > 1
            for n, three in zip(model.learned[encoding][1], of_layers.T, strict=True):
                for part, value in zip(("", "/low", "/high")[: 3 if several else 1], three, strict=False):
                    if math.isfinite(value):
                        found[f"learned/{name}/{n}{part}"] = float(value)
        return found

    return numbers
