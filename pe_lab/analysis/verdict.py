"""The report's headline: whether the dropped model beats the best RoPE variant past the training length.

At each length the dropped model is compared with the RoPE variant of the best score at that length, so the comparison
favours RoPE. One variant of the dropped model is compared at all lengths, chosen before the scores are read: with the
paper's beta, else with a fitted one, else as trained. A difference within 95% of the noise of both is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pe_lab.results.formatting import listing, short_number, shortened
from pe_lab.results.records import Record
from pe_lab.results.scores import Cell, Column, Table, compare
from pe_lab.results.variants import DROPPED, is_dropped, is_rotary, kind


@dataclass(frozen=True)
class Duel:
    """The dropped model against the best RoPE variant at one length; `outcome` is win, tie or loss."""

    column: Column
    label: str
    ours: Cell
    rival: str
    theirs: Cell
    outcome: str

    @property
    def gap(self) -> str:
        """The difference as seen from the dropped model: `21 points higher`; of perplexities `12.0% lower`."""
        difference = self.ours.score - self.theirs.score
        direction = "higher" if difference >= 0 else "lower"
        if "accuracy" in self.ours.record:
            points = 100 * abs(difference)
            return f"{points:.{1 if points < 9.95 else 0}f} points {direction}"
        if "nll" not in self.ours.record and "perplexity" not in self.ours.record:
            return f"{short_number(abs(difference))} {direction}"
        ratio = math.exp(min(abs(difference), 700.0))  # the worse perplexity over the better one
        if difference < 0 and ratio > 2:
            return f"{short_number(ratio)} times as high"
        share = 100 * (1 - 1 / ratio if difference >= 0 else ratio - 1)
        return f"{share:.1f}% {'lower' if difference >= 0 else 'higher'}"


@dataclass(frozen=True)
class Verdict:
    """The sentences at the top of the page, and the duels behind them by table.

    Attributes:
      headline: the judgement.
      tone: win, mixed, loss, or missing if there are no duels past the training length.
      details: more sentences.
      duels: the duels of each table.
      opening: the two scores of the nearest and the farthest duel.
    """

    headline: str
    tone: str
    details: list[str] = field(default_factory=list)
    duels: list[tuple[Table, list[Duel]]] = field(default_factory=list)
    opening: str = ""


def judge(needles: Table | None, perplexity: Table | None, source: str = "") -> Verdict:
    """The verdict from a table of needle accuracies and one of perplexities; None if not measured.

    `source` is the external checkpoint of an imported run.
    """
    judged = [(table, duels(table)) for table in (needles, perplexity) if table and table.cells]
    if not judged:
        return Verdict("Nothing has been evaluated here yet.", "missing")
    longer = [(table, [duel for duel in found if duel.column.key > 1]) for table, found in judged]
    decided = [(table, found) for table, found in longer if found]
    details = [sentence for table, _ in judged for sentence in _rotary_by_length(table)]
    if not decided:
        first = judged[0][0]
        dropped = any(is_dropped(record) for record in first.variants.values())
        headline = imported_headline(first, source) if source and not dropped else _undecided(first)
        return Verdict(headline, "missing", details, judged)
    outcomes = {duel.outcome for _, found in decided for duel in found}
    tone = "win" if outcomes == {"win"} else "mixed" if "win" in outcomes else "loss"
    headline = _sentence(*decided[0])
    if len(decided) == 2:
        headline = f"{headline[:-1]}{_perplexity_clause(decided[1][1], after=decided[0][1])}."
    more = [_at_training_length(judged), *(_against_other_schemes(table) for table, _ in judged)]
    details += [sentence for sentence in more if sentence]
    return Verdict(headline, tone, details, judged, _opening(*decided[0]))


def duels(table: Table) -> list[Duel]:
    """A duel for each length at which both sides were measured."""
    result = []
    for column in table.columns:
        ours, theirs = _dropped(table, column), _best(table, column, is_rotary)
        if ours and theirs:
            result.append(Duel(column, *ours, *theirs, compare(ours[1], theirs[1])))
    return result


def imported_headline(table: Table, source: str) -> str:
    """The headline of an imported checkpoint: its best variant at the greatest length beside the model as it is."""
    column = table.columns[-1]
    best, _ = table.best(column)
    cells, plain = table.column(column), _plain_rope(table, column)
    at = f"{column.title} its training length" if column.factor is not None else column.title
    start = f"Imported from {shortened(source)}. At {at} {shortened(best)} {_has(table, cells[best])}"
    if plain is None or len(cells) == 1:
        return f"{start}."
    if cells[best] is plain:
        return f"{start}: none of the {len(cells) - 1} other variants is better."
    return f"{start}, the best of {len(cells)} variants; as it is, the model {_has(table, plain)}."


def _has(table: Table, cell: Cell) -> str:
    """`finds 51% of the needles`, `has perplexity 7.40`, `scores 20%`."""
    if table.suite == "needles":
        return f"finds {cell.shown} of the needles"
    return f"has perplexity {cell.shown}" if table.suite == "perplexity" else f"scores {cell.shown}"


def _dropped(table: Table, column: Column) -> tuple[str, Cell] | None:
    """The variant of the dropped model that is compared: with the paper's beta, else a fitted one, else as trained."""
    found = [item for item in table.column(column).items() if is_dropped(item[1].record)]
    chosen = [item for name in DROPPED for item in found if kind(item[1].record) == name]
    return next(iter([*chosen, *found]), None)


