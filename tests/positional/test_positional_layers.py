"""Texts, patterns and JSON for layers, and what they say when they cannot be read."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.errors import UserError
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Bands,
    Beta,
    DynamicNTK,
    DynamicYarn,
    Function,
    Gaussian,
    HeadEdit,
    Layer,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Uniform,
    Yarn,
    family,
    from_json,
    label,
    layers,
    parse,
    to_json,
)
from pe_lab.positional.encodings import ENCODINGS
from pe_lab.positional.notebook import NotebookBias, NotebookNTK, NotebookYarn
from pe_lab.positional.scalings import SCALINGS

# The tests' check of annotations looks at a random item of a tuple, also while a strategy builds a description.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")


FACTOR, LENGTH = st.floats(1, 2**31 - 1), st.integers(2, 1 << 30)
RAMP = {"beta_fast": st.floats(2, 64), "beta_slow": st.floats(0.1, 1.5), "truncate": st.booleans()}
MSCALES = st.sampled_from([{}, {"mscale": 1.0, "mscale_all_dim": 0.707}])
MAGNITUDE = st.none() | st.floats(0.01, 100)
TABLE = st.lists(st.floats(0.01, 1e4), max_size=4).map(tuple)
IN_TEXTS = [  # a text has numbers only, and no LongRoPE tables
    st.builds(PI, FACTOR),
    st.builds(NTK, FACTOR),
    st.builds(DynamicNTK, LENGTH, FACTOR),
    st.builds(NTKByParts, FACTOR, LENGTH, **RAMP),
    st.builds(
        lambda mscales, **rest: Yarn(**mscales, **rest),
        MSCALES,
        factor=FACTOR,
        original_length=LENGTH,
        attention_factor=MAGNITUDE,
        **RAMP,
    ),
    st.builds(lambda mscales, **rest: DynamicYarn(**mscales, **rest), MSCALES, original_length=LENGTH, **RAMP),
    st.builds(Llama3, FACTOR, st.floats(0.1, 2), st.floats(2.5, 9), LENGTH),
    st.builds(NotebookNTK, FACTOR),
]
TEXT_SCALING = st.one_of(IN_TEXTS)
SCALING = st.one_of(*IN_TEXTS, st.builds(LongRope, TABLE, TABLE, LENGTH, FACTOR, MAGNITUDE))
BASE, FRACTION = st.floats(1.5, 1e9), st.floats(0, 1)


def encodings(scaling):
    """What all heads of a layer, or some, can have."""
    return st.one_of(
        st.builds(Rope, BASE, FRACTION, st.none() | scaling),
        st.builds(PartialRope, BASE, FRACTION, st.none() | scaling),
        st.just(NoPE()),
        st.just(Alibi()),
        st.builds(NotebookYarn, BASE, st.floats(0.1, 16), st.floats(0.1, 16), LENGTH, st.integers(1, 2)),
        st.builds(NotebookBias, st.floats(-9, 9), LENGTH),
    )


def described(scaling, denoised=()):
    """Layers with all that a layer can have."""
    encoding = encodings(scaling)
    heads = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple)
    edits = st.lists(st.builds(HeadEdit, heads, st.one_of(encoding, *denoised)), max_size=3).map(tuple)
    window = st.none() | st.integers(1, 1 << 20)
    scale = st.one_of(st.floats(0.1, 10), st.builds(Beta, st.floats(-1, 1), LENGTH))
    return st.builds(Layer, encoding, window, scale, edits)


DENOISED = [
    st.builds(Bands, st.floats(1e-6, 6), st.sampled_from(["slow", "fast"])),
    st.just(Uniform()),
    st.builds(Gaussian, st.integers(1, 2**32 - 1)),
]
LAYER = described(SCALING, DENOISED)


def test_strategies_know_every_kind():
    """A new kind must be added here, or to test_schemes.py, or its round trip is not tested."""
    kinds = {Rope, PartialRope, NoPE, Alibi, NotebookYarn, NotebookBias, Bands, Uniform, Gaussian}
    own = {kind for kind in (*ENCODINGS.values(), Bands, Uniform) if kind.__module__.startswith("pe_lab.")}
    assert {kind for kind in own if not issubclass(kind, Function) and ".schemes." not in kind.__module__} == kinds
    assert len(SCALINGS) == len(IN_TEXTS) + 1


@settings(max_examples=60)
@given(LAYER)
def test_json_round_trip(layer):
    text = json.dumps(to_json(layer), allow_nan=False)
    back = from_json(json.loads(text))
    assert back == layer and hash(back) == hash(layer)
    assert json.dumps(to_json(back)) == text
    assert layers(json.loads(text), 3) == (layer,) * 3


KINDS_AS_JSON = [Layer(kind) for kind in (Rope(), PartialRope(), NoPE(), Alibi(), NotebookYarn(), NotebookBias())] + [
    Layer(Rope(scaling=LongRope((1.0, 1.5), (2.0, 8.0), 64, 4.0))),
    Layer(Rope(), 64, Beta(0.412, 1024)),
    Layer(
        Rope(), heads=(HeadEdit((0, 3), Bands(0.01, "slow")), HeadEdit((1,), Uniform()), HeadEdit((2,), Gaussian(7)))
    ),
]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("layer", KINDS_AS_JSON, ids=label)
def test_json_of_every_kind_and_with_whole_numbers_as_other_programs_write_them(layer):
    """1e4 as 10000, lists for tuples: what reads back is the same description, and hashes."""

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    assert from_json(plain(json.loads(json.dumps(to_json(layer))))) == layer


@settings(max_examples=60)
@given(LAYER)
def test_every_layer_has_a_name_a_person_can_read(layer):
    text = label(layer)
    assert type(layer.encoding) is ENCODINGS[text.split("(")[0].split(" ")[0]]
    assert family(layer)
    assert (" / window " in text) == (layer.window is not None)
    assert text.count(" / heads ") == len(layer.heads)
    assert (" / logit scale " in text) == (layer.logit_scale != 1)


NAMES = {kind: name for name, kind in {**ENCODINGS, **SCALINGS}.items()}


def encoding_text(encoding, short):
    """An encoding as a user would type it; a scaling of RoPE can stand alone (`short`)."""
    values = {k: v for k, v in vars(encoding).items() if k != "scaling"}
    scaling = getattr(encoding, "scaling", None)
    name = NAMES[type(encoding)]
    if scaling is not None:
        if short and isinstance(encoding, Rope):
            name = NAMES[type(scaling)]
        else:
            values["scaling"] = NAMES[type(scaling)]
        values |= vars(scaling)
    words = [f"{k}={v if k == 'scaling' else repr(v).lower()}" for k, v in values.items()]
    return name + ":" * bool(words) + ",".join(words)


def text_of(layer, short=True):
    """A layer as a user would type it; the tests' own writer, so that `parse` is read against something."""
    text = encoding_text(layer.encoding, short)
    if layer.window:
        text += f"/window={layer.window}"
    if isinstance(layer.logit_scale, Beta):
        text += f"/beta={layer.logit_scale.coefficient!r}@{layer.logit_scale.original_length}"
    elif layer.logit_scale != 1:
        text += f"/logit_scale={layer.logit_scale!r}"
    for edit in layer.heads:
        text += f"/heads={','.join(map(str, edit.heads))}:{encoding_text(edit.to, short)}"
    return text


