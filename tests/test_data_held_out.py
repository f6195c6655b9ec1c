"""Held-out data: never trained on, the same batches at every call, contiguous tokens, needles of any length."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from corpora import numbered

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.held_out import held_out_tokens, needle_windows, validation_batches
from pe_lab.data.mixture import open_mixture
from pe_lab.data.pipeline import build_pipeline
from pe_lab.errors import UserError

LENGTH = 32


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    sources = (
        SourceConfig(numbered(directory / "a.jsonl", 400)),
        SourceConfig("needles", options={"pairs": 2, "queries": 2}),
        SourceConfig(numbered(directory / "b.jsonl", 150, seed=1)),
    )
    return DataConfig(sources, cache_dir=str(directory / "cache"), validation_fraction=0.1)


def same(batches, others):
    jax.tree.map(np.testing.assert_array_equal, batches, others)


def test_validation_text_is_never_trained_on(config):
    config = replace(config, sources=config.sources[:1], segments=True)
    train = open_mixture(config).sources[0].prepared
    held_out = {d for d in train.tokenizer.decode(held_out_tokens(config, 0, 10**6)[:-1]).split(": ") if len(d) > 20}
    trained = train.tokenizer.decode(train.tokens("train", 0, 10**6))
    assert len(held_out) > 10
    assert not any(f": {d}" in trained for d in held_out)


def test_validation_batches_are_fixed_and_named(config):
    batches = validation_batches(config, sequence_length=LENGTH, batch_size=4, count=3)
    a, needles, b = (s.source for s in config.sources)
    assert {k: len(v) for k, v in batches.items()} == {a: 3, needles: 3, b: 3}
    again = validation_batches(config, sequence_length=LENGTH, batch_size=4, count=3, source=a)
    assert list(again) == [a]
    same(again[a], batches[a])
    for name in batches:
        halves = [
            validation_batches(config, sequence_length=LENGTH, batch_size=4, count=3, process_index=p, process_count=2)[
                name
            ]
            for p in range(2)
        ]
        joined = [{k: np.concatenate([x[k], y[k]]) for k in x} for x, y in zip(*halves, strict=True)]
        same(joined, batches[name])
    rows = np.concatenate([x["tokens"] for x in batches[a]])
    assert len({r.tobytes() for r in rows}) == 12


def test_a_small_validation_split_is_padded_with_sequences_of_weight_0(config):
    config = replace(config, sources=config.sources[2:], segments=True)
    (source,) = open_mixture(config).sources
    held_out = source.tokens("validation")
    windows = (held_out - 1) // LENGTH
    (batches,) = validation_batches(config, sequence_length=LENGTH, batch_size=64, count=9).values()
    assert len(batches) == -(-windows // 64)
    rows_that_count = np.concatenate([b["weights"] for b in batches]).any(axis=1)
    assert rows_that_count.sum() == windows
    (batches,) = validation_batches(config, sequence_length=held_out + 50, batch_size=2, count=1).values()
    tokens = held_out_tokens(config, 0, 10**6)
    np.testing.assert_array_equal(batches[0]["tokens"][0, : held_out - 1], tokens[:-1])
    ends = (tokens[:-1] == source.prepared.tokenizer.eos_id).sum()
    assert batches[0]["weights"].sum() == held_out - 1 - ends


def test_held_out_tokens_are_contiguous(config):
    tokens = held_out_tokens(config, 0, 500)
    assert tokens.shape == (500,) and tokens.dtype == np.int32
    np.testing.assert_array_equal(held_out_tokens(config, 0, 200), tokens[:200])
    with pytest.raises(UserError, match="needles"):
        held_out_tokens(config, 1, 10)
    with pytest.raises(UserError, match="number 3"):
        held_out_tokens(config, 3, 10)
    nothing = replace(config, validation_fraction=0.0, sources=config.sources[:1])
    with pytest.raises(UserError, match="holds out nothing"):
        held_out_tokens(nothing, 0, 10)
    assert validation_batches(nothing, sequence_length=LENGTH, batch_size=2, count=1) == {}


def test_needles_for_evaluation_use_the_vocabulary_of_training(config):
    pipeline = build_pipeline(config, sequence_length=LENGTH, batch_size=8, seed=0)
    needles = needle_windows(config, 1, 8 * LENGTH)
    assert needles.mark == pipeline.tokenizer.vocab_size
    assert needles.read(np.array([0]))[0].max() < pipeline.vocab_size
    assert needles.options.pairs == 2
    with pytest.raises(UserError, match="is not needles"):
        needle_windows(config, 0, 64)
    pipeline.close()
