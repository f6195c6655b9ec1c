"""Heads that differ from their layer: their logits, their structure and their rows in the table."""

import math
import re

import jax
import numpy as np
import pytest
from head_scores import AT, KEY, QUERY, H, K, N, R, edited, schedule_of, scores_of

from pe_lab.positional import (
    Alibi,
    Bands,
    Beta,
    DynamicNTK,
    DynamicYarn,
    Gaussian,
    HeadEdit,
    Layer,
    LayerHooks,
    LayerStructure,
    Llama4Temperature,
    LongRope,
    NoPE,
    PartialRope,
    Rope,
    Uniform,
    Yarn,
    alibi_slopes,
    build_schedule,
    describe,
    dope_by_all,
    dope_by_gaussian,
    frequencies,
    layers,
)
from pe_lab.positional.notebook import NotebookBias, NotebookYarn
from pe_lab.positional.rotation import fixed_point_frequencies


def same(a, b):
    """Equal structure and equal bits."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# What a head's logits become.


def expected_scores(pairs_kept, head, inv_freq, gain=1.0):
    """The logits [B] of one head by hand: each pair's product rotated by the distance, the kept pairs added up."""
    query, key = (x[head, :R] + 1j * x[head, R:] for x in (QUERY.astype(float), KEY.astype(float)))
    distance = (AT[:, 0] - AT[:, 1])[:, None]
    products = (query * key.conj() * np.exp(1j * distance * inv_freq)).real
    return gain**2 * (products * pairs_kept).sum(-1)


FREQUENCIES = frequencies(Rope(), K)[0]  # 10 ** (-i / 2)
EVERY, FAST = np.ones(R), np.array([1, 1, 1, 0, 0, 0, 0, 0])  # of a training length of 128: 2 pi / 128 = .049


@pytest.mark.parametrize(
    ("to", "kept", "inv_freq"),
    [
        (NoPE(), EVERY, np.zeros(R)),
        (Rope(1e6), EVERY, frequencies(Rope(1e6), K)[0]),
        (Uniform(), np.zeros(R), FREQUENCIES),
        (Bands(2 * math.pi / 128, "fast"), FAST, FREQUENCIES),
        (Bands(2 * math.pi / 128, "slow"), 1 - FAST, FREQUENCIES),
    ],
    ids=repr,
)
def test_an_edited_head_computes_what_it_says_and_the_other_heads_what_they_did(to, kept, inv_freq):
    """Head 3 shares its key head with head 2: each sees the key as its own rotation has it."""
    scores = scores_of(edited([3], to))
    before = scores_of(schedule_of([Layer(Rope())]))
    others = [0, 1, 2, 4, 5]
    np.testing.assert_array_equal(scores[:, others], before[:, others])
    np.testing.assert_allclose(before[:, 3], expected_scores(EVERY, 3, FREQUENCIES), atol=2e-5)
    np.testing.assert_allclose(scores[:, 3], expected_scores(kept, 3, inv_freq), atol=2e-5)
    assert np.abs(scores[:, 3] - before[:, 3]).max() > 0.3


def test_both_parts_of_a_head_add_up_to_the_head():
    """Bands leave what they keep alone, YaRN's gain included; so logits are a sum over both."""
    encoding = Rope(scaling=Yarn(8.0, 128))
    slow, fast = (scores_of(edited(range(H), Bands(0.02, keep), encoding)) for keep in ("slow", "fast"))
    np.testing.assert_allclose(slow + fast, scores_of(schedule_of([Layer(encoding)])), atol=2e-5)
    assert np.abs(slow).max() > 1 and np.abs(fast).max() > 1


# Structure.


@pytest.mark.parametrize(
    ("heads", "kind"),
    [
        ([0], "split"),
        ([1, 2], "split"),
        ([0, 1, 2], "split"),
        ([0, 1], "grouped"),
        ([2, 3, 4, 5], "grouped"),
        ([5, 4, 4], "grouped"),
        (range(H), "shared"),
    ],
    ids=str,
)
@pytest.mark.parametrize("to", [NoPE(), Rope(1e6), PartialRope(), Bands(0.05), Uniform()], ids=repr)
def test_heads_are_split_grouped_or_shared_as_edits_cut_through_groups(heads, kind, to):
    (structure,) = edited(heads, to).structure
    all_nope = kind == "shared" and to == NoPE()
    assert structure == LayerStructure(rotates=not all_nope, heads=kind)


