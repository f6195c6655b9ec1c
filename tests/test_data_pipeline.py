"""The pipeline: one order for any number of processes, exact resumption, and weights."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from corpora import COLOURS, numbered

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.held_out import validation_batches
from pe_lab.data.mixture import open_mixture
from pe_lab.data.order import mixing_counts, mixing_order
from pe_lab.data.pipeline import build_pipeline
from pe_lab.data.windows import TokenWindows
from pe_lab.errors import UserError

LENGTH, BATCH = 32, 8


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    return DataConfig(
        sources=(
            SourceConfig(numbered(directory / "a.jsonl", 400), weight=0.5),
            SourceConfig("needles", weight=0.3, options={"pairs": 2, "queries": 2}),
            SourceConfig(numbered(directory / "b.jsonl", 150, seed=1), weight=0.2),
        ),
        tokenizer="sentencepiece:train:300",
        cache_dir=str(directory / "cache"),
        validation_fraction=0.1,
    )


def build(config, **settings):
    return build_pipeline(config, **{"sequence_length": LENGTH, "batch_size": BATCH, "seed": 0, **settings})


def take(pipeline, count):
    return list(itertools.islice(pipeline, count))


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)


def test_the_arrays_of_a_batch(config):
    pipeline = build(config)
    batch = next(pipeline)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "tokens": ((BATCH, LENGTH), "int32"),
        "targets": ((BATCH, LENGTH), "int32"),
        "weights": ((BATCH, LENGTH), "float32"),
    }
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert pipeline.vocab_size == 300 + 2 + 64 + 64 + 64
    mixture = pipeline.describe(10)
    tokens = [row["tokens"] for row in mixture]
    assert tokens[1] is None and tokens[0] > tokens[2] > 1000
    assert [row["weight"] for row in mixture] == [0.5, 0.3, 0.2]
    json.dumps(mixture)
    pipeline.close()


@pytest.mark.parametrize(("done", "segments"), [(0, False), (1, False), (7, True), (150, False)])
def test_resuming_gives_the_batches_of_an_uninterrupted_run(config, done, segments):
    """After 150 batches of 8 sequences several epochs of the small source have been read."""
    config = replace(config, segments=segments)
    undisturbed = build(config)
    first, rest = take(undisturbed, done), take(undisturbed, 10)
    stopped = build(config)
    assert_same(take(stopped, done), first)
    state = json.loads(json.dumps(stopped.get_state()))
    stopped.close()
    resumed = build(config)
    take(resumed, 3)
    resumed.set_state(state)
    assert_same(take(resumed, 10), rest)
    assert resumed.get_state()["batches"] == done + 10
    for pipeline in (undisturbed, resumed):
        pipeline.close()


@pytest.mark.parametrize("count", [2, 4])
def test_the_global_batch_does_not_depend_on_the_processes(config, count):
    whole = build(config)
    batches = take(whole, 12)
    state = whole.get_state()
    after = take(whole, 3)
    parts = [build(config, process_index=p, process_count=count) for p in range(count)]
    together = zip(*(take(part, 12) for part in parts), strict=True)
    assert_same([{k: np.concatenate([r[k] for r in rows]) for k in rows[0]} for rows in together], batches)
    for part in parts:  # saved by one process, resumed by several
        part.set_state(state)
    together = zip(*(take(part, 3) for part in parts), strict=True)
    assert_same([{k: np.concatenate([r[k] for r in rows]) for k in rows[0]} for rows in together], after)
    assert all(part.get_state() == whole.get_state() for part in parts)
    for pipeline in (whole, *parts):
        pipeline.close()


def test_more_threads_give_the_same_batches(config):
    alone, workers = build(config), build(replace(config, workers=2))
    take(alone, 3)
    workers.set_state(alone.get_state())
    assert_same(take(workers, 6), take(alone, 6))
    assert workers.get_state() == alone.get_state()
    workers.close()
    alone.close()


def test_the_mixture_has_its_weights(config):
    pipeline = build(config)
    first_needle = pipeline.tokenizer.vocab_size
    needles = sum(int((batch["tokens"][:, 0] >= first_needle).sum()) for batch in take(pipeline, 50))
    assert needles == 0.3 * 50 * BATCH
    pipeline.close()


@pytest.mark.parametrize(
    ("weights", "period"),
    [
        ((1.0,), [1]),
        ((0.7, 0.3), [7, 3]),
        ((2.0, 1.0, 1.0), [2, 1, 1]),
        ((1 / 3, 2 / 3), [1, 2]),
        ((5e-5, 1.0), [1, 20_000]),
        ((6e-5, 1e-4), [3, 5]),
        ((2e-9, 0.0, 6e-9, 1e-9), [2, 0, 6, 1]),
        ((3e-300, 7e-300), [3, 7]),
        ((0.12345, 0.54321, 1.0), [12_345, 54_321, 100_000]),
        ((1e-6, 1.0), [1, 1_000_000]),
    ],
)
def test_the_mixing_order_is_exact_and_even(weights, period):
    """The order of Fractions of the decimal numbers, whatever their size; any element follows from its number."""
    number = sum(period)
    order, index = mixing_order(weights, 0, number)
    assert [int((order == i).sum()) for i in range(len(weights))] == period
    for i, share in enumerate(period):  # up to any element, each source is within one of its share
        np.testing.assert_array_equal(index[order == i], np.arange(share))
        counts = np.cumsum(order == i)
        assert np.abs(counts - share / sum(period) * np.arange(1, len(order) + 1)).max() <= 1
    np.testing.assert_array_equal(mixing_counts(weights, 10**9 * number), 10**9 * np.asarray(period))
    middle = (number // 3, min(number // 3 + 40, number))
    np.testing.assert_array_equal(mixing_order(weights, *middle), (order[slice(*middle)], index[slice(*middle)]))
    if number < 100:
        places = sorted((Fraction(2 * j + 1, 2 * s), i) for i, s in enumerate(period) for j in range(s))
        assert order.tolist() == [i for _, i in places]


@pytest.mark.parametrize("seed", range(3))
def test_the_mixing_order_is_exact_for_any_weights(seed):
    rng = np.random.default_rng(seed)
    weights = tuple((10.0 ** rng.uniform(-9, 0, 40)).tolist())
    number = 10**11
    counts = mixing_counts(weights, number)
    assert counts.sum() == number
    np.testing.assert_allclose(counts, number * np.asarray(weights) / sum(weights), atol=1)
    sources, index = mixing_order(weights, number, number + 5_000)
    after = mixing_counts(weights, number + 5_000)
    np.testing.assert_array_equal(np.bincount(sources, minlength=40), after - counts)
    assert all((np.diff(index[sources == i]) == 1).all() for i in range(40))


def test_small_weights_are_read_and_logged_by_their_ratio(config):
    """Weights of 6e-5 and 1e-4 are 3 : 5, and so are the expected tokens."""
    small = tuple(replace(config.sources[0], name=name, weight=w) for name, w in (("a", 6e-5), ("b", 1e-4)))
    pipeline = build(replace(config, sources=small))
    list(take(pipeline, 40))
    total = 40 * BATCH * LENGTH
    counted = pipeline.tokens_read()
    assert [counted[f"expected_tokens/{name}"] for name in "ab"] == [total * 3 / 8, total * 5 / 8]
    assert [counted[f"read_tokens/{name}"] for name in "ab"] == [total * 3 / 8, total * 5 / 8]
    pipeline.close()


def addresses(pipeline, windows, batches):
    """The windows of a source in the order of the batches, found by their tokens."""
    rows = windows.read(np.arange(len(windows))).tokens
    numbers = {row[:-1].astype(np.int32).tobytes(): i for i, row in enumerate(rows)}
    assert len(numbers) == len(windows)  # all different
    return [numbers[row.tobytes()] for batch in take(pipeline, batches) for row in batch["tokens"]]


def test_an_epoch_has_every_window_once_and_the_next_another_order(config):
    config = replace(config, sources=config.sources[2:])
    windows = TokenWindows(open_mixture(config).sources[0].prepared.streams["train"], LENGTH)
    pipeline = build(config, batch_size=1)
    came = addresses(pipeline, windows, 2 * len(windows))
    first, second = came[: len(windows)], came[len(windows) :]
    assert sorted(first) == sorted(second) == list(range(len(windows)))
    assert first != second and first != sorted(first)
    other = build(config, batch_size=1, seed=1)
    assert addresses(other, windows, len(windows)) != first
    again = build(config, batch_size=1)
    assert addresses(again, windows, len(windows)) == first
    for p in (pipeline, other, again):
        p.close()


def test_needles_with_another_vocabulary_have_their_own_symbols(config):
    def needles(**options):
        return SourceConfig("needles", options=options)

    config = replace(config, sources=(needles(), needles(pairs=2), needles(keys=8)), tokenizer="bytes")
    mixture = open_mixture(config)
    assert [s.offset_vocab for s in mixture.sources] == [257, 257, 257 + 194]
    assert mixture.vocab_size == 257 + 194 + 138
    assert [s.name for s in mixture.sources] == ["needles#1", "needles#2", "needles#3"]


@pytest.fixture
def prepared_directory(config, tmp_path):
    from pe_lab.prepare import main

    directory = tmp_path / "prepared"
    source = config.sources[0].source
    assert main([f"--source={source}", "--tokenizer=bytes", f"--out={directory}", "--validation-fraction=0.1"]) == 0
    return str(directory)


def test_prepared_data_replaces_the_text_and_the_tokenizer(config, prepared_directory):
    config = replace(config, sources=config.sources[:2], prepared=prepared_directory)
    pipeline = build(config)
    assert pipeline.tokenizer.kind == "bytes"
    assert [(m["source"].partition(":")[0], m["weight"]) for m in pipeline.describe(1)] == [
        ("prepared", 0.5),
        ("needles", 0.3),
    ]
    assert next(pipeline)["tokens"].shape == (BATCH, LENGTH)
    pipeline.close()
    alone = open_mixture(DataConfig(prepared=prepared_directory))  # sources are not given: stdlib is replaced
    assert [s.weight for s in alone.sources] == [1.0]
    needles_only = open_mixture(DataConfig(prepared=prepared_directory, sources=config.sources[1:2]))
    assert len(needles_only.sources) == 2


def test_prepared_sources_must_share_a_tokenizer(config, prepared_directory):
    text = config.sources[2]
    both = replace(config, sources=(SourceConfig(f"prepared:{prepared_directory}"), text))
    mixture = open_mixture(both)  # the text is prepared with the prepared source's tokenizer
    assert {s.prepared.tokenizer.kind for s in mixture.sources} == {"bytes"}
    other = open_mixture(replace(config, sources=(text,))).sources[0].prepared.directory
    wrong = replace(config, sources=(SourceConfig(f"prepared:{prepared_directory}"), SourceConfig(f"prepared:{other}")))
    with pytest.raises(UserError, match="Prepare all sources with one tokenizer"):
        open_mixture(wrong)
    with pytest.raises(UserError, match="data.prepared"):
        open_mixture(replace(config, prepared=prepared_directory))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"seed": 1}, "seed"),
        ({"sequence_length": 16}, "sequence_length"),
        ({"segments": True}, "segments"),
        ({"tokenizer": "bytes"}, "sources"),
        ({"options": {"pairs": 3, "queries": 2}}, "sources"),
    ],
)
def test_a_position_in_other_data_is_refused(config, change, differs):
    pipeline = build(config)
    settings = {k: v for k, v in change.items() if k in ("seed", "sequence_length", "batch_size")}
    data = {k: v for k, v in change.items() if k in ("segments", "tokenizer")}
    if "options" in change:
        data["sources"] = tuple(replace(s, **change) if s.source == "needles" else s for s in config.sources)
    other = build(replace(config, **data), **settings)
    with pytest.raises(UserError, match=f"{differs} was"):
        other.set_state(pipeline.get_state())


def test_bad_input(config, tmp_path):
    with pytest.raises(UserError, match="batch_size=8 does not divide into 3"):
        build(config, process_count=3)
    with pytest.raises(UserError, match="less than one window"):
        build(config, sequence_length=10**6)
    with pytest.raises(UserError, match="weight"):
        build(replace(config, sources=(SourceConfig("needles", weight=0.0),), tokenizer="bytes"))
    with pytest.raises(UserError, match="data.sources is empty"):
        build(replace(config, sources=()))
    with pytest.raises(UserError, match="no text to train on"):
        build(replace(config, sources=config.sources[1:2]))
    with pytest.raises(UserError, match="'nothing'"):
        validation_batches(config, sequence_length=LENGTH, batch_size=2, count=1, source="nothing")
    missing = (SourceConfig(numbered(tmp_path / "fine.jsonl", 9)), SourceConfig(f"text:{tmp_path}/missing/*"))
    with pytest.raises(UserError, match="missing"):
        build(replace(config, sources=missing, tokenizer="bytes", cache_dir=str(tmp_path / "cache")))
    assert not (tmp_path / "cache").exists()


def test_a_truncated_shard_is_named_before_anything_is_read(config, prepared_directory):
    from pathlib import Path

    shard = next(Path(prepared_directory).glob("train-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=shard.name):
        build(replace(config, sources=(), prepared=prepared_directory))


def test_a_shard_damaged_inside_is_named_when_it_is_read(config, prepared_directory):
    from pathlib import Path

    shard = next(Path(prepared_directory).glob("train-*"))
    content = shard.read_bytes()
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) * 400 + content[middle + 400 :])
    pipeline = build(replace(config, sources=(), prepared=prepared_directory))
    with pytest.raises(UserError, match=f"{shard.name} is damaged"):
        next(pipeline)
    pipeline.close()


@pytest.mark.parametrize("count", [1, 2])
def test_batches_that_are_left_out_are_passed_over_and_stay_so(config, count):
    whole = take(build(config), 12)
    processes = [build(config, process_index=i, process_count=count) for i in range(count)]
    for pipeline in processes:
        take(pipeline, 3)
        pipeline.leave_out([4])
        take(pipeline, 1)
        pipeline.leave_out([9, 5])
        assert [pipeline.batch_index(n) for n in range(8)] == [0, 1, 2, 3, 6, 7, 8, 10]
    read = [take(pipeline, 2) for pipeline in processes]
    resumed = build(config)
    resumed.set_state(json.loads(json.dumps(processes[0].get_state())))
    assert resumed.get_state()["left_out"] == [4, 5, 9]
    rest = take(resumed, 3)
    joined = [{name: np.concatenate([read[i][n][name] for i in range(count)]) for name in whole[0]} for n in range(2)]
    expected = [whole[n] for n in (6, 7, 8, 10, 11)]
    assert_same(joined, expected[:2])
    assert_same(rest, expected[2:])
    assert "left_out" not in build(config).get_state()


def test_the_sequences_of_a_batch_name_their_documents(config):
    pipeline, batch = build(config), 3
    tokens = take(build(config), batch + 1)[batch]["tokens"]
    found = list(pipeline.sequences(batch))
    np.testing.assert_array_equal([record["tokens"][:-1] for record in found], tokens)
    mixture = open_mixture(config)
    streams = {s.name: s.prepared.streams["train"] for s in mixture.sources if s.prepared is not None}
    assert {record["source"] for record in found} == {*streams, "needles"}
    for record in found:
        if record["source"] == "needles":
            assert "documents" not in record
            continue
        everything = streams[record["source"]].read(0, streams[record["source"]].tokens).tolist()
        first = record["first_token"]
        assert everything[first : first + LENGTH + 1] == record["tokens"]
        document, documents = 0, []
        for token in everything[: first + LENGTH]:
            documents.append(document)
            document += token == mixture.tokenizer.eos_id
        assert record["documents"] == [documents[first], documents[first + LENGTH - 1]]
        assert any(colour in record["text"] for colour in COLOURS)
