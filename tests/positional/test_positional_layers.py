"""Texts, patterns and JSON for layers, and what they say when they cannot be read."""

import dataclasses
import json

import jaxtyping
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.config import UserError
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Layer,
    NoPE,
    PartialRope,
    Rope,
    Yarn,
    family,
    from_json,
    label,
    layers,
    parse,
    to_json,
)

FACTOR = st.floats(1, 1e30)
SCALING = st.one_of(
    st.builds(PI, FACTOR),
    st.builds(NTK, FACTOR),
    st.builds(Yarn, FACTOR, st.integers(1, 1 << 30), beta_fast=st.floats(2, 64), beta_slow=st.floats(0.1, 1.5)),
)
BASE, FRACTION = st.floats(1.5, 1e9), st.floats(0, 1)
ROPE = st.builds(Rope, BASE, FRACTION, st.none() | SCALING)
ENCODING = st.one_of(
    ROPE,
    st.builds(PartialRope, BASE, FRACTION, st.none() | SCALING),
    st.just(NoPE()),
    st.just(Alibi()),
)
WINDOW = st.none() | st.integers(1, 1 << 20)
LAYER = st.builds(Layer, ENCODING, WINDOW, st.floats(0.1, 10))


@settings(max_examples=80, deadline=None)
@given(LAYER)
def test_json_round_trip(layer):
    text = json.dumps(to_json(layer))
    assert from_json(json.loads(text)) == layer
    assert layers(json.loads(text), 3) == (layer,) * 3


def text_of(layer):
    """A layer as a user would type it; the tests' own writer, so that `parse` is read against something."""
    encoding = layer.encoding
    names = {
        Rope: "rope",
        PartialRope: "partial_rope",
        NoPE: "nope",
        Alibi: "alibi",
        PI: "pi",
        NTK: "ntk",
        Yarn: "yarn",
    }
    values = {k: v for k, v in vars(encoding).items() if k != "scaling"}
    scaling = getattr(encoding, "scaling", None)
    if scaling is not None:
        values |= vars(scaling)
    text = names[type(encoding if scaling is None else scaling)]
    if values:
        text += ":" + ",".join(f"{k}={v!r}" for k, v in values.items())
    return text + (f"/window={layer.window}" if layer.window else "")


@settings(max_examples=80, deadline=None)
@given(
    st.builds(
        Layer,
        st.one_of(ROPE, st.builds(PartialRope, BASE, FRACTION), st.just(NoPE()), st.just(Alibi())),
        WINDOW,
    )
)
def test_text_round_trip(layer):
    assert parse(text_of(layer)) == layer


@pytest.mark.parametrize(
    ("text", "layer"),
    [
        ("rope", Layer(Rope())),
        ("rope:base=1e6", Layer(Rope(1e6))),
        ("rope:fraction=0.25/window=512", Layer(Rope(fraction=0.25), 512)),
        ("partial_rope:fraction=0.1", Layer(PartialRope(fraction=0.1))),
        ("nope/window=64", Layer(NoPE(), 64)),
        (" alibi ", Layer(Alibi())),
        ("pi:factor=2", Layer(Rope(scaling=PI(2.0)))),
        ("ntk:factor=4,base=1e6", Layer(Rope(1e6, scaling=NTK(4.0)))),
        ("yarn:factor=2,original_length=1024,base=1e6", Layer(Rope(1e6, scaling=Yarn(2.0, 1024)))),
        (
            "yarn:factor=8,original_length=4096,beta_fast=16,fraction=0.5",
            Layer(Rope(fraction=0.5, scaling=Yarn(8.0, 4096, beta_fast=16.0))),
        ),
    ],
)
def test_texts_of_the_documentation(text, layer):
    assert parse(text) == layer


def test_a_length_is_a_whole_number_again():
    assert type(parse("yarn:factor=2,original_length=1024").encoding.scaling.original_length) is int


@pytest.mark.parametrize(
    "description",
    [
        "rope:base=500000/window=128",
        Layer(Rope(500000.0), 128),
        {"encoding": {"kind": "rope", "base": 500000.0}, "window": 128},
        ["rope:base=500000/window=128"],
    ],
    ids=["text", "layer", "mapping", "list"],
)
def test_every_way_to_say_the_same(description):
    assert layers(description, 2) == (Layer(Rope(500000.0), 128),) * 2


def test_a_pattern_tiles_the_model():
    local, full = Layer(Rope(), 512), Layer(NoPE())
    described = layers(["rope/window=512", local, "rope/window=512", NoPE()], 8)
    assert described == (local, local, local, full) * 2


def test_labels_say_what_differs_from_the_default():
    shown = {
        "rope": "rope(base=10000)",
        "rope:base=1048577": "rope(base=1048577.0)",
        "rope:fraction=0.25,base=5e5": "rope(base=500000, fraction=0.25)",
        "partial_rope": "partial_rope(base=10000)",
        "nope": "nope",
        "alibi/window=64": "alibi / window 64",
        "pi:factor=2.5": "rope(base=10000) + pi(factor=2.5)",
        "yarn:factor=2,original_length=1024/window=512": (
            "rope(base=10000) + yarn(factor=2, original_length=1024) / window 512"
        ),
        "yarn:factor=2,original_length=1048576,beta_slow=2": (
            "rope(base=10000) + yarn(factor=2, original_length=1048576, beta_slow=2)"
        ),
    }
    assert {text: label(parse(text)) for text in shown} == shown


