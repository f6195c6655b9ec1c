"""Needles: an answer is the value of its fact at any length; training and validation share no window."""

import numpy as np
import pytest

from pe_lab.data.needles import NeedleOptions, NeedleWindows, needle_vocab
from pe_lab.errors import UserError

OFFSET = 1000
OPTIONS = {"pairs": 4, "queries": 4, "keys": 64, "values": 64}


def facts_and_queries(window, needles):
    """The facts {key: (value, its position)} and queries [(key, answer, its position)] of a window."""
    facts, queries, i = {}, [], 0
    while i < len(window):
        if window[i] == needles.mark and needles.options.facts == "symbol":
            key, value = divmod(window[i + 1] - needles.first_fact, needles.options.values)
            assert needles.first_key + key not in facts
            facts[needles.first_key + key] = (needles.first_value + value, i + 1)
            i += 2
        elif window[i] == needles.mark:
            assert window[i + 1] not in facts  # the keys of a window differ
            facts[window[i + 1]] = (window[i + 2], i + 2)
            i += 3
        elif window[i] == needles.ask:
            queries.append((window[i + 1], window[i + 2], i + 2))
            i += 3
        else:
            assert needles.first_filler <= window[i] < needles.first_filler + needles.options.filler_symbols
            i += 1
    return facts, queries


@pytest.mark.parametrize("queries_at", ["end", "anywhere"])
@pytest.mark.parametrize(
    ("options", "length"),
    [
        (OPTIONS, 64),
        (OPTIONS, 512),
        (OPTIONS, 23),
        ({"pairs": 3, "queries": 7, "keys": 3, "values": 2}, 100),
        ({"pairs": 8, "queries": 4, "keys": 16, "values": 15, "facts": "symbol"}, 64),
    ],
)
def test_answers_are_the_values_of_their_facts(options, length, queries_at):
    needles = NeedleWindows({**options, "queries_at": queries_at}, length, 0, "train", OFFSET)
    batch = needles.batch(np.arange(40))
    for i in range(40):
        (window,) = needles.read(np.array([i])).tokens
        assert len(window) == length + 1
        facts, queries = facts_and_queries(window, needles)
        assert len(facts) == options["pairs"] and len(queries) == options["queries"]
        distance = np.zeros(length, int)
        for key, answer, place in queries:
            value, fact_place = facts[key]
            assert answer == value
            assert place > fact_place
            distance[place - 1] = place - fact_place
        np.testing.assert_array_equal(batch["tokens"][i], window[:-1])
        np.testing.assert_array_equal(batch["targets"][i], window[1:])
        np.testing.assert_array_equal(batch["distance"][i], distance)
        np.testing.assert_array_equal(batch["answers"][i], distance > 0)
        assert all(needles.first_key <= k < needles.first_key + options["keys"] for k in facts)
        assert all(needles.first_value <= v < needles.first_value + options["values"] for v, _ in facts.values())


def test_queries_at_the_end_ask_for_every_fact_in_random_order():
    needles = NeedleWindows(OPTIONS, 64, 0, "train", OFFSET)
    orders = set()
    for window in needles.read(np.arange(50))[0]:
        facts, queries = facts_and_queries(window, needles)
        assert [place for _, _, place in queries] == [55, 58, 61, 64]
        assert {key for key, _, _ in queries} == set(facts)
        orders.add(tuple(list(facts).index(key) for key, _, _ in queries))
    assert len(orders) > 10


def test_a_window_does_not_depend_on_its_neighbours():
    needles = NeedleWindows(OPTIONS, 64, 0, "train", OFFSET)
    together = needles.batch(np.array([5, 10**9, 3]))
    for row, index in enumerate([5, 10**9, 3]):
        for name, array in needles.batch(np.array([index])).items():
            np.testing.assert_array_equal(array[0], together[name][row], err_msg=name)
    windows, weights, *_ = needles.read(np.array([3]))
    np.testing.assert_array_equal(windows[0, :-1], together["tokens"][2])
    np.testing.assert_array_equal(weights[0], needles.read(np.array([5, 10**9, 3]))[1][2])


