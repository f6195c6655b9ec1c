"""Whether the scores of a run are whole, comparable, and of its last checkpoints; in sentences where they are not."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pe_lab.results.formatting import listing, times
from pe_lab.results.records import Record, as_dict, is_measured, number
from pe_lab.results.runs import PhaseFiles, RunFiles
from pe_lab.results.scores import build_tables, column_of, label_of, source_of
from pe_lab.results.table import Table

SHOWN = 4  # names in a sentence; of the others the number
# Settings of a record that belong to its variant. The others choose the samples, which a comparison has in common.
OF_VARIANT = ("stride", "coefficient", "fit", "fingerprint", "max_length")
SETTINGS_OF = ("perplexity", "needles")  # whose records list their settings


def cautions(run: RunFiles) -> list[str]:
    """Sentences on scores of former checkpoints, of other weights, on other samples, and on those that are missing.

    Those of a group name the run. None where the scores are what they seem.
    """
    found = []
    for member in run.members or (run,):
        before = f"{member.name}: " if run.members else ""
        found += [before + sentence for sentence in _cautions(member)]
    return found[:SHOWN] + ([f"{len(found) - SHOWN} more remarks of this kind."] if len(found) > SHOWN else [])


def _cautions(run: RunFiles) -> Iterator[str]:
    planned, missing = [unit for plan in run.plans for unit in plan], _missing(run)
    if missing:
        yield (
            f"The evaluation is not complete: {len(missing):,} of {len(planned):,} measurements are missing "
            f"({_places(missing)}). The same command goes on with it. Lengths with a gap do not count in the verdict."
        )
    old = list(_former(run))
    yield from old
    yield from _mixed(run)
    if old:
        yield f"To measure the last checkpoints: python -m pe_lab.evaluate --from={run.directory}"


def usable(run: RunFiles, table: Table) -> Table:
    """A table without the lengths at which a planned measurement is missing, or variants read different samples."""
    keys = set()
    for member in run.members or (run,):
        for unit in _missing(member):
            if unit.get("suite") == table.suite and unit.get("source") in (None, table.source):
                keys |= {column.key for column in [column_of(run, unit)] if column}
        keys |= _mixed_columns(member).get((table.suite, table.source), set())
    return table.without(keys)


def comparable(runs: Sequence[RunFiles], table: Table) -> Table:
    """A table of several runs without the lengths at which they, or the members of a group, read different samples."""
    members = [member for run in runs for member in run.members or (run,)]  # a group's mean has the settings of one
    tables = [own for member in members for own in build_tables(table.suite, [member]) if own.source == table.source]
    return table.without(mixed_lengths(tables))


def not_compared(runs: Sequence[RunFiles], tables: Iterable[Table]) -> str:
    """A sentence on the lengths of tables of several runs that `comparable` leaves out; "" without any."""
    parts = []
    for table in tables:
        kept = comparable(runs, table).columns
        if lengths := [column.title for column in table.columns if column not in kept]:
            where = f" on {table.source}" if table.source and table.source != table.suite else ""
            parts.append(f"{table.suite}{where} at {listing(lengths)}")
    why = "Measured under different settings, so on different samples, and not compared"
    return f"{why}: {'; '.join(parts)}." if parts else ""


def last_step(phase: PhaseFiles | None) -> float | None:
    """The step that an evaluation of a phase would measure; None if it is not known.

    Of a phase that is not complete, that of its newest checkpoint: the log is ahead of it. Of any other, and where no
    checkpoint is here, the last step of the log.
    """
    if phase and phase.saved:
        return float(phase.saved[-1])
    return float(phase.steps_done) if phase and phase.steps_done else None


def is_former(run: RunFiles, record: Mapping[str, Any]) -> bool:
    """Whether a record, or a model of an analysis, is of a step before the last one of its phase."""
    step, last = number(record, "step"), last_step(run.phase(record.get("phase")))
    return step is not None and last is not None and step < last


# ---------------------------------------------------------------------------------------------------------------------
# Of former checkpoints


def _former(run: RunFiles) -> Iterator[str]:
    """A sentence for each phase and step whose scores are the latest of some variants, and not of the last step."""
    latest: dict[tuple[str, str, str, Hashable], Record] = {}
    for suite, records in run.evaluation.items():
        for record in records:
            key = (str(record.get("phase")), suite, source_of(record), label_of(record))
            if key not in latest or (number(record, "step") or 0) >= (number(latest[key], "step") or 0):
                latest[key] = record
    of_phase: dict[str, list[Record]] = {}
    behind: dict[tuple[str, float], dict[str, None]] = {}
    for (name, suite, _, label), record in latest.items():
        of_phase.setdefault(name, []).append(record)
        if is_former(run, record):
            behind.setdefault((name, number(record, "step") or 0.0), {})[f"{label} ({suite})"] = None
    for (name, step), labels in behind.items():
        last = last_step(run.phase(name)) or 0.0
        every = all(number(record, "step") == step for record in of_phase[name])
        which = f"The scores of {name}" if every else f"Of {name}, the scores of {_some(list(labels))}"
        yield f"{which} are of step {step:,.0f}; it has been trained to step {last:,.0f} since."
    others = [name for name, records in of_phase.items() if any(_of_other_weights(run, one) for one in records)]
    if others:
        yield f"The scores of {listing(others)} are of other weights than those that are here under the same name."


def _of_other_weights(run: RunFiles, record: Record) -> bool:
    """Whether the lineage of a record's phase has its checkpoint under another id."""
    phase, path = run.phase(record.get("phase")), str(record.get("checkpoint") or "")
    known = {
        str(entry.get("id"))
        for entry in (phase.lineage if phase else [])
        if path and f"/{entry.get('path')}".endswith(f"/{path}") and entry.get("step") == record.get("step")
    }
    return bool(known) and "checkpoint_id" in record and str(record["checkpoint_id"]) not in known