def test_what_does_not_stand_alone_acts_beside_the_layers_encoding():
    """A temperature of two heads, or their noise, leaves their rotation, slopes and hooks."""
    for to in (Gaussian(7), Llama4Temperature()):
        for encoding in (Rope(), Alibi(), NotebookYarn()):
            schedule, before = edited([1, 4], to, encoding), schedule_of([Layer(encoding)])
            for name in ("fixed_freq", "gain", "alibi_slope"):
                np.testing.assert_array_equal(getattr(schedule, name), getattr(before, name))
            own = before.structure[0].hooks
            assert schedule.structure[0].hooks == (*own, LayerHooks(to.on((1, 4)), None, (1, 4)))


def test_without_grouped_queries_no_head_splits_a_group():
    schedule = build_schedule([Layer(Rope(), heads=(HeadEdit((0,), NoPE()),))], H, H, K)
    assert schedule.structure == (LayerStructure(rotates=True, heads="grouped"),)


@pytest.mark.parametrize(
    "to", [NoPE(), Alibi(), Rope(5e5), PartialRope(), Rope(fraction=0.5, scaling=Yarn(8.0, 64))], ids=repr
)
@pytest.mark.parametrize("encoding", [Rope(), Alibi(), NoPE()], ids=repr)
def test_all_heads_edited_are_the_layer_that_they_say(encoding, to):
    assert same(edited(range(H), to, encoding), schedule_of([Layer(to)]))


def test_the_last_edit_of_a_head_is_what_it_has_and_denoising_adds_to_it():
    edits = [HeadEdit((0, 1, 2), Rope(1e6)), HeadEdit((1,), NoPE()), HeadEdit((2,), Bands(0.05))]
    schedule = schedule_of([Layer(Rope(), heads=tuple(edits))])
    other = frequencies(Rope(1e6), K)[0].astype(np.float32)
    np.testing.assert_array_equal(schedule.inv_freq[0, [0, 2]], [other, other])
    assert (schedule.inv_freq[0, 1] == 0).all()
    np.testing.assert_array_equal(schedule.gain[0, 2], other > 0.05)  # of the frequencies it has by then
    np.testing.assert_array_equal(schedule.gain[0, [0, 1, 3, 4, 5]], 1)
    # And an encoding says all there is: what was noise is none.
    noisy = [HeadEdit((0, 1), Gaussian(3)), HeadEdit((1,), Rope())]
    (hooks,) = schedule_of([Layer(Rope(), heads=tuple(noisy))]).structure[0].hooks
    assert hooks.heads == hooks.encoding.heads == (0,)


def test_alibi_on_one_head_takes_that_heads_slope():
    slopes = alibi_slopes(H).astype(np.float32)
    schedule = edited([4], Alibi())
    assert schedule.alibi_slope[0].tolist() == [0, 0, 0, 0, slopes[4], 0]
    assert (schedule.inv_freq[0, 4] == 0).all() and (schedule.inv_freq[0, 5] != 0).any()
    assert schedule.structure == (LayerStructure(rotates=True, slopes=True, heads="split"),)
    mixed = edited([1, 2], Rope(), Alibi())
    np.testing.assert_array_equal(mixed.alibi_slope[0], np.where(np.isin(range(H), [1, 2]), 0, slopes))


def test_the_length_reaches_scalings_edits_and_betas():
    dynamic = [DynamicNTK(64), DynamicYarn(64), LongRope((1.0,) * R, (2.0,) * R, 64, 8.0)]
    described = [
        *[Layer(Rope(scaling=scaling)) for scaling in dynamic],
        Layer(Rope(), heads=(HeadEdit((0,), Rope(scaling=dynamic[0])),), logit_scale=Beta(0.5, 64)),
    ]
    for length in (None, 64, 65, 512):
        schedule = schedule_of(described, length)
        for n, scaling in enumerate(dynamic):
            inv_freq, gain = frequencies(Rope(scaling=scaling), K, length)
            np.testing.assert_array_equal(schedule.fixed_freq[n], np.tile(fixed_point_frequencies(inv_freq), (H, 1, 1)))
            np.testing.assert_array_equal(schedule.gain[n], np.tile(gain.astype(np.float32), (H, 1)))
        np.testing.assert_array_equal(schedule.fixed_freq[3, 0], schedule.fixed_freq[0, 0])
        np.testing.assert_array_equal(schedule.fixed_freq[3, 1], fixed_point_frequencies(FREQUENCIES))
        assert schedule.logit_scale[3] == pytest.approx(1 + 0.5 * math.log(max(1, (length or 0) / 64)))
    near, far = (schedule_of(described, length) for length in (64, 512))
    assert all((near.fixed_freq[n] != far.fixed_freq[n]).any() for n in range(4))


