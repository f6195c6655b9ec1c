"""ROUGE-L by the rules of the PyPI package `rouge` 1.0.1, which LongBench scores summaries with, and the longest common
subsequence that it rests on."""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(output: str, reference: str) -> float:
    """F of ROUGE-L over whole texts, 0..1, words as they are written.

    Sentences end at full stops, and at nothing else. Of each pair of a reference's and an output's sentence the words
    of their longest common subsequence are taken. The size of the set of all of these, over that of the set of the
    output's words and over that of the reference's, is precision and recall: a word counts once however often it
    occurs. F is 2pr / (p + r + 1e-8), so that equal texts score 1 - 5e-9. The package follows Lin (2004, "ROUGE",
    section 3.2), with sets in place of counts.

    An output or a reference without a sentence (empty, or full stops alone) scores 0: the package raises, and LongBench
    catches that. LongBench also catches the package's RecursionError, where two sentences have some 1,000 words
    together, and so gives 0 to a summary without full stops; here such sentences are scored like others.
    """
    said, wanted = _sentences(output), _sentences(reference)
    if not said or not wanted:
        return 0.0
    shared: set[str] = set()
    for sentence in wanted:
        for other in said:
            shared |= common_words(sentence, other)
    precision = len(shared) / len({word for sentence in said for word in sentence})
    recall = len(shared) / len({word for sentence in wanted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """The words of each. What is blank but not empty between two full stops is a sentence of one empty word."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def common_words(reference: Sequence[str], output: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence; among several that of `rouge`, which drops the output's last word
    rather than the reference's where either will do."""
    if set(reference).isdisjoint(output):
        return set()
    rows = _rows(reference, output)
    words: set[str] = set()
    i, j = len(reference), len(output)
    while i and j:
        if reference[i - 1] == output[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif rows[i] >> (j - 1) & 1:  # without the output's last word the subsequence were shorter
            i -= 1
        else:
            j -= 1
    return words


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of their longest common subsequence; of two strings, in characters."""
    return _rows(one, other)[-1].bit_count()


def _rows(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """The table of the longest common subsequence, a row after each item of `one`, and one before all.

    A row never falls, and never grows by more than one from an item of `other` to the next: it is kept as a number
    whose bit j says that it grows at item j. One addition of such numbers makes a row from the one before (Hyyro 2004,
    "Bit-parallel LCS-length computation revisited").
    """
    full = (1 << len(other)) - 1
    places: dict[str, int] = {}
    for j, item in enumerate(other):
        places[item] = places.get(item, 0) | 1 << j
    level, rows = full, [0]
    for item in one:
        met = level & places.get(item, 0)
        level = ((level + met) | (level - met)) & full
        rows.append(full & ~level)
    return rows
