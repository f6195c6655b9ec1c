"""The global order: Grain's shuffle, exact mixtures whose weights change, and positions to go on from."""

import grain.experimental
import numpy as np
import pytest

from pe_lab.data.order import Order, shuffled

STAGES = [(0, (0.7, 0.3, 0.0)), (9, (0.2, 0.3, 0.5)), (9 + 13, (0.0, 1.0, 0.0)), (40, (1.0, 1.0, 1.0))]
SIZES, SEEDS = (101, 37, 0), (5, 6, 7)


@pytest.mark.parametrize("count", [1, 2, 100, 65_535, 65_536, 65_538, 100_000, 2**18, 2**20 + 2, 2**33 + 5])
@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_shuffle_is_that_of_grain(count, seed):
    indices = np.unique(np.append(np.random.default_rng(0).integers(0, count, 50), [0, count - 1]))
    expected = [grain.experimental.index_shuffle(int(i), count - 1, seed, 4) for i in indices]
    np.testing.assert_array_equal(shuffled(indices, count, seed), expected)


@pytest.mark.parametrize("count", [2**16 + 1, 2**18 + 1, 70_000, 5])
def test_the_shuffle_is_a_permutation(count):
    """Also of 2^16 + 1 and 2^18 + 1 indices, of which Grain gives two the same place."""
    np.testing.assert_array_equal(np.sort(shuffled(np.arange(count), count, 3)), np.arange(count))


def test_each_stage_has_its_weights_and_each_epoch_every_window_once():
    order = Order(SIZES, SEEDS, STAGES, batch_size=10)
    sources, windows = order.addresses(0, 1000)
    edges = [0, 90, 220, 400, 1000]
    for start, stop, (_, weights) in zip(edges, edges[1:], STAGES, strict=False):
        share = np.asarray(weights) / sum(weights)
        counts = np.cumsum(sources[start:stop, None] == np.arange(3), axis=0)
        assert np.abs(counts - share * np.arange(1, stop - start + 1)[:, None]).max() <= 1
    for source, size in enumerate(SIZES):
        mine = windows[sources == source]
        for epoch in range(0, len(mine), size or len(mine)):
            part = mine[epoch : epoch + (size or len(mine))]
            assert len(set(part.tolist())) == len(part)
    for at in (0, 1, 89, 90, 91, 399, 777):
        np.testing.assert_array_equal(order.counts(at), np.bincount(sources[:at], minlength=3))
    np.testing.assert_array_equal(order.addresses(13, 500), [sources[13:500], windows[13:500]])


@pytest.mark.parametrize("batch", [0, 1, 9, 15, 22, 30, 41, 77])
def test_a_position_goes_on_with_the_same_order(batch):
    order = Order(SIZES, SEEDS, STAGES, batch_size=10)
    again = Order(SIZES, SEEDS, STAGES, 10).after(order.position(batch))
    for start, stop in ((batch * 10, batch * 10 + 333), (900, 950)):
        np.testing.assert_array_equal(again.addresses(start, stop), order.addresses(start, stop))
    assert again.position(80) == order.position(80)


def test_any_position_is_computed_from_the_weights_alone():
    order = Order((10**9 + 7, 2**31), SEEDS[:2], [(0, (0.75, 0.25)), (10**8, (1e-4, 1.0))], batch_size=1000)
    start = 10**11 + 10**9
    sources, windows = order.addresses(start, start + 100)
    rare = 10**9 // 10_001
    np.testing.assert_array_equal(order.counts(start), [75 * 10**9 + rare, 25 * 10**9 + 10**9 - rare])
    assert (windows < np.asarray(order.windows)[sources]).all()