def test_training_and_validation_share_no_window():
    def seen(seed, split):
        needles = NeedleWindows(OPTIONS, 32, seed, split, OFFSET)
        return {row.tobytes() for row in needles.read(np.arange(4000))[0]}

    train, validation, other = seen(0, "train"), seen(0, "validation"), seen(1, "train")
    assert len(train) == len(validation) == len(other) == 4000
    assert not train & validation and not train & other and not validation & other


def test_the_filler_is_one_sparse_chain_for_all_seeds():
    following: dict[int, set[int]] = {}
    for seed, split in ((0, "train"), (7, "validation")):
        needles = NeedleWindows({**OPTIONS, "branches": 3, "filler_symbols": 20}, 2048, seed, split, 0)
        for window in needles.read(np.arange(8))[0]:
            filler = window[window >= needles.first_filler]
            inside = np.arange(1, len(filler)) % 32 != 0  # the chain starts anew every 32 tokens
            for before, after in zip(filler[:-1][inside], filler[1:][inside], strict=True):
                following.setdefault(int(before), set()).add(int(after))
    assert len(following) == 20
    assert all(len(symbols) == 3 for symbols in following.values())


def test_weights_and_vocabulary():
    options = NeedleOptions.from_mapping({**OPTIONS, "answer_weight": 5, "filler_weight": 0.25})
    needles = NeedleWindows(options, 64, 0, "train", OFFSET)
    weights, batch = needles.read(np.arange(100)).weights, needles.batch(np.arange(100))
    np.testing.assert_array_equal(weights, np.where(batch["answers"], 5.0, 0.25))
    assert weights.dtype == np.float32 and batch["tokens"].dtype == np.int32
    assert needle_vocab(options) == 2 + 64 + 64 + 64
    assert batch["tokens"].min() >= OFFSET and batch["targets"].max() < OFFSET + needle_vocab(options)
    used = np.unique(batch["tokens"])
    assert len(used) == needle_vocab(options)  # every symbol occurs


def test_every_symbol_of_a_key_and_value_occurs():
    options = NeedleOptions(pairs=4, queries=2, keys=5, values=3, filler_symbols=4, facts="symbol")
    needles = NeedleWindows(options, 32, 0, "train", OFFSET)
    assert needle_vocab(options) == 2 + 5 + 3 + 4 + 15
    batch = needles.batch(np.arange(500))
    assert set(np.unique(batch["tokens"])) == set(range(OFFSET, OFFSET + needle_vocab(options)))


def test_facts_are_spread_over_the_window():
    needles = NeedleWindows(OPTIONS, 512, 0, "train", OFFSET)
    batch = needles.batch(np.arange(500))
    distances = batch["distance"][batch["answers"]]
    counts, _ = np.histogram(distances, bins=5, range=(0, 512))
    assert counts.min() > 0.7 * counts.mean()
    values = batch["targets"][batch["answers"]] - needles.first_value
    assert np.bincount(values, minlength=64).min() > 5


@pytest.mark.parametrize(
    ("options", "length", "says"),
    [
        ({"pairz": 3}, 64, "Did you mean 'pairs'"),
        ({"pairs": 0}, 64, "pairs is 0; it must be positive"),
        ({"queries": 1.5}, 64, "queries is 1.5"),
        ({"pairs": 70}, 640, "pairs=70 is more than keys=64"),
        ({"branches": 65}, 64, "branches=65"),
        ({"answer_weight": -1.0}, 64, "answer_weight is -1.0; it must be at least 0"),
        ({"filler_weight": float("nan")}, 64, "filler_weight is nan"),
        ({"queries_at": "start"}, 64, "queries_at is 'start'"),
        (OPTIONS, 22, "sequence_length=22 is too short .* they need 23"),
    ],
)
def test_bad_options(options, length, says):
    with pytest.raises(UserError, match=says):
        NeedleWindows(options, length, 0, "train", OFFSET)