@settings(max_examples=60)
@given(described(TEXT_SCALING), st.booleans())
def test_text_round_trip(layer, short):
    assert parse(text_of(layer, short)) == layer


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
        ("rope:scaling=yarn,factor=2,original_length=1024", Layer(Rope(scaling=Yarn(2.0, 1024)))),
        (
            "partial_rope:fraction=0.25,scaling=yarn,factor=2,original_length=1024",
            Layer(PartialRope(fraction=0.25, scaling=Yarn(2.0, 1024))),
        ),
        ("dynamic_ntk:original_length=1024", Layer(Rope(scaling=DynamicNTK(1024)))),
        ("dynamic_yarn:original_length=1024,base=1e6", Layer(Rope(1e6, scaling=DynamicYarn(1024)))),
        ("ntk_by_parts:factor=2,original_length=1024", Layer(Rope(scaling=NTKByParts(2.0, 1024)))),
        ("llama3", Layer(Rope(scaling=Llama3()))),
        ("notebook_ntk", Layer(Rope(scaling=NotebookNTK()))),
        ("notebook_yarn:alpha=1,beta=2", Layer(NotebookYarn(alpha=1.0, beta=2.0))),
        ("notebook_bias:strength=-1", Layer(NotebookBias(-1.0))),
        ("rope/logit_scale=1.2", Layer(Rope(), logit_scale=1.2)),
        ("nope/beta=0.412@1024", Layer(NoPE(), logit_scale=Beta(0.412, 1024))),
        ("rope/heads=0-3,6:nope", Layer(Rope(), heads=(HeadEdit((0, 1, 2, 3, 6), NoPE()),))),
        ("rope/heads=5-5:alibi", Layer(Rope(), heads=(HeadEdit((5,), Alibi()),))),
        (
            "nope/window=64/heads=0:yarn:factor=2,original_length=64/heads=1,3:rope:base=1e6,fraction=0.5",
            Layer(
                NoPE(),
                64,
                heads=(HeadEdit((0,), Rope(scaling=Yarn(2.0, 64))), HeadEdit((1, 3), Rope(1e6, 0.5))),
            ),
        ),
    ],
)
def test_texts_of_the_documentation(text, layer):
    assert parse(text) == layer


