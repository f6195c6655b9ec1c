"""Sequences too long for one pass or one device: equal losses and predictions, and the memory that they need."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from pe_lab.errors import UserError
from pe_lab.evaluation.command_line import parse_length
from pe_lab.evaluation.scoring import forward as forwards
from pe_lab.evaluation.scoring.forward import Forward, Meshes
from pe_lab.model import Model
from pe_lab.model.cache import cache_bytes
from pe_lab.parallel import one_program
from pe_lab.planning.memory import longest, sequence_memory
from pe_lab.positional import Layer, NoPE, Rope, build_schedule, layers

ROPE = layers(Rope(), tiny.MODEL.layers)
WINDOWED = [Layer(Rope(), window=20), Layer(NoPE())]
CONFIG = Model(tiny.MODEL).config
T = 150


def sequences(rows: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(rows).integers(0, tiny.MODEL.vocab_size, (rows, T + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def both(forward: Forward, batch, described):
    params = forward.place(tiny.parameters())
    at = np.random.default_rng(0).integers(0, T, (len(batch["tokens"]), 9))
    losses = forward.losses(params, batch, described)
    return losses, forward.predictions(params, batch["tokens"], at, described)


@pytest.mark.parametrize("described", [pytest.param(ROPE, marks=pytest.mark.slow), WINDOWED], ids=["rope", "windowed"])
def test_losses_and_predictions_in_chunks_equal_those_in_one_pass(described, monkeypatch):
    monkeypatch.setitem(forwards.CHUNK, "cpu", 32)
    batch = sequences(3)
    whole = Forward(CONFIG, devices=tiny.one_device())
    chunked = Forward(CONFIG, devices=tiny.one_device(), whole=100)
    read = []
    chunked.on_tokens = read.append
    for found, wanted in zip(both(chunked, batch, described), both(whole, batch, described), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert not chunked.traces and whole.traces  # the whole pass was never compiled
    assert sum(read) == 2 * 3 * T and len(read) > 6  # losses and predictions, chunk by chunk


def test_packed_documents_are_read_in_one_pass():
    """The cache takes no segments: sequences with segments are read in one pass, whatever their length."""
    chunked = Forward(CONFIG, devices=tiny.one_device(), whole=100)
    batch = sequences(1)
    batch["segments"] = np.repeat([[1, 2]], T // 2, axis=1).astype(np.int32)
    chunked.losses(tiny.parameters(), batch, ROPE)
    assert chunked.traces["losses", T] == 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_sequences_than_devices_are_sharded_over_them(rows, monkeypatch):
    monkeypatch.setattr(forwards, "SHARD_FROM", 64)
    batch = sequences(rows)
    several = Forward(CONFIG, devices=jax.devices()[:4])
    assert several._meshes.of(rows, T).shape["context"] == {1: 4, 2: 2, 3: 2}[rows]
    one = Forward(CONFIG, devices=tiny.one_device())
    for found, wanted in zip(both(several, batch, WINDOWED), both(one, batch, WINDOWED), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_together_every_long_sequence_is_sharded_and_the_weights_too(monkeypatch):
    """As many sequences as devices, which each would read by itself otherwise; two devices hold the weights."""
    monkeypatch.setattr(forwards, "SHARD_FROM", 64)
    batch = sequences(4)
    with one_program(together=True):
        several = Forward(CONFIG, devices=jax.devices()[:4], tensor=2)
    assert {name: several._meshes.of(4, T).shape[name] for name in ("data", "tensor", "context")} == {
        "data": 1,
        "tensor": 2,
        "context": 2,
    }
    query = several.place(tiny.parameters())["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.size == query.size // 2
    one = Forward(CONFIG, devices=tiny.one_device())
    for found, wanted in zip(both(several, batch, WINDOWED), both(one, batch, WINDOWED), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_many_or_short_sequences_are_not_sharded():
    meshes = Meshes(jax.devices()[:4])
    for rows, length in ((4, 2**20), (100, 2**20), (1, 2048)):
        assert meshes.of(rows, length).shape["context"] == 1
    assert Meshes(jax.devices()[:1]).of(1, 2**20) is None


def test_the_arithmetic_of_a_cache_by_hand():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    full = build_schedule(ROPE, 2, 2, 8).structure
    windowed = build_schedule(WINDOWED, 2, 2, 8).structure
    # 2 layers, keys and values, 2 heads of 8 channels, 2 bytes; the windowed layer keeps 20 tokens.
    assert cache_bytes(config, full, 1000) == 2 * 1000 * 2 * 2 * 8 * 2
    assert cache_bytes(config, windowed, 1000) == (1000 + 20) * 2 * 2 * 8 * 2
    text = sequence_memory(Model(config), full, 2**20, 16)
    assert text.cache == 2**20 * 128 and text.decoding == text.cache // 16
    assert text.cache < text.in_chunks and text.at_once < sequence_memory(Model(config), full, 2**20, 4).at_once


def test_the_estimate_of_a_sequence_is_that_of_its_pass(monkeypatch):
    """The KV cache on one device; on several, their share of the hidden states of a layer."""
    from pe_lab.evaluation.scoring import forward

    needed = []
    monkeypatch.setattr(forward, "check_memory", lambda size, *_: needed.append(size))
    for devices, wanted in ((1, 2**20 * 2 * 2 * 2 * 8 * 4), (4, 3 * 2**20 * CONFIG.d_model * 4)):
        monkeypatch.setattr(forward, "compute_devices", lambda devices=devices: jax.devices()[:devices])
        forward.check_length(CONFIG, ROPE, 2**20)
        assert needed.pop() == wanted
    monkeypatch.setattr(forward, "compute_devices", lambda: jax.devices()[:1])
    forward.check_length(CONFIG, ROPE, forward.WHOLE)  # one pass, without a cache
    assert needed.pop() == 0


def test_the_longest_text_is_the_last_that_fits():
    model, structure = Model(tiny.MODEL), build_schedule(ROPE, 2, 2, 8).structure
    for way in ("at_once", "in_chunks", "decoding"):
        budget = getattr(sequence_memory(model, structure, 300 * 1024, 4), way)
        assert longest(model, structure, 4, budget, way) == 300 * 1024, way
        assert longest(model, structure, 4, 0, way) == 0


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("128k", 131072), ("1M", 2**20), ("1.5k", 1536)])
def test_lengths_as_people_write_them(text, tokens):
    assert parse_length("--x", text) == tokens


@pytest.mark.parametrize("text", ["", "k", "many", "2x", "1", "-5", "1.0001k", "nan", "inf"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(UserError, match="--x: .*(is no length. Write 8192, 128k or 1m|give a whole number)"):
        parse_length("--x", text)
