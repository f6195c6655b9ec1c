"""The report's headline, computed: does the dropped model beat every way of reading on with RoPE, where, by
how much.

At each length the dropped model meets whichever RoPE row did best *at that length*, so the comparison leans against
it. It is read in one way at all lengths, chosen beforehand: with the paper's beta, else a fitted one, else as trained.
A difference within 95% of the noise of the two is a tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pe_lab.analysis.scores import Cell, Column, Table, compare
from pe_lab.analysis.variants import is_dropped, is_rotary, kind
from pe_lab.results.formatting import listing, short_number


@dataclass(frozen=True)
class Duel:
    """The dropped model against the best RoPE row at one length."""

    column: Column
    label: str
    ours: Cell
    rival: str
    theirs: Cell
    outcome: str  # win | tie | loss

    @property
    def gap(self) -> str:
        """The size of the difference, without its direction: `21 points`, `perplexity 12% lower`."""
        return gap(self.ours, self.theirs)


@dataclass(frozen=True)
class Verdict:
    """Sentences for the top of the page, and the duels behind them by table.

    `opening` sets plain RoPE beside the dropped model, in numbers; `headline` judges the dropped model against the
    best RoPE variant of each length.
    """

    headline: str
    tone: str  # win | mixed | loss | missing
    details: list[str] = field(default_factory=list)
    duels: list[tuple[Table, list[Duel]]] = field(default_factory=list)
    opening: str = ""


def gap(ours: Cell, theirs: Cell) -> str:
    """The difference of two cells in words, seen from `ours`."""
    difference = ours.score - theirs.score
    if "accuracy" in ours.row:
        points = 100 * abs(difference)
        size = f"{points:.1f}" if points < 9.95 else f"{points:.0f}"
        return f"{size} points {'higher' if difference >= 0 else 'lower'}"
    if "nll" not in ours.row and "perplexity" not in ours.row:
        return f"{short_number(abs(difference))} {'higher' if difference >= 0 else 'lower'}"
    lower = difference >= 0
    ratio = math.exp(min(abs(difference), 700.0))  # perplexity of the worse over that of the better
    if not lower and ratio > 2:
        return f"perplexity {short_number(ratio)} times as high"
    share = 100 * (1 - 1 / ratio if lower else ratio - 1)
    return f"perplexity {share:.1f}% {'lower' if lower else 'higher'}"


def dropped_at(table: Table, column: Column) -> tuple[str, Cell] | None:
    """The dropped model's row at a length: with the paper's beta, else a fitted one, else as trained."""
    found = [(label, cell) for label, cell in table.column(column).items() if is_dropped(table.rows[label])]
    for preferred in ("DroPE paper beta", "DroPE beta"):
        if chosen := [item for item in found if kind(table.rows[item[0]]) == preferred]:
            return chosen[0]
    return found[0] if found else None


def rotary_at(table: Table, column: Column) -> tuple[str, Cell] | None:
    """The best RoPE row at a length."""
    found = [(label, cell) for label, cell in table.column(column).items() if is_rotary(table.rows[label])]
    return max(found, key=lambda item: item[1].score) if found else None


def duels(table: Table) -> list[Duel]:
    """One duel for each length at which both sides were measured."""
    result = []
    for column in table.columns:
        ours, theirs = dropped_at(table, column), rotary_at(table, column)
        if ours and theirs:
            result.append(Duel(column, *ours, *theirs, compare(ours[1], theirs[1])))
    return result


def judge(needles: Table | None, perplexity: Table | None) -> Verdict:
    """The verdict from a table of needle accuracies and one of perplexities; either may be missing."""
    judged = [(table, duels(table)) for table in (needles, perplexity) if table and table.cells]
    if not judged:
        return Verdict("Nothing has been evaluated here yet.", "missing")
    longer = [(table, [duel for duel in found if duel.column.key > 1]) for table, found in judged]
    decided = [(table, found) for table, found in longer if found]
    details = [sentence for table, _ in judged if (sentence := baseline(table))]
    if not decided:
        return Verdict(undecided(judged[0][0]), "missing", details, judged)
    outcomes = {duel.outcome for _, found in decided for duel in found}
    tone = "win" if outcomes == {"win"} else "mixed" if "win" in outcomes else "loss"
    headline = sentence_of(*decided[0])
    if len(decided) == 2:
        headline = f"{headline[:-1]}{clause(*decided[1], after=decided[0][1])}."
    more = [cost(judged), *(peers(table) for table, _ in judged)]
    details += [sentence for sentence in more if sentence]
    return Verdict(headline, tone, details, judged, opening_of(judged[0][0]))


def opening_of(table: Table) -> str:
    """What happens past the training length, in numbers: plain RoPE and the dropped model, nearest and farthest."""
    both = [
        (column, plain, ours[1])
        for column in table.columns
        if column.key > 1 and (plain := plain_rope(table, column)) and (ours := dropped_at(table, column))
    ]
    if not both:
        return ""
    found = "finds {} of the needles" if table.suite == "needles" else "has perplexity {}"
    (near, plain, ours), (far, far_plain, far_ours) = both[0], both[-1]
    first = f"At {near.title} its training length RoPE {found.format(plain.shown)}, the dropped model {ours.shown}"
    return f"{first}; at {far.title}, {far_plain.shown} and {far_ours.shown}." if len(both) > 1 else f"{first}."


def undecided(table: Table) -> str:
    """What is missing for a verdict."""
    if not any(is_dropped(row) for row in table.rows.values()):
        return "No dropped model has been evaluated here yet, so there is nothing to compare RoPE with."
    if not any(is_rotary(row) for row in table.rows.values()):
        return "The dropped model was evaluated, but RoPE was not, so there is nothing to compare it with."
    return "The dropped model and RoPE have not both been evaluated past the training length yet."


def lengths(found: list[Duel]) -> str:
    """`2×, 4× and 8×`."""
    return listing([duel.column.title for duel in found])


def sentence_of(table: Table, found: list[Duel]) -> str:
    """The duels of one table, past the training length, in one sentence."""
    wins, ties, losses = (by_outcome(found, outcome) for outcome in ("win", "tie", "loss"))
    what = "in needle accuracy" if table.suite == "needles" else "in perplexity"
    if len(wins) == len(found):
        return triumph(table, wins[-1])
    if not wins and not losses:
        return (
            f"The dropped model does not win: {what} it cannot be told from the best RoPE variant at "
            f"{lengths(ties)} its training length."
        )
    parts = [f"wins at {lengths(wins)}"] if wins else []
    parts += [f"ties at {lengths(ties)}"] if ties else []
    if losses:
        each = [f"at {duel.column.title} ({measured_against(duel)})" for duel in losses]
        parts.append(f"loses to the best RoPE variant {listing(each)}")
    opening = "The dropped model does not win everywhere" if wins else "The dropped model does not win"
    return f"{opening}: {what} it {listing(parts)}."


def measured_against(duel: Duel) -> str:
    """`15 points lower than RoPE + NTK`, `10.0% higher than ...`, `3.7 times that of ...`."""
    size = duel.gap.removeprefix("perplexity ")
    if size.endswith(" times as high"):
        return f"{size.removesuffix(' as high')} that of {duel.rival}"
    return f"{size} than {duel.rival}"


def triumph(table: Table, last: Duel) -> str:
    """The sentence for a table in which the dropped model wins at every length; `last` is the longest."""
    plain, at = plain_rope(table, last.column), last.column.title
    itself = f"RoPE as trained {plain.shown}, and the" if plain and last.rival != plain_label(table) else "the"
    if table.suite == "needles":
        return (
            f"Without its positional encoding the model reads on past its training length: at {at} it finds "
            f"{last.ours.shown} of the needles, {itself} best RoPE variant ({last.rival}) "
            f"{last.theirs.shown}."
        )
    return (
        f"Without its positional encoding the model reads on past its training length: at {at} its "
        f"perplexity is {last.ours.shown}, that of the best RoPE variant ({last.rival}) {last.theirs.shown}."
    )


def clause(table: Table, found: list[Duel], after: list[Duel]) -> str:
    """What a second table adds to the headline, honest where it disagrees."""
    wins, ties, losses = (by_outcome(found, outcome) for outcome in ("win", "tie", "loss"))
    if len(wins) == len(found) and all(duel.outcome == "win" for duel in after):
        return ""  # the headline stands as it is; the board below it has the figures
    parts = [f"wins at {lengths(wins)}"] if wins else []
    parts += [f"ties at {lengths(ties)}"] if ties else []
    if losses:
        worst = min(losses, key=lambda duel: duel.ours.score - duel.theirs.score)
        most = "at worst " if len(losses) > 1 else ""
        parts.append(f"loses at {lengths(losses)} ({most}{measured_against(worst)})")
    return f"; in perplexity it {listing(parts)}"


def by_outcome(found: list[Duel], outcome: str) -> list[Duel]:
    """The duels that ended so."""
    return [duel for duel in found if duel.outcome == outcome]


def plain_label(table: Table) -> str | None:
    """The row of RoPE as trained."""
    return next((label for label, row in table.rows.items() if kind(row) == "RoPE"), None)


def plain_rope(table: Table, column: Column) -> Cell | None:
    """RoPE as trained, at a length."""
    label = plain_label(table)
    return table.cell(label, column) if label else None


def baseline(table: Table) -> str | None:
    """What plain RoPE does with length."""
    cells = [(column, cell) for column in table.columns if (cell := plain_rope(table, column))]
    if len(cells) < 2:
        return None
    (first, start), rest = cells[0], cells[1:]
    values = listing([f"{cell.shown} at {column.title}" for column, cell in rest])
    if table.suite == "needles":
        return f"RoPE as trained finds {start.shown} of needles at {first.title}, {values}."
    return f"RoPE as trained has perplexity {start.shown} at {first.title}, {values}."


def cost(judged: list[tuple[Table, list[Duel]]]) -> str | None:
    """What dropping costs or gains at the training length itself."""
    words = {"win": "better", "loss": "worse", "tie": "no difference beyond the noise"}
    parts = []
    for table, found in judged:
        duel = next((duel for duel in found if duel.column.key == 1), None)
        if duel:
            what = "needles" if table.suite == "needles" else "perplexity"
            parts.append(f"{what} {duel.ours.shown} against {duel.theirs.shown} with RoPE ({words[duel.outcome]})")
    return f"At the training length itself, the dropped model: {listing(parts)}." if parts else None


def peers(table: Table) -> str | None:
    """How the dropped model stands to models of other schemes (NoPE from scratch, ALiBi), at the longest
    length."""
    for column in reversed(table.columns):
        ours = dropped_at(table, column)
        others = {
            label: cell
            for label, cell in table.column(column).items()
            if not is_rotary(table.rows[label]) and not is_dropped(table.rows[label])
        }
        if not ours or not others:
            continue
        label = max(others, key=lambda name: others[name].score)
        outcome = compare(ours[1], others[label])
        words = {"win": "ahead of", "loss": "behind", "tie": "within the noise of"}[outcome]
        unit = "needles" if "accuracy" in ours[1].row else "perplexity"
        return (
            f"At {column.title}, {ours[0]} ({unit} {ours[1].shown}) is {words} {label} "
            f"({others[label].shown}), "
            "which was not trained with RoPE at all."
        )
    return None