def test_the_notebooks_two_are_constants_of_the_program():
    encodings = NotebookYarn(blend=8), NotebookBias(1.5, 64)
    structures = schedule_of([Layer(one) for one in encodings]).structure
    assert structures == tuple(LayerStructure(hooks=(LayerHooks(one),)) for one in encodings)


@pytest.mark.parametrize(
    ("encoding", "to"),
    [(NotebookYarn(), Rope()), (NotebookYarn(), PartialRope()), (NotebookBias(), NoPE()), (NotebookBias(), Rope())],
    ids=repr,
)
def test_the_other_heads_of_a_notebooks_layer_keep_its_encoding(encoding, to):
    """Each has the heads that it acts on: Rope() is not warped, and NoPE() has no bias."""
    schedule = edited([0, 2], to, encoding)
    assert schedule.structure[0].hooks == (LayerHooks(encoding, None, (1, *range(3, H))),)
    inv_freq, _ = frequencies(to, K)
    np.testing.assert_array_equal(schedule.fixed_freq[0, 0], fixed_point_frequencies(inv_freq))
    assert not schedule.fixed_freq[0, 1].any()
    (hooks,) = edited([0, 2], encoding, to).structure[0].hooks
    assert hooks == LayerHooks(encoding, None, (0, 2))


# The table of a schedule.


def table(text):
    """The cells of `describe`'s table, by column name."""
    header, *rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return [dict(zip(header, row, strict=False)) for row in rows]


def test_describe_has_a_column_for_other_properties_only_where_there_are_some():
    pattern = layers(["rope", "nope"], N)
    assert "other" not in describe(schedule_of(pattern)) + describe(schedule_of(pattern), pattern)
    assert "other" not in describe(schedule_of(dope_by_all(pattern, [(0, 1)])))
    noisy = dope_by_gaussian(pattern, [(1, 0), (1, 5)])
    rows = table(describe(schedule_of(noisy)))
    assert [(row["layers"], row.get("other")) for row in rows] == [
        ("0,2", None),
        ("1", "gaussian: encode on heads 0,5"),
        ("3", None),
    ]


def test_describe_names_encodings_with_hooks_and_their_hooks():
    described = [Layer(NotebookYarn()), Layer(NotebookBias()), Layer(NotebookBias(-0.5, 64))]
    rows = table(describe(schedule_of(described), described))
    assert [row["other"] for row in rows] == [
        "notebook_yarn: encode",
        "notebook_bias: bias",
        "notebook_bias: bias",
    ]
    assert [row["encoding"] for row in rows] == [
        "notebook_yarn(base=10000)",
        "notebook_bias",
        "notebook_bias(strength=-0.5, original_length=64)",
    ]


def test_describe_names_heads_that_differ_and_shows_how():
    described = [
        Layer(Rope(), 64, heads=(HeadEdit((0, 1, 5), NoPE()),)),
        Layer(Rope(scaling=Yarn(8.0, 64)), heads=(HeadEdit((3,), Uniform()), HeadEdit((2,), Alibi()))),
        Layer(Alibi(), heads=(HeadEdit((0, 1), Bands(0.05, "slow")),)),
    ]
    rows = table(describe(schedule_of(described), described))
    assert [row["encoding"] for row in rows] == [
        "rope(base=10000) / window 64 / heads 0-1,5: nope",
        "rope(base=10000) + yarn(factor=8, original_length=64) / heads 3: uniform / heads 2: alibi",
        "alibi / heads 0-1: bands(threshold=0.05, keep=slow)",
    ]
    shown = ("rotated pairs", "gain", "slope", "heads")
    assert [tuple(row[name] for name in shown) for row in rows] == [
        ("0-8/8", "1", "none", "split"),
        ("0-8/8", "0 .. 1.208", "0 .. 0.01562", "split"),
        ("0/8", "none", "0.003906 .. 0.5", "none"),
    ]
