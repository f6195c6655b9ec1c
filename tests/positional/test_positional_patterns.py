"""Which layer gets which encoding: patterns, the papers' arrangements, edits of the layers before."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.config import PhaseConfig, from_dict, to_json
from pe_lab.errors import UserError
from pe_lab.positional import (
    NTK,
    PI,
    Alibi,
    Bands,
    Beta,
    Drop,
    DynamicNTK,
    DynamicYarn,
    Gaussian,
    HeadEdit,
    Layer,
    LongRope,
    NoPE,
    PartialRope,
    Rescale,
    Rope,
    Uniform,
    Yarn,
    build_schedule,
    drop,
    layers,
    pattern,
    read_with,
    rescale,
    rnope_swa,
    smollm3,
    swan,
    text_of,
)
from pe_lab.positional.notebook import NotebookYarn

NOPE, LOCAL = Layer(NoPE()), Layer(Rope(), 512)


# Patterns.


def test_a_list_of_layers_is_repeated_from_the_bottom_up():
    described = layers(["rope/window=512", LOCAL, {"encoding": {"kind": "rope"}, "window": 512}, NoPE()], 8)
    assert described == (LOCAL, LOCAL, LOCAL, NOPE) * 2


@settings(max_examples=60)
@given(period=st.integers(1, 7), count=st.integers(1, 40))
def test_a_pattern_is_periodic_and_only_cut_when_it_says_so(period, count):
    items = [Layer(Rope(), n + 1) for n in range(period)]
    cut = layers(pattern(items, cut=True), count)
    assert cut == tuple(items[n % period] for n in range(count))
    if count % period == 0:
        assert layers(items, count) == layers(tuple(items), count) == layers(pattern(items), count) == cut
        return
    for described in (items, tuple(items), pattern(items)):
        with pytest.raises(UserError) as error:
            layers(described, count)
        message = str(error.value)
        assert f"A pattern of {period} layers does not tile {count} layers" in message
        assert "its length must divide" in message and "pattern([...], cut=True)" in message


def test_patterns_of_texts_read_as_lists_do():
    assert layers(pattern(["rope/window=512"] * 3 + ["nope"], cut=True), 6) == (LOCAL, LOCAL, LOCAL, NOPE, LOCAL, LOCAL)


def test_texts_joined_by_a_plus_are_a_pattern():
    assert layers("rope:base=50+nope/window=8", 4) == layers(["rope:base=50", "nope/window=8"], 4)
    assert layers("rope:base=1e+4", 2) == layers("rope:base=1e4", 2)
    assert read_with("rope + nope", layers("rope", 2), 64) == layers(["rope", "nope"], 2)


@pytest.mark.parametrize("count", [1, 3, 4, 6, 24, 30])
def test_rnope_swa_has_a_full_nope_layer_where_cohere2_has_one(count):
    described = layers(rnope_swa(512, base=5e4), count)
    assert len(described) == count
    for i, layer in enumerate(described):
        full = (i + 1) % 4 == 0
        assert layer == (NOPE if full else Layer(Rope(5e4), 512)), i
    schedule = build_schedule(described, 2, 1, 8)
    assert [s.rotates for s in schedule.structure] == [(i + 1) % 4 != 0 for i in range(count)]
    assert [s.window for s in schedule.structure] == [None if (i + 1) % 4 == 0 else 512 for i in range(count)]
    assert schedule.same_rotation


@pytest.mark.parametrize("count", [4, 6, 36])
def test_smollm3_leaves_every_fourth_layer_without_an_encoding_and_has_no_windows(count):
    described = layers(smollm3(), count)
    assert [layer.encoding for layer in described] == [
        NoPE() if (i + 1) % 4 == 0 else Rope(5_000_000.0) for i in range(count)
    ]
    assert {layer.window for layer in described} == {None}


@pytest.mark.parametrize("count", [4, 6, 24])
def test_swan_begins_with_a_full_nope_layer_whose_logits_grow_with_the_text(count):
    described = layers(swan(512, 1024, 0.3, base=5e4), count)
    for i, layer in enumerate(described):
        assert layer == (Layer(NoPE(), None, Beta(0.3, 1024)) if i % 4 == 0 else Layer(Rope(5e4), 512)), i
    scale = build_schedule(described, 2, 1, 8, length=4096).logit_scale
    assert scale[0] == pytest.approx(1 + 0.3 * 1.3862944) and (scale[1:4] == 1).all()
    assert (build_schedule(described, 2, 1, 8, length=1024).logit_scale == 1).all()


def test_swan_without_a_coefficient_scales_nothing_at_any_length():
    described = layers(swan(512, 1024), 4)
    assert described[0] == NOPE and not any(layer.follows_length for layer in described)


@pytest.mark.parametrize(
    ("description", "count", "says"),
    [
        (["rope", "nope", "rope"], 8, "A pattern of 3 layers does not tile 8"),
        (["rope"] * 4, 2, "A pattern of 4 layers does not tile 2"),
        ([], 4, "A pattern of 0 layers"),
        (pattern([], cut=True), 4, "A pattern of 0 layers"),
        (["rope", 3], 4, "3 does not describe a layer; give an encoding, a Layer, or a text like 'rope'"),
        (None, 4, "None does not describe a layer"),
        (PI(2.0), 4, "PI(factor=2.0) does not describe a layer"),
        (["rope", drop()], 4, "Drop(layers=None, extras=False) does not describe a layer"),
        (["rope", pattern(["nope"])], 4, "Pattern(items=('nope',), cut=False) does not describe a layer"),
        (pattern(["rope", "nop"], cut=True), 3, "there is no encoding 'nop'"),
        (["drop"], 4, "there is no encoding 'drop'"),
    ],
)
def test_a_bad_pattern_is_refused(description, count, says):
    with pytest.raises(UserError) as error:
        layers(description, count)
    assert says in str(error.value)


def test_a_window_of_no_tokens_is_refused():
    for make in (lambda: rnope_swa(0), lambda: swan(0, 1024)):
        with pytest.raises(UserError, match="Layer.window is 0"):
            make()


# Edits of the layers before. Every layer differs from its neighbours in something an edit must not touch.

ENCODINGS = [
    Rope(1e6),
    PartialRope(5e5, 0.5),
    NoPE(),
    Rope(fraction=0.5, scaling=PI(3.0)),
    Alibi(),
    NotebookYarn(),
]
HEADS = (HeadEdit((0,), NoPE()), HeadEdit((1,), Bands(0.1)))
MIXED = tuple(
    Layer(
        ENCODINGS[n % 6],
        None if n % 3 else 64 + n,
        Beta(0.1, 64 + n) if n % 5 == 0 else 1.0 + n / 64,
        HEADS,
    )
    for n in range(24)
)


@pytest.mark.parametrize(
    ("edit", "chosen"),
    [
        (drop(), range(24)),
        ("drop", range(24)),
        (" drop ", range(24)),
        (drop(layers=range(12, 24)), range(12, 24)),
        (drop(layers=[0]), [0]),
        (drop([5, 3, 3]), [3, 5]),
        (Drop((23,)), [23]),
    ],
    ids=str,
)
def test_drop_takes_encodings_and_edits_of_heads_and_leaves_windows_and_logit_scales(edit, chosen):
    after = layers(edit, 24, before=MIXED)
    assert len(after) == 24
    for n, (old, new) in enumerate(zip(MIXED, after, strict=True)):
        assert new == (Layer(NoPE(), old.window, old.logit_scale) if n in chosen else old), n


@settings(max_examples=40)
@given(st.sets(st.integers(0, 23)), st.sets(st.integers(0, 23)))
def test_drops_add_up_and_a_drop_is_the_last_word(first, second):
    one_by_one = drop(sorted(second)).apply(drop(sorted(first)).apply(MIXED))
    assert one_by_one == drop(sorted(first | second)).apply(MIXED)
    rotary = {n for n in first if n % 6 in (0, 1, 3)}
    if rotary:
        rescaled = rescale(NTK(2.0), sorted(first)).apply(MIXED)
        assert drop(sorted(first)).apply(rescaled) == drop(sorted(first)).apply(MIXED)


def test_a_dropped_model_has_no_rotation_compiled():
    schedule = build_schedule(layers("drop", 24, before=MIXED), 2, 1, 8)
    assert not any(s.rotates or s.slopes for s in schedule.structure)
    assert [s.window for s in schedule.structure] == [layer.window for layer in MIXED]


SCALING = Yarn(2.0, 1024)
RESCALED = {0: Rope(1e6, scaling=SCALING), 1: PartialRope(5e5, 0.5, SCALING), 3: Rope(fraction=0.5, scaling=SCALING)}


@pytest.mark.parametrize(
    ("edit", "chosen"),
    [
        (rescale(SCALING), range(24)),
        (rescale(SCALING, layers=range(12, 24)), range(12, 24)),
        (rescale(SCALING, [3, 4]), [3, 4]),
        (Rescale(SCALING, (0,)), [0]),
    ],
    ids=["all", "upper half", "one of two", "one"],
)
def test_rescale_reaches_the_rotary_layers_and_changes_nothing_but_their_scaling(edit, chosen):
    """What was scaled before is scaled anew, not twice."""
    after = layers(edit, 24, before=MIXED)
    for n, (old, new) in enumerate(zip(MIXED, after, strict=True)):
        encoding = RESCALED.get(n % 6, old.encoding) if n in chosen else old.encoding
        assert new == Layer(encoding, old.window, old.logit_scale, old.heads), n


@pytest.mark.parametrize("edit", [drop(), drop([0]), "drop", rescale(SCALING), rescale(DynamicYarn(64), [0])], ids=str)
def test_an_edit_with_nothing_before_it_says_what_to_do(edit):
    with pytest.raises(UserError) as error:
        layers(edit, 4)
    message = str(error.value)
    assert message.startswith("rescale(...)" if isinstance(edit, Rescale) else "drop(...)")
    assert "edits the layers of the phase or checkpoint before, and there is none" in message
    assert "Give this phase its own encodings, or an init_from whose checkpoint exists" in message


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: drop(range(12, 25)).apply(MIXED), "drop: there is no layer 24; the model has layers 0 to 23"),
        (lambda: drop([-1]).apply(MIXED), "drop: there is no layer -1; the model has layers 0 to 23"),
        (lambda: layers(drop([4]), 4, before=MIXED[:4]), "drop: there is no layer 4; the model has layers 0 to 3"),
        (lambda: rescale(SCALING, [24]).apply(MIXED), "rescale: there is no layer 24; the model has layers 0 to 23"),
        (lambda: rescale(SCALING, [2, 4]).apply(MIXED), "rescale: none of these layers is rotary"),
        (lambda: rescale(SCALING, []).apply(MIXED), "rescale: none of these layers is rotary"),
        (lambda: rescale(SCALING).apply([NOPE]), "none of these layers is rotary; there is nothing to rescale"),
        (lambda: rescale(SCALING).apply([Layer(NotebookYarn())]), "none of these layers is rotary"),
        (lambda: rescale(2.0), "rescale needs a scaling (PI, NTK, DynamicNTK, NTKByParts, Yarn,"),
        (lambda: rescale("yarn:factor=2"), "not 'yarn:factor=2'"),
        (lambda: rescale(Rope()), "not Rope(base=10000.0"),
        (lambda: rescale(None), "not None"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_edits_name_the_layer_or_what_is_allowed(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


def test_an_edit_of_another_number_of_layers_is_refused():
    """`layers` returns one layer for each of N, or says why not."""
    with pytest.raises(UserError, match="6"):
        layers(drop(), 6, before=MIXED[:4])


def test_a_rescale_stretches_rotary_heads_too():
    layer = Layer(NoPE(), heads=(HeadEdit((0,), Rope(1e6)), HeadEdit((1,), Alibi())))
    (after,) = rescale(PI(2.0)).apply([layer])
    assert after == Layer(NoPE(), heads=(HeadEdit((0,), Rope(1e6, scaling=PI(2.0))), HeadEdit((1,), Alibi())))


def test_a_scaling_by_its_name_stretches_the_rotation_there_is():
    before = (Layer(Rope(500.0), window=64), Layer(NoPE()), Layer(PartialRope(7e4, 0.5)))
    after = read_with("yarn:factor=4", before, 2048)
    assert after == rescale(Yarn(4, 2048)).apply(before)
    assert after[0].encoding.base == 500.0 and after[0].window == 64 and after[1] == before[1]
    assert read_with("yarn:factor=4,original_length=1024", before, 2048) == rescale(Yarn(4, 1024)).apply(before)
    assert read_with("pi:factor=2", before, 2048) == rescale(PI(2)).apply(before)
    # One per layer too: not the default base, which would break the weights.
    yarn = Yarn(4, 2048)
    one_each = (Layer(Rope(500.0, scaling=yarn)), Layer(NoPE()), Layer(PartialRope(7e4, 0.5, scaling=yarn), window=9))
    assert read_with("yarn:factor=4+nope+yarn:factor=4/window=9", before, 2048) == one_each
    assert read_with(["yarn:factor=4", "nope", "yarn:factor=4/window=9"], before, 2048) == one_each
    with pytest.raises(UserError, match="layer 1 of these weights does not rotate"):
        read_with("rope+yarn:factor=4+rope", before, 2048)


@pytest.mark.parametrize(
    "description", ["yarn:factor=4,original_length=64,base=300", "rope:base=300", "nope", ["rope", "nope"], Rope(300.0)]
)
def test_all_else_is_read_as_layers_reads_it(description):
    before = (Layer(Rope(500.0)), Layer(Rope(500.0)))
    assert read_with(description, before, 2048) == layers(description, 2, before)
    # The sign of an exponent joins no layers.
    assert read_with("pi:factor=1e+1", before, 64) == read_with("pi:factor=10", before, 64)


def test_a_scaling_has_nothing_to_stretch_where_nothing_rotates():
    with pytest.raises(UserError, match="none of these layers is rotary"):
        read_with("yarn:factor=4", (Layer(NoPE()),) * 2, 2048)


HEADS = tuple(HeadEdit((n,), to) for n, to in enumerate([NoPE(), Gaussian(7, 2.0), Bands(0.1), Uniform()]))
DESCRIPTIONS = [
    Rope(1e6, scaling=LongRope((1.0, 2.0), (3.0, 4.0), 64, 8.0)),
    Layer(PartialRope(scaling=Yarn(2.0, 1024)), 16, Beta(0.1, 64), HEADS),
    pattern(["rope/window=4", Layer(NoPE()), Alibi()], cut=True),
    Drop(),
    Drop((0, 3)),
    Drop(()),
    Rescale(DynamicNTK(64), (1,)),
    ["nope", Layer(Rope()), Layer(NotebookYarn())],
]


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=repr)
def test_a_config_holds_any_description_and_reads_it_back(description):
    before = layers("rope", 4)
    wanted = layers(description, 4, before) if not isinstance(description, list) else layers(description, 3)
    plain = json.loads(json.dumps(to_json(PhaseConfig(positional=description))))
    read = from_dict(PhaseConfig, plain).positional
    assert (layers(read, 4, before) if not isinstance(description, list) else layers(read, 3)) == wanted
    assert to_json(read) == plain["positional"]


def test_a_config_names_what_is_wrong_with_a_description():
    with pytest.raises(UserError, match="there is no kind 'rop'. Did you mean 'rope'"):
        from_dict(PhaseConfig, {"positional": {"kind": "rop"}})
    with pytest.raises(UserError, match="Rescale has no key 'scalin'. Did you mean 'scaling'"):
        from_dict(PhaseConfig, {"positional": {"kind": "rescale", "scalin": {"kind": "pi", "factor": 2}}})
    with pytest.raises(UserError, match="qk_norm_init is 'one'. Did you mean 'ones'"):
        from_dict(PhaseConfig, {"qk_norm_init": "one"})


@pytest.mark.parametrize(
    "described",
    [
        "rope",
        "rope:base=500000,fraction=0.75/window=512/beta=0.1@2048",
        "yarn:factor=4,original_length=1024,base=1e6,truncate=false",
        "partial_rope:fraction=0.5,scaling=pi,factor=3.1",
        "longrope_start:divisors=2:,start=16",
        "longrope:short_factor=1:1:1:1,long_factor=1:1.25:2.7:4.0001,original_length=64,factor=4/logit_scale=1.017",
        "nope+rope/heads=0-1,3:nope+alibi/with=t5+rope/with=llama4_temperature:floor_scale=16/with=sink",
        "clipped_rope:original_length=64",
    ],
)
def test_layers_have_a_text_that_reads_as_them(described):
    """Both as a config reads it, and as surgery and evaluation do."""
    before = layers(described, 4)
    text = text_of(before)
    assert layers(text, 4) == before
    assert read_with(text, layers("rope:base=7", 4), 99) == before


def test_what_has_no_text_is_refused():
    with pytest.raises(UserError, match="bands has no text; describe it as an object"):
        text_of([Layer(Rope(), heads=(HeadEdit((0,), Bands(0.1)),))])


def test_kept_changes_no_layer():
    before = layers("rope:base=7/window=4+nope", 4)
    assert layers("kept", 4, before) == read_with("kept", before, 16) == before
    with pytest.raises(UserError, match="and there is none"):
        layers("kept", 4)
