"""The report's headline: whether the dropped model beats the best RoPE variant past the training length; without one,
which variant is the best.

At each length the dropped model is compared with the RoPE variant of the best score at that length, so the comparison
favours RoPE. One variant of the dropped model is compared at all lengths of a table, and its score has no part in the
choice: it is the one measured at most lengths past training, and of several the one with a logit scale fitted on other
text, which is the paper's procedure, else as trained. A difference within 95% of the noise of both is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pe_lab.results.formatting import listing, short_number, shortened
from pe_lab.results.records import Record
from pe_lab.results.statistics import Z95
from pe_lab.results.table import Cell, Length, Table, by_seed, compare
from pe_lab.results.variants import DROPPED, is_dropped, is_rotary, kind


@dataclass(frozen=True)
class Duel:
    """The dropped model against the best RoPE variant at one length; `outcome` is win, tie or loss."""

    column: Length
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
      cautions: what the scores lack (`standing.cautions`), to be read before the headline.
    """

    headline: str
    tone: str
    details: list[str] = field(default_factory=list)
    duels: list[tuple[Table, list[Duel]]] = field(default_factory=list)
    opening: str = ""
    cautions: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """The opening and the headline; the first one begins with `Preliminary` where there are cautions."""
        first, *more = filter(None, (self.opening, self.headline))
        return [f"Preliminary: {first}" if self.cautions else first, *more]


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
        dropped = any(is_dropped(record) for record in first.rows.values())
        if source and not dropped:
            headline = imported_headline(first, source)
        else:
            headline = _undecided(first) if dropped else best_headline([table for table, _ in judged])
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
    result, label = [], _dropped(table)
    for column in table.columns if label else ():
        ours, theirs = table.cell(label, column), _best(table, column, is_rotary)
        if ours and theirs:
            result.append(Duel(column, label, ours, *theirs, compare(ours, theirs[1])))
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


def _dropped(table: Table) -> str | None:
    """The variant of the dropped model that is compared at all lengths; None without one.

    The one measured at most of the lengths past the training length at which RoPE was measured, so that no length is
    left out for the sake of a variant. Of several, the first of `DROPPED`.
    """
    found = [(str(label), kind(record)) for label, record in table.rows.items() if is_dropped(record)]
    chosen = [label for name in DROPPED for label, its in found if its == name]
    past = [column for column in table.columns if column.key > 1 and _best(table, column, is_rotary)]

    def lengths(label: str) -> int:
        return sum(table.cell(label, column) is not None for column in past)

    return max([*chosen, *(label for label, _ in found)], key=lengths, default=None)  # the first of equals


def _best(table: Table, column: Length, wanted: Callable[[Record], bool]) -> tuple[str, Cell] | None:
    """The best of the wanted variants at a length."""
    found = [item for item in table.column(column).items() if wanted(item[1].record)]
    return max(found, key=lambda item: item[1].score, default=None)


def _plain_rope(table: Table, column: Length) -> Cell | None:
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
    """The headline of a run with a dropped model and without a verdict: the measurement that is missing."""
    if not any(is_rotary(record) for record in table.rows.values()):
        return "The dropped model was evaluated, but RoPE was not, so there is nothing to compare it with."
    return "The dropped model and RoPE have not both been evaluated past the training length yet."


# ---------------------------------------------------------------------------------------------------------------------
# Without a drop


def best_headline(tables: Sequence[Table], unlike: str = "variants", in_pairs: bool = False) -> str:
    """Which variant is the best at the greatest length, and by how much: a sentence for each table.

    The difference to the next variant has its 95% interval: as of independent scores, or in pairs of seeds.

    Args:
      unlike: what the variants are: encodings, runs.
      in_pairs: whether seeds that both have are pairs, where they are two or more.
    """
    sentences = []
    for table in tables:
        column = next((one for one in reversed(table.columns) if _ranked(table, one)), None)
        if column is not None:
            sentences.append(_best_sentence(table, column, unlike, in_pairs))
    return " ".join(sentences) or "Nothing that could be compared has been evaluated here yet."


