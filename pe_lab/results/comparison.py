"""What runs have in common and in what they differ: keys of their configs, and differences of scores by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.results.groups import SEEDS, flat, seeds_of
from pe_lab.results.paired import Difference, paired_t
from pe_lab.results.records import as_dict, mappings
from pe_lab.results.runs import Run
from pe_lab.results.scores import Column, Table
from pe_lab.results.standing import mixed_lengths
from pe_lab.results.tables import build_tables
from pe_lab.results.variants import DROPPED, kind

# Keys that no result depends on, and those that have columns of their own.
_ASIDE = ("name", "notes", "log", "checkpoint", "evaluation", "phases", *SEEDS, "data.cache_dir", "data.workers")


def settings(run: Run) -> dict[str, Any]:
    """The config of a run flat, by short keys: `data.tokenizer`, `pretrain.optimizer.learning_rate`, ...

    A positional encoding and the options of a source are one value each. `phases` names the phases.
    """
    config = run.config
    found = dict(flat({key: value for key, value in config.items() if key not in _ASIDE}))
    found = {key: value for key, value in found.items() if key not in _ASIDE}
    phases = mappings(config.get("phases"))
    names = [str(phase.get("name", n)) for n, phase in enumerate(phases)]
    if phases:
        found["phases"] = " → ".join(names)
    for name, phase in zip(names, phases, strict=True):
        inner = {key: value for key, value in phase.items() if key not in ("name", "positional")}
        found |= {f"{name}.{key}": value for key, value in flat(inner)}
        found[f"{name}.positional"] = encoding_text(phase.get("positional"))
    return found


def encoding_text(encoding: object) -> str:
    """An encoding in one line, whether it was written as a text, as a mapping, or as a list for the layers."""
    if isinstance(encoding, list):
        return " / ".join(map(encoding_text, encoding))
    described = as_dict(encoding)
    if not described:
        return str(encoding or "unknown encoding")
    rest = ", ".join(f"{k}={v}" for k, v in described.items() if k != "kind" and v is not None)
    return f"{described.get('kind', '?')}({rest})" if rest else str(described.get("kind", "?"))


def differing(runs: Sequence[Run]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The keys whose values differ, by short names, each with the value of every run; and the equal keys.

    Keys of a phase that a run lacks do not differ: `phases` does. A run without a config has None.
    """
    found = [settings(run) for run in runs]
    known = [one for one in found if one]
    everywhere = [key for key in (known[0] if known else {}) if all(key in one for one in known)]
    equal = {key: known[0][key] for key in everywhere if all(one[key] == known[0][key] for one in known)}
    some = dict.fromkeys(key for one in known for key in one if key not in equal)
    phases = {name for one in known for name in str(one.get("phases", "")).split(" → ")}
    keys = [key for key in some if key in everywhere or key.split(".")[0] not in phases]
    values = {key: [one.get(key) for one in found] for key in keys}
    return {short: values[key] for key, short in short_names(keys).items()}, equal


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The shortest end of each key that no other key has: `learning_rate`, `pretrain optimizer learning_rate`."""

    def end(key: str, parts: int) -> str:
        return " ".join(key.split(".")[-parts:])

    short = {}
    for key in keys:
        sizes = range(1, key.count(".") + 2)
        short[key] = next((end(key, n) for n in sizes if [end(k, n) for k in keys].count(end(key, n)) == 1), key)
    return short


# ---------------------------------------------------------------------------------------------------------------------
# Differences in pairs


def finished(run: Run) -> bool:
    """Whether all phases of a run are complete."""
    return bool(run.phases) and not any(phase.running for phase in run.phases)


def last_validation(run: Run) -> float | None:
    """The last validation loss of a run, in nats per token; None if it has none."""
    points = [value for phase in run.phases for _, value in phase.series("validation_loss")]
    return points[-1] if points else None


def finished_members(run: Run) -> list[Run]:
    """The members of a group that have finished, or the run itself."""
    return [member for member in run.members or (run,) if finished(member)]


def last_losses(run: Run) -> list[float]:
    """The last validation losses of the members of a group that have finished, or of the run itself."""
    considered = finished_members(run) if run.members else [run]
    return [loss for member in considered if (loss := last_validation(member)) is not None]


def by_seed(values: Mapping[Any, float | None], baseline: Mapping[Any, float | None]) -> Difference | None:
    """The difference `values - baseline`, each {seed: value}, over the seeds that both have; None without one."""
    pairs = [(value, baseline.get(seed)) for seed, value in values.items()]
    known = [(value, other) for value, other in pairs if value is not None and other is not None]
    return paired_t(*zip(*known, strict=True)) if known else None


@dataclass(frozen=True)
class Paired:
    """The difference of two groups in one measurement, seed by seed.

    Attributes:
      name: of the two: `drope − rope`.
      what: what was measured: `perplexity`, `validation loss`.
      column: the length; None without one.
      labels: the variants that are compared, where they are variants.
      difference: in the units of `what`; of perplexities that of the losses, nats per token.
      share: whether scores are shares of 1.
    """

    name: str
    what: str
    column: Column | None
    labels: tuple[str, str]
    difference: Difference
    share: bool


def representative(run: Run, table: Table) -> str | None:
    """The variant in a table of a run that stands for it: the dropped model with β, else the last phase as trained."""
    kinds = {kind(record): label for label, record in reversed(table.variants.items())}
    for name in DROPPED:
        if name in kinds:
            return str(kinds[name])
    trained = [label for label, record in table.variants.items() if record.get("variant") == "as trained"]
    order = {phase.name: n for n, phase in enumerate(run.phases)}
    phases = {str(label): order.get(str(table.variants[label].get("phase")), -1) for label in trained or table.variants}
    return max(phases, key=phases.__getitem__, default=None)


def stand_ins(runs: Sequence[Run], of: Table) -> tuple[Table, dict[str, str]]:
    """A table of the suite and source of `of` with one variant for each run, under the run's name; and their labels."""
    cells, variants, labels = {}, {}, {}
    known = {column.key for column in of.columns}  # lengths in tokens alone have no place on an axis of multiples
    for run in runs:
        own = next((one for one in build_tables(of.suite, [run]) if one.source == of.source), None)
        if own is None or not own.cells or not (label := representative(run, own)):
            continue
        labels[run.name], variants[run.name] = label, own.variants[label]
        cells |= {(run.name, key): cell for (one, key), cell in own.cells.items() if one == label and key in known}
    return Table(of.suite, of.source, of.columns, variants, cells), labels


