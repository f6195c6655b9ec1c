"""Numbers of one run, {metric: value}: of its evaluations and of its training log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pe_lab.analysis.runs import Phase, read_runs
from pe_lab.errors import DataError
from pe_lab.results.records import number
from pe_lab.results.scores import measure
from pe_lab.results.variants import VARIANTS
from pe_lab.storage import AnyPath

Measure = Callable[[AnyPath], Mapping[str, float]]
SUITES = {"perplexity": "text", "needles": "needles"}


def together(*measures: Measure) -> Measure:
    """All numbers of several measures."""

    def measured(directory: AnyPath) -> dict[str, float]:
        return {name: value for one in measures for name, value in one(directory).items()}

    return measured


def scores(directory: AnyPath) -> dict[str, float]:
    """The numbers of `pe_lab.evaluate` for the last checkpoint: `text 4x`, `needles 4x YaRN`, `niah:standard 2x`.

    Texts are the loss in nats per token, the mean over the sources; needles and prompted tasks the share found, and
    `niah 2x` the mean over the tasks of a suite. At the end is the name of a method other than as trained.
    """
    (run,) = read_runs([directory])
    last, found = run.phases[-1].name, {}
    for suite in run.evaluation.values():
        for record in suite:
            cell, factor = measure(record), number(record, "factor")
            if cell is None or factor is None or record.get("phase") not in (None, last):
                continue
            kind = str(record.get("suite", ""))
            source = str(record.get("source"))
            method = str(record.get("method", ""))
            variant = "" if method == VARIANTS[0] else f" {method}"
            value = cell.score if cell.higher_is_better else -cell.score  # nats, not a perplexity
            for of in ("",) if kind in SUITES else ("", f":{source}"):
                name = f"{SUITES.get(kind, kind)}{of} {factor:g}x{variant}"
                found.setdefault(name, {})[source] = (number(record, "step") or 0.0, value)
    latest = {name: max(step for step, _ in each.values()) for name, each in found.items()}
    kept = {name: [v for step, v in each.values() if step == latest[name]] for name, each in found.items()}
    return {name: math.fsum(values) / len(values) for name, values in kept.items()}


def losses(directory: AnyPath) -> dict[str, float]:
    """The last validation loss of each source, in nats per token: `validation`, `validation prose`."""
    (run,) = read_runs([directory])
    found = {}
    for name in validation_names(run.phases[-1]):
        series = run.phases[-1].series(name)
        found[name.replace("validation_loss", "validation").replace("/", " ")] = series[-1][1]
    return found


def validation_names(phase: Phase) -> list[str]:
    """The validation losses that a phase has logged."""
    names = dict.fromkeys(name for record in phase.metrics for name in record if name.startswith("validation_loss"))
    if not names:
        raise DataError(f"phase '{phase.name}' has logged no validation loss: lower log.validate_every_steps.")
    return list(names)