def test_a_length_is_a_whole_number_again():
    assert type(parse("yarn:factor=2,original_length=1024").encoding.scaling.original_length) is int
    assert type(parse("nope/beta=0.1@1024").logit_scale.original_length) is int
    assert type(parse("rope/window=64").window) is int


@pytest.mark.parametrize(
    ("words", "truncate"),
    [("true", True), ("True", True), ("1", True), ("1.0", True), ("false", False), ("FALSE", False), ("0", False)],
)
def test_words_and_numbers_for_true_and_false(words, truncate):
    scaling = parse(f"yarn:factor=2,original_length=1024,truncate={words}").encoding.scaling
    assert scaling.truncate is truncate


def test_none_is_a_word_where_nothing_is_allowed():
    scaling = parse("yarn:factor=2,original_length=1024,attention_factor=none").encoding.scaling
    assert scaling == Yarn(2.0, 1024) and scaling.attention_factor is None


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
        "yarn:factor=2,original_length=1024,truncate=0": (
            "rope(base=10000) + yarn(factor=2, original_length=1024, truncate=False)"
        ),
        "dynamic_ntk:original_length=1024": "rope(base=10000) + dynamic_ntk(original_length=1024)",
        "llama3": "rope(base=10000) + llama3",
        "notebook_bias:strength=-1": "notebook_bias(strength=-1)",
        "rope/logit_scale=1.25": "rope(base=10000) / logit scale 1.25",
        "nope/window=8/beta=0.412@1024": "nope / window 8 / logit scale 1 + 0.412 ln(n / 1024)",
        "rope/heads=3,0-1:nope": "rope(base=10000) / heads 0-1,3: nope",
        "nope/heads=2:alibi/heads=0:pi:factor=2": "nope / heads 2: alibi / heads 0: rope(base=10000) + pi(factor=2)",
    }
    assert {text: label(parse(text)) for text in shown} == shown


def test_labels_of_what_no_text_can_say():
    table = tuple(float(i) for i in range(1, 33))
    layer = Layer(
        Rope(scaling=LongRope(table, (2.5,) * 32, 4096, 32.0)),
        heads=(HeadEdit((0, 1, 5), Bands(0.125, "slow")), HeadEdit((2,), Uniform()), HeadEdit((3,), Gaussian(7))),
    )
    assert label(layer) == (
        "rope(base=10000) + longrope(short_factor=1 .. 32 [32], long_factor=2.5 .. 2.5 [32], original_length=4096, "
        "factor=32) / heads 0-1,5: bands(threshold=0.125, keep=slow) / heads 2: uniform / heads 3: gaussian(seed=7)"
    )


