"""Mixtures: weights by phase and step, epochs, dry sources, tokens that are counted; each window of an epoch once."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from corpora import numbered

from pe_lab.config import Config, DataConfig, SourceConfig, from_dict
from pe_lab.data.held_out import validation_batches
from pe_lab.data.mixture import open_mixture
from pe_lab.data.pipeline import build_pipeline
from pe_lab.errors import UserError

LENGTH = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    return DataConfig(
        sources=(
            SourceConfig(numbered(directory / "a.jsonl", 70, 0, words=9), weight=0.6, name="a"),
            SourceConfig(numbered(directory / "b.jsonl", 30, 1, words=9), weight=0.3, name="b"),
            SourceConfig("needles", weight=0.1, options={"pairs": 1, "queries": 1}),
        ),
        cache_dir=str(directory / "cache"),
        validation_fraction=0.1,
    )


def build(config, batch_size=12, **settings):
    return build_pipeline(config, **{"sequence_length": LENGTH, "batch_size": batch_size, "seed": 0, **settings})


def windows_of(pipeline):
    """The number of windows of each source."""
    return {row["name"]: row["windows"] for row in pipeline.describe(1)}


class Readers:
    """What some processes read together until they are killed, in the order of the sequences."""

    def __init__(self, config, state, count, **settings):
        self.config = config
        self.pipelines = [build(config, process_index=i, process_count=count, **settings) for i in range(count)]
        for pipeline in self.pipelines:
            if state is not None:
                pipeline.set_state(json.loads(json.dumps(state)))

    def read(self, batches):
        """(source, window) of each sequence, found by its tokens, and the state."""
        sources = open_mixture(self.config).sources
        names = {}
        for source in sources:
            windows = source.windows(LENGTH, 0, "train")
            for i, row in enumerate(windows.read(np.arange(min(len(windows), 100)))[0]):
                assert names.setdefault(row[:-1].astype(np.int32).tobytes(), (source.name, i)) == (source.name, i)
        parts = zip(*(itertools.islice(pipeline, batches) for pipeline in self.pipelines), strict=True)
        whole = [names[row.tobytes()] for each in parts for part in each for row in part["tokens"]]
        states = [pipeline.get_state() for pipeline in self.pipelines]
        assert all(state == states[0] for state in states)
        return whole, json.loads(json.dumps(states[0]))

    def kill(self):
        for pipeline in self.pipelines:
            pipeline.close()


def assert_each_window_once_an_epoch(read, sizes):
    for name, size in sizes.items():
        windows = [window for source, window in read if source == name]
        for start in range(0, len(windows), size or len(windows)):
            epoch = Counter(windows[start : start + (size or len(windows))])
            assert set(epoch.values()) <= {1}, name
            assert size is None or len(epoch) == size or start + size > len(windows), name


SCHEDULE = {"a": [[0, 1], [7, 0], [15, 0.5]], "b": [[0, 0.5], [11, 2]]}


@pytest.mark.parametrize("packing", [pytest.param("concatenate", marks=pytest.mark.slow), "best_fit"])
def test_over_kills_and_other_numbers_of_processes_every_window_is_read_once(config, packing):
    config = replace(config, packing=packing, segments=packing == "best_fit")
    alone = Readers(config, None, 1, weights=SCHEDULE)
    sizes = windows_of(alone.pipelines[0])
    expected, _ = alone.read(24)
    read, state = [], None
    for count, batches, lost in ((1, 6, 2), (3, 7, 1), (2, 11, 3)):
        session = Readers(config, state, count, weights=SCHEDULE)
        part, state = session.read(batches)
        read += part
        session.read(lost)  # after the checkpoint, before the kill
        session.kill()
    assert read == expected
    assert_each_window_once_an_epoch(read, sizes)
    assert len(read) > sizes["a"] and len([1 for source, _ in read if source == "b"]) > sizes["b"]
    alone.kill()


def test_each_source_goes_on_with_other_weights_and_batch_sizes(config):
    read, state = [], None
    for settings, count, batches in (
        ({}, 1, 5),
        ({"batch_size": 6}, 3, 9),
        ({"batch_size": 6, "weights": {"b": 0, "needles": 0}}, 2, 8),
        ({"batch_size": 20, "weights": {"a": [[0, 5], [26, 1]]}}, 1, 12),
        ({"batch_size": 20, "weights": {"a": [[0, 5], [26, 1]]}}, 2, 12),
    ):
        session = Readers(config, state, count, **settings)
        sizes = windows_of(session.pipelines[0])
        part, state = session.read(batches)
        assert len(part) == batches * settings.get("batch_size", 12)
        if "b" in settings.get("weights", {}):
            assert {source for source, _ in part} == {"a"}
        read += part
        session.kill()
    assert state["sequences"] == len(read) == 5 * 12 + 17 * 6 + 24 * 20 and state["batches"] == 46
    assert_each_window_once_an_epoch(read, sizes)
    needles = [window for source, window in read if source == "needles"]
    assert needles == list(range(len(needles)))
    counted = {source["name"]: source["sequences"] for source in state["sources"]}
    assert counted == Counter(source for source, _ in read)


def test_batches_to_be_left_out_are_left_out_with_another_batch_size(config):
    pipeline = build(config)
    list(itertools.islice(pipeline, 4))
    pipeline.leave_out([6])  # sequences 72 to 83
    other = build(config, batch_size=8)
    other.set_state(json.loads(json.dumps(pipeline.get_state())))
    assert other.get_state()["left_out"] == [7, 8]
    read = np.concatenate([next(other)["tokens"] for _ in range(3)])
    whole = build(config)
    expected = np.concatenate([next(whole)["tokens"] for _ in range(8)])
    np.testing.assert_array_equal(read, expected[48:72])
    np.testing.assert_array_equal(next(other)["tokens"], expected[88:96])
    for one in (pipeline, other, whole):
        one.close()


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_tokens_are_counted_by_source(config, packing):
    config = replace(config, packing=packing, segments=packing == "best_fit")
    pipeline, processes = build(config, weights=SCHEDULE), []
    padding = 0
    for n in range(20):
        if n == 5:
            pipeline.leave_out([8])
        batch = next(pipeline)
        if packing == "best_fit":  # padding has a segment of its own, the last, and no weight
            last = batch["segments"] == batch["segments"].max(axis=1, keepdims=True)
            padding += int((last & (batch["weights"].sum(axis=1, keepdims=True, where=last) == 0)).sum())
    found = pipeline.tokens_read()
    read = {name: found[f"read_tokens/{name}"] for name in ("a", "b", "needles")}
    assert abs(sum(read.values()) + padding - 20 * 12 * LENGTH) <= (0 if packing == "concatenate" else 20 * 12)
    for name, tokens in read.items():
        assert tokens == pytest.approx(found[f"expected_tokens/{name}"], rel=0.06), name
    processes = [build(config, weights=SCHEDULE, process_index=i, process_count=2) for i in range(2)]
    for process in processes:
        process.leave_out([8])
        list(itertools.islice(process, 20))
        assert process.tokens_read() == found
    for one in (pipeline, *processes):
        one.close()


def test_packed_batches_keep_documents_apart_and_whole(config):
    config = replace(config, packing="best_fit", segments=True, sources=config.sources[:1])
    pipeline = build(config)
    (row,) = pipeline.describe(1)
    assert row["packing_efficiency"] > 0.9
    source = open_mixture(config).sources[0].prepared
    stream = source.streams["train"]
    lengths = np.diff(stream.ends, prepend=0)
    eos = source.tokenizer.eos_id
    counted = 0.0
    for batch in itertools.islice(pipeline, row["windows"] // 12):
        tokens, targets, weights, segments, positions = (
            batch[k] for k in ("tokens", "targets", "weights", "segments", "positions")
        )
        counted += weights.sum()
        # A position is 0 where a segment begins, and counts from there.
        first = np.concatenate([np.ones((12, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        assert (positions[first] == 0).all() and (np.diff(positions)[~first[:, 1:]] == 1).all()
        # What counts as a target is the next token of the same document: none follows EOS.
        assert not weights[tokens == eos].any()
        assert (segments[:, 1:][weights[:, :-1] > 0] == segments[:, :-1][weights[:, :-1] > 0]).all()
        assert (targets[:, :-1] == tokens[:, 1:]).all()
    assert counted <= (lengths - 1).sum()
    assert counted >= (lengths - 1).sum() * (row["windows"] // 12 * 12 - 1) / row["windows"] * 0.9
    held_out = validation_batches(config, sequence_length=LENGTH, batch_size=4, count=10**6)["a"]
    expected = np.diff(source.streams["validation"].ends, prepend=0) - 1
    assert sum(batch["weights"].sum() for batch in held_out) == expected.sum()
    pipeline.close()


def test_epochs_become_steps_and_end_before_any_source_repeats(config):
    pipeline = build(config)
    sizes = windows_of(pipeline)
    for epochs, name in ((1, None), (2.5, None), ({"a": 1}, "a"), ({"b": 3}, "b")):
        steps = pipeline.steps_of(epochs)
        counts = {}
        for done in (steps, steps + 1):
            order = pipeline._steps.order.counts(done * 12)
            counts[done] = dict(zip("ab", order, strict=False))
        number = epochs if name is None else epochs[name]
        names = "ab" if name is None else name
        assert all(counts[steps][n] <= number * sizes[n] for n in names)
        assert any(counts[steps + 1][n] > number * sizes[n] for n in names)
    pipeline.close()


def test_a_dry_source_is_found_before_training_and_repeats_are_told(config):
    sources = (config.sources[0], replace(config.sources[1], epochs=2), config.sources[2])
    pipeline = build(replace(config, sources=sources))
    size = windows_of(pipeline)["b"]
    dry = -(-(2 * size + 1) * 10 // (3 * 12))  # 3 of 10 sequences
    with pytest.raises(UserError, match=rf"'b' runs dry at step (\d+) of 500: epochs=2 of its {size} windows") as found:
        pipeline.check_supply(500)
    step = int(str(found.value).partition("step ")[2].split()[0])
    assert abs(step - dry) <= 1
    pipeline.check_supply(step - 1)
    told = []
    for n in range(1, step):
        next(pipeline)
        told += [(n, *repeat) for repeat in pipeline.new_repeats()]
    assert [repeat[1:] for repeat in told if repeat[1] == "b"] == [("b", 2)]
    with pytest.raises(UserError, match=f"'b' runs dry at step {step}:"):
        next(pipeline)
    with pytest.raises(UserError, match=f"'b' runs dry at step {step}:"):
        next(pipeline)
    repeats = build(replace(config, sources=(sources[0], replace(sources[1], when_dry="repeat"), sources[2])))
    repeats.check_supply(10**6)
    list(itertools.islice(repeats, step + 5))
    assert ("b", 3) in repeats.new_repeats() and repeats.new_repeats() == []
    for one in (pipeline, repeats):
        one.close()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"aa": 1}, "the data source 'aa', which there is not. Did you mean 'a'"),
        ({"a": -1}, "'a' has weight -1"),
        ({"a": "much"}, "'a' has weight 'much'; it must be a number"),
        ({"a": float("nan")}, "it must be a number"),
        ({"a": [[0, 1, 2]]}, r"or \[\[first step, weight\], ...\]"),
        ({"a": [[1, 1]]}, r"from steps \[1\] on; they must ascend from 0"),
        ({"a": [[0, 1], [5, 2], [5, 3]]}, "must ascend from 0"),
        ({"a": 0, "b": 0, "needles": 0}, r"All data sources \(a, b, needles\) have weight 0: give one"),
        ({"a": [[0, 1], [9, 0]], "b": 0, "needles": 0}, "have weight 0 from step 9 on"),
    ],
)
def test_weights_that_are_none(config, weights, message):
    with pytest.raises(UserError, match=message):
        build(config, weights=weights)


@pytest.mark.parametrize(
    ("epochs", "message"),
    [
        ({"c": 1}, "'c', which does not exist"),
        ({"needles": 1}, "'needles', which is endless"),
        ({"a": "one"}, "it must be above 0"),
        (1e-4, "less than a batch of 12 windows"),
    ],
)
def test_epochs_that_are_none(config, epochs, message):
    pipeline = build(config)
    with pytest.raises(UserError, match=message):
        pipeline.steps_of(epochs)
    with pytest.raises(UserError, match="never reached"):
        build(config, weights={"a": 0}).steps_of({"a": 1})


def test_other_bad_input(config):
    with pytest.raises(UserError, match="data.packing='best_fit' .* set data.segments=True"):
        build(replace(config, packing="best_fit"))
    with pytest.raises(UserError, match="Two data sources have the name 'a'"):
        build(replace(config, sources=(config.sources[0], replace(config.sources[1], name="a"))))
    with pytest.raises(UserError, match="phases.0..epochs is -1"):
        from_dict(Config, {"phases": [{"epochs": -1}]})
    with pytest.raises(UserError, match="when_dry is 'stop'. Allowed: error, repeat"):
        from_dict(Config, {"data": {"sources": [{"when_dry": "stop"}]}})
