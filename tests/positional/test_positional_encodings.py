"""The frequencies of each encoding: which pairs rotate, and by how much.

Scalings are in test_positional_scalings.py.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.errors import UserError
from pe_lab.positional import (
    PI,
    Alibi,
    NoPE,
    PartialRope,
    Rope,
    Yarn,
    alibi_slopes,
    frequencies,
)
from pe_lab.positional.notebook import NotebookBias, NotebookYarn

HEAD_DIM = st.integers(1, 128).map(lambda pairs: 2 * pairs)
BASE = st.floats(1.5, 1e9)


@settings(max_examples=60)
@given(HEAD_DIM, BASE)
def test_rope_is_its_formula(head_dim, base):
    inv_freq, gain = frequencies(Rope(base), head_dim)
    assert inv_freq.dtype == gain.dtype == np.float64
    np.testing.assert_allclose(inv_freq, [base ** (-2 * i / head_dim) for i in range(head_dim // 2)], rtol=1e-14)
    assert inv_freq[0] == 1 and (np.diff(inv_freq) < 0).all()
    assert (gain == 1).all()


@settings(max_examples=80)
@given(HEAD_DIM, BASE, st.floats(0, 1))
def test_p_rope_is_rope_with_its_slow_pairs_at_rest(head_dim, base, fraction):
    full, kept = frequencies(Rope(base), head_dim)[0], frequencies(Rope(base, fraction), head_dim)[0]
    count = math.floor(fraction * head_dim / 2)
    np.testing.assert_array_equal(kept[:count], full[:count])
    assert (kept[count:] == 0).all()


@settings(max_examples=60)
@given(HEAD_DIM, BASE)
def test_the_ends_of_both_fractions_are_rope_and_nope_to_the_bit(head_dim, base):
    rope, nope = frequencies(Rope(base), head_dim), frequencies(NoPE(), head_dim)
    for kind in (Rope, PartialRope):
        for fraction, end in ((1.0, rope), (0.0, nope)):
            np.testing.assert_array_equal(frequencies(kind(base, fraction), head_dim), end)


@settings(max_examples=80)
@given(HEAD_DIM, BASE, st.floats(0, 1))
def test_partial_rope_is_rope_of_a_narrower_head(head_dim, base, fraction):
    width = PartialRope(base, fraction).rotated_channels(head_dim)
    assert width % 2 == 0 and 0 <= width - int(fraction * head_dim) <= 1 and width <= head_dim
    inv_freq = frequencies(PartialRope(base, fraction), head_dim)[0]
    if width:
        np.testing.assert_array_equal(inv_freq[: width // 2], frequencies(Rope(base), width)[0])
    assert (inv_freq[width // 2 :] == 0).all()


def test_p_rope_keeps_the_fastest_pairs_of_the_full_spectrum():
    full, kept = frequencies(Rope(), 64)[0], frequencies(Rope(fraction=0.25), 64)[0]
    np.testing.assert_array_equal(kept[:8], full[:8])
    assert (kept[8:] == 0).all()


def test_partial_rope_squeezes_a_whole_spectrum_into_the_first_pairs():
    squeezed = frequencies(PartialRope(fraction=0.25), 64)[0]
    np.testing.assert_array_equal(squeezed[:8], frequencies(Rope(), 16)[0])
    assert (squeezed[8:] == 0).all()
    p_rope = frequencies(Rope(fraction=0.25), 64)[0]
    assert np.count_nonzero(squeezed) == np.count_nonzero(p_rope) == 8
    assert squeezed[7] < p_rope[7] / 100


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [
        (256, {0.0: 0, 0.01: 2, 0.10: 26, 0.25: 64, 0.50: 128, 0.75: 192, 1.0: 256}),
        (64, {0.0: 0, 0.04: 2, 0.10: 6, 0.25: 16, 0.50: 32, 0.75: 48, 1.0: 64}),
        (128, {0.0: 0, 0.10: 12, 0.25: 32, 0.50: 64, 0.75: 96, 1.0: 128}),
    ],
)
def test_partial_rope_widths_of_the_paper(head_dim, widths):
    for fraction, channels in widths.items():
        assert PartialRope(fraction=fraction).rotated_channels(head_dim) == channels
        assert np.count_nonzero(frequencies(PartialRope(fraction=fraction), head_dim)[0]) == channels // 2


@pytest.mark.parametrize(
    "encoding",
    [
        NoPE(),
        Alibi(),
        NotebookBias(),
        Rope(fraction=0.0),
        PartialRope(fraction=0.0),
        Rope(fraction=0.0, scaling=Yarn(4.0, 1024)),
    ],
    ids=repr,
)
def test_what_does_not_rotate_has_no_frequency_and_no_gain(encoding):
    inv_freq, gain = frequencies(encoding, 32)
    assert (inv_freq == 0).all() and (gain == 1).all()


def test_the_notebooks_yarn_has_ropes_spectrum_and_warps_positions_instead():
    encoding = NotebookYarn(5e5, alpha=0.5, beta=3.0)
    np.testing.assert_array_equal(encoding.spectrum(64), frequencies(Rope(5e5), 64)[0])
    inv_freq, gain = frequencies(encoding, 64)  # of the schedule's rotation, which it does not use
    assert not inv_freq.any() and (gain == 1).all()


@pytest.mark.parametrize("encoding", [NoPE(), Alibi(), NotebookYarn(), NotebookBias(), Rope(), PartialRope()], ids=repr)
@pytest.mark.parametrize("length", [1, 128, 1 << 20])
def test_what_has_no_scaling_does_not_read_the_length(encoding, length):
    assert not encoding.follows_length
    np.testing.assert_array_equal(frequencies(encoding, 64, length), frequencies(encoding, 64))


def test_yarns_gain_covers_the_rotary_width_and_nothing_beyond():
    p_rope = frequencies(Rope(fraction=0.25, scaling=Yarn(2.0, 2048)), 64)[1]
    np.testing.assert_array_equal(p_rope, np.full(32, 0.1 * math.log(2) + 1))
    partial = frequencies(PartialRope(fraction=0.25, scaling=Yarn(2.0, 2048)), 64)[1]
    assert (partial[:8] > 1).all() and (partial[8:] == 1).all()


def test_alibi_slopes_of_fourteen_heads_are_eight_and_six():
    slopes = alibi_slopes(14)
    np.testing.assert_array_equal(slopes[:8], 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(slopes[8:], 2.0 ** -np.arange(0.5, 6))


@settings(max_examples=50)
@given(heads=st.integers(1, 200))
def test_alibi_slopes_are_distinct_penalties(heads):
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == heads
    assert (slopes > 0).all() and (slopes < 1).all()


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rope(base=1.0), "Rope.base is 1.0"),
        (lambda: Rope(base=math.inf), "Rope.base is inf"),
        (lambda: Rope(fraction=1.01), "Rope.fraction is 1.01"),
        (lambda: Rope(fraction=-0.1), "Rope.fraction is -0.1"),
        (lambda: Rope(fraction=NAN), "Rope.fraction is nan"),
        (lambda: Rope(scaling=2.0), "Rope.scaling is 2.0"),
        (lambda: PartialRope(base=0.5), "PartialRope.base is 0.5"),
        (lambda: PartialRope(fraction=2), "PartialRope.fraction is 2"),
        (lambda: PartialRope(fraction=-1e-9), "PartialRope.fraction is -1e-09; it must lie in [0, 1]"),
        (lambda: PartialRope(scaling="yarn"), "PartialRope.scaling is 'yarn'; give None or one of PI, NTK,"),
        (lambda: NotebookYarn(base=1.0), "NotebookYarn.base is 1.0"),
        (lambda: NotebookYarn(alpha=0.0), "NotebookYarn.alpha is 0.0; it must be above 0 and at most 16"),
        (lambda: NotebookYarn(beta=17.0), "NotebookYarn.beta is 17.0"),
        (lambda: NotebookYarn(beta=NAN), "NotebookYarn.beta is nan"),
        (lambda: NotebookYarn(blend=0), "NotebookYarn.blend is 0; it must lie in [1, original_length], which is 128"),
        (lambda: NotebookYarn(blend=129), "NotebookYarn.blend is 129"),
        (lambda: NotebookBias(strength=math.inf), "NotebookBias.strength is inf"),
        (lambda: NotebookBias(original_length=0), "NotebookBias.original_length is 0; give the training length"),
        (lambda: frequencies(Rope(), 63), "head_dim is 63; it must be even and positive"),
        (lambda: frequencies(NoPE(), 63), "head_dim is 63"),
        (lambda: frequencies(PartialRope(), 63), "head_dim is 63"),
        (lambda: frequencies(Rope(), -2), "head_dim is -2"),
        (lambda: frequencies(NoPE(), 64, 0), "length is 0; it must be a positive number of tokens, or None"),
        (lambda: frequencies(NoPE(), 0), "head_dim is 0"),
        (lambda: frequencies("rope", 64), "'rope' is not a positional encoding; use one of "),
        (lambda: frequencies(PI(2.0), 64), "PI(factor=2.0) is not a positional encoding"),
        (lambda: alibi_slopes(0), "num_heads is 0"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_descriptions_name_the_field(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NotebookYarn(original_length=128.5), "NotebookYarn.original_length is 128.5"),
        (lambda: NotebookYarn(blend=0.5), "NotebookYarn.blend is 0.5"),
        (lambda: NotebookBias(original_length=2.5), "NotebookBias.original_length is 2.5"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_number_of_tokens_is_whole(make, says):
    """A text has floats only, and texts.py leaves what is no whole number for the description to refuse."""
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)