def paired_scores(
    runs: Sequence[Run], of: Table, labels: Mapping[str, str], column: Column, best: str, other: str
) -> Difference | None:
    """The difference `best - other` of two groups, named as in `stand_ins`, in pairs of seeds; None without two."""
    by_name = {run.name: run for run in runs}

    def read(name: str) -> Callable[[Run], float | None]:
        def score(run: Run) -> float | None:
            table = next((one for one in build_tables(of.suite, [run]) if one.source == of.source), None)
            cell = table.cell(labels[name], column) if table else None
            return cell.score if cell and math.isfinite(cell.score) else None

        return score

    return _of_members(by_name[other], by_name[best], read(other), read(best))


def paired_differences(runs: Sequence[Run], suites: Sequence[str]) -> list[Paired]:
    """Differences between groups that have at least two seeds in common, each against the first of `runs` that has.

    In the last validation loss of seeds that have finished, and in each suite at each length at which all read the same
    samples: of the variants that stand for the runs, then of every other variant that both have.
    """
    groups = [run for run in runs if run.members]
    if len(groups) < 2:
        return []
    first, found = groups[0], []
    for other in groups[1:]:
        name = f"{other.name} − {first.name}"
        if difference := _of_members(first, other, lambda run: last_validation(run) if finished(run) else None):
            found.append(Paired(name, "validation loss", None, ("", ""), difference, False))
        for suite in suites:
            found += _in_suite(name, suite, first, other)
    return found


def _in_suite(name: str, suite: str, first: Run, other: Run) -> list[Paired]:
    """The differences of two groups in one suite."""
    tables = [{table.source: table for table in build_tables(suite, [run])} for run in (first, other)]
    of_member = {
        id(run): {table.source: table for table in build_tables(suite, [run])}
        for run in (*first.members, *other.members)
    }
    result = []
    for source, one in tables[0].items():
        two = tables[1].get(source)
        if two is None or not one.cells or not two.cells:
            continue

        def read(label: str, column: Column, source: str = source) -> Callable[[Run], float | None]:
            def score(run: Run) -> float | None:
                table = of_member[id(run)].get(source)
                cell = table.cell(label, column) if table else None
                return cell.score if cell and math.isfinite(cell.score) else None

            return score

        mixed = mixed_lengths([found[source] for found in of_member.values() if source in found])
        stand_in = (representative(first, one), representative(other, two))
        both = [(label, label) for label in one.variants if label in two.variants]
        for mine, theirs in dict.fromkeys([stand_in, *both]):
            for column in (column for column in one.columns if column.key not in mixed):
                cell = one.cell(mine, column)
                if cell and (found := _of_members(first, other, read(str(mine), column), read(str(theirs), column))):
                    found = found if one.higher_is_better else _negative(found)  # losses, not their negatives
                    what = suite if not source or suite == "needles" else f"{suite}, {source}"
                    result.append(Paired(name, what, column, (str(theirs), str(mine)), found, cell.share))
    return result


def _negative(found: Difference) -> Difference:
    return found._replace(mean=-found.mean, low=-found.high, high=-found.low)


def _of_members(
    first: Run, other: Run, read: Callable[[Run], float | None], read_other: Callable[[Run], float | None] | None = None
) -> Difference | None:
    """The difference `other - first` over the seeds that both have; None for fewer than two."""
    theirs = {seeds_of(run): (read_other or read)(run) for run in other.members}
    found = by_seed(theirs, {seeds_of(run): read(run) for run in first.members})
    return found if found and found.count > 1 else None
