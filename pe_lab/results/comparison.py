"""What runs have in common and in what they differ: keys of their configs, and differences of scores by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pe_lab.config import flat
from pe_lab.results.groups import SEEDS, seeds_of
from pe_lab.results.records import as_dict, mappings
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import build_tables
from pe_lab.results.standing import comparable
from pe_lab.results.statistics import Difference
from pe_lab.results.table import Cell, Length, Metric, Table, by_seed, seeds_table
from pe_lab.results.variants import DROPPED, kind

LOSS = "validation loss"
# Keys that no result depends on, and those that have columns of their own.
_ASIDE = ("name", "notes", "log", "checkpoint", "evaluation", "phases", *SEEDS, "data.cache_dir", "data.workers")


def settings(run: RunFiles) -> dict[str, Any]:
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


def differing(runs: Sequence[RunFiles]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
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


def finished(run: RunFiles) -> bool:
    """Whether all phases of a run are complete."""
    return bool(run.phases) and not any(phase.running for phase in run.phases)


def last_validation(run: RunFiles) -> float | None:
    """The last validation loss of a run, in nats per token; None if it has none."""
    points = [value for phase in run.phases for _, value in phase.series("validation_loss")]
    return points[-1] if points else None


def finished_members(run: RunFiles) -> list[RunFiles]:
    """The members of a group that have finished, or the run itself."""
    return [member for member in run.members or (run,) if finished(member)]


def last_losses(run: RunFiles) -> list[float]:
    """The last validation losses of the members of a group that have finished, or of the run itself."""
    considered = finished_members(run) if run.members else [run]
    return [loss for member in considered if (loss := last_validation(member)) is not None]


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
    column: Length | None
    labels: tuple[str, str]
    difference: Difference
    share: bool


def representative(run: RunFiles, table: Table) -> str | None:
    """The variant in a table of a run that stands for it: the dropped model with β, else the last phase as trained."""
    kinds = {kind(record): label for label, record in reversed(table.rows.items())}
    for name in DROPPED:
        if name in kinds:
            return str(kinds[name])
    trained = [label for label, record in table.rows.items() if record.get("variant") == "as trained"]
    order = {phase.name: n for n, phase in enumerate(run.phases)}
    phases = {str(label): order.get(str(table.rows[label].get("phase")), -1) for label in trained or table.rows}
    return max(phases, key=phases.__getitem__, default=None)


def stand_ins(runs: Sequence[RunFiles], of: Table) -> tuple[Table, dict[str, str]]:
    """A table of the suite and source of `of` with one variant for each run, under the run's name; and their labels."""
    cells, rows, labels = {}, {}, {}
    known = {column.key for column in of.columns}  # lengths in tokens alone have no place on an axis of multiples
    for run in runs:
        own = next((one for one in build_tables(of.suite, [run]) if one.source == of.source), None)
        if own is None or not own.cells or not (label := representative(run, own)):
            continue
        labels[run.name], rows[run.name] = label, own.rows[label]
        cells |= {(run.name, key): cell for (one, key), cell in own.cells.items() if one == label and key in known}
    return Table(of.columns, rows, cells, of.suite, of.source), labels


def paired_differences(runs: Sequence[RunFiles], suites: Sequence[str]) -> list[Paired]:
    """Differences between groups that have at least two seeds in common, each against the first of `runs` that has.

    In the last validation loss of seeds that have finished, and in each suite at each length at which all read the same
    samples: of the variants that stand for the runs, then of every other variant that both have.
    """
    groups = [run for run in runs if run.members]
    if len(groups) < 2:
        return []
    first, found = groups[0], []
    losses = seeds_table({run.name: {LOSS: _final_losses(run)} for run in groups})
    for other in groups[1:]:
        name = f"{other.name} − {first.name}"
        mine, theirs = (losses.cell(run.name, Metric(LOSS)) for run in (first, other))
        if one := _paired(theirs, mine):
            found.append(Paired(name, LOSS, None, ("", ""), one, False))
        for suite in suites:
            found += _in_suite(name, suite, first, other)
    return found


def _final_losses(run: RunFiles) -> dict[Any, float]:
    """{seed: last validation loss} of the members of a group that have finished."""
    known = {seeds_of(one): last_validation(one) for one in finished_members(run)}
    return {seed: loss for seed, loss in known.items() if loss is not None}


def _in_suite(name: str, suite: str, first: RunFiles, other: RunFiles) -> list[Paired]:
    """The differences of two groups in one suite."""
    mine, theirs = ({table.source: table for table in build_tables(suite, [run])} for run in (first, other))
    result = []
    for source in mine:
        if source not in theirs or not mine[source].cells or not theirs[source].cells:
            continue
        one, two = comparable([first, other], mine[source]), theirs[source]
        stand_in = (representative(first, mine[source]), representative(other, two))
        both = [(label, label) for label in mine[source].rows if label in two.rows]
        for label, of_other in dict.fromkeys([stand_in, *both]):
            for column in one.columns:
                cell = one.cell(label, column)
                if found := _paired(two.cell(of_other, column), cell):
                    what = suite if not source or suite == "needles" else f"{suite}, {source}"
                    result.append(Paired(name, what, column, (str(of_other), str(label)), found, cell.share))
    return result


def _paired(theirs: Cell | None, mine: Cell | None) -> Difference | None:
    """The difference of two cells, of losses where they are losses; None for fewer than two seeds in common."""
    found = by_seed(theirs, mine) if theirs and mine else None
    if found is None or found.count < 2:
        return None
    return found if mine.higher_is_better else found.reversed
