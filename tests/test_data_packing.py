"""Best-fit packing: as one by one, every document once, none cut that fits; masks that keep documents apart."""

import numpy as np
import pytest

from pe_lab.data.packing import pack


def one_by_one(sizes, window):
    """The spaces left by best-fit decreasing."""
    spaces = []
    for size in sorted(sizes, reverse=True):
        fitting = [(space, i) for i, space in enumerate(spaces) if space >= size]
        if fitting:
            spaces[min(fitting)[1]] -= size
        else:
            spaces.append(window - size)
    return spaces


def lengths_of(trial):
    rng = np.random.default_rng(trial)
    length, count = int(rng.integers(1, 40)), int(rng.integers(0, 60))
    longest = int(rng.integers(2, 3 * length + 3))
    uniform = rng.integers(1, longest, count)
    return length, uniform if trial % 2 else np.minimum(rng.geometric(0.2, count), 5 * length)


def test_the_windows_are_those_of_best_fit_decreasing():
    for trial in range(60):
        length, lengths = lengths_of(trial)
        plan = pack(np.cumsum(lengths, dtype=np.int64), length, trial)
        pieces, full = [n for n in lengths if n <= length + 1], 0
        for n in lengths[lengths > length + 1]:
            full += (n - 1) // length
            pieces += [(n - 1) % length + 1] * int((n - 1) % length > 0)
        left = plan.window - plan.used(np.arange(len(plan)))
        assert sorted(left) == sorted(one_by_one(pieces, length + 1) + [0] * full)
        assert plan.tokens == plan.used(np.arange(len(plan))).sum()


def test_every_target_is_in_one_window_and_no_document_is_cut_that_fits():
    for trial in range(30):
        length, lengths = lengths_of(trial)
        ends = np.cumsum(lengths, dtype=np.int64)
        plan = pack(ends, length, trial)
        which, documents, starts, sizes = plan.pieces(np.arange(len(plan)), ends)
        seen = np.zeros(int(lengths.sum()), int)
        for start, size in zip(starts, sizes, strict=True):
            seen[start + 1 : start + size] += 1
        seen[(ends - lengths)] += 1  # the first token of a document is no target
        assert (seen == 1).all()
        for document in np.flatnonzero(lengths <= length + 1):
            assert sizes[documents == document].tolist() == [lengths[document]]
        chosen = np.random.default_rng(trial).permutation(len(plan))[:5]
        again = plan.pieces(chosen, ends)
        for k, window in enumerate(chosen):
            np.testing.assert_array_equal(again[2][again[0] == k], starts[which == window])


def test_the_seed_chooses_among_documents_of_one_length():
    ends = np.arange(1, 1001) * 7
    one, same, other = (pack(ends, 20, seed).pieces(np.arange(334), ends)[1].tolist() for seed in (0, 0, 1))
    assert one == same != other
    assert sorted(one) == sorted(other) == list(range(1000))


def test_no_documents_and_one():
    assert len(pack(np.zeros(0, np.int64), 8, 0)) == 0
    plan = pack(np.asarray([9]), 8, 0)
    assert len(plan) == 1 and plan.efficiency == 1.0


@pytest.mark.slow
def test_ten_million_documents():
    """About 5 s: counts are filled, not documents."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.2, 10**7).astype(np.int64))
    ends = np.cumsum(lengths)
    plan = pack(ends, 2048, 0)
    assert plan.efficiency > 0.999 and plan.documents.nbytes <= 4 * 10**7
    which, _, _, sizes = plan.pieces(np.random.default_rng(1).integers(0, len(plan), 10_000), ends)
    assert np.bincount(which, weights=sizes).max() <= 2049