def _ranked(table: Table, column: Length) -> list[tuple[str, Cell]]:
    """The variants at a length that have a number, the best first."""
    known = [(str(label), cell) for label, cell in table.column(column).items() if math.isfinite(cell.score)]
    return sorted(known, key=lambda item: -item[1].score)


def _best_sentence(table: Table, column: Length, unlike: str, in_pairs: bool) -> str:
    """`At 8× the training length YaRN has perplexity 9.60, the best of 5 variants: 13% lower [12, 14] than ...`"""
    (name, best), *others = _ranked(table, column)
    of = "the training length" if column.factor is not None else ""
    at = of if column.factor == 1 else " ".join(filter(None, (column.title, of)))
    start = f"At {at} {shortened(name)} {_has(table, best)}"
    if not others:
        return f"{start}; nothing else was measured."
    rival, theirs = others[0]
    found = by_seed(best, theirs) if in_pairs else None
    found = found if found and found.count > 1 else None
    against = f"{shortened(rival)} ({theirs.shown})"
    if found is None and (best.stderr is None or theirs.stderr is None):
        return f"{start}, the best of {len(others) + 1} {unlike}; next is {against}, without a known interval."
    if found is None:
        half = Z95 * math.hypot(best.stderr or 0.0, theirs.stderr or 0.0)
        low, high = best.score - theirs.score - half, best.score - theirs.score + half
    else:
        low, high = found.low, found.high
    mean = best.score - theirs.score if found is None else found.mean
    pairs = f" in pairs of {found.count} seeds" if found is not None else ""
    gap = _gap_with_interval(best, mean, low, high)
    if low <= 0:
        return f"{start}, the best of {len(others) + 1} {unlike}, but cannot be told from {against}: {gap}{pairs}."
    return f"{start}, the best of {len(others) + 1} {unlike}: {gap}{pairs} than {against}."


def _gap_with_interval(cell: Cell, mean: float, low: float, high: float) -> str:
    """A difference of scores with its interval: `24 points more [20, 28]`, `13.0% lower [12.1, 13.9]`."""
    if cell.share:
        mean, low, high = (100 * value for value in (mean, low, high))
        return f"{mean:.1f} points more [{low:.1f}, {high:.1f}]"
    if not ("nll" in cell.record or "perplexity" in cell.record):
        return f"{short_number(mean)} better [{short_number(low)}, {short_number(high)}]"
    shares = [100 * (1 - math.exp(-max(min(value, 700.0), -700.0))) for value in (mean, low, high)]
    if min(shares) < -1000:
        return f"{mean:.3f} nats per token lower [{low:.3f}, {high:.3f}]"
    return f"{shares[0]:.1f}% lower [{shares[1]:.1f}, {shares[2]:.1f}]"


# ---------------------------------------------------------------------------------------------------------------------
# The sentences of duels


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
    for label, record in table.rows.items():
        cells = [(column, cell) for column in table.columns if (cell := table.cell(label, column))]
        if not is_rotary(record) or record.get("variant") != "as trained" or len(cells) < 2:
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
            rival = f"{duel.theirs.shown} of {shortened(duel.rival)}"
            parts.append(f"{what} {duel.ours.shown} against {rival} ({words[duel.outcome]})")
            label = shortened(duel.label)
    return f"At the training length itself, {label}: {listing(parts)}." if parts else None


def _against_other_schemes(table: Table) -> str | None:
    """The dropped model beside models that never had RoPE (NoPE from scratch, ALiBi), at the longest length."""
    label = _dropped(table)
    for column in reversed(table.columns if label else ()):
        ours = table.cell(label, column)
        other = _best(table, column, lambda record: not is_rotary(record) and not is_dropped(record))
        if not ours or not other:
            continue
        rival, theirs = other
        words = {"win": "ahead of", "loss": "behind", "tie": "within the noise of"}[compare(ours, theirs)]
        unit = "needles" if "accuracy" in ours.record else "perplexity"
        return (
            f"At {column.title}, {shortened(label)} ({unit} {ours.shown}) is {words} {shortened(rival)} "
            f"({theirs.shown}), the best of the models with another encoding."
        )
    return None
