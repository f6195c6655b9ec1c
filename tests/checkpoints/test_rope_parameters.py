"""Rotary encodings as config.json says them: written, read back from either schema, refused, overruled."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pe_lab.checkpoints.rope_parameters import RopeKeys, WriteOptions, declared_length, read_rope, write_rope
from pe_lab.errors import UserError
from pe_lab.positional import (
    NTK,
    PI,
    DynamicNTK,
    DynamicYarn,
    Llama3,
    LongRope,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    frequencies,
)
from pe_lab.positional.notebook import NotebookNTK

LENGTH = 2048  # of training
OLD = ("max_position_embeddings", "rope_theta", "rope_scaling", "original_max_position_embeddings")
OLD_NEOX = (
    "max_position_embeddings",
    "rotary_emb_base",
    "rotary_pct",
    "rope_scaling",
    "original_max_position_embeddings",
)
NEW = ("max_position_embeddings", "rope_parameters")


def family(neox):
    if neox:
        names = dict(theta_key="rotary_emb_base", fraction_key="rotary_pct")
        return RopeKeys(theta=123.0, fraction=0.125, partial=True, **names)
    return RopeKeys(theta=123.0)


def read(config, head_dim=64, neox=False):
    return read_rope(json.loads(json.dumps(config)), head_dim, family(neox))


def assert_same(one, other, head_dim, original):
    """Equal rotation up to the original length, just above it and far above."""
    for n in (original, original + 1, 50 * original):
        (a, gain), (b, found) = frequencies(one, head_dim, n), frequencies(other, head_dim, n)
        assert (abs(b - a) <= 1e-9 * a + 1e-25).all() and (abs(found - gain) <= 1e-12).all(), (n, one, other)


def assert_round_trip(encoding, head_dim, neox=False):
    config = write_rope(encoding, head_dim, family(neox), WriteOptions(LENGTH))
    original = getattr(getattr(encoding, "scaling", None), "original_length", LENGTH)
    for keys in (tuple(config), OLD_NEOX if neox else OLD, NEW):
        found, _ = read({key: config[key] for key in keys if key in config}, head_dim, neox)
        assert_same(encoding, found, head_dim, original)


SCALINGS = [
    None,
    PI(4.0),
    PI(2.5),
    NTK(3.0),
    NotebookNTK(4.0),
    NTKByParts(4.0, 2048),
    NTKByParts(4.0, 2048, beta_fast=16.0, beta_slow=2.0, truncate=False),
    Llama3(),
    Llama3(4.0, 2.0, 8.0, 1024),
]
WITH_GAIN = [
    Yarn(4.0, 2048),
    Yarn(1.0, 2048),
    Yarn(4.0, 2048, beta_fast=16.0, beta_slow=2.0, truncate=False),
    Yarn(8.0, 1024, mscale=0.7, mscale_all_dim=1.3),
    Yarn(8.0, 1024, attention_factor=1.25),
    Yarn(1.1, 1001),  # reaches no whole number of tokens
    Yarn(2.5, 2049, mscale=0.7, mscale_all_dim=1.3),
]


def longrope(head_dim, **more):
    ramp = np.linspace(1, 5, head_dim // 2)
    return LongRope(tuple(1 + ramp / 10), tuple(ramp), 512, 8.0, **more)


@pytest.mark.parametrize("head_dim, base", [(16, 500.0), (64, 10000.0), (80, 1e6), (128, 500000.0)])
def test_every_encoding_comes_back_from_both_schemas_and_from_each_alone(head_dim, base):
    dynamic = [DynamicNTK(1024), DynamicNTK(1024, 2.5), longrope(head_dim), longrope(head_dim, attention_factor=1.5)]
    for scaling in [*SCALINGS, *WITH_GAIN, *dynamic]:
        assert_round_trip(Rope(base, 1.0, scaling), head_dim)
        assert_round_trip(Rope(base, 1.0, scaling), head_dim, neox=True)
    assert_round_trip(NoPE(), head_dim)
    assert_round_trip(NoPE(), head_dim, neox=True)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.75])
def test_p_rope_comes_back_where_transformers_4_has_no_word_for_it(fraction):
    for scaling in [*SCALINGS, *WITH_GAIN]:
        if isinstance(scaling, Yarn) and fraction == 0:
            continue  # no pair rotates, so none has a gain
        assert_round_trip(Rope(10000.0, fraction, scaling), 64)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_partial_rope_comes_back_on_neox_and_elsewhere(fraction):
    for scaling in SCALINGS:
        assert_round_trip(PartialRope(10000.0, fraction, scaling), 64, neox=True)
        assert_round_trip(PartialRope(10000.0, fraction, scaling), 64)
    for scaling in (s for s in WITH_GAIN if s.factor * s.original_length % 1 == 0):
        assert_round_trip(PartialRope(10000.0, fraction, scaling), 64, neox=True)
    channels = PartialRope(10000.0, fraction).rotated_channels(64)
    assert_round_trip(PartialRope(10000.0, fraction, longrope(channels)), 64, neox=True)


@pytest.mark.parametrize("head_dim, fraction", [(64, 0.1), (80, 0.1), (96, 0.26), (256, 0.1), (100, 0.29)])
def test_an_odd_share_of_channels_is_written_as_the_even_one_that_rotates(head_dim, fraction):
    encoding = PartialRope(10000.0, fraction)
    written = write_rope(encoding, head_dim, family(neox=True), WriteOptions(LENGTH))
    # transformers rounds down, and for an odd number rotates one channel too many at other frequencies.
    assert int(head_dim * written["rotary_pct"]) == encoding.rotated_channels(head_dim)
    assert_round_trip(encoding, head_dim, neox=True)


def test_an_odd_share_of_channels_is_not_read_as_something_else():
    with pytest.raises(UserError, match=r"0.1 of 256 channels are 25, an odd number"):
        read({"rotary_pct": 0.1}, 256, neox=True)


def scalings(pairs):
    """A scaling and its numbers; made within the test, since what checks annotations draws random numbers."""
    factor, length, magnitude = st.floats(1.0, 40.0), st.integers(128, 100_000), st.floats(0.1, 3.0)
    stretched = {"factor": factor, "original_length": length}
    ramp = {"beta_fast": st.floats(4.0, 64.0), "beta_slow": st.floats(0.5, 3.9), "truncate": st.booleans()}
    bands = {"low_freq_factor": st.floats(0.5, 2.0), "high_freq_factor": st.floats(2.5, 9.0)}
    table = st.lists(st.floats(0.5, 60.0), min_size=pairs, max_size=pairs).map(tuple)
    kinds = [
        (PI, {"factor": factor}),
        (NTK, {"factor": factor}),
        (DynamicNTK, stretched),
        (NTKByParts, stretched | ramp),
        (Yarn, stretched | ramp),
        (Yarn, stretched | {"mscale": magnitude, "mscale_all_dim": magnitude}),
        (Yarn, stretched | {"attention_factor": magnitude}),
        (Llama3, stretched | bands),
        (LongRope, stretched | {"short_factor": table, "long_factor": table}),
    ]
    return st.one_of(*(st.tuples(st.just(kind), st.fixed_dictionaries(numbers)) for kind, numbers in kinds))


@settings(max_examples=60)
@given(st.sampled_from([8, 16, 48]), st.floats(50.0, 1e8), st.booleans(), st.data())
def test_any_scaling_comes_back_as_it_was(head_dim, base, neox, data):
    kind, numbers = data.draw(scalings(head_dim // 2))
    encoding = Rope(base, 1.0, kind(**numbers))
    try:
        frequencies(encoding, head_dim)
    except UserError:
        assume(False)  # yarn's ramp has no place at this base and length
    assert_round_trip(encoding, head_dim, neox)


def test_what_nothing_turns_in_is_nope():
    assert read({"rope_scaling": {"type": "linear", "factor": 1e30}})[0] == NoPE()
    assert read(write_rope(NoPE(), 64, family(neox=False), WriteOptions(LENGTH))) == (NoPE(), LENGTH)
    written = write_rope(NoPE(), 64, family(neox=False), WriteOptions(LENGTH))
    with np.errstate(under="ignore"):
        angle = np.float32(2**20) * np.float32(1 / written["rope_scaling"]["factor"])
    assert np.cos(angle) == 1 and np.sin(angle) < 1e-20


REFUSED = {
    "dynamic yarn": (
        Rope(scaling=DynamicYarn(1024)),
        False,
        r"no dynamic YaRN.*Nearest: YaRN for one length.*--length",
    ),
    "partial yarn": (PartialRope(scaling=Yarn(4.0, 2048)), False, r"only the rotary ones.*Nearest.*ntk_by_parts"),
    "p-rope that follows": (Rope(1e4, 0.5, DynamicNTK(512)), False, r"that depends on the length.*Nearest.*--length"),
    "p-rope by table": (Rope(1e4, 0.5, longrope(64)), False, r"that depends on the length.*Nearest.*--length"),
    "partial that follows": (PartialRope(scaling=DynamicNTK(512)), False, r"that depends on the length.*Nearest"),
    "partial dynamic yarn": (PartialRope(scaling=DynamicYarn(512)), True, r"no dynamic YaRN.*Nearest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_said_names_the_nearest_that_can(case):
    encoding, neox, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        write_rope(encoding, 64, family(neox), WriteOptions(LENGTH))


def test_keys_that_contradict_each_other_are_refused():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    linear = {"rope_type": "linear", "factor": 2.0}
    contradictions = {
        "rope_type is 'yarn' by rope_scaling, and 'linear' in rope_parameters": dict(
            rope_scaling=yarn, rope_parameters={"rope_type": "linear", "rope_theta": 5e5}
        ),
        "factor is 2.0 by rope_scaling, and 4.0 in rope_parameters": dict(
            rope_scaling=linear, rope_parameters=linear | {"factor": 4.0}
        ),
        "rope_theta is 1000000.0 by rope_theta, and 500000.0 in rope_parameters": dict(
            rope_theta=1e6, rope_parameters={"rope_theta": 5e5}
        ),
        "rope_theta is 1000000.0 by rope_theta, and 500000.0 in rope_scaling": dict(
            rope_theta=1e6, rope_scaling=linear | {"rope_theta": 5e5}
        ),
        "original_max_position_embeddings is 256, and 512 in the rope parameters": dict(
            rope_scaling=yarn, original_max_position_embeddings=256
        ),
    }
    for message, config in contradictions.items():
        with pytest.raises(UserError, match=message):
            read(config)
    # The same in two places, and what one place leaves out, is no contradiction.
    both = dict(rope_scaling=linear | {"type": "linear"}, rope_parameters=linear | {"rope_theta": 5e5}, rope_theta=5e5)
    assert read(both)[0] == Rope(5e5, 1.0, PI(2.0))
    assert read({"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}})[0] == Rope(1e6)


def test_a_family_reads_its_own_names_and_no_others():
    neox = {"rotary_emb_base": 500, "rotary_pct": 0.5, "rope_theta": 7e5, "partial_rotary_factor": 0.75}
    assert read(neox, neox=True)[0] == PartialRope(500.0, 0.5)
    assert read({"rope_theta": 7e5, "partial_rotary_factor": 0.75}, neox=True)[0] == PartialRope(123.0, 0.125)
    assert read({"rotary_emb_base": 500, "rotary_pct": 0.5})[0] == Rope(123.0)


def test_lengths_and_factors_that_are_left_out():
    assert read({}) == (Rope(123.0), 2048)
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert read({"max_position_embeddings": 8192, "rope_scaling": yarn}) == (Rope(123.0, 1.0, Yarn(8.0, 1024)), 1024)
    tables = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    found, length = read(
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 512, "rope_scaling": tables}, 16
    )
    assert length == 512 and found.scaling.factor == 8.0
    assert frequencies(found, 16)[1][0] == pytest.approx(math.sqrt(1 + math.log(8) / math.log(512)))
    one = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.7}
    assert read({"rope_scaling": one})[0].scaling == Yarn(4.0, 512)  # one mscale alone is not read
    assert read({"rope_scaling": one | {"truncate": None}})[0].scaling.truncate is False  # as `.get` has it


def test_parameters_by_layer_type_are_refused():
    """transformers 5.23 computes llama, gemma and GPT-NeoX with the base outside of them, the others not at all."""
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    for nested in (
        {"full_attention": linear},
        {"full_attention": linear, "sliding_attention": dict(linear)},
        {"full_attention": linear, "sliding_attention": None},
        {"full_attention": linear, "rope_theta": 1e4, "rope_type": "default"},
    ):
        for key in ("rope_parameters", "rope_scaling"):
            with pytest.raises(
                UserError, match=r"types of layers \(full_attention.* this architecture has one rotation"
            ):
                read({key: nested})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DAMAGED = {
    "factor missing": ({"rope_scaling": {"type": "linear"}}, "need 'factor', and have rope_type"),
    "factor a text": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; it must be a number"),
    "factor a truth": ({"rope_scaling": {"type": "dynamic", "factor": True}}, "factor is True"),
    "factor below 1": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"PI\.factor is 0.5"),
    "factor infinite": ({"rope_scaling": YARN | {"factor": math.inf}}, "factor is inf"),
    "llama3 without bands": ({"rope_scaling": YARN | {"type": "llama3", "rope_type": None}}, "need 'low_freq_factor'"),
    "base a text": ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    "base of 1": ({"rope_theta": 1}, r"Rope\.base is 1"),
    "length a text": ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
    "length 0": ({"max_position_embeddings": 0, "rope_scaling": YARN}, "max_position_embeddings is 0"),
    "original a text": ({"rope_scaling": YARN | {"original_max_position_embeddings": "x"}}, "original_max_.* is 'x'"),
    "original below 0": ({"rope_scaling": YARN, "original_max_position_embeddings": -4}, "original_max_.* is -4"),
    "betas swapped": ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, "Yarn needs beta_fast > beta_slow"),
    "no table": ({"rope_scaling": YARN | {"rope_type": "longrope"}}, "longrope needs 'short_factor'"),
    "table of texts": (
        {"rope_scaling": YARN | {"rope_type": "longrope", "short_factor": ["1"] * 32, "long_factor": [1] * 32}},
        "longrope needs 'short_factor', a list",
    ),
    "short table": (
        {"rope_scaling": YARN | {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 8}},
        "has 8 numbers; 64 rotated channels need 32",
    ),
    "table too fast": (
        {"rope_scaling": YARN | {"rope_type": "longrope", "short_factor": [0.01] * 32, "long_factor": [1] * 32}},
        "a frequency must lie in",
    ),
    "unknown type": ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope' is unknown. Known: default"),
    "no set of keys": ({"rope_scaling": ["linear", 2.0]}, "they must be a set of keys"),
    "fraction above 1": ({"rope_parameters": {"partial_rotary_factor": 1.5}}, r"PartialRope\.fraction is 1.5"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_keys_are_named(case):
    config, message = DAMAGED[case]
    with pytest.raises(UserError, match=message):
        read(config)


def vllm_length(config):
    """The longest sequence as vLLM 0.33 derives it from config.json (config/model.py, _get_and_verify_max_len).

    For longrope that is the longest --max-model-len; without one it serves the original length.
    """
    rope = config["rope_parameters"]
    scaled = rope["rope_type"] in ("su", "longrope", "llama3", "yarn")
    return config["max_position_embeddings"] * (1 if scaled else rope.get("factor", 1))


@pytest.mark.parametrize(
    ("encoding", "reach"),
    [
        (Rope(), 1024),
        (Rope(scaling=PI(4)), 4096),  # whose length was counted twice
        (Rope(scaling=NTK(4.0)), 4096),
        (Rope(scaling=DynamicNTK(1024)), 1024),
        (Rope(scaling=DynamicNTK(1024, 8.0)), 8192),
        (Rope(scaling=Yarn(4.0, 1024)), 4096),
        (Rope(scaling=Yarn(2.3, 1024)), 2355),
        (Rope(10000.0, 0.5, Yarn(2.0, 1024)), 2048),
        (Rope(10000.0, 0.5, PI(3.0)), 3072),
        (PartialRope(10000.0, 0.5, Yarn(2.0, 1024)), None),  # not one gain
        (Rope(scaling=Llama3(8.0, original_length=1024)), 8192),
    ],
    ids=str,
)
def test_an_export_declares_the_length_that_the_scaling_is_for(encoding, reach):
    if reach is None:
        encoding, reach = PartialRope(10000.0, 0.5, NTKByParts(2.0, 1024)), 2048
    config = write_rope(encoding, 64, family(neox=False), WriteOptions(1024))
    assert vllm_length(config) == declared_length(config) == reach
    # vLLM and SGLang iterate over a factor that is no float.
    assert isinstance(config["rope_parameters"].get("factor", 1.0), float)


@pytest.mark.parametrize("encoding", [Rope(scaling=Yarn(2.3, 1024)), Rope(10000.0, 0.5, Yarn(2.0, 1024))], ids=str)
def test_a_table_has_its_gain_under_the_keys_of_servers(encoding):
    """vLLM and SGLang compute a gain of max_position_embeddings / original_max_position_embeddings without them."""
    config = write_rope(encoding, 64, family(neox=False), WriteOptions(1024))
    for rope in (config["rope_parameters"], config["rope_scaling"]):
        gain = 0.1 * math.log(encoding.scaling.factor) + 1
        assert rope["short_mscale"] == rope["long_mscale"] == rope["attention_factor"] == pytest.approx(gain)
        # Servers serve no more than the original length, and SGLang rotates the token at it as the first one.
        assert rope["original_max_position_embeddings"] == config["max_position_embeddings"]
        assert rope["factor"] == 1


def test_a_longest_sequence_can_be_declared_where_no_frequency_depends_on_it():
    for encoding in (NoPE(), Rope(), Rope(10000.0, 0.5)):
        config = write_rope(encoding, 64, family(neox=False), WriteOptions(1024, 16384))
        assert config["max_position_embeddings"] == declared_length(config) == 16384
        (expected, _), (found, gain) = frequencies(encoding, 64), frequencies(read(config)[0], 64)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-25)
        assert (gain == 1).all()
    for scaling in (PI(4), DynamicNTK(1024, 4.0), Yarn(4.0, 1024)):
        message = "whose scaling declares no length.* declares 4,096 tokens by its factor. Change the factor"
        with pytest.raises(UserError, match=message):
            write_rope(Rope(scaling=scaling), 64, family(neox=False), WriteOptions(1024, 16384))