def _best(table: Table, column: Column, wanted: Callable[[Record], bool]) -> tuple[str, Cell] | None:
    """The best of the wanted variants at a length."""
    found = [item for item in table.column(column).items() if wanted(item[1].record)]
    return max(found, key=lambda item: item[1].score, default=None)


def _plain_rope(table: Table, column: Column) -> Cell | None:
    """RoPE as trained, at a length."""
    return next((cell for cell in table.column(column).values() if kind(cell.record) == "RoPE"), None)


def _opening(table: Table, found: Sequence[Duel]) -> str:
    """The scores of the dropped model and of the best RoPE variant, at the nearest and the farthest length."""
    near, far = found[0], found[-1]
    if near is far and near.outcome == "win":  # the headline has these numbers
        return ""
    sentence = (
        f"At {near.column.title} its training length {shortened(near.label)} {_has(table, near.ours)}, the best RoPE "
        f"variant ({shortened(near.rival)}) {near.theirs.shown}"
    )
    if len(found) == 1:
        return f"{sentence}."
    return f"{sentence}; at {far.column.title}, {far.ours.shown} and {far.theirs.shown} ({shortened(far.rival)})."


def _undecided(table: Table) -> str:
    """The headline of a run without a verdict: the measurement that is missing."""
    if not any(is_dropped(record) for record in table.variants.values()):
        return "No dropped model has been evaluated here yet, so there is nothing to compare RoPE with."
    if not any(is_rotary(record) for record in table.variants.values()):
        return "The dropped model was evaluated, but RoPE was not, so there is nothing to compare it with."
    return "The dropped model and RoPE have not both been evaluated past the training length yet."


def _by_outcome(found: Sequence[Duel]) -> tuple[list[Duel], list[Duel], list[Duel], list[str]]:
    """The wins, ties and losses, and the lengths of the wins and of the ties in words."""
    wins, ties, losses = ([duel for duel in found if duel.outcome == name] for name in ("win", "tie", "loss"))
    words = [f"{name} at {_lengths(some)}" for name, some in (("wins", wins), ("ties", ties)) if some]
    return wins, ties, losses, words


def _lengths(found: Sequence[Duel]) -> str:
    """`2×, 4× and 8×`."""
    return listing([duel.column.title for duel in found])