def test_families_have_the_names_people_use():
    shown = {
        "rope": "RoPE",
        "yarn:factor=2,original_length=1024": "RoPE",
        "rope:fraction=0.25": "p-RoPE 0.25",
        "partial_rope": "Partial RoPE",
        "nope": "NoPE",
        "alibi": "ALiBi",
        "notebook_yarn": "the notebook's YaRN",
        "notebook_bias": "the notebook's bias",
    }
    assert {text: family(parse(text)) for text in shown} == shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ropee", ["'ropee'", "Did you mean 'rope'?"]),
        ("yarm:factor=2", ["'yarm'", "Did you mean 'yarn'?"]),
        ("alib", ["Did you mean 'alibi'?"]),
        ("zzzz", ["'zzzz'", "Allowed: alibi, ", "clipped_rope", "yarn."]),
        ("", ["''", "Allowed:"]),
        ("rope:bass=1e4", ["Rope has no key 'bass'", "Did you mean 'base'?"]),
        ("nope:base=1e4", ["NoPE has no key 'base'"]),
        ("yarn:factr=2,original_length=1024", ["Yarn has no key 'factr'", "Did you mean 'factor'?"]),
        ("yarn:factor=2,original_length=1024,bas=1e6", ["Yarn has no key 'bas'", "Did you mean 'base'?"]),
        ("yarn:factor=2", ["Yarn needs original_length"]),
        ("yarn", ["Yarn needs factor, original_length"]),
        ("pi", ["PI needs factor"]),
        ("pi:factor=0.5", ["PI.factor is 0.5"]),
        ("ntk:factor=0", ["NTK.factor is 0"]),
        ("rope:fraction=1.5", ["Rope.fraction is 1.5"]),
        ("partial_rope:fraction=-0.25", ["PartialRope.fraction is -0.25"]),
        ("rope:base=ten", ["'base=ten' is not key=number"]),
        ("rope:base", ["'base' is not key=number"]),
        ("rope:kind=nope", ["the kind is rope, before the colon", "leave 'kind=nope' out"]),
        ("rope:scaling=2", ["there is no scaling '2'", "Allowed: dynamic_ntk"]),
        ("yarn:factor=2,original_length=1024.5", ["Yarn.original_length is 1024.5"]),
        ("yarn:factor=2,original_length=inf", ["Yarn.original_length is inf"]),
        ("rope/window=0", ["Layer.window is 0"]),
        ("rope/window=-5", ["window=TOKENS", "window=-5"]),
        ("rope/window=²", ["window=TOKENS", "window=²"]),
        ("rope/widow=5", ["window=TOKENS", "widow=5"]),
        ("rope/", ["window=TOKENS"]),
        ("rope/window=none", ["window=TOKENS", "window=none"]),
        ("longrope:factor=2,original_length=64", ["LongRope needs short_factor, long_factor"]),
        (
            "longrope:factor=2,original_length=64,short_factor=1,long_factor=2",
            ["'longrope:factor=2", "LongRope.short_factor is 1.0", "it must be a list"],
        ),
        ("rope:scaling=yarm", ["'rope:scaling=yarm'", "there is no scaling 'yarm'", "Did you mean 'yarn'?"]),
        ("partial_rope:scaling=yarn,factor=2", ["Yarn needs original_length"]),
        ("rope:scaling=pi,factor=2,bse=1e6", ["PI has no key 'bse'", "Did you mean 'base'?"]),
        ("pi:scaling=ntk,factor=2", ["pi is a scaling itself", "rope:scaling=pi,... or pi:... alone"]),
        ("alibi:scaling=pi,factor=2", ["'alibi:scaling=pi,factor=2'", "Alibi has no key 'scaling'"]),
        ("rope:factor=2", ["Rope has no key 'factor'", "Did you mean 'fraction'?"]),
        ("rope:base=none", ["Rope.base is None; it must be of type float"]),
        ("rope:base=true", ["Rope.base is True; it must be of type float"]),
        ("yarn:factor=2,original_length=64,truncate=2", ["Yarn.truncate is 2.0; it must be of type bool"]),
        ("yarn:factor=2,original_length=64,attention_factor=no", ["'attention_factor=no' is not key=number"]),
        ("yarn:factor=2,original_length=64,mscale=1", ["mscale_all_dim 0.0; give both, or neither"]),
        ("rope/logit_scale=0", ["Layer.logit_scale is 0.0; it must lie in [1e-6, 1e6], or be Beta(...)"]),
        ("rope/logit_scale=nan", ["Layer.logit_scale is nan"]),
        ("rope/logit_scale", ["'logit_scale' is not key=number"]),
        ("rope/logit_scale=high", ["'rope/logit_scale=high'", "'logit_scale=high' is not key=number"]),
        ("rope/beta=0.412", ["logit_scale=X, beta=C@LENGTH, heads=0-3:ENCODING or with=ENCODING, not 'beta=0.412'"]),
        ("rope/beta=0.412@", ["'rope/beta=0.412@'", "'beta=0.412@' is not key=number"]),
        ("rope/beta=c@1024", ["'beta=c@1024' is not key=number"]),
        ("rope/beta=true@1024", ["Layer.logit_scale.coefficient is True; it must be of type float"]),
        ("rope/beta=none@1024", ["Layer.logit_scale.coefficient is None"]),
        ("rope/beta=inf@1024", ["Beta.coefficient is inf; it must lie in"]),
        ("rope/beta=0.1@0", ["Beta.original_length is 0; give the training length"]),
        ("rope/heads=0-3", ["heads=0-3:ENCODING or with=ENCODING, not 'heads=0-3'"]),
        ("rope/heads=:nope", ["'rope/heads=:nope'", "'' is not a number or a range such as 0-3"]),
        ("rope/heads=0,:nope", ["'' is not a number or a range"]),
        ("rope/heads=3-1:nope", ["'3-1' is not a number or a range such as 0-3"]),
        ("rope/heads=1-:nope", ["'1-' is not a number or a range"]),
        ("rope/heads=-1:nope", ["'-1' is not a number or a range"]),
        ("rope/heads=a:nope", ["'a' is not a number or a range"]),
        ("rope/heads=0:nop", ["'rope/heads=0:nop'", "there is no encoding 'nop'", "Did you mean 'nope'?"]),
        ("rope/heads=0:", ["there is no encoding ''", "Allowed:"]),
        ("rope/heads=0:pi:factor=0.5", ["PI.factor is 0.5"]),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_texts_name_what_is_wrong(text, says):
    with pytest.raises(UserError) as error:
        parse(text)
    for part in says:
        assert part in str(error.value)