def former_models(run: RunFiles, about: Mapping[str, Any]) -> str:
    """A sentence on the models of an analysis that have been trained on since; "" without one."""
    models = about.get("models") if isinstance(about, Mapping) else None
    old = [model for model in models if is_former(run, as_dict(model))] if isinstance(models, list) else []
    each = dict.fromkeys(f"{one.get('phase')} (step {number(one, 'step'):,.0f})" for one in old)
    last = {f"{one.get('phase')}": last_step(run.phase(one.get("phase"))) for one in old}
    now = listing([f"step {step:,.0f}" for step in last.values() if step is not None])
    return f"This is of {_some(list(each))}; trained to {now} since." if each else ""


# ---------------------------------------------------------------------------------------------------------------------
# What is missing, and what is not comparable


def _missing(run: RunFiles) -> list[Record]:
    """The planned measurements that no record has, each once."""
    found = {}
    for plan in run.plans:
        for unit in plan:
            if not is_measured(unit, run.evaluation.get(str(unit.get("suite")), [])):
                found[json.dumps(unit, sort_keys=True, default=str)] = unit
    return list(found.values())


def _places(units: list[Record]) -> str:
    """`perplexity at 4× and 8×; needles at 8×`."""
    lengths: dict[str, dict[str, None]] = {}
    for unit in sorted(units, key=lambda one: number(one, "length") or 0.0):
        factor, length = number(unit, "factor"), number(unit, "length")
        shown = times(factor) if factor is not None else f"{length:,.0f} tokens" if length is not None else ""
        lengths.setdefault(str(unit.get("suite")), {})[shown] = None
    each = [f"{suite} at {listing(list(filter(None, at)))}" if any(at) else suite for suite, at in lengths.items()]
    return "; ".join(each)


def _mixed(run: RunFiles) -> Iterator[str]:
    """A sentence for each table whose variants were measured on different samples."""
    for (suite, source), keys in _mixed_columns(run).items():
        where = f" on {source}" if source and source != suite else ""
        yield (
            f"{suite}{where}: the variants were measured under different settings at {len(keys)} "
            f"length{'s' * (len(keys) > 1)}, so on different samples: they are not compared there."
        )


def _mixed_columns(run: RunFiles) -> dict[tuple[str, str], set[Hashable]]:
    """{(suite, source): the keys of lengths at which variants differ in the settings that choose the samples}."""
    tables = [table for suite in SETTINGS_OF for table in build_tables(suite, [run])]
    return {(table.suite, table.source): keys for table in tables if (keys := mixed_lengths([table]))}


def mixed_lengths(tables: Sequence[Table]) -> set[Hashable]:
    """The keys of lengths at which the cells of tables differ in the settings that choose the samples."""
    chosen: dict[Hashable, set[str]] = {}
    for table in tables if tables and tables[0].suite in SETTINGS_OF else ():
        for (_, key), cell in table.cells.items():
            settings = cell.record.get("settings")
            if isinstance(settings, dict):
                common = {name: value for name, value in settings.items() if name not in OF_VARIANT}
                chosen.setdefault(key, set()).add(json.dumps([common, cell.record.get("seed")], sort_keys=True))
    return {key for key, kinds in chosen.items() if len(kinds) > 1}


def _some(names: list[str]) -> str:
    """`a, b and 3 more`."""
    return listing(names if len(names) <= SHOWN + 1 else [*names[:SHOWN], f"{len(names) - SHOWN} more"])