def _sentence(table: Table, found: Sequence[Duel]) -> str:
    """The duels of one table, past the training length, in one sentence."""
    wins, ties, losses, parts = _by_outcome(found)
    name = shortened(found[-1].label)
    if len(wins) == len(found):
        last = wins[-1]
        plain = _plain_rope(table, last.column)
        itself = f", RoPE as trained {plain.shown}" if plain and plain is not last.theirs else ""
        return (
            f"Without its positional encoding the model works past its training length: at {last.column.title} {name} "
            f"{_has(table, last.ours)}{itself}, and the best RoPE variant ({shortened(last.rival)}) "
            f"{last.theirs.shown}."
        )
    what = "in needle accuracy" if table.suite == "needles" else "in perplexity"
    if not wins and not losses:
        return (
            f"The dropped model ({name}) does not win: {what} it cannot be told from the best RoPE variant at "
            f"{_lengths(ties)} its training length."
        )
    if losses:
        each = [f"at {duel.column.title} ({_measured_against(duel)})" for duel in losses]
        parts.append(f"loses to the best RoPE variant {listing(each)}")
    return f"The dropped model ({name}) does not win{' everywhere' if wins else ''}: {what} it {listing(parts)}."


def _measured_against(duel: Duel) -> str:
    """`15 points lower than RoPE + NTK`, `10.0% higher than ...`, `3.7 times that of ...`."""
    rival = shortened(duel.rival)
    if duel.gap.endswith(" times as high"):
        return f"{duel.gap.removesuffix(' as high')} that of {rival}"
    return f"{duel.gap} than {rival}"


def _perplexity_clause(found: Sequence[Duel], after: Sequence[Duel]) -> str:
    """The perplexities as a clause after a headline about needles; "" if every duel of both tables is a win."""
    wins, _, losses, parts = _by_outcome(found)
    if len(wins) == len(found) and all(duel.outcome == "win" for duel in after):
        return ""
    if losses:
        worst = min(losses, key=lambda duel: duel.ours.score - duel.theirs.score)
        most = "at worst " if len(losses) > 1 else ""
        parts.append(f"loses at {_lengths(losses)} ({most}{_measured_against(worst)})")
    return f"; in perplexity it {listing(parts)}"


def _rotary_by_length(table: Table) -> list[str]:
    """The scores of the models that rotate, as trained, by length: RoPE, p-RoPE; none for fewer than two lengths."""
    found = []
    for label, record in table.variants.items():
        cells = [(column, cell) for column in table.columns if (cell := table.cell(label, column))]
        if not is_rotary(record) or record.get("method") != "as trained" or len(cells) < 2:
            continue
        (first, start), *rest = cells
        values = listing([f"{cell.shown} at {column.title}" for column, cell in rest])
        found.append(f"{shortened(label)} as trained {_has(table, start)} at {first.title}, {values}.")
    return found


def _at_training_length(judged: Sequence[tuple[Table, list[Duel]]]) -> str | None:
    """The scores of both sides at the training length; None if they were not measured there."""
    words = {"win": "better", "loss": "worse", "tie": "no difference beyond the noise"}
    parts = []
    for table, found in judged:
        duel = next((duel for duel in found if duel.column.key == 1), None)
        if duel:
            what = "needles" if table.suite == "needles" else "perplexity"
            parts.append(f"{what} {duel.ours.shown} against {duel.theirs.shown} with RoPE ({words[duel.outcome]})")
    return f"At the training length itself, the dropped model: {listing(parts)}." if parts else None


def _against_other_schemes(table: Table) -> str | None:
    """The dropped model beside models that never had RoPE (NoPE from scratch, ALiBi), at the longest length."""
    for column in reversed(table.columns):
        dropped = _dropped(table, column)
        other = _best(table, column, lambda record: not is_rotary(record) and not is_dropped(record))
        if not dropped or not other:
            continue
        (label, ours), (rival, theirs) = dropped, other
        words = {"win": "ahead of", "loss": "behind", "tie": "within the noise of"}[compare(ours, theirs)]
        unit = "needles" if "accuracy" in ours.record else "perplexity"
        return (
            f"At {column.title}, {shortened(label)} ({unit} {ours.shown}) is {words} {shortened(rival)} "
            f"({theirs.shown}), which was not trained with RoPE at all."
        )
    return None