LONGROPE = {"kind": "longrope", "short_factor": [1], "long_factor": [1], "original_length": 64, "factor": 2.0}


def rope_with(**fields):
    return {"encoding": {"kind": "rope", **fields}}


def layer_with(**fields):
    return {"encoding": {"kind": "rope"}, **fields}


def edit_with(**fields):
    return layer_with(heads=[fields])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # As JSON has it too: a bool is no number, and nothing is no logit scale.
        ("rope/logit_scale=none", "logit_scale"),
        ("rope/logit_scale=true", "logit_scale"),
        # What is no whole number is the description's to refuse.
        ("rope/beta=0.4@10.5", "Layer.logit_scale.original_length is 10.5"),
        # Of two that contradict each other none is obeyed silently.
        ("rope:base=1e4,base=1e6", "base"),
        ("rope/window=4/window=8", "window"),
        ("rope/logit_scale=2/beta=0.1@64", "beta"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_texts_that_must_not_be_read_as_something(text, says):
    with pytest.raises(UserError) as error:
        parse(text)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"encoding": {"kind": "rop"}}, ["'rop'", "Did you mean 'rope'?"]),
        ({"encoding": {"base": 1e4}}, ["there is no kind ''"]),
        ({"encoding": {"kind": "rope", "bse": 1e4}}, ["Rope has no key 'bse'", "Did you mean 'base'?"]),
        ({"encoding": {"kind": "rope", "base": "1e4"}}, ["Rope.base is '1e4'", "type float"]),
        ({"encoding": {"kind": "rope", "base": True}}, ["Rope.base is True"]),
        ({"encoding": {"kind": "rope", "scaling": {"kind": "yarn", "factor": 2.0}}}, ["original_length"]),
        ({"encoding": {"kind": "rope", "scaling": "yarn"}}, ["Rope.scaling is 'yarn'"]),
        ({"encoding": {"kind": "nope", "scaling": {"kind": "pi", "factor": 2.0}}}, ["NoPE has no key 'scaling'"]),
        ({"encoding": {"kind": "rope"}, "windw": 5}, ["Layer has no key 'windw'", "Did you mean 'window'?"]),
        ({"encoding": {"kind": "rope"}, "window": 0}, ["Layer.window is 0"]),
        ({"encoding": "rope"}, ["Layer.encoding is 'rope'; write it as {'kind': NAME, ...}", "Did you mean 'rope'?"]),
        ({}, ["Layer needs encoding"]),
        (
            {"encoding": {"kind": "rope", "scaling": {"kind": "rope"}}},
            ["there is no kind 'rope'", "Did you mean"],
        ),
        ({"encoding": {"kind": "bands", "threshold": 0.1}}, ["there is no kind 'bands'", "Allowed: alibi"]),
        (rope_with(scaling=LONGROPE | {"short_factor": 1.0}), ["LongRope.short_factor is 1.0", "must be a list"]),
        (rope_with(scaling=LONGROPE | {"short_factor": "11"}), ["LongRope.short_factor is '11'", "must be a list"]),
        (
            rope_with(scaling=LONGROPE | {"long_factor": ["1"]}),
            ["LongRope.long_factor[0] is '1'; it must be of type float"],
        ),
        (rope_with(scaling=LONGROPE | {"long_factor": [0]}), ["LongRope.long_factor holds [0.0]"]),
        (layer_with(logit_scale=True), ["logit_scale is True; it must be of type float"]),
        (layer_with(logit_scale=None), ["logit_scale is None"]),
        (layer_with(logit_scale="1"), ["logit_scale is '1'"]),
        (layer_with(logit_scale=0), ["Layer.logit_scale is 0.0"]),
        (layer_with(logit_scale={"coefficient": 0.1}), ["Layer.logit_scale needs original_length"]),
        (
            layer_with(logit_scale={"coeficient": 0.1}),
            ["Layer.logit_scale has no key 'coeficient'", "Did you mean 'coefficient'?"],
        ),
        (
            layer_with(logit_scale={"coefficient": 0.1, "original_length": "1k"}),
            ["Layer.logit_scale.original_length is '1k'"],
        ),
        (edit_with(heads=[0], to={"kind": "nop"}), ["there is no kind 'nop'", "Did you mean 'nope'?"]),
        (edit_with(heads=[0], to=None), ["Layer.heads[0].to is None; write it as {'kind': "]),
        (edit_with(heads=[], to={"kind": "nope"}), ["HeadEdit.heads is empty; name at least one query head"]),
        (edit_with(to={"kind": "nope"}), ["Layer.heads[0] needs heads"]),
        (edit_with(head=[0], to={"kind": "nope"}), ["Layer.heads[0] has no key 'head'", "Did you mean 'heads'?"]),
        (edit_with(heads=[0], to={"kind": "notebook_yarn", "blend": 0}), ["NotebookYarn.blend is 0"]),
        (edit_with(heads=[0], to={"kind": "bands"}), ["Bands needs threshold"]),
        (edit_with(heads=[0], to={"kind": "bands", "threshold": 0.0}), ["Bands.threshold is 0.0", "2 pi / training"]),
        (
            edit_with(heads=[0], to={"kind": "bands", "threshold": 1, "keep": "low"}),
            ["Bands.keep is 'low'. Did you mean 'slow'?"],
        ),
        (edit_with(heads=[0], to={"kind": "gaussian", "seed": 0}), ["Gaussian.seed is 0; give a whole number in [1,"]),
        (edit_with(heads=[0], to={"kind": "gaussian", "seed": 1.5}), ["Gaussian.seed is 1.5"]),
        (edit_with(heads=[0], to={"kind": "gaussian", "seed": 2**32}), ["Gaussian.seed is 4294967296"]),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_json_names_what_is_wrong(value, says):
    with pytest.raises(UserError) as error:
        layers(value, 1)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (edit_with(heads="03", to={"kind": "nope"}), ["'03'"]),
        (edit_with(heads=3, to={"kind": "nope"}), ["heads"]),
        (edit_with(heads=[1.5], to={"kind": "nope"}), ["1.5"]),
        (edit_with(heads=["a"], to={"kind": "nope"}), ["'a'"]),
        (layer_with(heads=5), ["heads"]),
        (layer_with(heads=[3]), ["heads"]),
        (layer_with(heads=[["heads"]]), ["heads"]),
        (layer_with(window="64"), ["window"]),
        (layer_with(window=2.5), ["window"]),
        (layer_with(window=True), ["window"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("as_users_run_it")
def test_json_of_the_wrong_type_is_neither_read_as_something_nor_a_bare_traceback(value, says):
    with pytest.raises(UserError) as error:
        from_json(value)
    for part in says:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Layer(Rope(), 0), "Layer.window is 0; give a whole number of tokens from 1, or None"),
        (lambda: Layer(Rope(), -1), "Layer.window is -1"),
        (lambda: Layer(Rope(), logit_scale=0.0), "Layer.logit_scale is 0.0"),
        (lambda: Layer(Rope(), logit_scale=-1.0), "Layer.logit_scale is -1.0"),
        (lambda: Layer(Rope(), logit_scale=float("inf")), "Layer.logit_scale is inf"),
        (lambda: Beta(float("nan"), 64), "Beta.coefficient is nan"),
        (lambda: Beta(0.1, -1), "Beta.original_length is -1"),
        (lambda: Beta(-0.5, 64).at(64 * 8), "Beta.coefficient -0.5 makes the logit scale -0.0397 at 512 tokens"),
        (lambda: HeadEdit((), NoPE()), "HeadEdit.heads is empty"),
        (lambda: HeadEdit((0,), PI(2.0)), "HeadEdit.to is PI(factor=2.0); a head can have an encoding"),
        (lambda: HeadEdit((0,), "nope"), "HeadEdit.to is 'nope'"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_layers_name_the_field(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


def test_beta_is_one_up_to_its_length_and_grows_with_the_logarithm_beyond():
    """DroPE: 1 + 0.412 ln s; 1.2856 at twice the training length, 2.1424 at sixteen times."""
    beta = Beta(0.412, 1024)
    assert {beta.at(n) for n in (None, 1, 512, 1024)} == {1.0}
    assert beta.at(2048) == pytest.approx(1.285577, abs=1e-6)
    assert beta.at(16384) == pytest.approx(2.142307, abs=1e-6)
    assert beta.at(1025) > 1
    assert Beta(-0.1, 1024).at(2048) == pytest.approx(0.930685, abs=1e-6)
    layer = Layer(NoPE(), logit_scale=beta)
    assert layer.scale_at(2048) == beta.at(2048) and Layer(NoPE(), logit_scale=1.5).scale_at(2048) == 1.5


def test_a_layer_follows_the_length_if_anything_in_it_does():
    dynamic = Rope(scaling=DynamicYarn(64))
    assert Layer(dynamic).follows_length
    assert Layer(NoPE(), logit_scale=Beta(0.1, 64)).follows_length
    assert Layer(Rope(), heads=(HeadEdit((0,), NoPE()), HeadEdit((1,), dynamic))).follows_length
    edits = tuple(HeadEdit((n,), to) for n, to in enumerate([NoPE(), Bands(0.1), Uniform(), Gaussian(1)]))
    assert not Layer(Rope(scaling=Yarn(2.0, 64)), 64, 2.0, edits).follows_length


@pytest.mark.usefixtures("as_users_run_it")
def test_lists_become_tuples_so_that_a_layer_hashes():
    layer = Layer(Rope(), heads=[HeadEdit([0, 1], NoPE())])
    assert layer == Layer(Rope(), heads=(HeadEdit((0, 1), NoPE()),))
    assert len({layer, Layer(Rope(), heads=(HeadEdit((0, 1), NoPE()),))}) == 1


def test_descriptions_cannot_be_changed_after_they_are_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rope().base = 0.5
