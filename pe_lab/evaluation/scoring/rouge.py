"""ROUGE-L by the rules of the PyPI package `rouge` 1.0.1, as in LongBench, and the longest common subsequence."""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(output: str, reference: str) -> float:
    """F of ROUGE-L over whole texts, 0..1, without a change of case or words.

    Only full stops end sentences. The shared words are the set of all words of the longest common subsequences of each
    sentence of the reference with each of the output. Their number, divided by the number of different words of the
    output and of the reference, is precision and recall. F is 2pr / (p + r + 1e-8), so that equal texts score 1 - 5e-9.
    The package follows Lin (2004, "ROUGE", section 3.2), with sets in place of counts.

    An output or a reference without a sentence (empty, or full stops alone) scores 0: the package raises, and LongBench
    catches that. LongBench also catches the package's RecursionError for two sentences of about 1,000 words together,
    and so gives 0 to a summary without full stops; here such sentences are scored like others.
    """
    given, wanted = _sentences(output), _sentences(reference)
    if not given or not wanted:
        return 0.0
    shared: set[str] = set()
    for sentence in wanted:
        for other in given:
            shared |= common_words(sentence, other)
    precision = len(shared) / len({word for sentence in given for word in sentence})
    recall = len(shared) / len({word for sentence in wanted for word in sentence})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. A blank, non-empty sentence has one empty word."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def common_words(reference: Sequence[str], output: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence: of several the one that `rouge` finds.

    That is, of two equally long ones the one without the last word of the output, not of the reference.
    """
    if set(reference).isdisjoint(output):
        return set()
    table = _lcs_table(reference, output)
    words: set[str] = set()
    i, j = len(reference), len(output)
    while i and j:
        if reference[i - 1] == output[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif table[i] >> (j - 1) & 1:  # without the output's last word the subsequence would be shorter
            i -= 1
        else:
            j -= 1
    return words


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence; of two strings, in characters."""
    return _lcs_table(one, other)[-1].bit_count()


def _lcs_table(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """The table of the lengths of common subsequences: a row before the first item of `one`, and one after each.

    Along a row, the length grows by 0 or 1 from an item of `other` to the next. A row is stored as an integer whose bit
    j is 1 if it grows at item j, and follows from the previous row by one addition (Hyyro 2004, "Bit-parallel
    LCS-length computation revisited").
    """
    full = (1 << len(other)) - 1
    places: dict[str, int] = {}
    for j, item in enumerate(other):
        places[item] = places.get(item, 0) | 1 << j
    level, rows = full, [0]
    for item in one:
        matches = level & places.get(item, 0)
        level = ((level + matches) | (level - matches)) & full
        rows.append(full & ~level)
    return rows