def test_families_have_the_names_people_use():
    shown = {
        "rope": "RoPE",
        "yarn:factor=2,original_length=1024": "RoPE",
        "rope:fraction=0.25": "p-RoPE 0.25",
        "partial_rope": "Partial RoPE",
        "nope": "NoPE",
        "alibi": "ALiBi",
    }
    assert {text: family(parse(text)) for text in shown} == shown


@pytest.fixture
def as_users_run_it():
    """Without the test suite's checks of annotations, which would speak before our own messages."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ropee", ["'ropee'", "Did you mean 'rope'?"]),
        ("yarm:factor=2", ["'yarm'", "Did you mean 'yarn'?"]),
        ("alib", ["Did you mean 'alibi'?"]),
        ("sinusoidal", ["'sinusoidal'", "Allowed: alibi, nope, ntk, partial_rope, pi, rope, yarn."]),
        ("", ["''", "Allowed:"]),
        ("rope:bass=1e4", ["Rope has no 'bass'", "Did you mean 'base'?"]),
        ("nope:base=1e4", ["NoPE has no 'base'"]),
        ("yarn:factr=2,original_length=1024", ["Yarn has no 'factr'", "Did you mean 'factor'?"]),
        ("yarn:factor=2,original_length=1024,bas=1e6", ["Yarn has no 'bas'", "Did you mean 'base'?"]),
        ("yarn:factor=2", ["Yarn needs original_length"]),
        ("yarn", ["Yarn needs factor, original_length"]),
        ("pi", ["PI needs factor"]),
        ("pi:factor=0.5", ["PI.factor is 0.5"]),
        ("ntk:factor=0", ["NTK.factor is 0"]),
        ("rope:fraction=1.5", ["Rope.fraction is 1.5"]),
        ("partial_rope:fraction=-0.25", ["PartialRope.fraction is -0.25"]),
        ("rope:base=ten", ["'base=ten' is not key=number"]),
        ("rope:base", ["'base' is not key=number"]),
        ("rope:scaling=2", ["Rope.scaling is 2.0"]),
        ("yarn:factor=2,original_length=1024.5", ["Yarn.original_length is 1024.5"]),
        ("yarn:factor=2,original_length=inf", ["Yarn.original_length is inf"]),
        ("rope/window=0", ["Layer.window is 0"]),
        ("rope/window=-5", ["window=TOKENS", "window=-5"]),
        ("rope/window=²", ["window=TOKENS", "window=²"]),
        ("rope/widow=5", ["window=TOKENS", "widow=5"]),
        ("rope/", ["window=TOKENS"]),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_texts_name_what_is_wrong(text, says):
    with pytest.raises(UserError) as error:
        parse(text)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"encoding": {"kind": "rop"}}, ["'rop'", "Did you mean 'rope'?"]),
        ({"encoding": {"base": 1e4}}, ["is of kind ''"]),
        ({"encoding": {"kind": "rope", "bse": 1e4}}, ["Rope has no 'bse'", "Did you mean 'base'?"]),
        ({"encoding": {"kind": "rope", "base": "1e4"}}, ["Rope.base is '1e4'", "number"]),
        ({"encoding": {"kind": "rope", "base": True}}, ["Rope.base is True"]),
        ({"encoding": {"kind": "rope", "scaling": {"kind": "yarn", "factor": 2.0}}}, ["original_length"]),
        ({"encoding": {"kind": "rope", "scaling": "yarn"}}, ["Rope.scaling is 'yarn'"]),
        ({"encoding": {"kind": "nope", "scaling": {"kind": "pi", "factor": 2.0}}}, ["NoPE has no 'scaling'"]),
        ({"encoding": {"kind": "rope"}, "windw": 5}, ["Layer has no 'windw'", "Did you mean 'window'?"]),
        ({"encoding": {"kind": "rope"}, "window": 0}, ["Layer.window is 0"]),
        ({"encoding": "rope"}, ["'encoding'"]),
        ({}, ["'encoding'"]),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_json_names_what_is_wrong(value, says):
    with pytest.raises(UserError) as error:
        layers(value, 1)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("description", "count", "says"),
    [
        (["rope", "nope", "rope"], 8, "A pattern of 3 layers does not tile 8"),
        (["rope"] * 4, 2, "A pattern of 4 layers does not tile 2"),
        ([], 4, "A pattern of 0 layers"),
        (["rope", 3], 4, "3 does not describe a layer"),
        (None, 4, "None does not describe a layer"),
    ],
)
def test_a_bad_pattern_is_refused(description, count, says):
    with pytest.raises(UserError) as error:
        layers(description, count)
    assert says in str(error.value)


def test_descriptions_cannot_be_changed_after_they_are_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rope().base = 0.5
